"""TFRecord files, read by record number, without TensorFlow.

A record is framed by its length (8 bytes, little-endian), the masked crc32c of the length, the data, and the masked
crc32c of the data (the format of tf.io.TFRecordWriter, uncompressed).  The index holds where each record begins;
lengths are checked when it is built, data when they are read.
"""

from __future__ import annotations

import itertools
import os
import struct

import numpy as np

from elasticdl.data.index_cache import Arrays, cached
from elasticdl.kernels._native import crc32c
from elasticdl_client.errors import DataError

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_FRAME = _HEAD.size + _TAIL.size
_MASK_DELTA = 0xA282EAD8
_PIECE_BYTES = 1 << 20


class TFRecordFile:
    """Records of one file."""

    def __init__(self, path: str) -> None:
        """Builds the index, or finds it.

        Raises:
            DataError: the file cannot be read, or its framing is damaged.
        """
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"The file {path} cannot be opened: {error.strerror}.") from error
        self._offsets = cached(path, "tfrecord", self._index)["offsets"]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, end: int) -> list[bytes]:
        places = self._offsets[start : end + 1].tolist()
        first = places[0]
        data = self._bytes(first, places[-1])
        records = []
        for begin, after in itertools.pairwise(places):
            record = data[begin - first + _HEAD.size : after - first - _TAIL.size]
            (checksum,) = _TAIL.unpack_from(data, after - first - _TAIL.size)
            if masked_crc(record) != checksum:
                raise self._damaged(begin, "the checksum of the record that begins here is wrong")
            records.append(record)
        return records

    def _bytes(self, start: int, end: int) -> bytes:
        pieces = []
        while start < end:  # the system gives 2 GiB at once, at most
            piece = os.pread(self._descriptor, end - start, start)
            if not piece:
                raise self._damaged(start, "the file has become shorter since it was indexed")
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def _index(self) -> Arrays:
        size = os.fstat(self._descriptor).st_size
        offsets, offset = [], 0
        piece, piece_begin = b"", 0
        while offset < size:
            if offset + _HEAD.size > piece_begin + len(piece) or offset < piece_begin:
                piece, piece_begin = os.pread(self._descriptor, _PIECE_BYTES, offset), offset
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


def masked_crc(data: bytes) -> int:
    """The checksum that TFRecord files hold."""
    checksum = crc32c(data)
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF
