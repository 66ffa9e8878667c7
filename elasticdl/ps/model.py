"""One PS's part of a model: dense slice, non-trainable slice, tables, the optimizer that changes them.

It checks what it is given, and then changes everything or nothing.  It knows no names, leases or locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.ps.optimizers import SGD, build_optimizer
from elasticdl.ps.parameters import DenseSlice, DenseSnapshot, EmbeddingTable, NumpyTable, TableSnapshot
from elasticdl.ps.wire import InitializeCall, PullCall, PushCall, RequestError, table_from_message


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A copy of one PS's part of a model, and all that is needed to go on from it.

    Attributes:
        optimizer: Keras config as JSON; empty: the model is only read.
        version: pushes applied: the optimizer's step count.
    """

    optimizer: str
    seed: int
    version: int
    dense: DenseSnapshot
    non_trainable: Floats
    tables: tuple[Table, ...] = ()
    table_snapshots: Mapping[str, TableSnapshot] = field(default_factory=dict)


def initial_snapshot(call: InitializeCall) -> ModelSnapshot:
    """A model before its first update, from what a worker says of it.

    Raises:
        RequestError: the header and the arrays disagree.
    """
    header = call.header
    if (len(call.trainable), len(call.non_trainable)) != (header.num_trainable, header.num_non_trainable):
        raise RequestError("the sizes of the initial values are not those of the header")
    tables = tuple(table_from_message(table) for table in header.tables)
    return ModelSnapshot(header.optimizer, header.seed, 0, DenseSnapshot(call.trainable), call.non_trainable, tables)


def adopt(restored: ModelSnapshot, wanted: ModelSnapshot) -> ModelSnapshot:
    """The values of another job's checkpoint under the optimizer, seed and initializers of this job's model.

    Slots of the same name are kept.

    Raises:
        RequestError: they are not the same model.
    """
    check_same_model(restored, wanted)
    return ModelSnapshot(
        wanted.optimizer or restored.optimizer,
        wanted.seed,
        restored.version,
        restored.dense,
        restored.non_trainable,
        wanted.tables,
        restored.table_snapshots,
    )


def check_same_model(ours: ModelSnapshot, theirs: ModelSnapshot) -> None:
    """Sizes and tables agree.

    Raises:
        RequestError: they do not; both are said.
    """
    if _shape(ours) != _shape(theirs):
        raise RequestError(f"another model is here: {_shape(ours)}, the caller's has {_shape(theirs)}")


class ModelPart:
    """Values that change."""

    def __init__(self, snapshot: ModelSnapshot) -> None:
        """Takes a snapshot over; it is not kept.

        Raises:
            ModelDefinitionError: the optimizer or an initializer is not supported.
        """
        self._optimizer_json = snapshot.optimizer
        self._seed = snapshot.seed
        self._described = snapshot.tables
        self.version = snapshot.version
        optimizer = build_optimizer(snapshot.optimizer) if snapshot.optimizer else SGD(np.float32(0.0))
        self._dense = DenseSlice(snapshot.dense, optimizer)
        self._non_trainable = np.array(snapshot.non_trainable, np.float32)
        self._tables: dict[str, EmbeddingTable] = {}
        self._dims = {table.name: table.dim for table in snapshot.tables}
        for table in snapshot.tables:
            self._tables[table.name] = NumpyTable(table, optimizer, snapshot.seed)
            if table.name in snapshot.table_snapshots:
                self._tables[table.name].load(snapshot.table_snapshots[table.name])

    def prepare(self, push: PushCall) -> list[Ids]:
        """Everything of a push that may fail: no value of the model has changed when it does.

        Returns:
            For `apply`: the row numbers of each table in ``push.rows``.

        Raises:
            RequestError: the push does not fit the model.
        """
        if not self._optimizer_json:
            raise RequestError("the model was initialised without an optimizer, to be read only")
        if push.gradient is not None and push.change is not None:
            shapes = push.gradient.shape, push.change.shape
            if shapes != (self._dense.values.shape, self._non_trainable.shape):
                raise RequestError(f"dense gradient and change have shapes {shapes}, not those of this PS's slices")
        for name, ids, gradients in push.rows:
            if gradients.shape != (len(ids), self._dim(name)):
                raise RequestError(f"row gradients of table {name} have shape {gradients.shape} for {len(ids)} ids")
        return [self._tables[name].reserve(ids) for name, ids, _ in push.rows]

    def apply(self, push: PushCall, row_numbers: Sequence[Ids]) -> None:
        """One update by a push and what `prepare` has returned for it."""
        step = self.version + 1
        if push.gradient is not None and push.change is not None:
            self._dense.apply(push.gradient, step)
            self._non_trainable += push.change
        for (name, _, gradients), numbers in zip(push.rows, row_numbers, strict=True):
            if len(numbers):
                self._tables[name].apply(numbers, gradients, step)
        self.version = step

    def check_pull(self, pull: PullCall) -> None:
        """
        Raises:
            RequestError: it asks for a table that is not there.
        """
        for name, _ in pull.ids:
            self._dim(name)

    def pull(self, pull: PullCall) -> list[Floats]:
        """The arrays of the reply."""
        arrays = [self._dense.values.copy(), self._non_trainable.copy()] if pull.header.dense else []
        create = not pull.header.read_only
        return arrays + [self._tables[name].pull(ids, create) for name, ids in pull.ids]

    def known_ids(self, table: str) -> Ids:
        """Ids of a table that have rows here.

        Raises:
            RequestError: there is no such table.
        """
        self._dim(table)
        return self._tables[table].ids()

    def snapshot(self) -> ModelSnapshot:
        """A copy."""
        return ModelSnapshot(
            self._optimizer_json,
            self._seed,
            self.version,
            self._dense.snapshot(),
            self._non_trainable.copy(),
            self._described,
            {name: table.snapshot() for name, table in self._tables.items()},
        )

    def check_same_model(self, wanted: ModelSnapshot) -> None:
        """
        Raises:
            RequestError: a caller's model is not the one here.
        """
        ours = ModelSnapshot("", 0, 0, DenseSnapshot(self._dense.values), self._non_trainable, self._described)
        check_same_model(ours, wanted)

    def _dim(self, table: str) -> int:
        if table not in self._dims:
            raise RequestError(f"this PS has no table {table!r}, only {sorted(self._dims)}")
        return self._dims[table]


def _shape(snapshot: ModelSnapshot) -> str:
    tables = ", ".join(f"{t.name} × {t.dim}" for t in sorted(snapshot.tables, key=lambda t: t.name)) or "none"
    return f"{len(snapshot.dense.values)} trainable and {len(snapshot.non_trainable)} other floats, tables: {tables}"
