"""Read TFRecord files by record number, and frame records in this format, without TensorFlow.

A framed record consists of its length (8 bytes, little-endian), the masked crc32c of the length, the data, and the
masked crc32c of the data (the format of tf.io.TFRecordWriter, uncompressed).  The index contains the offset of each
record; lengths are checked when it is built, data when they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.files import Arrays, cached, open_file, pread_in_order
from elasticdl.kernels._native import crc32c
from elasticdl.storage.remote_file import equal_parts
from elasticdl_client.errors import DataError

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_FRAME = _HEAD.size + _TAIL.size
_MASK_DELTA = 0xA282EAD8
_PIECE_BYTES = 1 << 20


class TFRecordFile:
    """The records of one file."""

    def __init__(self, path: str) -> None:
        """Build the index, or load the cached one.

        Raises:
            DataError: The file cannot be read, or its framing is damaged.
        """
        self._path = path
        self._file = open_file(path)
        self._offsets = cached(path, "tfrecord", self._index, self._file.stamp)["offsets"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, start: int, end: int) -> list[bytes]:
        offsets = self._offsets[start : end + 1]
        bounds = _groups(offsets)
        groups = list(pairwise(offsets[bounds].tolist()))
        records: list[bytes] = []
        found = self._file.pread_spans(groups)
        for (offset, end_offset), data, (first, after) in zip(groups, found, pairwise(bounds), strict=True):
            if len(data) < end_offset - offset:
                raise self._damaged(offset + len(data), "the file has become shorter since it was indexed")
            for begin, following in pairwise((offsets[first : after + 1] - offset).tolist()):
                record = data[begin + _HEAD.size : following - _TAIL.size]
                (checksum,) = _TAIL.unpack_from(data, following - _TAIL.size)
                if masked_crc(record) != checksum:
                    raise self._damaged(offset + begin, "the checksum of the record that begins here is wrong")
                records.append(record)
        return records

    def _index(self) -> Arrays:
        with pread_in_order(self._file) as pread:
            return self._index_of(self._file.size_bytes, pread)

    def _index_of(self, size: int, pread: Callable[[int, int], bytes]) -> Arrays:
        offsets, offset = [], 0
        piece, piece_begin = b"", 0
        while offset < size:
            if offset + _HEAD.size > piece_begin + len(piece) or offset < piece_begin:
                piece, piece_begin = pread(_PIECE_BYTES, offset), offset
            if len(piece) - (offset - piece_begin) < _HEAD.size:
                raise self._damaged(offset, "the file ends within the length of a record")
            length, checksum = _HEAD.unpack_from(piece, offset - piece_begin)
            if masked_crc(piece[offset - piece_begin : offset - piece_begin + 8]) != checksum:
                raise self._damaged(offset, "no record begins here: the checksum of its length is wrong")
            if offset + _FRAME + length > size:
                raise self._damaged(offset, f"the record that begins here has {length} bytes, the file ends before")
            offsets.append(offset)
            offset += _FRAME + length
        return {"offsets": np.array([*offsets, size], np.int64)}

    def _damaged(self, offset: int, what: str) -> DataError:
        return DataError(
            f"TFRecord file {self._path}, byte {offset}: {what}.",
            "The file was cut off, changed or is compressed: write it again, uncompressed, or remove it.",
        )


def _groups(offsets: NDArray[np.int64]) -> list[int]:
    """Group records for concurrent reads, see `equal_parts`; return the boundaries as indices in `offsets`.

    Args:
        offsets: Offset of each record, and the end of the last one.
    """
    ends = [end for _, end in equal_parts(int(offsets[0]), int(offsets[-1]))]
    found: list[int] = np.unique(np.searchsorted(offsets, [offsets[0], *ends])).tolist()
    return found


def framed(record: bytes) -> bytes:
    """Return a record framed as in a TFRecord file."""
    length = len(record).to_bytes(8, "little")
    return length + _TAIL.pack(masked_crc(length)) + record + _TAIL.pack(masked_crc(record))


def masked_crc(data: bytes) -> int:
    """Return the masked crc32c, the checksum in TFRecord files."""
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF
