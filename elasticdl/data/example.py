"""Encode and parse tf.train.Example messages without TensorFlow, directly in protobuf's wire format.

Features are sorted by name, so the same values give the same bytes.  `encode_example` encodes one record of any kind;
`encode_examples` encodes numeric columns of many records and is about ten times as fast;
`elasticdl.data.table_encoder` encodes columns of any kind.

Records with the same layout, which differ only in the bytes of their values, are parsed together by NumPy; only the
first record of each layout is parsed byte by byte.  Files written by this module have few layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from elasticdl.kernels import _native
from elasticdl_client.errors import DataError

FeatureValue: TypeAlias = bytes | str | int | float | Sequence[bytes] | Sequence[str] | ArrayLike

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_WIRE_TYPE = 2
_UINT64_MASK = (1 << 64) - 1


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """Return one serialized tf.train.Example.

    Args:
        features: Maps a name to a value or several values.  bytes and str become a BytesList, integers and booleans an
            Int64List, floats a FloatList; arrays are flattened.  An empty sequence becomes a feature without values.

    Raises:
        TypeError: A feature has values of another type, or of several types.
    """
    entries = [_map_entry(name.encode(), _encode_feature(name, features[name])) for name in sorted(features)]
    return _field(1, b"".join(entries))


def encode_examples(
    columns: Mapping[str, NDArray[np.integer] | NDArray[np.floating] | NDArray[np.bool_]],
) -> list[bytes]:
    """Return one serialized tf.train.Example for each row of numeric columns.

    Args:
        columns: Maps a name to an array of shape (records,) or (records, values).

    Raises:
        TypeError: A column is not numeric.
        ValueError: The columns differ in length, or a column has no values per row.
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
    """Return the bytes before each feature's packed values, for packed values of these sizes."""
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
    """Return a serialized tf.train.Feature."""
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
    """Return the packed values of each row."""
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
    """Return all values as concatenated varints, and the end of each row in them."""
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


Column: TypeAlias = npt.NDArray[Any]
_BYTES, _FLOATS, _INTS = 1, 2, 3  # fields of tf.train.Feature
_KINDS = {_BYTES: "bytes", _FLOATS: "floats", _INTS: "integers"}
_Span = tuple[int, int, int]  # kind, begin and end of the packed values


def parse_examples(records: Sequence[bytes], features: Mapping[str, tuple[int, ...]]) -> dict[str, Column]:
    """Return the named features of all records.

    Args:
        records: Serialized tf.train.Example messages.
        features: Maps a name to the shape of the values in one record; () for a single value.

    Returns:
        A map from names to arrays [records, *shape]: float32, int64, or bytes objects.

    Raises:
        DataError: A record is not a tf.train.Example, lacks a feature, or has another number of values.
    """
    found: dict[str, list[tuple[list[int], Column]]] = {name: [] for name in features}
    for rows in _by_layout(records).values():
        spans = _spans(records[rows[0]])
        for name, shape in features.items():
            if name not in spans:
                raise DataError(f"A record has no feature {name!r}; it has {', '.join(sorted(spans)) or 'none'}.")
            found[name].append((rows, _values(name, [records[row] for row in rows], spans[name], shape)))
    return {name: _joined(len(records), features[name], parts) for name, parts in found.items()}


def parse_all(records: Sequence[bytes]) -> dict[str, list[tuple[list[int], Column]]]:
    """Return every feature of all records, with any number of values.

    Returns:
        A map from names to parts: indices of records, and their values [records, values]: float32, int64, or bytes
        objects.

    Raises:
        DataError: A record is not a tf.train.Example.
    """
    found: dict[str, list[tuple[list[int], Column]]] = {}
    for rows in _by_layout(records).values():
        for name, span in _spans(records[rows[0]]).items():
            parts = found.setdefault(name, [])
            try:
                parts.append((rows, _values(name, [records[row] for row in rows], span)))
            except DataError:  # same number of bytes, but different numbers of values
                parts += [([row], _values(name, [records[row]], span)) for row in rows]
    return found


