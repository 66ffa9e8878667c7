"""Ranges of objects of S3, received by the requesting threads, directly from their sockets.

s3fs receives all data in the single thread of its event loop, in small pieces that are copied twice.  This client uses
botocore, which s3fs is built on, with the settings of s3fs.  It never retries; `FsspecStorage` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import botocore
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error
from urllib3.exceptions import HTTPError

_CREDENTIALS_S = 10.0  # limit for an answer with credentials: threads request them one at a time


class S3Ranges:
    """Objects of S3, by URL.  Thread-safe."""

    def __init__(self, file_system: Any) -> None:
        """
        Args:
            file_system: A file system of s3fs; its settings, from the environment or fsspec's files, are used.
        """
        self._file_system = file_system
        self._session: botocore.session.Session | None = None
        self._deadlines = _Deadlines()
        self._lock = threading.Lock()  # a session must not create clients in several threads
        self._clients: dict[float, Any] = {}

    def read(self, url: str, *, start: int, end: int, timeout_s: float, etag: str = "") -> bytes:
        """Return a range of an object, in one buffer that is filled from the socket.

        Args:
            timeout_s: Limit for each wait, and for the whole body; there is one client per limit, as it has only one.
            etag: The etag that the object must have; empty: any.

        Raises:
            OSError: as in s3fs.
            RuntimeError: as in s3fs, in a forked process, which shares its parent's connections.
        """
        loop = self._file_system.loop  # raises the error in a forked process
        client = self._client(timeout_s)
        bucket, key, version = self._file_system.split_path(url)
        which = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        which |= {"VersionId": version} if version else {}
        which |= {"IfMatch": etag} if etag else {}
        try:
            answer = client.get_object(**self._of_each_request(client), **which)
        except ClientError as error:
            raise translate_boto_error(error) from error
        with answer["Body"] as connected, self._deadlines.within(timeout_s, connected, loop):
            try:
                data: bytes = answer["Body"].read()
            except HTTPError as error:  # of TLS, for example: botocore converts only some of them
                raise ConnectionError(str(error)) from error
        return data

    def _of_each_request(self, client: Any) -> dict[str, Any]:
        """Return the arguments that settings of s3fs add to requests, such as RequestPayer and encryption keys."""
        added = {**self._file_system.s3_additional_kwargs, **self._file_system.req_kw}
        if not added:
            return {}
        known = client.meta.service_model.operation_model("GetObject").input_shape.members
        return {name: value for name, value in added.items() if name in known and value is not None}

    def _client(self, timeout_s: float) -> Any:
        with self._lock:
            if timeout_s not in self._clients:
                self._clients[timeout_s] = self._new_client(timeout_s)
            return self._clients[timeout_s]

    def _new_session(self, timeout_s: float) -> botocore.session.Session:
        session = botocore.session.Session(**self._file_system.kwargs)
        of_credentials = {name: min(timeout_s, _CREDENTIALS_S) for name in ("connect_timeout", "read_timeout")}
        session.set_default_client_config(Config(retries={"total_max_attempts": 1}, **of_credentials))
        known = self._file_system.session  # None before the first request
        if known is not None:  # reuse its model of S3: loading takes 0.14 s and 14 MB
            session.register_component("data_loader", known.get_component("data_loader"))
        return session

    def _new_client(self, timeout_s: float) -> Any:
        self._session = self._session or self._new_session(timeout_s)
        settings = self._file_system
        config = {name: value for name, value in settings.config_kwargs.items() if name != "connector_args"}
        config |= {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        named = {
            "aws_access_key_id": settings.key,
            "aws_secret_access_key": settings.secret,
            "aws_session_token": settings.token,
            "endpoint_url": settings.endpoint_url,
            "use_ssl": settings.use_ssl,
            **settings.client_kwargs,
        }
        if settings.anon:
            config["signature_version"] = botocore.UNSIGNED
            named = {name: value for name, value in named.items() if not name.startswith("aws_")}
        return self._session.create_client("s3", config=Config(**config), **named)


class _Deadlines:
    """Ends answers that take too long: a socket limits each wait, but not the sum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks_at_s = math.inf
        self._running: dict[object, tuple[float, Any]] = {}

    @contextlib.contextmanager
    def within(self, timeout_s: float, answer: Any, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """End the connection of an answer of urllib3 if the block lasts longer.

        Args:
            loop: Runs in another thread; it checks about once per time-out, while there are answers.
        """
        key, end_s = object(), time.monotonic() + timeout_s
        with self._lock:
            self._running[key] = end_s, answer
            is_first = end_s < self._looks_at_s
            if is_first:
                self._looks_at_s = end_s
        if is_first:
            loop.call_soon_threadsafe(loop.call_later, timeout_s, self._look, end_s, loop)
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(key, None)

    def _look(self, at_s: float, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if at_s != self._looks_at_s:  # a check for an earlier deadline has replaced this one
                return
            overdue = [key for key, (end_s, _) in self._running.items() if end_s <= at_s]
            ended = [self._running.pop(key)[1] for key in overdue]
            self._looks_at_s = min((end_s for end_s, _ in self._running.values()), default=math.inf)
            if self._running:
                loop.call_later(self._looks_at_s - time.monotonic(), self._look, self._looks_at_s, loop)
        for answer in ended:
            # The answer may be complete by now; and `answer.connection` has no socket if it ends with the answer.
            with contextlib.suppress(OSError, AttributeError):
                socket.socket.shutdown(answer._fp.fp.raw._sock, socket.SHUT_RDWR)
