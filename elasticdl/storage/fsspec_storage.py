"""The port `Storage` over fsspec: the only place that waits, retries, and converts errors to ours.

A request that is rejected temporarily (503, 429), breaks off, stalls or returns too few bytes is retried, after a wait
that doubles, until the policy's time is over.  An upload may take any time while its bytes move.  The clients' own
retries are switched off where possible, so that waits do not multiply.  Never logs a URL's credentials, and has none:
they come from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import mimetypes
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticdl.storage.port import FileStatus
from elasticdl.storage.uploads import (
    GCS_MULTIPART_BYTES,
    PART_BYTES,
    PARTS_AT_ONCE,
    WHOLE_BYTES,
    Progress,
    S3Uploads,
    fits_multipart,
    part_ranges,
)
from elasticdl_client.errors import StorageError, StorageFileMissing, StorageUnreachable
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import KINDS, check_url, missing_package, scheme_of

if TYPE_CHECKING:
    from elasticdl.storage.s3_ranges import S3Ranges

_log = logging.getLogger("elasticdl.storage")
_ETAGS = ("ETag", "etag", "generation", "VersionId", "blob_id", "Last-Modified", "LastModified", "mtime", "commit_hash")
_REFUSED_FOR_NOW = frozenset({408, 425, 429, 500, 502, 503, 504})
_NO_PERMISSION = frozenset({401, 403})
_OF_METADATA = re.compile(  # errors of botocore and google-auth about a machine's credential server
    r"non 200 response (\d{3}) from container metadata|metadata service\..* [Ss]tatus: (\d{3})"
)
_ASKS_AGAIN = "IDPCommunicationError"  # of STS, with status 400: it could not reach the issuer of the token
_CHANGED = 412  # status: the condition on the etag is not met
_COMPARE = ("aiohttp", "oss2", "huggingface_hub")
_TAKE_PARTS = ("s3fs", "oss2")
_CONNECTIONS = 16  # in flight at once; clients keep more connections open


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time-outs and waits of requests.

    Attributes:
        request_s: Limit for an answer, or in an upload for the next bytes to be sent, at the first attempt; doubled for
            each retry, up to `total_s`.
        first_wait_s: Wait before the first retry; doubled for each further one.
        longest_wait_s: The longest wait before a retry.
        total_s: A request that fails after this time is not retried; for an upload, the time since an attempt got
            further than all before.
    """

    request_s: float = 30.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0
    total_s: float = 180.0


_Verb = str | Callable[..., Any]
"""A verb of fsspec by its name, or a function of ours; one that is no coroutine function takes `timeout_s`."""


class _TooShort(OSError):
    pass