def _by_layout(records: Sequence[bytes]) -> dict[tuple[int, bytes], list[int]]:
    """Group the indices of records by layout: their length and the bytes between their values."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    known: dict[int, list[tuple[bytes, list[_Span]]]] = {}
    for row, record in enumerate(records):
        layouts = known.setdefault(len(record), [])
        for frame, spans in layouts:
            if _frame(record, spans) == frame:
                break
        else:
            spans = sorted(_spans(record).values(), key=lambda span: span[1])
            frame = _frame(record, spans)
            layouts.append((frame, spans))
        groups.setdefault((len(record), frame), []).append(row)
    return groups


def _frame(record: bytes, spans: Sequence[_Span]) -> bytes:
    """Return the bytes of a record between its values."""
    position, pieces = 0, []
    for _, begin, end in spans:
        pieces.append(record[position:begin])
        position = end
    return b"|".join([*pieces, record[position:]])


def _values(name: str, records: Sequence[bytes], span: _Span, shape: tuple[int, ...] | None = None) -> Column:
    """Return one feature of records with the same layout.

    Args:
        name: Name of the feature.
        records: The records.
        span: Position of its values, in each record.
        shape: Shape of its values in a record; None: any.
    """
    kind, begin, end = span
    wanted = None if shape is None else int(np.prod(shape, dtype=np.int64))
    if kind == _FLOATS:
        joined = b"".join([record[begin:end] for record in records])
        column: Column = np.frombuffer(joined, "<f4").reshape(len(records), -1)
    elif kind == _INTS:
        column = _integers(records, begin, end)
    else:
        column = _texts(records, begin, end)
    if wanted is not None and column.shape[1] != wanted:
        raise DataError(f"Feature {name!r} of a record has {column.shape[1]} {_KINDS[kind]}, not {wanted}.")
    return column


def _integers(records: Sequence[bytes], begin: int, end: int) -> Column:
    """Decode varints: together if their boundaries are the same in all records, else record by record."""
    data = np.frombuffer(b"".join([record[begin:end] for record in records]), np.uint8).reshape(len(records), -1)
    more = data >= 0x80
    if not (more == more[0]).all():
        rows = [_integers([record], begin, end)[0] for record in records]
        if len({len(row) for row in rows}) != 1:
            raise DataError("Records differ in the number of integers of a feature.")
        return np.stack(rows)
    lasts = np.flatnonzero(~more[0])
    if not len(lasts):
        return np.zeros((len(records), 0), np.int64)
    sizes = np.diff(lasts, prepend=-1)
    firsts = lasts + 1 - sizes
    data = data[:, : lasts[-1] + 1]
    shifts = 7 * (np.arange(data.shape[1]) - np.repeat(firsts, sizes)).astype(np.uint64)
    groups = (data & 0x7F).astype(np.uint64) << shifts
    return np.bitwise_or.reduceat(groups, firsts, axis=1).view(np.int64)


def _texts(records: Sequence[bytes], begin: int, end: int) -> Column:
    """Decode lists of bytes: together if every list has one value, else record by record."""
    fields = [(a, b) for number, a, b in _fields(records[0], begin, end) if number == 1]
    cut: list[bytes] | None = None
    if len(fields) == 1 and fields[0][1] == end:
        start = fields[0][0]
        cut = _native.cut_records(list(records), records[0][begin:start], start, end)
    lists = [_strings(record, begin, end) for record in records] if cut is None else [[value] for value in cut]
    if len({len(values) for values in lists}) != 1:
        raise DataError("Records differ in the number of texts of a feature.")
    column = np.empty((len(records), len(lists[0])), object)
    for row, values in enumerate(lists):
        column[row] = values
    return column


def _strings(record: bytes, begin: int, end: int) -> list[bytes]:
    return [record[a:b] for number, a, b in _fields(record, begin, end) if number == 1]


def _spans(record: bytes) -> dict[str, _Span]:
    """Return the position of each feature's values; for numbers, of the packed list."""
    found: dict[str, _Span] = {}
    for _, begin, end in _fields(record, 0, len(record)):
        for _, entry_begin, entry_end in _fields(record, begin, end):
            parts = {number: (a, b) for number, a, b in _fields(record, entry_begin, entry_end)}
            if 1 not in parts or 2 not in parts:
                raise _broken("a feature has no name or no value")
            name = record[slice(*parts[1])].decode(errors="replace")
            for kind, a, b in _fields(record, *parts[2]):
                if kind in (_FLOATS, _INTS):
                    packed = [(x, y) for number, x, y in _fields(record, a, b) if number == 1]
                    if len(packed) > 1:
                        raise _broken(f"the numbers of {name!r} are not packed")
                    a, b = packed[0] if packed else (b, b)
                found[name] = (kind, a, b)
    return found


def _fields(record: bytes, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return number, begin and end of each field of a message; all fields must be length-delimited."""
    found = []
    position = begin
    while position < end:
        tag, position = _varint(record, position, end)
        if tag & 7 != 2:
            raise _broken(f"field {tag >> 3} is of wire type {tag & 7}")
        size, position = _varint(record, position, end)
        if position + size > end:
            raise _broken(f"it ends within field {tag >> 3}")
        found.append((tag >> 3, position, position + size))
        position += size
    return found


def _varint(record: bytes, position: int, end: int) -> tuple[int, int]:
    value, shift = 0, 0
    while position < end and shift < 64:
        byte = record[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _broken("it ends within a number")


def _broken(why: str) -> DataError:
    return DataError(f"A record is not a tf.train.Example: {why}.", "Was it written for another feed?")


def _joined(num_records: int, shape: tuple[int, ...], parts: list[tuple[list[int], Column]]) -> Column:
    if not parts:
        return np.zeros((num_records, *shape), np.float32)
    if len({part.dtype for _, part in parts}) != 1:
        raise DataError("Records differ in the type of a feature.")
    whole = np.empty((num_records, parts[0][1].shape[1]), parts[0][1].dtype)
    for rows, part in parts:
        whole[rows] = part
    return whole.reshape(num_records, *shape)
