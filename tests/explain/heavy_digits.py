"""The digits in NumPy with more for the parameter servers to do, as the environment says.

BALLAST: floats of the dense model that nothing is computed with.  HOT_ROWS: rows of a wide table that every minibatch
looks up, all of them on the first of two servers.  NEW_ROWS: rows that every minibatch is the first to look up, so that
a server has to make their initial values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from elasticdl.frameworks.framework import (
    Batch,
    Floats,
    Ids,
    Mode,
    ModelReport,
    Parameters,
    Step,
    Table,
    TaskRecords,
    Variable,
)
from elasticdl.ps.partition import NUM_BUCKETS, buckets
from tests.e2e_kubernetes.zoo.paced import numpy_digits

_DIM = 4096
_INITIALIZER = '{"class_name": "TruncatedNormal", "config": {"stddev": 0.1}}'


def custom_model() -> Floats:
    return numpy_digits.custom_model()


def framework(definition: Any, minibatch_size: int, **_: object) -> HeavyFramework:
    return HeavyFramework(definition.model(), minibatch_size)


class HeavyFramework(numpy_digits.NumpyFramework):
    """See `elasticdl.frameworks.framework.Framework`."""

    def __init__(self, weights: Floats, minibatch_size: int) -> None:
        super().__init__(weights, minibatch_size)
        self._ballast = np.zeros(int(os.environ.get("BALLAST", "0")), np.float32)
        self._ids = _on_first_server(int(os.environ.get("HOT_ROWS", "0")))
        self._num_new = int(os.environ.get("NEW_ROWS", "0"))

    def report(self) -> ModelReport:
        report = super().report()
        variables = (*report.variables, Variable("ballast", self._ballast.shape, True)) if self._ballast.size else ()
        tables = (Table("rows", _DIM, _INITIALIZER),) if self._ids.size or self._num_new else ()
        return replace(report, variables=variables or report.variables, tables=tables)

    def initial(self) -> Parameters:
        dense = super().initial()
        return replace(dense, trainable=np.concatenate([dense.trainable, self._ballast]))

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for batch in super().batches(mode, tasks):
            if self._num_new:
                self._ids = np.arange(self._num_new, dtype=np.int64) + (self._ids[-1] + 1 if self._ids.size else 0)
            yield replace(batch, ids={"rows": self._ids}) if self._ids.size and not batch.end else batch

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        own = replace(parameters, trainable=parameters.trainable[: self.weights.size])
        step = super().gradients(batch, own, {}, seed)
        row_gradients = {name: np.ones((ids.size, _DIM), np.float32) for name, ids in batch.ids.items()}
        return replace(step, gradient=np.concatenate([step.gradient, self._ballast]), row_gradients=row_gradients)


def _on_first_server(count: int) -> Ids:
    """Ids of the lower half of the buckets."""
    ids = np.arange(8 * count, dtype=np.int64)
    return ids[buckets(ids) < NUM_BUCKETS // 2][:count]