class FsspecStorage:
    """The `Storage` for URLs with one scheme."""

    def __init__(self, scheme: str, policy: RetryPolicy | None = None) -> None:
        """
        Args:
            scheme: Scheme of the URLs.
            policy: None: the policy of jobs.

        Raises:
            StorageError: a package is missing, or the client rejects its settings.
        """
        self._policy = policy or RetryPolicy()
        self._scheme = scheme
        self._kind = KINDS[scheme]
        self._file_system = _file_system(scheme)
        self._s3 = S3Uploads(self._file_system) if self._kind.module == "s3fs" else None
        self._s3_ranges = _s3_ranges(self._file_system) if self._kind.module == "s3fs" else None
        self._pause = threading.Event()
        self._jitter = random.Random()  # a separate generator: user code uses the common one
        self.can_write = self._kind.can_write
        self.pool = ThreadPoolExecutor(_CONNECTIONS, f"storage-{scheme}")

    def list(self, directory: str) -> list[FileStatus]:
        if not self._kind.can_list:
            raise StorageError(f"{self._scheme}:// has no directories to list: {directory}.", "Name each file.")
        try:
            found = self._call(directory, "ls", directory.rstrip("/"), detail=True)
        except StorageFileMissing:
            return []
        statuses = [self._status(info) for info in found]
        own = directory.rstrip("/")
        return sorted((one for one in statuses if one.url != own), key=lambda one: one.url)

    def stat(self, url: str) -> FileStatus:
        return self._status(self._call(url, "info", url))

    def read(self, url: str, start: int, end: int, etag: str = "") -> bytes:
        def check(data: bytes) -> None:
            if len(data) > end - start:
                raise _without_ranges(url)
            if len(data) < end - start:
                raise _TooShort(f"{len(data)} bytes of {end - start} came")

        if end <= start:
            return b""
        how: dict[str, Any] = {"start": start, "end": end, "_check": check}
        is_compared = self.compares(etag)
        if is_compared:
            how["etag"] = etag
        verb: _Verb = "cat_file"
        if self._s3_ranges is not None:
            verb = self._s3_ranges.read
        elif self._kind.module == "aiohttp":
            verb = self._read_http
        data: bytes = self._call(url, verb, url, **how)
        return data

    def compares(self, etag: str) -> bool:
        if self._kind.module == "s3fs":
            return etag.startswith('"')  # a date, from a server without etags, is not a valid condition
        return self._kind.module in _COMPARE and bool(etag)

    def publish(self, url: str, content: bytes | Path) -> None:
        if not self._kind.can_write:
            raise StorageError(f"{self._scheme}:// cannot be written: {hide(url)}.", "Name other storage.")
        if isinstance(content, bytes):
            self._publish_bytes(url, content)
        else:
            self._upload(url, str(content), content.stat().st_size)

    def _publish_bytes(self, url: str, content: bytes, **how: Any) -> None:
        if self._kind.module == "gcsfs" and not fits_multipart(content):
            how["chunksize"] = min(len(content), PART_BYTES)  # else content of that size is uploaded in parts
        self._call(url, "pipe_file", url, content, **how)

    def _upload(self, url: str, local: str, size_bytes: int) -> None:
        """Send a local file; a large one in parts, if the client can, so that each is retried separately."""
        if size_bytes <= WHOLE_BYTES or self._kind.module not in _TAKE_PARTS:
            how: dict[str, Any] = {}
            if self._kind.module == "gcsfs":
                if size_bytes < GCS_MULTIPART_BYTES and not fits_multipart(content := Path(local).read_bytes()):
                    content_type = mimetypes.guess_type(local)[0] or "application/octet-stream"
                    self._publish_bytes(url, content, content_type=content_type)
                    return
                how["chunksize"] = PART_BYTES
            self._call(url, self._upload_verb("put_file"), local, url, _progress=Progress(), **how)
            return
        upload = self._call(url, self._upload_verb("begin_upload"), url)

        def put(part: tuple[int, tuple[int, int]]) -> str:
            number, (start, size) = part
            verb = self._upload_verb("put_part")
            return str(self._call(url, verb, local, url, upload, number, start, size, _progress=Progress()))

        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, f"upload-{self._scheme}") as threads:
                etags = [*threads.map(put, enumerate(part_ranges(size_bytes), 1))]
            self._complete(url, upload, etags, size_bytes)
        except BaseException:
            with contextlib.suppress(Exception):  # if storage is away, it keeps the parts
                self._once(self._upload_verb("abort_upload"), self._policy.request_s, url, upload)
            raise

    def _complete(self, url: str, upload: str, etags: Sequence[str], size_bytes: int) -> None:
        try:
            self._call(url, self._upload_verb("complete_upload"), url, upload, etags)
        except StorageFileMissing:  # no such upload: it is complete, and the answer was lost
            if self.stat(url).size_bytes != size_bytes:
                raise

    def _upload_verb(self, name: str) -> _Verb:
        verb: _Verb = getattr(self._s3, name) if self._s3 is not None else name
        return verb

    def delete(self, url: str) -> None:
        with contextlib.suppress(StorageFileMissing):
            self._call(url, "rm_file", url)

    def exists(self, url: str) -> bool:
        try:
            self.stat(url)
        except StorageFileMissing:
            return False
        return True

    def _status(self, info: dict[str, Any]) -> FileStatus:
        name = str(info["name"])
        url = (name if "://" in name else f"{self._scheme}://{name.lstrip('/')}").rstrip("/")
        if info.get("type") == "directory":
            return FileStatus(url, 0, "", is_directory=True)
        if info.get("size") is None:
            raise StorageError(
                f"{hide(url)}: its server does not say how large the file is.", "Copy it to storage that does."
            )
        etag = next((str(info[name]) for name in _ETAGS if info.get(name)), "")
        return FileStatus(url, int(info["size"]), etag)

    def _call(
        self,
        url: str,
        verb: _Verb,
        *arguments: Any,
        _check: Callable[[Any], None] | None = None,
        _progress: Progress | None = None,
        **named: Any,
    ) -> Any:
        """Call a verb, with retries, and return its result."""
        started, handled = time.monotonic(), sys.exception()
        for timeout_s, wait_s in self._times():
            try:
                if _progress is not None:
                    _progress.begin()
                    named["callback"] = _progress
                answer = self._once(verb, timeout_s, *arguments, **named)
                if _check is not None:
                    _check(answer)
                return answer
            except StorageError:
                raise
            except Exception as error:  # every client has its own exceptions
                final = _final_error(url, error, list(_causes(error, handled)))
                if final is not None:
                    raise final from error
                what = _text(error)
                if _progress is not None:
                    _progress.end()
                since = started if _progress is None else _progress.furthest_at
                if time.monotonic() - since + wait_s > self._policy.total_s:
                    raise StorageUnreachable(
                        f"{hide(url)} could not be reached for {time.monotonic() - since:.0f} s: {what}.",
                        "Check the network, and the endpoint in the environment (for S3: AWS_ENDPOINT_URL).",
                    ) from error
                _log.warning("%s: %s; asking again in %.1f s", hide(url), what, wait_s)
            self._pause.wait(wait_s)
        raise AssertionError("the times never end")

    def _times(self) -> Iterator[tuple[float, float]]:
        timeout_s, wait_s = self._policy.request_s, self._policy.first_wait_s
        while True:
            yield timeout_s, wait_s * self._jitter.uniform(0.5, 1.0)  # so that workers do not retry all at once
            timeout_s = min(timeout_s * 2, max(self._policy.request_s, self._policy.total_s))
            wait_s = min(wait_s * 2, self._policy.longest_wait_s)

    def _once(self, verb: _Verb, timeout_s: float, *arguments: Any, **named: Any) -> Any:
        if isinstance(verb, str):
            is_async = self._file_system.async_impl
            function = getattr(self._file_system, f"_{verb}" if is_async else verb)
        else:
            is_async, function = asyncio.iscoroutinefunction(verb), verb
        if not is_async:
            return function(*arguments, timeout_s=timeout_s, **named)

        async def call() -> Any:
            progress = named.get("callback")
            if progress is None:
                return await asyncio.wait_for(function(*arguments, **named), timeout_s)
            return await _while_it_moves(function(*arguments, **named), progress, timeout_s)

        return asyncio.run_coroutine_threadsafe(call(), self._file_system.loop).result()

    async def _read_http(self, url: str, start: int, end: int, etag: str = "") -> bytes:
        """Return a range, if the answer has this etag: servers may ignore a condition.

        Raises:
            StorageError: the answer has another etag, or is the whole file, which is not downloaded.
        """
        session = await self._file_system.set_session()
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(self._file_system.encode_url(url), headers=headers) as answer:
            if answer.status == 404:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            if etag and (answer.headers.get("ETag") or answer.headers.get("Last-Modified")) != etag:
                raise _changed(url)
            if answer.status == 200 and (start > 0 or (answer.content_length or 0) > end - start):
                raise _without_ranges(url)
            data: bytes = await answer.read()
        return data


