"""Memory shared by two processes for one task: its records, and its minibatches once they are made.

It is an anonymous file (memfd): it uses no space in /dev/shm, and is freed with the last process that holds it, even if
this process is killed.  Reading tensors and arrays does not copy them.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch

from elasticdl.frameworks.memory_file import create_memory_file
from elasticdl_client.errors import DataError, ModelDefinitionError

_PAGE = mmap.ALLOCATIONGRANULARITY
_ALIGNMENT = 64  # bytes; the alignment of PyTorch's allocator
_GAP = memoryview(bytes(_ALIGNMENT))
_MOST_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))  # per system call
_MOST_APART = 4096  # separate buffers: their lengths fit into a datagram; others are in the pickled object
_LARGE_RECORD_BYTES = 4096  # average size of large records
_MOST_GAPS = 2  # a tensor whose memory is larger than its values by this factor is sent without the gaps
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_NOT_SENT = (pickle.PicklingError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """The position of an object in the memory.

    Attributes:
        offset: Offset in bytes, a multiple of the page size.
        lengths: Sizes in bytes of the pickled object and of the buffers of its tensors and arrays.
    """

    offset: int
    lengths: tuple[int, ...]


class TaskMemory:
    """The shared memory of a task.  Either process may write, one at a time; it is freed when both have dropped it."""

    def __init__(self, descriptor: int) -> None:
        """
        Args:
            descriptor: File descriptor; this object owns it from now on.
        """
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._first_page = mmap.mmap(descriptor, _PAGE)

    @classmethod
    def create(cls) -> TaskMemory:
        """Create an empty shared memory.

        Raises:
            DataError: There is not enough memory, or too many files are open.
        """
        try:
            descriptor = create_memory_file("elasticdl-input")
            os.ftruncate(descriptor, _PAGE)
            return cls(descriptor)
        except OSError as error:
            raise _no_memory(_PAGE, error) from error

    def cancel(self) -> None:
        """Ask the other process to stop working on this task."""
        self._first_page[0] = 1

    @property
    def is_cancelled(self) -> bool:
        """Whether either process has cancelled it."""
        return self._first_page[0] == 1

    def put(self, value: Any) -> MemorySpan:
        """Append an object.

        Raises:
            ModelDefinitionError: The object cannot be sent to another process.
            DataError: There is not enough memory for it.
        """
        buffers: list[pickle.PickleBuffer] = []

        def is_kept_within(buffer: pickle.PickleBuffer) -> bool:
            if len(buffers) < _MOST_APART:
                buffers.append(buffer)
                return False
            return True

        pickled = _pickled(value, is_kept_within)
        parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        place = MemorySpan(_rounded(os.fstat(self.descriptor).st_size, _PAGE), tuple(len(part) for part in parts))
        starts = _starts(place.lengths)
        try:
            os.ftruncate(self.descriptor, place.offset + starts[-1] + place.lengths[-1])
            _write(self.descriptor, parts, starts, place.offset)
        except OSError as error:
            raise _no_memory(sum(place.lengths), error) from error
        return place

    def put_records(self, records: Sequence[bytes]) -> MemorySpan:
        """Append records; large ones are not copied first.

        Raises:
            DataError: There is not enough memory for them.
        """
        are_large = sum(map(len, records)) > _LARGE_RECORD_BYTES * len(records)
        return self.put([memoryview(record) for record in records] if are_large else list(records))

    def get_records(self, place: MemorySpan) -> list[bytes]:
        """Return records written by `put_records`."""
        return [bytes(record) for record in self.get(place)]

    def get(self, place: MemorySpan) -> Any:
        """Return an object; the memory of its tensors and arrays is this one, and writable."""
        starts = _starts(place.lengths)
        mapped = _mapped(self.descriptor, starts[-1] + place.lengths[-1], place.offset)
        pickled, *buffers = (
            mapped[start : start + length] for start, length in zip(starts, place.lengths, strict=True)
        )
        return pickle.loads(pickled, buffers=buffers)


def _mapped(descriptor: int, length: int, offset: int) -> memoryview:
    """Map a part of a file like `mmap.mmap`, but without holding the GIL while unmapping.

    Unmapping takes 5 ms for 77 MB, a minibatch of 128 images; training would pause for this time.

    Raises:
        OSError: There is not enough memory.
    """
    address = _LIBC.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapped: Any = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(mapped, _LIBC.munmap, address, length).atexit = False  # tensors may still be used
    seen: Any = np.frombuffer(mapped, np.uint8)  # a memoryview of ctypes cannot be cast
    return memoryview(seen)


class _Pickler(pickle.Pickler):
    """Leaves the values of tensors out, as `pickle` itself does those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        """See `pickle.Pickler`."""
        if type(value) is torch.Tensor and _is_plain(value):
            return _reduced(value)
        if type(value) is memoryview:
            return memoryview, (pickle.PickleBuffer(value),)
        return NotImplemented


