"""Prediction: the outputs of a model for the records of a task go to the user's processor, to a part, or to both.

Columns of the data may be written beside the predictions (--prediction_columns).

`TableParts` writes the rows of a task to a database table, in one transaction, when the lease is confirmed.
The first of --prediction_columns is the table's primary key; see elasticdl.data.sql.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import grpc
import numpy as np

from elasticdl.activities import Activity
from elasticdl.data.example import parse_all, parse_examples
from elasticdl.data.factory import open_source
from elasticdl.data.reader import Reader
from elasticdl.data.sql import OutputTable
from elasticdl.data.table_decoder import Column, FeedColumns, decode, numbers_of_cells
from elasticdl.data.table_encoder import exact_fractions
from elasticdl.frameworks.framework import Batch, FeedError, Inference, Surplus
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl.protocol import Shard
from elasticdl.storage.paths import DONE_FILE, path_of
from elasticdl.worker.inference.output_parts import Columns, Parts, RowWriter, columns_of, format_of, open_rows
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, LeaseLost, TaskBatches, ValueSource
from elasticdl_client.choices import PredictionFormat
from elasticdl_client.data_sources import is_table, split_columns
from elasticdl_client.errors import DataError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec

Name = tuple[int, int]  # task, minibatch
Process = Callable[[Any, Name], None]
_ONE_VALUE = "Name columns that hold one value in each record, such as its key."
_ONE_A_RECORD = "Let feed keep every record when its mode is 'prediction', and repeat none."


class PredictionWork:
    """The `TaskWork` of a predict job."""

    def __init__(
        self,
        failures: TaskFailures,
        model: Inference,
        source: ValueSource,
        spec: JobSpec,
        definition: ModelDefinition,
    ) -> None:
        """
        Args:
            source: The source of the values of `model`.

        Raises:
            JobError, ModelDefinitionError: there is no place for predictions.
        """
        self.model = model
        self.failures = failures
        self._link, self._clock = failures.link, failures.clock
        link = failures.link
        self._source = source
        self._process = make_process(definition, link.worker_id)
        self._parts: Parts | None = None
        self._table: TableParts | None = None
        self._carried: CarriedColumns | None = None
        if is_table(spec.prediction_outputs):
            self._carried = CarriedColumns(spec, definition)
            self._table = TableParts(spec.prediction_outputs, self._carried.names[0], link.confirm)
        elif spec.prediction_outputs:
            self._format: PredictionFormat = format_of(spec.prediction_format)
            self._parts = Parts(path_of(spec.prediction_outputs), self._format.value, link.confirm)
            self._carried = CarriedColumns(spec, definition) if spec.prediction_columns else None
        elif self._process is None:
            raise ModelDefinitionError(
                f"{definition.path} has no {spec.prediction_outputs_processor}, and there is no --prediction_outputs.",
                "Define a class with a method process(predictions, worker_id), or name a directory.",
            )

    def run(self, held: HeldLease, batches: TaskBatches) -> None:
        with self._clock.during(Activity.EVALUATE):
            values = self._source.values(held)
        with self._writing(held) as writer:
            for batch in batches:
                held.minibatch = batch.n
                with self._clock.during(Activity.COMPUTE):
                    outputs = self.model.predict(batch, values.parameters, values.rows(batch))
                self._give(outputs, batch, held, writer)
            held.check_read()
            self._check_count(held, batches.surplus)
        assert batches.num_minibatches is not None
        self._link.finish(held.id, batches.num_minibatches)
        self._link.leases.remove(held.id)

    def alone(self, held: HeldLease) -> None:
        self.end(held)
        self._link.finish(held.id, 0)
        self._link.leases.remove(held.id)

    def close(self) -> None:
        self._source.close()

    @contextmanager
    def _writing(self, held: HeldLease) -> Iterator[RowWriter | None]:
        """Yield the writer for the rows of a task, stored when the block ends; None: only the processor gets them."""
        if self._table is not None:
            with self._table.writing(held) as rows:
                yield rows
        elif self._parts is not None:
            with self._parts.writing(held) as path, closing(open_rows(self._format, path)) as writer:
                yield writer
        else:
            yield None

    def _check_count(self, held: HeldLease, surplus: Surplus) -> None:
        if surplus.count:
            what = surplus.explained(len(held.record_numbers))
            raise FeedError(held.id, 0, f"{what}. A prediction has one row for each record. {_ONE_A_RECORD}")

    def end(self, held: HeldLease) -> None:
        """Write a marker file beside the complete parts; or check that the table has a row for each record.

        Raises:
            DataError: rows are missing.
        """
        if self._table is not None:
            self._table.check_num_rows(held.lease.shard.end)
            return
        assert self._parts is not None
        self._parts.sweep()
        with self._parts.writing_named(held, DONE_FILE) as path:
            parts = self._parts.names()
            path.write_text(json.dumps({"model_version": held.lease.model_version, "parts": parts}) + "\n")

    def _give(self, outputs: Any, batch: Batch, held: HeldLease, writer: RowWriter | None) -> None:
        if self._process is not None:
            self._process(outputs, (held.lease.task, batch.n))
        if writer is not None:
            columns = columns_of(outputs)
            wrong = {name: len(values) for name, values in columns.items() if len(values) != batch.size}
            if wrong:
                raise TypeError(f"the model makes {wrong} rows of a minibatch of {batch.size} samples")
            writer.write({**self._columns_beside(columns, batch, held), **columns})

    def _columns_beside(self, outputs: Columns, batch: Batch, held: HeldLease) -> Columns:
        if self._carried is None:
            return {}
        both = next((name for name in self._carried.names if name in outputs), None)
        if both is not None:
            raise TypeError(f"the model has an output {both!r}, and --prediction_columns names a column of that name")
        with self._clock.during(Activity.INPUT):
            columns = self._carried.of(held, batch.n)
        count = len(next(iter(columns.values())))
        if count != batch.size:
            what = f"feed makes {batch.size} samples of {count} records"
            raise FeedError(held.id, batch.n, f"{what}. A prediction has one row for each record. {_ONE_A_RECORD}")
        return columns


def make_process(definition: ModelDefinition, worker_id: int) -> Process | None:
    """Return `process` of the user's class, which may take the minibatch's name; None without such a class."""
    made = definition.prediction_outputs_processor
    if made is None:
        return None
    where = f"{definition.path}: {getattr(made, '__name__', 'PredictionOutputsProcessor')}"
    processor = user_call(made, f"{where}()")
    process = getattr(processor, "process", None)
    if not callable(process):
        raise ModelDefinitionError(
            f"{where} has no method process.", "Define process(self, predictions, worker_id), maybe with name=None."
        )
    takes_name = True
    try:
        inspect.signature(process).bind(None, worker_id, name=(0, 0))
    except TypeError:
        takes_name = False

    def give(outputs: Any, name: Name) -> None:
        try:
            process(outputs, worker_id, **({"name": name} if takes_name else {}))
        except grpc.RpcError as error:  # of a client of the user's: an RpcError of ours would end the worker
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return give


class CarriedColumns:
    """Columns of the prediction data that are written beside the predictions, such as an id per row.

    They are read from the source separately, so they need not be features of the model, and are unchanged.
    """

    def __init__(self, spec: JobSpec, definition: ModelDefinition) -> None:
        """
        Raises:
            DataError: the source has no such column.
            ModelDefinitionError: the module has its own data reader.
        """
        if definition.custom_data_reader is not None:
            raise ModelDefinitionError(
                f"{definition.path} has a data reader of its own, whose records --prediction_columns cannot read.",
                "Leave --prediction_columns out, and let the model return the columns beside its outputs.",
            )
        self.names = tuple(dict.fromkeys(split_columns(spec.prediction_columns)))
        self._size = spec.minibatch_size
        everything = dataclasses.replace(spec, columns="", label_column="")
        given = spec.data_reader_params_dict().items()
        params = {name: value for name, value in given if name not in ("columns", "label_col")}
        reader = open_source(everything, spec.prediction_data, params)
        if available := reader.metadata().column_names:
            missing = next((name for name in self.names if name not in available), None)
            if missing is not None:
                what = f"--prediction_data has no column {missing}, which --prediction_columns names."
                raise DataError(what, f"It has: {', '.join(available)}.")
            everything = dataclasses.replace(everything, columns=spec.prediction_columns)
            reader = open_source(everything, spec.prediction_data, params, is_exact=True)
        self._reader: Reader = reader
        metadata = reader.metadata()
        dtypes, shapes = dict(metadata.column_dtypes), dict(metadata.column_shapes)
        self._whole = [name for name in self.names if dtypes.get(name) == "int64" and name not in shapes]
        self._fractions = [name for name in self.names if dtypes.get(name) == "float64" and name not in shapes]
        texts = dtypes | dict.fromkeys(self._fractions, "string")
        self._rows = (
            FeedColumns(texts, shapes, self.names, "", metadata.delimiter)
            if metadata.delimiter
            else None  # records are tf.train.Examples
        )

    def of(self, held: HeldLease, minibatch: int) -> Columns:
        """Return the columns of the records of a minibatch.

        Raises:
            DataError: a record lacks a column, or has several values for it.
        """
        numbers = held.record_numbers[minibatch * self._size : (minibatch + 1) * self._size]
        name, identity = held.lease.shard.name, held.lease.shard.identity
        runs = [Shard(name, start, end, identity) for start, end in _runs(numbers)]
        records = [record for run in runs for record in self._reader.read(run)]
        if self._rows is not None:
            decoded = decode(records, self._rows)
        else:
            try:
                decoded = dict(parse_examples(records, dict.fromkeys(self.names, ())))
            except DataError as error:
                self._check_whole(records, name, numbers)
                what = f"--prediction_columns={','.join(self.names)}: {error.what}"
                raise DataError(what, error.hint or _ONE_VALUE) from error
        for column in self._fractions:
            values: Any = decoded[column]
            decoded[column] = (
                exact_fractions(values)
                if self._rows is None
                else numbers_of_cells(column, "float64", [value.decode() for value in values])
            )
        return {column: _array(decoded[column]) for column in self.names}

    def _check_whole(self, records: Sequence[bytes], shard: str, numbers: Sequence[int]) -> None:
        """Raise if a record lacks an integer column.

        Raises:
            DataError: a record has no value for it.
        """
        for record, number in zip(records, numbers, strict=True):
            found = parse_all([record]) if self._whole else {}
            missing = next((column for column in self._whole if column not in found), None)
            if missing is not None:
                raise DataError(
                    f"--prediction_columns={missing}: record {number} of {shard} has no value of it, and it holds "
                    "whole numbers.",
                    f'Fill it in; or say --data_reader_params=\'column_dtypes={{"{missing}": "float64"}}\', where '
                    "missing is NaN.",
                )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of consecutive numbers."""
    start = 0
    for k in range(1, len(numbers) + 1):
        if k == len(numbers) or numbers[k] != numbers[k - 1] + 1:
            yield numbers[start], numbers[k - 1] + 1
            start = k


