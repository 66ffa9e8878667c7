"""What a PS holds of a model: a dense slice with slots, non-trainable values, embedding tables with slots.

This module owns values and their updates; names of minibatches, locks and the wire are elsewhere.  `EmbeddingTable` is
a port: the NumPy implementation here is the oracle of its tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.ps.id_index import IdIndex
from elasticdl.ps.initializers import Initializer, build_initializer
from elasticdl.ps.optimizers import Optimizer

_SMALLEST_ARENA = 1024  # rows


@dataclass(frozen=True, slots=True)
class DenseSnapshot:
    """Values [t] and optimizer slots by name, each [t]."""

    values: Floats
    slots: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """Ids [U] in order of creation, rows [U, dim], optimizer slots by name, each [U, dim]."""

    ids: Ids
    rows: Floats
    slots: dict[str, Floats] = field(default_factory=dict)


class EmbeddingTable(Protocol):
    """Rows of one table, created when first needed by its initializer.  Callers hold a lock around every call."""

    def pull(self, ids: Ids, create: bool) -> Floats:
        """Rows [len(ids), dim]; what is missing is created, or only computed when `create` is false."""
        ...

    def reserve(self, ids: Ids) -> Ids:
        """Row numbers for `apply`, missing rows created: whatever can fail of an update fails here."""
        ...

    def apply(self, numbers: Ids, gradients: Floats, step: int) -> None:
        """One optimizer step on each row; gradients [len(numbers), dim] of repeated rows are summed first."""
        ...

    def ids(self) -> Ids:
        """All ids that have rows, in order of creation; a copy."""
        ...

    def snapshot(self) -> TableSnapshot:
        """A copy of everything."""
        ...

    def load(self, snapshot: TableSnapshot) -> None:
        """Takes a snapshot's rows over into the empty table.  Slots that the snapshot lacks start fresh."""
        ...


class DenseSlice:
    """A slice of the flat vector of trainable values."""

    def __init__(self, snapshot: DenseSnapshot, optimizer: Optimizer) -> None:
        self.values = np.array(snapshot.values, np.float32)
        self._optimizer = optimizer
        self._slots = [
            np.array(snapshot.slots[slot.name], np.float32)
            if slot.name in snapshot.slots
            else np.full_like(self.values, slot.initial)
            for slot in optimizer.slots
        ]

    def apply(self, gradient: Floats, step: int) -> None:
        """One optimizer step; gradient [t]."""
        self._optimizer.apply(self.values, self._slots, gradient, step)

    def snapshot(self) -> DenseSnapshot:
        """A copy."""
        names = (slot.name for slot in self._optimizer.slots)
        return DenseSnapshot(self.values.copy(), {n: s.copy() for n, s in zip(names, self._slots, strict=True)})


class NumpyTable:
    """`EmbeddingTable` in NumPy: arenas of rows and slots that double when full, found through an `IdIndex`."""

    def __init__(self, table: Table, optimizer: Optimizer, seed: int) -> None:
        self._dim = table.dim
        self._optimizer = optimizer
        self._initializer: Initializer = build_initializer(table, seed)
        self._index = IdIndex()
        self._rows: Floats = np.empty((_SMALLEST_ARENA, table.dim), np.float32)
        self._slots: list[Floats] = [np.empty_like(self._rows) for _ in optimizer.slots]
        self._marks: Ids = np.empty(_SMALLEST_ARENA, np.int64)  # by row number, scratch of `_has_repeated`

    def pull(self, ids: Ids, create: bool) -> Floats:
        if create:
            created = self._find_or_create(ids)  # may replace the arenas
            return self._rows[created]
        numbers = self._index.find(ids)
        missing = np.flatnonzero(numbers < 0)
        rows: Floats = self._rows[numbers]  # -1 reads some row, replaced below
        if missing.size:
            rows[missing] = self._initializer.rows(ids[missing])
        return rows

    def reserve(self, ids: Ids) -> Ids:
        return self._find_or_create(ids)

    def apply(self, numbers: Ids, gradients: Floats, step: int) -> None:
        if self._has_repeated(numbers):
            numbers, gradients = _sum_repeated(numbers, gradients)
        weights = self._rows[numbers]
        slots = [slot[numbers] for slot in self._slots]
        self._optimizer.apply(weights, slots, gradients, step)
        self._rows[numbers] = weights
        for arena, slot in zip(self._slots, slots, strict=True):
            arena[numbers] = slot

    def ids(self) -> Ids:
        return self._index.ids.copy()

    def snapshot(self) -> TableSnapshot:
        num_rows = self._index.num_rows
        names = (slot.name for slot in self._optimizer.slots)
        slots = {n: arena[:num_rows].copy() for n, arena in zip(names, self._slots, strict=True)}
        return TableSnapshot(self.ids(), self._rows[:num_rows].copy(), slots)

    def load(self, snapshot: TableSnapshot) -> None:
        assert self._index.num_rows == 0, "a snapshot is loaded into an empty table"
        self._grow(len(snapshot.ids))
        numbers = self._index.add(np.array(snapshot.ids, np.int64))
        self._rows[numbers] = snapshot.rows
        for slot, arena in zip(self._optimizer.slots, self._slots, strict=True):
            arena[numbers] = snapshot.slots.get(slot.name, slot.initial)

    def _has_repeated(self, numbers: Ids) -> bool:
        positions = np.arange(len(numbers))
        self._marks[numbers] = positions
        return not np.array_equal(self._marks[numbers], positions)

    def _find_or_create(self, ids: Ids) -> Ids:
        numbers = self._index.find(ids)
        missing = np.flatnonzero(numbers < 0)
        if missing.size:
            new = np.unique(ids[missing])
            self._grow(self._index.num_rows + len(new))
            values = self._initializer.rows(new)
            created = self._index.add(new)
            self._rows[created] = values
            for slot, arena in zip(self._optimizer.slots, self._slots, strict=True):
                arena[created] = slot.initial
            numbers[missing] = created[np.searchsorted(new, ids[missing])]
        return numbers

    def _grow(self, num_rows: int) -> None:
        """Makes room for `num_rows` rows."""
        capacity = len(self._rows)
        if num_rows <= capacity:
            return
        capacity = max(num_rows, 2 * capacity)
        used = self._index.num_rows
        arenas = [np.empty((capacity, self._dim), np.float32) for _ in range(1 + len(self._slots))]
        for new, old in zip(arenas, [self._rows, *self._slots], strict=True):
            new[:used] = old[:used]
        self._rows, *self._slots = arenas
        self._marks = np.empty(capacity, np.int64)


def _sum_repeated(numbers: Ids, gradients: Floats) -> tuple[Ids, Floats]:
    """Unique row numbers with the sums of their gradients, each summed in the order given."""
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    first = np.ones(len(numbers), np.bool_)
    np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return in_order[starts], np.add.reduceat(gradients[order], starts, axis=0, dtype=np.float32)