async def _while_it_moves(upload: Coroutine[Any, Any, Any], progress: Progress, timeout_s: float) -> Any:
    """Wait for an upload, and return its result.

    Raises:
        TimeoutError: it has sent no bytes for `timeout_s`.
    """
    task = asyncio.ensure_future(upload)
    try:
        while (left_s := progress.moved_at + timeout_s - time.monotonic()) > 0:
            if (await asyncio.wait({task}, timeout=left_s))[0]:
                return task.result()
        raise TimeoutError(f"no bytes were taken for {timeout_s:g} s")
    finally:
        if task.cancel():
            await asyncio.wait({task})


@functools.cache
def storage_of_scheme(scheme: str) -> FsspecStorage:
    """Return the storage of a scheme; there is one per process, which shares its connections."""
    return FsspecStorage(scheme)


def storage_of(url: str) -> FsspecStorage:
    """Return the storage of a URL.

    Raises:
        StorageError: a package is missing, or the URL contains a credential.
    """
    check_url(url)
    return storage_of_scheme(scheme_of(url))


def _file_system(scheme: str) -> Any:
    for module in ("fsspec", KINDS[scheme].module):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise missing_package(f"{scheme}://", module) from error
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if KINDS[scheme].module == "s3fs":
        _quiet_loggers("botocore", "aiobotocore")  # each process would log where it found credentials and endpoint
        # They log a traceback for an error that is raised below.
        _quiet_loggers("aiobotocore.credentials", "botocore.credentials", level=logging.ERROR)
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 2 * _CONNECTIONS}
    try:
        file_system = _client_of_ours(scheme) or fsspec.filesystem(scheme, **options)
    except StorageError:
        raise
    except Exception as error:  # bad settings: a missing profile, a library of Hadoop
        raise StorageError(f"{scheme}:// cannot be used: {_text(error)}.", "Check its settings.") from error
    match KINDS[scheme].module:
        case "s3fs":
            file_system.retries = 1
        case "adlfs":  # it would retry for more than a minute, even with rejected credentials
            file_system.service_client._config.retry_policy.total_retries = 0
    return file_system


def _client_of_ours(scheme: str) -> Any:
    """Return our own client for a scheme whose fsspec file system does not fulfil `Storage`; else None."""
    match KINDS[scheme].module:
        case "oss2":
            from elasticdl.storage.oss_client import OssClient

            _quiet_loggers("oss2", "urllib3")
            return OssClient()
        case "huggingface_hub":
            from elasticdl.storage.hub_client import HubClient

            _quiet_loggers("httpx", "httpx2")
            return HubClient()
        case "hdfs_native":
            from elasticdl.storage.hdfs_client import HdfsClient

            return HdfsClient()
    return None


