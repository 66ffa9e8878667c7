"""Frames: tensors on the wire as raw bytes.

A frame is a protobuf header followed by arrays, little-endian and C-ordered, each at a multiple of 64 bytes: if the
frame itself is aligned so, the receiver and TensorFlow use the arrays in place, without a copy::

    u32 magic, its last byte the version  u32 crc32c of all that follows  u32 header size  u32 number of arrays
    per array: u8 dtype, u8 dimensions, u16 0, u32 0, then i64 per dimension
    header, padding, then per array: bytes, padding

A large frame is sent as a stream: a message with its size (u64), then messages with its bytes.  gRPC handlers and stubs
of these methods pass bytes through; this module does not know what the arrays mean.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.kernels import _native

WIRE_VERSION = 1  # of frames and their contents; worker and server must have the same
_NAME = 0x444C45  # "ELD"
MAGIC = WIRE_VERSION << 24 | _NAME
CHUNK_BYTES = 1 << 20
STREAM_FROM_BYTES = 4 << 20  # larger calls are sent as a stream of chunks

_ALIGNMENT = 64
_PADDING = bytes(_ALIGNMENT)
_PREFIX = struct.Struct("<II")
_SIZES = struct.Struct("<II")
PREFIX_BYTES = _PREFIX.size
_BODY = _PREFIX.size + _SIZES.size
_STREAM_SIZE = struct.Struct("<Q")
_ARRAY = struct.Struct("<BBHI")
_SHAPES = tuple(struct.Struct(f"<{num_dimensions}q") for num_dimensions in range(8))
_DTYPES = tuple(np.dtype(d) for d in ("<f4", "<i8", "<f8", "<i4", "<f2", "<u2"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

Array = npt.NDArray[Any]
Buffer = bytes | memoryview


class FrameError(ValueError):
    """The bytes are not a complete, undamaged frame."""


class WireVersionError(FrameError):
    """The other end has another `WIRE_VERSION`."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the caller speaks version {version} of the wire, this server version {WIRE_VERSION}: all pods of a job "
            "must run the same version of elasticdl"
        )


class Frame:
    """A header and arrays, not copied into one buffer yet; the arrays must not change meanwhile."""

    __slots__ = ("_parts", "_size")

    def __init__(self, header: bytes, arrays: Sequence[Array]) -> None:
        """
        Args:
            header: A serialized protobuf message.
            arrays: Arrays of float32, int64, float64, int32, float16 or uint16, of any shape.
        """
        described = bytearray(_SIZES.pack(len(header), len(arrays)))
        for array in arrays:
            described += _ARRAY.pack(_CODES[array.dtype], array.ndim, 0, 0)
            described += _SHAPES[array.ndim].pack(*array.shape)
        described += header
        parts: list[Any] = [described]
        position = _PREFIX.size + len(described)
        for array in arrays:
            padding = -position % _ALIGNMENT
            if padding:
                parts.append(_PADDING[:padding])
            if array.size:
                parts.append(array.data if array.flags.c_contiguous else np.ascontiguousarray(array).data)
            position += padding + array.nbytes
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._size = position

    def __len__(self) -> int:
        """Return the size in bytes."""
        return self._size

    def whole(self) -> bytes:
        """Return the frame as one message."""
        return b"".join([self._prefix(), *self._parts])

    def chunks(self) -> Iterator[bytes]:
        """Yield the frame as the messages of a stream."""
        yield _STREAM_SIZE.pack(self._size)
        for piece in _pieces([memoryview(self._prefix()), *self._parts], CHUNK_BYTES):
            yield b"".join(piece)

    @property
    def parts(self) -> list[memoryview]:
        """The frame without its prefix, as buffers that are not copied."""
        return self._parts

    def _prefix(self) -> bytes:
        return _PREFIX.pack(MAGIC, _checksum_of(self._parts))


def _pieces(parts: Iterable[memoryview], max_bytes: int) -> Iterator[list[memoryview]]:
    waiting: list[memoryview] = []
    room = max_bytes
    for part in parts:
        rest = part
        while len(rest):
            waiting.append(rest[:room])
            room, rest = room - len(waiting[-1]), rest[room:]
            if room == 0:
                yield waiting
                waiting, room = [], max_bytes
    if waiting:
        yield waiting


