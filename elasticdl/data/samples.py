"""Read samples of arrays as records: rows of several columns, read by index, each packed into one record.

Owns the layout of such a record (`elasticdl.frameworks.keras.input.module_data` unpacks it); uses only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.data.reader import Metadata
from elasticdl.data.sources import no_records, shard_not_of_source
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError

SHARD = "samples"
LENGTH_BYTES = 4  # size of the length of a text; all lengths precede all texts of a record
_KINDS = {"b": "bool", "i": "", "u": "", "f": "", "U": "string", "S": "string", "O": "string"}
_WIDENED = {"uint32": "int64"}  # tf.io.decode_raw does not support uint32
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column: its type ("float32", "int64", "string" …), and the shape of its values in one sample."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, column: Column, float_dtype: str) -> ColumnSpec:
        """Return the spec of a column; floating-point numbers become `float_dtype`, as in Keras's `fit`.

        Args:
            name: Name of the column, for messages.
            column: Array [n, …].
            float_dtype: Name of a NumPy type.

        Raises:
            DataError: The values have a type that a record cannot hold.
        """
        kind = _KINDS.get(column.dtype.kind)
        if kind is None or column.dtype == np.uint64:
            raise DataError(
                f"{name} is of type {column.dtype}, which no record holds.",
                "Give numbers, truth values or texts; of uint64, astype('int64').",
            )
        dtype = float_dtype if column.dtype.kind == "f" else kind or column.dtype.name
        return cls(_WIDENED.get(dtype, dtype), tuple(column.shape[1:]))

    @property
    def is_text(self) -> bool:
        """Whether the values are texts, which differ in length."""
        return self.dtype == "string"

    @property
    def count(self) -> int:
        """The number of values in a sample."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """The size of a sample in the fixed-length part of a record: the values, or the lengths of texts."""
        return self.count * (LENGTH_BYTES if self.is_text else np.dtype(self.dtype).itemsize)


class SampleRows(Protocol):
    """Columns with rows that can be read by index."""

    @property
    def specs(self) -> tuple[ColumnSpec, ...]:
        """The specs of the columns, in order."""
        ...

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> Sequence[Column]:
        """Return the columns of rows `start` to `end` - 1, each [end - start, …]."""
        ...


class ArrayRows:
    """Arrays of equal length, which are not copied: a memory-mapped array is read row by row."""

    def __init__(self, columns: Sequence[Any], names: Sequence[str], float_dtype: str) -> None:
        """
        Args:
            columns: Arrays, or objects with a shape and a dtype that can be sliced.
            names: Names of the columns, for messages.
            float_dtype: Type for floating-point numbers.

        Raises:
            DataError: The columns differ in length, or have a type that a record cannot hold.
        """
        lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{length} in {name}" for name, length in lengths.items())
            raise DataError(f"The arrays differ in length: {listed}.", "Give one row for each sample.")
        self._columns = columns
        self.specs = tuple(
            ColumnSpec.of(name, column, float_dtype) for name, column in zip(names, columns, strict=True)
        )

    def __len__(self) -> int:
        return len(self._columns[0])

    def read(self, start: int, end: int) -> Sequence[Column]:
        """See `SampleRows.read`."""
        return [np.asarray(column[start:end]) for column in self._columns]


class TextRows:
    """A column of texts in two files, read row by row: the bytes of all texts, and the position of each end."""

    dtype = np.dtype(object)

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: The path passed to `write`.
        """
        self._content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        self._ends = np.load(_ends_of(path), mmap_mode="r")
        self.shape = self._ends.shape

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, rows: slice) -> Column:
        start, stop, _ = rows.indices(len(self))
        ends = np.ravel(self._ends[start:stop])
        first = int(np.max(self._ends[start - 1], initial=0)) if start else 0
        texts = np.empty(len(ends), object)
        texts[:] = [self._content[begin:end].tobytes() for begin, end in pairwise([first, *ends.tolist()])]
        return texts.reshape(-1, *self.shape[1:])

    @staticmethod
    def write(path: Path, parts: Iterable[Column], shape: tuple[int, ...]) -> None:
        """Write the files of a column.

        Args:
            path: The file for the bytes; the file for the positions is next to it.
            parts: Consecutive rows; together they have the shape.
            shape: Shape of the whole column.
        """
        ends = np.lib.format.open_memmap(_ends_of(path), "w+", np.int64, shape)
        start = position = 0
        with path.open("wb") as file:
            for part in parts:
                encoded = [_text(value) for value in np.ravel(part)]
                file.writelines(encoded)
                ends[start : start + len(part)] = np.reshape(
                    position + np.cumsum([len(text) for text in encoded], dtype=np.int64), part.shape
                )
                start, position = start + len(part), file.tell()
        ends.flush()