def _s3_ranges(file_system: Any) -> S3Ranges:
    from elasticdl.storage.s3_ranges import S3Ranges

    return S3Ranges(file_system)


def _quiet_loggers(*libraries: str, level: int = logging.WARNING) -> None:
    """Set a minimum level for loggers, by default warnings, unless the user has set one."""
    for logger in map(logging.getLogger, libraries):
        if logger.level == logging.NOTSET:
            logger.setLevel(level)


def _final_error(url: str, error: BaseException, causes: Sequence[BaseException]) -> StorageError | None:
    """Return the error to raise for a request that must not be retried; None to retry."""
    statuses = {status for cause in causes if (status := _http_status(cause)) is not None}
    if statuses & _REFUSED_FOR_NOW:
        return None
    if _CHANGED in statuses:
        return _changed(url)
    if _does_not_give_now(causes):
        return None
    if statuses & _NO_PERMISSION or isinstance(error, PermissionError) or _has_no_credentials(causes):
        return StorageError(
            f"{hide(url)}: no permission: {_text(error)}.",
            "Give credentials by the environment: --envs, a Secret, or the identity of the pods' service accounts "
            "(--service_account, --worker_service_account).",
        )
    if isinstance(error, FileNotFoundError):
        unreachable = any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes)
        return None if unreachable else StorageFileMissing(f"{hide(url)} does not exist.", "Check the URL.")
    if isinstance(error, OSError | asyncio.TimeoutError) or _is_of_network(causes):
        return None
    return StorageError(f"{hide(url)}: {_text(error)}.", "Check the URL, and the settings of its client.")


def _changed(url: str) -> StorageError:
    return StorageError(f"The file {hide(url)} changed while the job reads it.", "Put new data into a new file.")


def _without_ranges(url: str) -> StorageError:
    return StorageError(f"{hide(url)}: its server gives no ranges, but whole files.", "Copy the file.")


def _causes(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes.

    Args:
        handled: The exception that the caller was handling: Python chains it to the error, but it is no cause.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and cause is not handled and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)  # a dictionary in errors of botocore
    found = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    for value in (
        found,
        *(getattr(one, name, None) for one in (error, response) for name in ("status", "status_code")),
    ):
        if isinstance(value, int):
            return value
    found = _OF_METADATA.search(str(error))
    return int(found[1] or found[2]) if found else None


def _has_no_credentials(causes: Sequence[BaseException]) -> bool:
    """Return whether credentials are missing or refused; a credential server that does not answer may later."""
    if any(_is_missing_token(cause) or _is_refused_role(cause) for cause in causes):
        return True
    return not _is_of_network(causes) and any(
        word in type(cause).__name__ for cause in causes for word in ("Credential", "ClientAuthentication")
    )


def _does_not_give_now(causes: Sequence[BaseException]) -> bool:
    """Return whether Google's credential server was not reached, which gcsfs reports as 401."""
    return any(type(cause).__name__ == "TransportError" and _http_status(cause) is None for cause in causes)


def _is_missing_token(error: BaseException) -> bool:
    """Return whether a credential file named by the environment is missing."""
    return isinstance(error, FileNotFoundError) and error.filename in os.environ.values()


def _is_refused_role(error: BaseException) -> bool:
    """Return whether AWS refuses credentials for the token of a pod."""
    status, response = _http_status(error), getattr(error, "response", None)
    is_refused = status is not None and 400 <= status < 500 and status not in _REFUSED_FOR_NOW
    if not is_refused or not str(getattr(error, "operation_name", "")).startswith("AssumeRole"):
        return False
    return not isinstance(response, dict) or response.get("Error", {}).get("Code") != _ASKS_AGAIN


def _is_of_network(causes: Sequence[BaseException]) -> bool:
    """Return whether errors of a client mean a broken connection or transfer, or an unknown host name."""
    words = (
        "Timeout",
        "Connection",
        "Payload",
        "IncompleteRead",
        "ResponseStreaming",
        "Disconnected",
        "HTTPClient",
        "RemoteProtocol",
        "ReadError",
        "WriteError",
        "gaierror",
        "Checksum",  # received data differ from sent data
    )
    return any(word in type(cause).__name__ for cause in causes for word in words)


def _text(error: BaseException) -> str:
    """Return the message of an error, or of its cause, if a client has translated it."""
    said = error.__cause__ or error
    lines = str(said).strip().splitlines() or [""]
    tried = [line.strip() for line in lines if line.startswith("\t")]  # by azure-identity; the last one counts
    return hide(" ".join([lines[0], *tried[-1:]])).rstrip(".") or type(said).__name__
