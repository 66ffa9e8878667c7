"""Arrays for collectives: as tensors of torch on the same memory, and cut for sending.

Large arrays are cut into pieces, small ones are put together into one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.collective.engine import Tensor

SUMMED = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
PIECE_BYTES = 16 << 20
SMALL_BYTES = 256 << 10  # an array below it is copied into a piece with its neighbours


def shared_tensor(buffer: Any) -> Tensor:
    """A tensor on the memory of a buffer: what is written to it is seen in the buffer.

    Args:
        buffer: a writable numpy array, a tensor of torch, or anything with `__dlpack__`; contiguous.

    Raises:
        ValueError: it cannot be summed in place.
    """
    import torch

    if isinstance(buffer, np.ndarray):
        if not buffer.flags.writeable:
            raise ValueError("cannot sum in place: the array is read-only")
        tensor = torch.from_numpy(buffer)
    elif isinstance(buffer, torch.Tensor):
        tensor = buffer.detach()
    elif hasattr(buffer, "__dlpack_device__"):
        tensor = torch.from_dlpack(buffer)
    elif hasattr(buffer, "__dlpack__"):
        tensor = torch.utils.dlpack.from_dlpack(buffer.__dlpack__())
    else:
        raise ValueError(f"cannot sum in place: a {type(buffer).__name__} is no array and has no __dlpack__")
    if not tensor.is_contiguous():
        raise ValueError("cannot sum in place: the array is not contiguous")
    if str(tensor.dtype).removeprefix("torch.") not in SUMMED:
        raise ValueError(f"cannot sum in place: elements of {tensor.dtype}")
    return tensor


def readable_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array for sending: a view, or a copy if it is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat if flat.flags.writeable else np.asarray(_Unlocked(flat))


def tensor_of_bytes(piece: NDArray[np.uint8]) -> Tensor:
    import torch

    return torch.from_numpy(piece)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """A name that `named_dtype` knows.

    Raises:
        ValueError: elements of that type are not plain bytes.
    """
    if dtype.hasobject or dtype.fields:
        raise ValueError(f"elements of type {dtype} cannot be sent")
    return dtype.name if dtype.kind == "V" else dtype.str


def named_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16 and the like, which frameworks bring with them
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


class _Unlocked:
    """A read-only array as one that torch takes without a warning.  It is read only, by the sender."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


@dataclass(frozen=True, slots=True)
class ArraySlice:
    """Bytes [start, end) of the array of that number."""

    array: int
    start: int
    end: int


Piece = Sequence[ArraySlice]


def pieces_of(sizes: Sequence[int]) -> Iterator[Piece]:
    """All bytes of arrays of these sizes, each once and in order; the same pieces in every member."""
    together: list[ArraySlice] = []
    size_together = 0
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        if together and (size >= SMALL_BYTES or size_together + size > PIECE_BYTES):
            yield together
            together, size_together = [], 0
        if size < SMALL_BYTES:
            together.append(ArraySlice(number, 0, size))
            size_together += size
        else:
            for start in range(0, size, PIECE_BYTES):
                yield [ArraySlice(number, start, min(start + PIECE_BYTES, size))]
    if together:
        yield together