def _ends_of(path: Path) -> Path:
    return path.with_suffix(".ends.npy")


class BatchRows:
    """Rows of batches that are read by number; all batches except the last have the same size.  Caches one batch."""

    def __init__(self, batch: Callable[[int], Sequence[Column]], num_batches: int, what: str, float_dtype: str) -> None:
        """
        Args:
            batch: Maps a number to the columns of that batch, each [n, …]; must always return the same batch.
            num_batches: Number of batches, at least 1.
            what: Source of the batches, for messages.
            float_dtype: Type for floating-point numbers.

        Raises:
            DataError: The columns of the first batch differ in length, or have a type that a record cannot hold.
        """
        self._batch = batch
        self._what = what
        self._float_dtype = float_dtype
        self._num_batches = num_batches
        first = batch(0)
        self._newest: tuple[int, Sequence[Column]] = 0, first
        self.specs = ArrayRows(first, self._names(first), float_dtype).specs
        self._size = len(first[0])
        if not self._size:
            raise no_records(what)
        self._length: int | None = None

    def __len__(self) -> int:
        if self._length is None:  # read the last batch only if the rows are counted
            last = self._num_batches - 1
            size = len(self._checked(last, is_last=True)[0])
            self._length = last * self._size + size
        return self._length

    def read(self, start: int, end: int) -> Sequence[Column]:
        """See `SampleRows.read`."""
        parts = []
        for number in range(start // self._size, -(-end // self._size)):
            columns, before = self._checked(number, number == self._num_batches - 1), number * self._size
            parts.append([column[max(0, start - before) : end - before] for column in columns])
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _checked(self, number: int, is_last: bool) -> Sequence[Column]:
        if self._newest[0] == number:
            return self._newest[1]
        columns = self._batch(number)
        found = ArrayRows(columns, self._names(columns), self._float_dtype)
        if found.specs != self.specs:
            raise DataError(
                f"Batch {number} of {self._what} has {_listed(found.specs)}, the first one {_listed(self.specs)}.",
                "All samples must be of one shape and type: pad them.",
            )
        if len(found) > self._size or (len(found) < self._size and not is_last) or not len(found):
            raise DataError(
                f"Batch {number} of {self._what} has {len(found)} samples, the first one {self._size}.",
                "All batches but the last must be of one size, so that a sample can be found by its index.",
            )
        self._newest = number, columns
        return columns

    def _names(self, columns: Sequence[Column]) -> list[str]:
        return [f"array {number} of {self._what}" for number in range(len(columns))]


class SamplesReader:
    """The `Reader` over rows: a single shard; record k is row k."""

    def __init__(self, rows: SampleRows, source: str, seed: int) -> None:
        """
        Args:
            rows: The rows.
            source: Source of the rows, for messages.
            seed: Seed of the job, for the metadata.
        """
        self._rows = rows
        self._source = source
        self._seed = seed

    def shards(self) -> list[Shard]:
        """See `Reader.shards`."""
        if not len(self._rows):
            raise no_records(self._source)
        return [Shard(SHARD, 0, len(self._rows))]

    def read(self, shard: Shard) -> Sequence[bytes]:
        """See `Reader.read`."""
        if shard.name != SHARD or not 0 <= shard.start <= shard.end <= len(self._rows):
            raise shard_not_of_source(shard, self._source, len(self._rows))
        return pack(self._rows.specs, self._rows.read(shard.start, shard.end)) if len(shard) else []

    def metadata(self) -> Metadata:
        """See `Reader.metadata`."""
        return Metadata(seed=self._seed)


def pack(specs: Sequence[ColumnSpec], columns: Sequence[Column]) -> list[bytes]:
    """Return a record for each row: the fixed-length part of all columns in order, then all texts."""
    num_rows = len(columns[0])
    texts: list[list[bytes]] = [[] for _ in range(num_rows)]
    parts = []
    for spec, column in zip(specs, columns, strict=True):
        values = np.asarray(column)
        if spec.is_text:
            encoded = [_text(value) for value in values.reshape(-1)]
            for place, text in enumerate(encoded):
                texts[place // spec.count].append(text)
            values = np.array([len(text) for text in encoded], "<i4")
        else:
            values = values.astype(np.dtype(spec.dtype).newbyteorder("<"), copy=False)
        parts.append(np.ascontiguousarray(values).reshape(num_rows, -1).view(np.uint8))
    fixed = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    width, data = fixed.shape[1], fixed.tobytes()
    rows = [data[place * width : (place + 1) * width] for place in range(num_rows)]
    return [row + b"".join(of_row) for row, of_row in zip(rows, texts, strict=True)]


def _text(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise DataError(
        f"An array of objects holds a {type(value).__name__}.", "Give arrays of numbers, truth values or texts."
    )


def _listed(specs: Sequence[ColumnSpec]) -> str:
    return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs)
