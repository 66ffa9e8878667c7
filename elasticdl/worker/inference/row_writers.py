"""Writes predictions as rows of a table: Parquet, CSV, or RecordIO with a tf.train.Example in each record.

Owns the names of the columns and how values look; where the file is and when it counts is said by parts.py.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.data.example import encode_example, encode_examples
from elasticdl.data.recordio_format import RecordIOWriter
from elasticdl_client.choices import PredictionFormat
from elasticdl_client.errors import JobError

Columns = dict[str, npt.NDArray[Any]]
_NAME = "prediction"


class RowWriter(Protocol):
    """Makes its file with the first rows: without any there is none."""

    def write(self, columns: Columns) -> None:
        """Adds rows; the columns are the same each time."""
        ...

    def close(self) -> None: ...


def format_of(wanted: PredictionFormat) -> PredictionFormat:
    """The format to write.

    Raises:
        JobError: a package that it needs is not installed.
    """
    has_parquet = importlib.util.find_spec("pyarrow") is not None
    if wanted is PredictionFormat.AUTO:
        return PredictionFormat.PARQUET if has_parquet else PredictionFormat.CSV
    if wanted is PredictionFormat.PARQUET and not has_parquet:
        raise JobError(
            "--prediction_format=parquet needs pyarrow, which is not installed.",
            "pip install pyarrow, or give --prediction_format=csv or recordio.",
        )
    return wanted


def open_rows(chosen: PredictionFormat, path: Path) -> RowWriter:
    """A writer of a file."""
    if chosen is PredictionFormat.PARQUET:
        return ParquetRows(path)
    return CsvRows(path) if chosen is PredictionFormat.CSV else RecordIORows(path)


def columns_of(outputs: Any, name: str = "") -> Columns:
    """The outputs of a model by column: those of a dictionary by its keys, those of a tuple by number.

    Raises:
        TypeError: an output has no rows.
    """
    if isinstance(outputs, Mapping):
        parts = [(f"{name}_{key}" if name else str(key), value) for key, value in outputs.items()]
    elif isinstance(outputs, tuple | list):
        parts = [(f"{name or _NAME}_{number}", value) for number, value in enumerate(outputs)]
    else:
        values = np.asarray(outputs)
        if values.ndim == 0:
            raise TypeError(
                f"the model's output {name or _NAME!r} is one value for a whole minibatch, not one a sample"
            )
        return {name or _NAME: values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values}
    columns: Columns = {}
    for part_name, value in parts:
        columns.update(columns_of(value, part_name))
    return columns


class ParquetRows:
    """A column of numbers, or of lists of numbers where an output has more than one a sample."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({name: _arrow(values) for name, values in columns.items()})
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _arrow(values: npt.NDArray[Any]) -> Any:
    import pyarrow as pa

    if values.dtype.kind in "OSU":
        flat = pa.array([value if isinstance(value, bytes) else str(value) for value in values.reshape(-1).tolist()])
    else:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 1:
        return flat
    width = int(np.prod(values.shape[1:]))
    return pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1) * width, pa.int32()), flat)


class CsvRows:
    """A header, then a line a sample; an output with more than one value a sample has as many columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        flat = {name: _text(values) for name, values in columns.items()}
        if self._file is None:
            self._file = open(self._path, "w", newline="", encoding="utf-8")  # noqa: SIM115  closed by `close`
            self._writer = csv.writer(self._file, lineterminator="\n")
            self._writer.writerow(
                [
                    name if columns[name].ndim == 1 else f"{name}_{k}"
                    for name, text in flat.items()
                    for k in range(text.shape[1])
                ]
            )
        self._writer.writerows(np.concatenate(list(flat.values()), axis=1).tolist())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[n, k]; numbers in as few digits as tell them from their neighbours."""
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    if flat.dtype.kind in "OS":
        decoded = [
            [v.decode(errors="backslashreplace") if isinstance(v, bytes) else str(v) for v in row]
            for row in flat.tolist()
        ]
        return np.array(decoded, dtype=object).reshape(flat.shape)
    return flat.astype(str).astype(object)


class RecordIORows:
    """A record a sample, with a feature a column."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: RecordIOWriter | None = None

    def write(self, columns: Columns) -> None:
        if self._writer is None:
            self._writer = RecordIOWriter(str(self._path))
        if all(values.dtype.kind in "fiub" for values in columns.values()):
            self._writer.write_all(encode_examples(columns))
            return
        length = len(next(iter(columns.values())))
        for row in range(length):
            self._writer.write(
                encode_example({name: values[row : row + 1].reshape(-1).tolist() for name, values in columns.items()})
            )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