@dataclass(frozen=True, slots=True)
class Arrived:
    """A received frame, with the checksum computed during the transfer; `decode` compares it.

    Attributes:
        checksum: Checksum of all bytes but the prefix.
    """

    data: npt.NDArray[np.uint8]
    checksum: int

    def __len__(self) -> int:
        return len(self.data)


Message = Buffer | Arrived


def _checksum_of(parts: Iterable[Buffer]) -> int:
    """Return the checksum of consecutive parts."""
    checksum = 0
    for part in parts:
        checksum = _native.crc32c(part, checksum)
    return checksum


def encode(header: bytes, arrays: Sequence[Array]) -> bytes:
    """Return a frame as one message; see `Frame`."""
    return Frame(header, arrays).whole()


def join(chunks: Iterable[bytes]) -> memoryview:
    """Return the frame of a stream, after its end.

    Raises:
        FrameError: the frame is incomplete.
    """
    messages = iter(chunks)
    return join_rest(announced_size(messages), messages)


def announced_size(messages: Iterator[bytes]) -> int:
    """Take the first message of a stream, and return the size of its frame in bytes.

    Raises:
        FrameError: the message is not a size.
    """
    first = next(messages, b"")
    if len(first) != _STREAM_SIZE.size:
        raise FrameError("a stream does not begin with the size of its frame")
    size: int = _STREAM_SIZE.unpack(first)[0]
    return size


def join_rest(size: int, messages: Iterator[bytes]) -> memoryview:
    """Return the frame of a stream after `announced_size`.

    Raises:
        FrameError: the frame is incomplete.
    """
    frame = np.empty(size, np.uint8).data
    place = 0
    for chunk in messages:
        if place + len(chunk) > len(frame):
            raise FrameError(f"more than the {len(frame)} bytes of a frame have come")
        frame[place : place + len(chunk)] = chunk
        place += len(chunk)
    if place != len(frame):
        raise FrameError(f"{place} of the {len(frame)} bytes of a frame have come")
    return frame


def decode(frame: Message | Frame) -> tuple[bytes, list[Array]]:
    """Return the header and the arrays of a frame; the arrays are views into it.

    Raises:
        WireVersionError: the frame has another version.
        FrameError: the bytes are truncated, damaged, or not a frame.
    """
    if isinstance(frame, Frame):
        frame = frame.whole()
    data = frame.data.data if isinstance(frame, Arrived) else memoryview(frame)
    if len(data) < _BODY:
        raise FrameError(f"a frame of {len(data)} bytes has no prefix")
    magic, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        if magic & 0xFFFFFF == _NAME:
            raise WireVersionError(magic >> 24)
        raise FrameError(f"not a frame: magic {magic:#x}")
    found = frame.checksum if isinstance(frame, Arrived) else _checksum_of([data[PREFIX_BYTES:]])
    if found != checksum:
        raise FrameError("the checksum of a frame does not match")
    try:
        return _decode_body(data)
    except (struct.error, ValueError, IndexError) as error:
        raise FrameError(f"malformed frame: {error}") from error


def _decode_body(frame: memoryview) -> tuple[bytes, list[Array]]:
    header_size, num_arrays = _SIZES.unpack_from(frame, _PREFIX.size)
    position = _BODY
    described = []
    for _ in range(num_arrays):
        dtype, num_dimensions, _, _ = _ARRAY.unpack_from(frame, position)
        position += _ARRAY.size
        shape = _SHAPES[num_dimensions].unpack_from(frame, position)
        position += 8 * num_dimensions
        if min(shape, default=0) < 0:
            raise ValueError(f"an array of shape {shape}")
        described.append((_DTYPES[dtype], shape))
    header = bytes(frame[position : position + header_size])
    position += header_size
    arrays: list[Array] = []
    for dtype, shape in described:
        position += -position % _ALIGNMENT
        count = math.prod(shape)
        arrays.append(np.frombuffer(frame, dtype, count, position).reshape(shape))
        position += count * dtype.itemsize
    return header, arrays