def _array(column: Column) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    values = np.asarray(column, dtype=object) if isinstance(column, list) else column
    if values.dtype != object:
        return values
    texts = [
        value.decode(errors="backslashreplace") if isinstance(value, bytes) else value for value in values.tolist()
    ]
    return np.array(texts, dtype=object)


class OutputRows:
    """A `RowWriter` that keeps the rows of a task in memory."""

    def __init__(self) -> None:
        self._parts: list[Columns] = []

    def write(self, columns: Columns) -> None:
        self._parts.append(columns)

    def close(self) -> None:
        """Do nothing: the transaction comes later."""

    def columns(self) -> Columns:
        """Return all rows."""
        names = self._parts[0] if self._parts else ()
        return {name: np.concatenate([part[name] for part in self._parts]) for name in names}


class TableParts:
    """The parts of one job in one database table; see `Parts`."""

    def __init__(self, url: str, key: str, confirm: Callable[[int], bool]) -> None:
        """
        Args:
            url: URL of the table, which is created with the first part.
            key: The column that is its primary key.
            confirm: `MasterLink.confirm`: returns whether a lease is still valid.

        Raises:
            DataError: a package for the URL is not installed, or the URL names no table.
        """
        self._table = OutputTable(url, key)
        self._confirm = confirm

    @contextmanager
    def writing(self, held: HeldLease) -> Iterator[OutputRows]:
        """Yield the writer for the rows of a task; they are stored when the block ends.

        Raises:
            LeaseLost: another worker has the task now.
            DataError: the database rejects the rows.
        """
        rows = OutputRows()
        yield rows
        if not self._confirm(held.id):
            raise LeaseLost
        if columns := rows.columns():
            self._table.replace(columns)

    def check_num_rows(self, least: int) -> None:
        """See `OutputTable.check_num_rows`."""
        self._table.check_num_rows(least)
