"""What a PS holds of a model in native memory: the dense vector with its slots, and how tables are made."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from elasticdl.frameworks.framework import Floats, Table
from elasticdl.kernels import _native
from elasticdl.ps.initializers import build_initializer
from elasticdl.ps.optimizers import OptimizerConfig
from elasticdl_client.errors import ModelDefinitionError

_BLOCK = 1 << 20  # floats


@dataclass(frozen=True, slots=True)
class DenseCopy:
    """Trainable values [t], each slot [t], non-trainable values [n]."""

    trainable: Floats
    slots: tuple[Floats, ...]
    non_trainable: Floats


class DenseValues:
    """A PS's parts of the flat vectors.  Thread-safe: whoever reads sees no half of an update."""

    def __init__(self, trainable: Floats, slots: Mapping[str, Floats], non_trainable: Floats, config: OptimizerConfig):
        """Copies what it is given; a slot that is missing starts fresh."""
        self._lock = threading.Lock()
        self._rule = _native.Optimizer(config.kind, config.options)
        self._clip = config.clip_value
        self.trainable = np.array(trainable, np.float32)
        self.non_trainable = np.array(non_trainable, np.float32)
        self._slots = [
            np.array(slots[slot.name], np.float32)
            if slot.name in slots
            else np.full_like(self.trainable, np.float32(slot.initial))
            for slot in config.slots
        ]

    def apply(
        self,
        gradient: Floats,
        change: Floats,
        parts: Sequence[tuple[Sequence[slice], Sequence[slice], Sequence[float]]],
    ) -> None:
        """One update.

        Args:
            gradient, change: whole.
            parts: what of the two vectors changes, with the optimizer's scalars for it.
        """
        with self._lock:
            for trainable, non_trainable, scalars in parts:
                for part in trainable:
                    slots = [slot[part] for slot in self._slots]
                    self._rule.apply(self.trainable[part], slots, gradient[part], scalars, self._clip)
                for part in non_trainable:
                    self.non_trainable[part] += change[part]

    def read(self) -> list[Floats]:
        """Copies of trainable and non-trainable values."""
        with self._lock:
            return [self.trainable.copy(), self.non_trainable.copy()]

    def buffers(self, threads: Executor) -> DenseCopy:
        """Room for `copy_into`, its pages in place already, so that the copy itself is short."""
        arrays = [np.empty_like(array) for array in self._arrays()]
        list(threads.map(lambda block: block.fill(0.0), _blocks(arrays)))
        return DenseCopy(arrays[0], tuple(arrays[1:-1]), arrays[-1])

    def copy_into(self, copy: DenseCopy, threads: Executor) -> None:
        copies = (copy.trainable, *copy.slots, copy.non_trainable)
        with self._lock:
            list(threads.map(np.copyto, _blocks(copies), _blocks(self._arrays())))

    def _arrays(self) -> tuple[Floats, ...]:
        return self.trainable, *self._slots, self.non_trainable


def _blocks(arrays: Iterable[Floats]) -> list[Floats]:
    """Views that several threads can work on."""
    return [array[start : start + _BLOCK] for array in arrays for start in range(0, len(array), _BLOCK)]


def build_table(table: Table, config: OptimizerConfig, seed: int, expected_rows: int) -> _native.Table:
    """An empty table.

    Raises:
        ModelDefinitionError: its initializer or constraint is not supported; named.
    """
    return _native.Table(
        table.dim,
        build_initializer(table, seed),
        _native.Optimizer(config.kind, config.options),
        [slot.initial for slot in config.slots],
        build_constraint(table),
        expected_rows,
    )


def build_constraint(table: Table) -> _native.Constraint:
    """Of Keras's config: along each row, as Keras's axis 1 of the whole table.

    Raises:
        ModelDefinitionError: it is not supported; named.
    """
    if not table.constraint:
        return _native.Constraint()
    described = json.loads(table.constraint)
    kind, options = described["class_name"], dict(described.get("config") or {})
    if (described.get("module") or "keras").startswith("keras"):
        if kind == "NonNeg":
            return _native.Constraint("non_neg")
        if options.pop("axis", 0) in (1, -1, [1], [-1]):
            if kind == "MaxNorm":
                return _native.Constraint("max_norm", float(options.get("max_value", 2.0)))
            if kind == "UnitNorm":
                return _native.Constraint("unit_norm")
            if kind == "MinMaxNorm":
                low, high = float(options.get("min_value", 0.0)), float(options.get("max_value", 1.0))
                return _native.Constraint("min_max_norm", low, high, float(options.get("rate", 1.0)))
        else:
            kind += " along axis 0"
    raise ModelDefinitionError(
        f"the embeddings_constraint {kind} of the embedding {table.name} is not supported by the parameter server",
        "supported are NonNeg, and MaxNorm, UnitNorm and MinMaxNorm with axis=1, which bound each row alone",
    )