def _pickled(value: Any, is_kept_within: Callable[[pickle.PickleBuffer], bool]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=is_kept_within).dump(value)
    except _NOT_SENT as error:
        name, part, cause = next(_unsent(value, ""), ("", value, error))
        raise ModelDefinitionError(
            f"feed makes minibatches that an input process cannot send: {name or 'one'} is a {type(part).__name__} "
            f"({cause}).",
            "Let feed or collate_fn make them of tensors, arrays, numbers and texts; or leave --input_workers out.",
        ) from error
    return file.getvalue()


def _unsent(part: Any, name: str) -> Iterator[tuple[str, Any, Exception]]:
    """Yield the parts of a structure that cannot be pickled: name, part and cause."""
    inner: list[tuple[str, Any]] = []
    if isinstance(part, Mapping):
        inner = [(f"{name}[{key!r}]", one) for key, one in part.items()]
    elif is_dataclass(part):
        inner = [(f"{name}.{one.name}".removeprefix("."), getattr(part, one.name)) for one in fields(part)]
    elif isinstance(part, list | tuple):
        inner = [(f"{name}[{number}]", one) for number, one in enumerate(part)]
    for name_of_one, one in inner:
        yield from _unsent(one, name_of_one)
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(part)
    except _NOT_SENT as error:
        yield name, part, error


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is completely described by its values, type and strides."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.requires_grad or tensor.__dict__:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _reduced(tensor: Any) -> tuple[Any, ...]:
    length = _length(tensor)
    if length > _MOST_GAPS * tensor.numel():
        tensor = tensor.contiguous()
        length = tensor.numel()
    size, stride = tuple(tensor.shape), tensor.stride()
    if not length:
        return _tensor, (tensor.dtype, size, stride, None)
    values = tensor.as_strided((length,), (1,), tensor.storage_offset()).view(torch.uint8).numpy()
    return _tensor, (tensor.dtype, size, stride, pickle.PickleBuffer(values))


def _length(tensor: Any) -> int:
    """Return the number of values from the tensor's first to its last one in memory, including gaps."""
    if not tensor.numel():
        return 0
    spans: Iterator[int] = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(spans)


def _tensor(dtype: Any, size: tuple[int, ...], stride: tuple[int, ...], values: Any) -> Any:
    if values is None:
        return torch.empty_strided(size, stride, dtype=dtype)
    return torch.frombuffer(values, dtype=dtype).as_strided(size, stride)


def _starts(lengths: tuple[int, ...]) -> list[int]:
    return list(accumulate((_rounded(length, _ALIGNMENT) for length in lengths[:-1]), initial=0))


def _rounded(length: int, unit: int) -> int:
    return math.ceil(length / unit) * unit


def _write(descriptor: int, parts: Sequence[memoryview], starts: Sequence[int], offset: int) -> None:
    """Write parts to their places behind an offset, in few calls: after each the interpreter's lock is waited for."""
    pending: deque[memoryview] = deque()
    position = 0
    for part, start in zip(parts, starts, strict=True):
        pending += (_GAP[: start - position], part)
        position = start + len(part)
    while pending:
        written = os.pwritev(descriptor, list(islice(pending, _MOST_BUFFERS)), offset)
        offset += written
        while pending and written >= len(pending[0]):
            written -= len(pending.popleft())
        if pending:
            pending[0] = pending[0][written:]


def _no_memory(num_bytes: int, error: OSError) -> DataError:
    return DataError(
        f"There is no memory for {num_bytes:,} bytes that an input process shares with its worker: {error.strerror}.",
        "Give workers more memory, or take fewer --input_workers or fewer --num_minibatches_per_task.",
    )
