"""The layers in NumPy and plain Python, and rows of cells as tensors of each kind and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Values = npt.NDArray[Any]
KINDS = ("dense", "sparse", "ragged")
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_WORD = (1 << 64) - 1


def tensor_of(rows: Sequence[Sequence[Any]], kind: str, dtype: Any) -> Any:
    """Rows as a tensor.  A dense one needs rows of one length; a sparse one has gaps between its cells."""
    if kind == "dense":
        return tf.constant(rows, dtype, shape=(len(rows), len(rows[0])))
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.constant([cell for row in rows for cell in row], dtype), [len(row) for row in rows]
    )
    if kind == "ragged":
        return ragged
    indices = [[k, 2 * j + 1] for k, row in enumerate(rows) for j in range(len(row))]
    width = 2 * max(map(len, rows)) + 1
    return tf.SparseTensor(np.array(indices, np.int64).reshape(-1, 2), ragged.flat_values, [len(rows), width])


def kind_of(tensor: Any) -> str:
    if isinstance(tensor, tf.SparseTensor):
        return "sparse"
    return "ragged" if isinstance(tensor, tf.RaggedTensor) else "dense"


def rows_of(tensor: Any) -> list[list[Any]]:
    """The cells of each row; of a sparse tensor those that it stores."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.to_list()
    if not isinstance(tensor, tf.SparseTensor):
        return tensor.numpy().tolist()
    rows: list[list[Any]] = [[] for _ in range(int(tensor.dense_shape[0]))]
    for (row, _), value in zip(tensor.indices.numpy().tolist(), tensor.values.numpy().tolist(), strict=True):
        rows[row].append(value)
    return rows


def apply(function: Callable[[Values], Values], rows: Sequence[Sequence[Any]], dtype: Any) -> list[list[Any]]:
    return [list(function(np.array(row, dtype)).tolist()) if len(row) else [] for row in rows]


def normalized(values: Values, subtractor: float, divisor: float) -> Values:
    return (values.astype(np.float32) - np.float32(subtractor)) / np.float32(divisor)


def digitized(values: Values, bins: Sequence[float]) -> Values:
    return np.digitize(values, np.array(bins, np.float32 if values.dtype == np.float32 else np.float64))


def log_rounded(values: Values, num_bins: int, default: int, base: float | None) -> Values:
    def one(value: float) -> int:
        if not value > 0 or math.isinf(value):
            return default
        rounded = round(math.log(value) / math.log(base) if base else math.log(value))
        return rounded if 0 <= rounded < num_bins else default

    return np.array([one(float(value)) for value in values])


def rounded_identity(values: Values, num_buckets: int, default: int) -> Values:
    def one(value: float) -> int:
        if not math.isfinite(value):
            return default
        return round(value) if 0 <= round(value) < num_buckets else default

    return np.array([one(value) for value in values.tolist()])


def fingerprint(text: bytes) -> int:
    """FarmHash's 64-bit fingerprint of up to 16 bytes."""
    size, number = len(text), int.from_bytes
    if size > 16:
        raise ValueError("longer strings are not for this oracle")
    factor = (_K2 + size * 2) & _WORD
    if size >= 8:
        a, b = (number(text[:8], "little") + _K2) & _WORD, number(text[-8:], "little")
        return _mixed((_turned(b, 37) * factor + a) & _WORD, ((_turned(a, 25) + b) * factor) & _WORD, factor)
    if size >= 4:
        return _mixed(size + (number(text[:4], "little") << 3), number(text[-4:], "little"), factor)
    if size:
        y = text[0] + (text[size >> 1] << 8)
        z = size + (text[-1] << 2)
        folded = ((y * _K2) ^ (z * _K0)) & _WORD
        return ((folded ^ (folded >> 47)) * _K2) & _WORD
    return _K2


def hashed(texts: Sequence[bytes], num_bins: int) -> list[int]:
    return [fingerprint(text) % num_bins for text in texts]


def looked_up(texts: Sequence[bytes], vocabulary: Sequence[str], num_oov: int) -> list[int]:
    places = {token.encode(): place for place, token in enumerate(vocabulary)}
    return [places.get(text, len(places) + fingerprint(text) % num_oov) for text in texts]


def embedded(rows: Sequence[Sequence[int]], table: Values, combiner: str) -> Values:
    result = np.zeros((len(rows), table.shape[1]), np.float32)
    for k, ids in enumerate(rows):
        if len(ids):
            total = table[np.array(ids)].astype(np.float64).sum(axis=0)
            result[k] = total / {"sum": 1, "mean": len(ids), "sqrtn": math.sqrt(len(ids))}[combiner]
    return result


def _turned(value: int, by: int) -> int:
    return ((value >> by) | (value << (64 - by))) & _WORD


def _mixed(u: int, v: int, factor: int) -> int:
    a = ((u ^ v) * factor) & _WORD
    a ^= a >> 47
    b = ((v ^ a) * factor) & _WORD
    b ^= b >> 47
    return (b * factor) & _WORD
