"""Parts: the output of tasks, one file per task, each complete and each once; and their merged result.

For jobs that make one pass over their data and keep an output of each task:

* `writing(held)` yields the name of a temporary file of the lease.  When the block ends, the master is asked whether
  the lease is still valid; only then does the file become ``part-<task>.<extension>``.  So a task that runs twice, in a
  lost worker and in its successor, leaves one file, and a killed worker leaves no file with the name of a part.
  For remote storage, the file is written on this machine and published as a whole: a partial upload is not a file.
* The master grants one TRAIN_END lease when all tasks are finished, if the job's settings have `has_last_task`
  (master/settings.py).  Its worker gets all parts from `finished()`, in the order of the data, may merge them into one
  file with `writing_file(held, path)`, and removes what killed workers have left with `sweep()`.

See `worker/inference/prediction.py` for an example.

`RowWriter`s write predictions as rows of a table in such a file: Parquet, CSV, or RecordIO with a tf.train.Example in
each record.  They decide names of columns and formats of values, not where a file is and when it becomes a part.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.data.example import encode_example, encode_examples
from elasticdl.data.recordio_format import RecordIOWriter
from elasticdl.storage.paths import (
    PARTS,
    UNFINISHED_PARTS,
    RemotePath,
    read_in_order,
    remove_directory,
    remove_matching,
    sync_directory,
    sync_file,
)
from elasticdl.worker.tasks import HeldLease, LeaseLost
from elasticdl_client.choices import PredictionFormat
from elasticdl_client.errors import JobError
from elasticdl_client.storage_kinds import AnyPath

_PREFIX = "part-"


class Parts:
    """The parts of one job in one directory, shared by all workers; it may be in remote storage."""

    def __init__(self, directory: AnyPath, extension: str, confirm: Callable[[int], bool]) -> None:
        """
        Args:
            extension: Extension of the files, without a dot.
            confirm: `MasterLink.confirm`: returns whether a lease is still valid.
        """
        self._directory = directory
        self._extension = extension
        self._confirm = confirm

    @contextmanager
    def writing(self, held: HeldLease) -> Iterator[Path]:
        """Yield the path of a file to write in the block; without a file there is no part.

        Raises:
            LeaseLost: another worker has the task now.
            StorageError: the part cannot be published.
        """
        with self.writing_named(held, part_name(held, self._extension)) as temporary:
            yield temporary

    @contextmanager
    def writing_named(self, held: HeldLease, name: str) -> Iterator[Path]:
        """Like `writing`, for a file with another name beside the parts."""
        with self.writing_file(held, self._directory / name) as temporary:
            yield temporary

    @contextmanager
    def writing_file(self, held: HeldLease, final: AnyPath) -> Iterator[Path]:
        """Like `writing`, for any file."""
        with confirmed_file(held, final, self._confirm) as temporary:
            yield temporary

    def finished(self) -> list[AnyPath]:
        """Return all parts, in the order of the data."""
        suffix = f".{self._extension}"
        found = [file for file in self._files() if file.name.startswith(_PREFIX) and file.suffix == suffix]
        return sorted(found, key=lambda part: (len(part.name), part.name))

    def names(self) -> list[str]:
        """Return the names of all parts, in the order of the data."""
        return [part.name for part in self.finished()]

    def contents(self) -> Iterator[bytes]:
        """Yield the bytes of all parts, in the order of the data."""
        return read_in_order(self._directory, self.names())

    def sweep(self) -> None:
        """Remove unfinished parts; call this only when all tasks are finished."""
        remove_matching(self._directory, UNFINISHED_PARTS)

    def remove(self) -> None:
        """Remove all parts, finished or not, and the directory if it is empty then; only after the job."""
        remove_matching(self._directory, PARTS)
        if not self._files():
            remove_directory(self._directory)

    def _files(self) -> list[AnyPath]:
        return list(self._directory.iterdir()) if self._directory.is_dir() else []


def part_name(held: HeldLease, extension: str) -> str:
    """Return the name of the part of a lease's task."""
    return f"{_PREFIX}{held.lease.task:05d}.{extension}"


