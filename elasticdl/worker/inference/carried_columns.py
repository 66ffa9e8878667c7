"""Columns of the data that are written beside the predictions (--prediction_columns), such as an id for each row.

They are read from the source once more, so they need not be features of the model.  They are never changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from elasticdl.data.default_feed import FeedColumns
from elasticdl.data.example_parser import parse_examples
from elasticdl.data.factory import open_source
from elasticdl.data.reader import Reader
from elasticdl.data.table_decoder import Column, decode
from elasticdl.model_def import ModelDefinition
from elasticdl.protocol.values import Shard
from elasticdl.worker.inference.row_writers import Columns
from elasticdl.worker.leases import HeldLease
from elasticdl_client.data_sources import split_columns
from elasticdl_client.errors import DataError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec


class CarriedColumns:
    """Of a job's prediction data."""

    def __init__(self, spec: JobSpec, definition: ModelDefinition) -> None:
        """
        Raises:
            DataError: the source has no such column.
            ModelDefinitionError: the module reads the data itself.
        """
        if definition.custom_data_reader is not None:
            raise ModelDefinitionError(
                f"{definition.path} has a data reader of its own, whose records --prediction_columns cannot read.",
                "Leave --prediction_columns out, and let the model return the columns beside its outputs.",
            )
        self.names = split_columns(spec.prediction_columns)
        self._size = spec.minibatch_size
        everything = dataclasses.replace(spec, columns="", label_column="")
        reader = open_source(everything, spec.prediction_data)
        if available := reader.metadata().column_names:
            missing = next((name for name in self.names if name not in available), None)
            if missing is not None:
                what = f"--prediction_data has no column {missing}, which --prediction_columns names."
                raise DataError(what, f"It has: {', '.join(available)}.")
            reader = open_source(dataclasses.replace(everything, columns=spec.prediction_columns), spec.prediction_data)
        self._reader: Reader = reader
        metadata = reader.metadata()
        self._rows = (
            FeedColumns(dict(metadata.column_dtypes), dict(metadata.column_shapes), self.names, "", metadata.delimiter)
            if metadata.delimiter
            else None  # records are tf.train.Examples
        )

    def of(self, held: HeldLease, minibatch: int) -> Columns:
        """Return the columns of the records of a minibatch.

        Raises:
            DataError: a record lacks one, or has several values of it.
        """
        numbers = held.record_numbers[minibatch * self._size : (minibatch + 1) * self._size]
        name = held.lease.shard.name
        records = [r for start, end in _runs(numbers) for r in self._reader.read(Shard(name, start, end))]
        if self._rows is not None:
            decoded = decode(records, self._rows)
        else:
            decoded = dict(parse_examples(records, dict.fromkeys(self.names, ())))
        return {column: _array(decoded[column]) for column in self.names}


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of what is consecutive."""
    start = 0
    for k in range(1, len(numbers) + 1):
        if k == len(numbers) or numbers[k] != numbers[k - 1] + 1:
            yield numbers[start], numbers[k - 1] + 1
            start = k


def _array(column: Column) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    values = np.asarray(column, dtype=object) if isinstance(column, list) else column
    if values.dtype != object:
        return values
    texts = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values.tolist()]
    return np.array(texts, dtype=object)
