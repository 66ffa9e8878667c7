"""Writes tf.train.Example messages without TensorFlow, by hand in protobuf's wire format.

Features are in the order of their names, so the same values give the same bytes.  `encode_example` takes one record of
any kind; `encode_examples` takes numeric columns of many records and is about ten times as fast; columns of any kind go
through `elasticdl.data.table_encoder`.  Never parses one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FeatureValue: TypeAlias = bytes | str | int | float | Sequence[bytes] | Sequence[str] | ArrayLike

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_WIRE_TYPE = 2
_UINT64_MASK = (1 << 64) - 1


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """One serialized tf.train.Example.

    Args:
        features: name to value or values.  bytes and str become a BytesList, integers and booleans an Int64List,
            floats a FloatList; arrays are flattened.  An empty sequence becomes a feature without values.

    Raises:
        TypeError: if a feature has values of another type, or of several.
    """
    entries = [_map_entry(name.encode(), _encode_feature(name, features[name])) for name in sorted(features)]
    return _field(1, b"".join(entries))


def encode_examples(
    columns: Mapping[str, NDArray[np.integer] | NDArray[np.floating] | NDArray[np.bool_]],
) -> list[bytes]:
    """One serialized tf.train.Example for each row of numeric columns.

    Args:
        columns: name to array of shape (records,) or (records, values).

    Raises:
        TypeError: if a column is not numeric.
        ValueError: if the columns differ in length or one has no values in a row.
    """
    names = sorted(columns)
    if len({len(columns[name]) for name in names}) != 1:
        raise ValueError("all columns must have the same number of records")
    packed = [_pack_column(name, columns[name]) for name in names]
    kinds = [_FLOAT_LIST if columns[name].dtype.kind == "f" else _INT64_LIST for name in names]
    heads: dict[tuple[int, ...], list[bytes]] = {}
    records: list[bytes] = []
    for values in zip(*packed, strict=True):
        sizes = tuple(map(len, values))
        if sizes not in heads:
            heads[sizes] = _heads(names, kinds, sizes)
        records.append(b"".join([piece for pair in zip(heads[sizes], values, strict=True) for piece in pair]))
    return records


def _heads(names: Sequence[str], kinds: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """The bytes before each feature's packed values, when these have the given sizes."""
    heads: list[bytes] = []
    total_bytes = 0
    for name, kind, size in zip(names, kinds, sizes, strict=True):
        values = bytes(size)
        entry = _map_entry(name.encode(), _field(kind, _field(1, values)))
        heads.append(entry[: len(entry) - size])
        total_bytes += len(entry)
    heads[0] = _tag(1) + varint(total_bytes) + heads[0]
    return heads


def _encode_feature(name: str, value: FeatureValue) -> bytes:
    """A serialized tf.train.Feature."""
    if isinstance(value, (bytes, str)):
        value = [value]
    if isinstance(value, Sequence) and value and all(isinstance(item, (bytes, str)) for item in value):
        items = [item.encode() if isinstance(item, str) else bytes(item) for item in value]  # type: ignore[union-attr,arg-type]
        return _field(_BYTES_LIST, b"".join(_field(1, item) for item in items))
    array = np.asarray(value).reshape(-1)
    if array.size == 0:
        return b""
    if array.dtype.kind == "f":
        return _field(_FLOAT_LIST, _field(1, array.astype("<f4").tobytes()))
    if array.dtype.kind in "iub":
        return _field(_INT64_LIST, _field(1, b"".join(varint(int(item) & _UINT64_MASK) for item in array)))
    raise TypeError(f"feature {name!r} has values that are neither bytes, integers nor floats: {value!r}")


def _map_entry(name: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, name) + _field(2, feature))


def _field(number: int, content: bytes) -> bytes:
    return _tag(number) + varint(len(content)) + content


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _WIRE_TYPE])


def varint(value: int) -> bytes:
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)


def _pack_column(name: str, column: NDArray[np.generic]) -> list[bytes]:
    """The packed values of each row."""
    rows = column.reshape(len(column), math.prod(column.shape[1:]))
    if rows.shape[1] == 0:
        raise ValueError(f"column {name!r} has no values in a row")
    if rows.dtype.kind == "f":
        data, ends = rows.astype("<f4").tobytes(), np.arange(1, len(rows) + 1) * (4 * rows.shape[1])
    elif rows.dtype.kind in "iub":
        data, ends = pack_varints(rows.astype(np.int64))
    else:
        raise TypeError(f"column {name!r} has values of type {rows.dtype}, which is neither integer nor float")
    positions = [0, *ends.tolist()]
    return [data[begin:end] for begin, end in itertools.pairwise(positions)]


def pack_varints(rows: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """All values as varints in one piece, and where each row ends in it."""
    values = rows.view(np.uint64)
    largest = int(values.max()) if values.size else 0
    num_bytes = max(1, -(-largest.bit_length() // 7))
    shifts = np.arange(num_bytes, dtype=np.uint64) * np.uint64(7)
    groups = values[..., None] >> shifts
    used = groups > 0
    used[..., 0] = True
    more = np.zeros_like(used)
    more[..., :-1] = used[..., 1:]
    data = (groups & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
    ends: NDArray[np.int64] = np.cumsum(used.sum(axis=(1, 2)), dtype=np.int64)
    return data[used].tobytes(), ends
