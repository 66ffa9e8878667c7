"""Uploads of local files: their progress, and the parts of a large file for S3.

An upload may take any time: it fails when it makes no progress, independent of its size.  `Progress` measures that.
"""

from __future__ import annotations

import io
import mimetypes
import time
from collections.abc import Sequence
from typing import Any

WHOLE_BYTES = 32 << 20  # a larger file is uploaded in parts, if the client can
PARTS_AT_ONCE = 8
PART_BYTES = 16 << 20
_MOST_PARTS = 10_000  # limit of S3 and OSS per file
GCS_MULTIPART_BYTES = 5 << 20  # gcsfs sends a smaller file inside of a multipart request
_GCS_BOUNDARY = b"--==0=="


def part_ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Return start and size of each part of a file."""
    part_bytes = max(PART_BYTES, -(-size_bytes // _MOST_PARTS))
    return [(start, min(part_bytes, size_bytes - start)) for start in range(0, size_bytes, part_bytes)]


def fits_multipart(content: bytes) -> bool:
    """Return whether a server can find the end of this content in a multipart request of gcsfs.

    gcsfs ends its lines with a line feed only.  A server that also accepts a carriage return before it (RFC 2046) would
    remove one from the content's end.
    """
    return not content.endswith(b"\r") and _GCS_BOUNDARY not in content


class Progress:
    """The progress of attempts to send some bytes; clients use it as a callback of fsspec.

    Attributes:
        moved_at: When the current attempt last sent bytes, or began.
        furthest_at: When an ended attempt got further than all before it.
    """

    def __init__(self) -> None:
        self._sent_bytes = self._furthest_bytes = 0
        self.moved_at = self.furthest_at = time.monotonic()

    def begin(self) -> None:
        """Begin an attempt, from the first byte."""
        self._sent_bytes = 0
        self.moved_at = time.monotonic()

    def end(self) -> None:
        """End a failed attempt, and compare it now: clients first read a body for its checksum."""
        if self._sent_bytes > self._furthest_bytes:
            self._furthest_bytes, self.furthest_at = self._sent_bytes, self.moved_at

    def set_size(self, size: int) -> None:
        """Do nothing: the size does not matter here."""

    def absolute_update(self, value: int) -> None:
        """Set the bytes sent in this attempt."""
        if value != self._sent_bytes:
            self._sent_bytes, self.moved_at = value, time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        """Add bytes sent in this attempt."""
        self.absolute_update(self._sent_bytes + inc)


class _Body(io.BytesIO):
    """The body of a request that counts the bytes read by its connection."""

    def __init__(self, content: bytes, progress: Progress) -> None:
        super().__init__(content)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self._progress.absolute_update(self.tell())
        return content

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        position = super().seek(position, whence)
        self._progress.absolute_update(position)
        return position


class S3Uploads:
    """Sends files over the connections of an s3fs file system, whose own uploads report no bytes within a part."""

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system

    async def put_file(self, local: str, url: str, *, callback: Progress) -> None:
        """Create or replace an object, from a local file, in one request."""
        with open(local, "rb") as file:
            body = _Body(file.read(), callback)
        await self._request("put_object", url, Body=body, **_content_type(url))

    async def begin_upload(self, url: str) -> str:
        """Begin an upload in parts, and return its id."""
        answer = await self._request("create_multipart_upload", url, **_content_type(url))
        return str(answer["UploadId"])

    async def put_part(
        self, local: str, url: str, upload: str, number: int, start: int, size: int, *, callback: Progress
    ) -> str:
        """Send a range of a local file as a part, numbered from 1; return its etag."""
        with open(local, "rb") as file:
            file.seek(start)
            body = _Body(file.read(size), callback)
        answer = await self._request("upload_part", url, UploadId=upload, PartNumber=number, Body=body)
        return str(answer["ETag"])

    async def complete_upload(self, url: str, upload: str, etags: Sequence[str]) -> None:
        """Create or replace an object, from the uploaded parts."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        await self._request("complete_multipart_upload", url, UploadId=upload, MultipartUpload={"Parts": parts})

    async def abort_upload(self, url: str, upload: str) -> None:
        """Delete the parts of an upload."""
        await self._request("abort_multipart_upload", url, UploadId=upload)

    async def _request(self, verb: str, url: str, **named: Any) -> Any:
        bucket, key, _ = self._file_system.split_path(url)
        return await self._file_system._call_s3(verb, Bucket=bucket, Key=key, **named)


def _content_type(url: str) -> dict[str, str]:
    guessed, _ = mimetypes.guess_type(url)
    return {"ContentType": guessed} if guessed else {}
