"""Samples of arrays as records: rows of several columns, read by index, each packed into the bytes of one record.

Owns the layout of such a record, which `elasticdl.frameworks.keras.input.module_data` unpacks; knows NumPy alone.
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
LENGTH_BYTES = 4  # of a text, before all texts of the record
_KINDS = {"b": "bool", "i": "", "u": "", "f": "", "U": "string", "S": "string", "O": "string"}
_WIDENED = {"uint32": "int64"}  # which tf.io.decode_raw does not know
Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column: the type ("float32", "int64", "string" …) and the shape of a sample's part."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, column: Column, float_dtype: str) -> ColumnSpec:
        """Return the spec of a column; numbers with a fraction become `float_dtype`, as `fit` makes them.

        Args:
            name: of the column, for messages.
            column: [n, …].
            float_dtype: a type of NumPy.

        Raises:
            DataError: it has values that no record holds.
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
        """Whether its values differ in length."""
        return self.dtype == "string"

    @property
    def count(self) -> int:
        """Values of a sample."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """Bytes of a sample in the part of a record that has a fixed length: the lengths of texts, else the values."""
        return self.count * (LENGTH_BYTES if self.is_text else np.dtype(self.dtype).itemsize)


class SampleRows(Protocol):
    """Columns that are read by index."""

    @property
    def specs(self) -> tuple[ColumnSpec, ...]:
        """Specs of the columns, in order."""
        ...

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> Sequence[Column]:
        """Return the columns of these rows, each [end - start, …]."""
        ...


class ArrayRows:
    """Arrays of one length, which stay where they are: a memory-mapped one is read row by row."""

    def __init__(self, columns: Sequence[Any], names: Sequence[str], float_dtype: str) -> None:
        """
        Args:
            columns: arrays, or what has shape and dtype and can be sliced.
            names: for messages.
            float_dtype: of numbers with a fraction.

        Raises:
            DataError: they differ in length, or hold what no record does.
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
    """A column of texts of any length in two files, which is read row by row: the bytes of all, and where each ends."""

    dtype = np.dtype(object)

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: given to `write`.
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
            parts: rows after rows, together of the shape.
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
    """Rows of batches that are read by number: all of one size but the last.  It keeps the newest batch."""

    def __init__(self, batch: Callable[[int], Sequence[Column]], num_batches: int, what: str, float_dtype: str) -> None:
        """
        Args:
            batch: from a number to the columns of that batch, each [n, …], the same whenever it is asked.
            num_batches: at least 1.
            what: has the batches, for messages.
            float_dtype: of numbers with a fraction.

        Raises:
            DataError: the columns of the first batch differ in length, or hold what no record does.
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
        if self._length is None:  # the last batch is read only where the rows are counted
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
    """The port `Reader` over rows: one shard, whose records are the rows by index."""

    def __init__(self, rows: SampleRows, source: str, seed: int) -> None:
        """
        Args:
            source: of the rows, for messages.
            seed: of the job; goes into the metadata.
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
    """Return a record for each row: all columns of a fixed length in order, of texts their lengths; then the texts."""
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