@contextmanager
def confirmed_file(held: HeldLease, final: AnyPath, confirm: Callable[[int], bool]) -> Iterator[Path]:
    """Yield a temporary file of the lease; it becomes `final` if the block ends normally and the lease is confirmed.

    Raises:
        LeaseLost: the lease is no longer valid; `final` is unchanged.
        StorageError: it cannot be published.
    """
    if isinstance(final, RemotePath):
        with tempfile.TemporaryDirectory(prefix="elasticdl-part-") as directory:
            temporary = Path(directory, final.name)
            yield temporary
            if not confirm(held.id):
                raise LeaseLost
            if temporary.exists():
                final.storage.publish(final.url, temporary)
        return
    final = Path(str(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{held.id}.{final.name}")
    try:
        yield temporary
        if not confirm(held.id):
            raise LeaseLost
        if temporary.exists():
            sync_file(temporary)
            os.replace(temporary, final)
            sync_directory(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


Columns = dict[str, npt.NDArray[Any]]
_NAME = "prediction"
_ROW_GROUP_BYTES = 16 << 20


class RowWriter(Protocol):
    """Writes rows to a file, which it creates with the first rows."""

    def write(self, columns: Columns) -> None:
        """Add rows; the columns are the same each time, in any order."""
        ...

    def close(self) -> None: ...


def format_of(wanted: PredictionFormat) -> PredictionFormat:
    """Return the format to write; AUTO is Parquet if pyarrow is installed, else CSV.

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
    """Return a writer for a new file."""
    if chosen is PredictionFormat.PARQUET:
        return ParquetRows(path)
    return CsvRows(path) if chosen is PredictionFormat.CSV else RecordIORows(path)


def columns_of(outputs: Any, name: str = "") -> Columns:
    """Return the outputs of a model by column: of a dictionary by key, of a tuple by number.

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


def _ordered(columns: Columns, names: Sequence[str]) -> Columns:
    """Return columns in the order of the first minibatch's names; unchanged if the names differ."""
    return {name: columns[name] for name in names} if columns.keys() == set(names) else columns


class ParquetRows:
    """Writes columns of numbers, or of lists of numbers for outputs with several values per sample.

    Several minibatches are written as one row group, since a file should have few.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._names: list[str] = []
        self._tables: list[Any] = []
        self._size_bytes = 0

    def write(self, columns: Columns) -> None:
        import pyarrow as pa

        self._names = self._names or list(columns)
        table = pa.table({name: _arrow(values) for name, values in _ordered(columns, self._names).items()})
        self._tables.append(table)
        self._size_bytes += table.nbytes
        if self._size_bytes >= _ROW_GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        try:
            if self._tables:
                self._write_group()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _write_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables, self._tables, self._size_bytes = self._tables, [], 0
        table = pa.concat_tables(tables)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)


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
    """Writes a header, then one line per sample; an output with k values per sample has k columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._writer: Any = None
        self._names: list[str] = []
        self._header: list[str] = []

    def write(self, columns: Columns) -> None:
        self._names = self._names or list(columns)
        columns = _ordered(columns, self._names)
        flat = {name: _text(values) for name, values in columns.items()}
        header = [
            name if columns[name].ndim == 1 else f"{name}_{k}"
            for name, text in flat.items()
            for k in range(text.shape[1])
        ]
        if self._file is None:
            self._header = header
            self._file = open(self._path, "w", newline="", encoding="utf-8")  # noqa: SIM115  closed by `close`
            self._writer = csv.writer(_RowsWithLf(self._file), lineterminator="\r\n")
            self._writer.writerow(header)
        elif header != self._header:
            others = ", ".join(sorted(set(header) ^ set(self._header))[:3])
            raise TypeError(
                f"not all minibatches have predictions in the columns {others}: make the model's outputs equally long, "
                "or at least two values long and give --prediction_format=parquet"
            )
        self._writer.writerows(np.concatenate(list(flat.values()), axis=1).tolist())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _RowsWithLf:
    """Writes lines that end with LF; before Python 3.13, csv quotes a CR only if its own lines end with one."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(line.removesuffix("\r\n") + "\n")


def _text(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values as text, [n, k]; numbers with the fewest digits that identify them."""
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    if flat.dtype.kind in "OS":
        decoded = [
            [v.decode(errors="backslashreplace") if isinstance(v, bytes) else str(v) for v in row]
            for row in flat.tolist()
        ]
        return np.array(decoded, dtype=object).reshape(flat.shape)
    return flat.astype(str).astype(object)


class RecordIORows:
    """Writes one record per sample, with one feature per column."""

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
