"""A file of storage, read by ranges: large ones in parallel parts, close ones together, scans read ahead."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from elasticdl.storage.fsspec_storage import FsspecStorage, storage_of
from elasticdl.storage.port import FileStatus

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PART_BYTES = 4 << 20  # of one request: large against the latency, small enough to repeat
_GAP_BYTES = 256 << 10  # between two ranges; reading a smaller gap costs less than another request
_PARTS_AHEAD = 8
_BUFFER_BYTES = 256 << 10


class RemoteFile:
    """A file in the state of its opening, if the storage compares etags.  Thread-safe."""

    is_local = False

    def __init__(self, url: str, storage: FsspecStorage | None = None, status: FileStatus | None = None) -> None:
        """
        Args:
            status: From the listing of a directory; None: request it.

        Raises:
            StorageError: the file is missing, or cannot be reached.
        """
        self.path = url
        self._storage = storage or storage_of(url)
        status = status or self._storage.stat(url)
        self.size_bytes = status.size_bytes
        self.stamp: list[object] = [status.size_bytes, status.etag]
        self._etag = status.etag

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """Return bytes from an offset on; fewer than `size_bytes` only at the end of the file."""
        end = max(offset, min(offset + size_bytes, self.size_bytes))
        (data,) = self.pread_spans([(offset, end)])
        return data

    def pread_all(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of several ranges, (offset, size), in ascending order; see `pread`.

        Close ranges are views of one answer: copying large ones costs as much as receiving them.
        """
        wanted = [(offset, max(offset, min(offset + size, self.size_bytes))) for offset, size in ranges]
        return read_together(wanted, self.pread_spans, _GAP_BYTES)

    def pread_spans(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each span, (start, end), read in parallel; large ones in parts."""
        parts = [equal_parts(start, end) for start, end in spans]
        first, *others = [part for of_span in parts for part in of_span] or [(0, 0)]
        futures = [self.fetch(*part) for part in others]
        pieces = iter([self._storage.read(self.path, *first, self._etag), *(other.result() for other in futures)])
        return [b"".join(itertools.islice(pieces, len(of_span))) for of_span in parts]

    def fetch(self, start: int, end: int) -> Future[bytes]:
        """Start to read a range."""
        return self._storage.pool.submit(self._storage.read, self.path, start, end, self._etag)

    def fetch_all(self) -> list[Future[bytes]]:
        """Start to read the whole file, in parts."""
        return [self.fetch(*part) for part in equal_parts(0, self.size_bytes)]

    def scan(self) -> io.BufferedReader:
        """Return a stream over the file that reads ahead while it is read sequentially."""
        return io.BufferedReader(_Scan(self), _BUFFER_BYTES)

    def close(self) -> None:
        """Do nothing: nothing is open between two reads."""


def equal_parts(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a range into equal parts of about `PART_BYTES`: a short last part would cost a request, too."""
    number = max(1, round((end - start) / PART_BYTES))
    return list(itertools.pairwise(start + (end - start) * i // number for i in range(number + 1)))


def read_together(
    ranges: Sequence[tuple[int, int]], read: Callable[[Sequence[tuple[int, int]]], Sequence[bytes]], gap_bytes: int
) -> list[memoryview]:
    """Return the bytes of ranges, (start, end), in ascending order, as views of larger spans that are read.

    Args:
        read: Returns the bytes of spans, (start, end): of one range, or of close ones up to `PART_BYTES`.
        gap_bytes: The largest gap between two ranges of a span.
    """
    spans: list[tuple[int, int]] = []
    for start, end in ranges:
        if spans and start - spans[-1][1] <= gap_bytes and end - spans[-1][0] <= PART_BYTES:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    remaining = zip(spans, (memoryview(data) for data in read(spans)), strict=True)
    found: list[memoryview] = []
    span, view = (0, -1), memoryview(b"")
    for start, end in ranges:
        while end > span[1]:
            span, view = next(remaining)
        found.append(view[start - span[0] : end - span[0]])
    return found


class PositionedStream(io.RawIOBase):
    """A seekable stream over a file of known size; the subclass reads at `_position`."""

    def __init__(self, size_bytes: Callable[[], int]) -> None:
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes()}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


class _Scan(PositionedStream):
    """A stream that reads parts ahead after two consecutive reads; after a jump it reads only what is requested."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(lambda: file.size_bytes)
        self._file = file
        self._end_of_last = -1
        self._ahead: dict[int, Future[bytes]] = {}

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        number = self._position // PART_BYTES
        if self._position >= self._file.size_bytes:
            return 0
        data: bytes | memoryview
        if self._position == self._end_of_last or number in self._ahead:
            start = self._position - number * PART_BYTES
            data = memoryview(self._part(number))[start : start + len(view)]
        else:
            self._ahead.clear()
            data = self._file.pread(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        self._end_of_last = self._position
        return len(data)

    def _part(self, number: int) -> bytes:
        last = (self._file.size_bytes - 1) // PART_BYTES
        for ahead in range(number, min(number + _PARTS_AHEAD, last + 1)):
            if ahead not in self._ahead:
                start = ahead * PART_BYTES
                self._ahead[ahead] = self._file.fetch(start, min(start + PART_BYTES, self._file.size_bytes))
        for passed in [one for one in self._ahead if one < number]:
            del self._ahead[passed]
        return self._ahead[number].result()
