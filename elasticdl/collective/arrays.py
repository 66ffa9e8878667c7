"""Arrays of other libraries as tensors of torch on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.collective.engine import Tensor

SUMMED = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


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
