"""Alibaba Cloud's OSS by its own client, oss2, with the verbs of fsspec that `FsspecStorage` calls.

ossfs, fsspec's file system for OSS, has no etags and takes no credentials from the environment.  This client takes them
like oss2: OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN; without them, requests are anonymous.
OSS_ENDPOINT or OSS_REGION sets the endpoint.  Requests are signed with version 4 if the region is known.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import oss2
from oss2.credentials import EnvironmentVariableCredentialsProvider

from elasticdl.storage.uploads import Progress
from elasticdl_client.errors import StorageError

_CONNECTIONS = 32
_KEYS_OF_A_PAGE = 1000  # the most that OSS returns in one listing
_CHUNK_BYTES = 1 << 20


class OssClient:
    """Files of OSS, by URL.  Thread-safe."""

    async_impl = False

    def __init__(self) -> None:
        """
        Raises:
            StorageError: the environment sets no endpoint.
        """
        endpoint, region = os.environ.get("OSS_ENDPOINT", ""), os.environ.get("OSS_REGION", "")
        if not endpoint and not region:
            raise StorageError("oss:// has no endpoint.", "Set OSS_ENDPOINT or OSS_REGION; for pods, with --envs.")
        self._endpoint = endpoint or f"https://oss-{region}.aliyuncs.com"
        found = re.search(r"oss-(?!accelerate)([a-z0-9-]+?)(?:-internal)?\.aliyuncs\.com", self._endpoint)
        self._region = region or (found[1] if found else "")
        signer = oss2.ProviderAuthV4 if self._region else oss2.ProviderAuth
        has_key = bool(os.environ.get("OSS_ACCESS_KEY_ID"))
        self._auth = signer(EnvironmentVariableCredentialsProvider()) if has_key else oss2.AnonymousAuth()
        self._session = oss2.Session(pool_size=_CONNECTIONS)

    def ls(self, url: str, *, timeout_s: float, detail: bool) -> list[dict[str, Any]]:
        """Return the entries of a directory; `detail` must be True."""
        bucket, key = self._split(url, timeout_s)
        return list(self._listed(bucket, f"{key}/" if key else "", _KEYS_OF_A_PAGE))

    def info(self, url: str, *, timeout_s: float) -> dict[str, Any]:
        """Return size and etag of a file, or the entry of a directory.

        Raises:
            FileNotFoundError: there is neither a file nor a directory.
        """
        bucket, key = self._split(url, timeout_s)
        directory = {"name": url, "type": "directory"}
        if not key:
            return directory
        try:
            found = bucket.head_object(key)
        except oss2.exceptions.NotFound:
            if any(self._listed(bucket, f"{key}/", 1)):
                return directory
            raise FileNotFoundError(url) from None
        return {"name": url, "type": "file", "size": found.content_length, "etag": found.etag}

    def cat_file(self, url: str, *, start: int, end: int, timeout_s: float, etag: str = "") -> bytes:
        """Return a range of a file if it has this etag; an empty `etag` allows any."""
        bucket, key = self._split(url, timeout_s)
        headers = {"x-oss-range-behavior": "standard"}  # otherwise an invalid range returns the whole file
        if etag:
            headers["If-Match"] = f'"{etag}"'
        try:
            answer = bucket.get_object(key, byte_range=(start, end - 1), headers=headers)
        except oss2.exceptions.NotFound:
            raise FileNotFoundError(url) from None
        content: bytes = answer.read()
        return content

    def pipe_file(self, url: str, content: bytes, *, timeout_s: float) -> None:
        """Create or replace a file, from bytes."""
        bucket, key = self._split(url, timeout_s)
        bucket.put_object(key, content, headers=_checksum(hashlib.md5(content, usedforsecurity=False).digest()))

    def put_file(self, local: str, url: str, *, timeout_s: float, callback: Progress) -> None:
        """Create or replace a file, from a local one."""
        bucket, key = self._split(url, timeout_s)
        with open(local, "rb") as file:
            headers = _checksum(_md5(local, 0, Path(local).stat().st_size))
            bucket.put_object(key, file, headers=headers, progress_callback=_counted(callback))

    def begin_upload(self, url: str, *, timeout_s: float) -> str:
        """Begin an upload in parts, and return its id."""
        bucket, key = self._split(url, timeout_s)
        return str(bucket.init_multipart_upload(key).upload_id)

    def put_part(
        self,
        local: str,
        url: str,
        upload: str,
        number: int,
        start: int,
        size: int,
        *,
        timeout_s: float,
        callback: Progress,
    ) -> str:
        """Send a range of a local file as a part, numbered from 1; return its etag."""
        bucket, key = self._split(url, timeout_s)
        with open(local, "rb") as file:
            file.seek(start)
            headers, body = _checksum(_md5(local, start, size)), oss2.SizedFileAdapter(file, size)
            done = bucket.upload_part(key, upload, number, body, headers=headers, progress_callback=_counted(callback))
        return str(done.etag)

    def complete_upload(self, url: str, upload: str, etags: Sequence[str], *, timeout_s: float) -> None:
        """Create or replace a file, from the uploaded parts.

        Raises:
            FileNotFoundError: there is no such upload.
        """
        bucket, key = self._split(url, timeout_s)
        try:
            parts = [oss2.models.PartInfo(number, etag) for number, etag in enumerate(etags, 1)]
            bucket.complete_multipart_upload(key, upload, parts)
        except oss2.exceptions.NotFound:
            raise FileNotFoundError(url) from None

    def abort_upload(self, url: str, upload: str, *, timeout_s: float) -> None:
        """Delete the parts of an upload."""
        bucket, key = self._split(url, timeout_s)
        bucket.abort_multipart_upload(key, upload)

    def rm_file(self, url: str, *, timeout_s: float) -> None:
        """Delete a file; a missing file is no error."""
        bucket, key = self._split(url, timeout_s)
        bucket.delete_object(key)

    def _split(self, url: str, timeout_s: float) -> tuple[Any, str]:
        """Return the bucket of a URL, with a time-out for answers, and the key in it."""
        name, _, key = url.partition("://")[2].partition("/")
        region = {"region": self._region} if self._region else {}
        bucket = oss2.Bucket(
            self._auth,
            self._endpoint,
            name,
            session=self._session,
            connect_timeout=timeout_s,
            enable_crc=False,  # in pure Python if crcmod is not compiled; MD5 protects uploads
            **region,
        )
        return bucket, key.rstrip("/")

    def _listed(self, bucket: Any, prefix: str, num_keys: int) -> Iterator[dict[str, Any]]:
        for one in oss2.ObjectIterator(bucket, prefix=prefix, delimiter="/", max_keys=num_keys):
            name = f"oss://{bucket.bucket_name}/{one.key}"
            if one.is_prefix():
                yield {"name": name, "type": "directory"}
            elif one.key != prefix:  # not an empty file that other programs create for a directory
                yield {"name": name, "type": "file", "size": one.size, "etag": one.etag}


def _counted(progress: Progress) -> Callable[[int, int], None]:
    """Return a callback for oss2, which passes the sent bytes and the total."""
    return lambda sent, _: progress.absolute_update(sent)


def _md5(local: str, start: int, size: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with open(local, "rb") as file:
        file.seek(start)
        while size:
            chunk = file.read(min(size, _CHUNK_BYTES))
            digest.update(chunk)
            size -= len(chunk)
    return digest.digest()


def _checksum(md5: bytes) -> dict[str, str]:
    """Return the header that makes OSS reject a damaged body."""
    return {"Content-MD5": base64.b64encode(md5).decode()}
