"""One PS's part of a model: dense values, tables, and the optimizer that changes them.

Arguments are checked first; after that, nothing may fail.  Updates and pulls of several threads run in parallel.  The
model knows no names, leases or pieces.

`DenseValues`: a PS's parts of the flat vectors, changed by the optimizer's rule, read as a whole, and frozen for a
checkpoint.

Freezing takes constant time, independent of the size: new values are written to other memory, to which each block is
moved before its first change, and frozen blocks are never written again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Ranges, Table
from elasticdl.kernels import _native
from elasticdl.ps.optim.initializers import build_initializer
from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl.ps.partition import (
    NUM_BUCKETS,
    Buckets,
    Chunks,
    Owners,
    PartSnapshot,
    Piece,
    TableChunk,
    joined_buckets,
    num_floats,
    slices_outside,
    slices_within,
)
from elasticdl.ps.wire import InitializeCall, PullCall, PushCall, RequestError, table_from_message
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import ModelDefinitionError

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Update:
    """The gradients of one update of a model.

    Attributes:
        gradient, change: For this PS's dense values; None: they stay unchanged.
        rows: Table, ids [U], gradients [U, dim]; ids may repeat.
        learning_rate: 0: the optimizer's own.
        unreached: Elements [start, end) of this PS's trainable values that stay unchanged, ascending.
    """

    gradient: Floats | None
    change: Floats | None
    rows: tuple[tuple[str, Ids, Floats], ...]
    learning_rate: float = 0.0
    unreached: Ranges = ()

    @classmethod
    def of(cls, push: PushCall) -> Update:
        return cls(push.gradient, push.change, push.rows, push.header.learning_rate, unreached(push))

    def divided(self, divisor: int) -> Update:
        """Return the update with all its gradients divided; the change of non-trainable values is kept."""
        factor = np.float32(1 / divisor)
        gradient = None if self.gradient is None else self.gradient * factor
        rows = tuple((table, ids, gradients * factor) for table, ids, gradients in self.rows)
        return replace(self, gradient=gradient, rows=rows)


def is_empty(push: PushCall) -> bool:
    """Return whether a push is only a name, because its minibatch was skipped: the step count stays unchanged."""
    return not push.header.dense and not push.rows


def unreached(push: PushCall) -> Ranges:
    """Return the elements of this PS's trainable values that a push does not change."""
    return tuple((part.start, part.end) for part in push.header.unreached)


class ModelPart:
    """The values of one PS's part of a model."""

    def __init__(self, snapshot: PartSnapshot) -> None:
        """Copy the values of a snapshot; do not keep or close it.

        Raises:
            ModelDefinitionError: the optimizer, an initializer or a constraint is not supported.
            CheckpointError: the snapshot's rows cannot be read.
        """
        self._origin = snapshot.optimizer, snapshot.seed, snapshot.total_trainable, snapshot.total_non_trainable
        self._described = snapshot.tables
        self._buckets = joined_buckets(span for piece in snapshot.pieces for span in piece.buckets)
        self._config = OptimizerConfig.parse(snapshot.optimizer)
        self._dense = DenseValues(snapshot.trainable, snapshot.trainable_slots, snapshot.non_trainable, self._config)
        self._tables: dict[str, _native.Table] = {}
        for table in snapshot.tables:
            native = build_table(table, self._config, snapshot.seed, snapshot.num_rows.get(table.name, 0))
            self._tables[table.name] = native
            for chunk in snapshot.chunks[table.name]() if table.name in snapshot.chunks else ():
                slots = [chunk.slots.get(slot.name) for slot in self._config.slots]
                native.load(chunk.ids, chunk.rows, slots)

    @property
    def shape(self) -> str:
        """A description of the model; equal for equal models."""
        return _shape(self._origin[2], self._origin[3], self._described)

    @property
    def num_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(len(table) for table in self._tables.values())

    @property
    def table_bytes(self) -> int:
        """Bytes of memory that all tables have allocated."""
        return sum(table.memory_bytes() for table in self._tables.values())

    def check_push(self, push: PushCall) -> None:
        """Raise if a push cannot be applied.

        Raises:
            RequestError: the push does not fit the model, or would damage it.
        """
        if not self._origin[0]:
            raise RequestError("the model was initialised without an optimizer, to be read only")
        if push.gradient is not None and push.change is not None:
            shapes = push.gradient.shape, push.change.shape
            if shapes != self._dense.shapes:
                raise RequestError(f"dense gradient and change have shapes {shapes}, not those of this PS's part")
            if not (_native.all_finite(push.gradient) and _native.all_finite(push.change)):
                raise RequestError("the gradient or change of the dense values is not finite")
            bounds = [bound for part in unreached(push) for bound in part]
            if bounds != sorted(bounds) or (bounds and bounds[-1] > len(push.gradient)):
                raise RequestError("the parts without a gradient are not ascending ranges of this PS's part")
        for name, ids, gradients in push.rows:
            table = self._table(name)
            if gradients.shape != (len(ids), table.dim):
                raise RequestError(f"row gradients of table {name} have shape {gradients.shape} for {len(ids)} ids")
            _check_ids(table, ids)
            if not _native.all_finite(gradients):
                raise RequestError(f"the row gradients of table {name} are not finite")

    def check_pull(self, pull: PullCall) -> None:
        """Raise if a pull cannot be answered.

        Raises:
            RequestError: it asks for a table or an id that cannot exist.
        """
        for name, ids in pull.ids:
            _check_ids(self._table(name), ids)

    def apply(self, update: Update, work: Sequence[tuple[Buckets, int]], staleness: int) -> None:
        """Update the values in some buckets.

        Args:
            update: The gradients.
            work: Buckets, with the number of this update there, from 1.
            staleness: If above 1, divides the learning rate; with Ftrl, the gradients.
        """
        if staleness > 1 and self._config.kind == "Ftrl":  # its weights are sums times the rate, which must not jump
            update, staleness = update.divided(staleness), 1
        scalars = [self._config.scalars(step, self._rate(update, step, staleness)) for _, step in work]
        if update.gradient is not None and update.change is not None:
            num_trainable, num_non_trainable = self._origin[2:]
            own = self._buckets
            parts = [
                (
                    slices_outside(slices_within(share, own, num_trainable), update.unreached),
                    slices_within(share, own, num_non_trainable),
                    numbers,
                )
                for (share, _), numbers in zip(work, scalars, strict=True)
            ]
            self._dense.apply(update.gradient, update.change, parts)
        owners = _owners(work, self._buckets)
        for name, ids, gradients in update.rows:
            if owners is None:
                self._tables[name].apply(ids, gradients, scalars[0], self._config.clip_value)
                continue
            for positions, numbers in zip(_native.split(ids, owners, len(work) + 1)[:-1], scalars, strict=True):
                self._tables[name].apply(ids[positions], gradients[positions], numbers, self._config.clip_value)

    def pull(self, pull: PullCall) -> list[Floats]:
        """Return the arrays of the reply."""
        arrays = self._dense.read() if pull.header.dense else []
        create = not pull.header.read_only
        return arrays + [self._tables[name].pull(ids, create) for name, ids in pull.ids]

    def known_ids(self, table: str) -> Ids:
        """Return the ids of a table that have rows here.

        Raises:
            RequestError: there is no such table.
        """
        self._table(table)
        return self._tables[table].ids()

    def dense_room(self, threads: Executor) -> DenseSnapshot:
        """Return memory for `freeze`; allocated before, because that takes longer."""
        return self._dense.room(threads)

    def freeze(self, room: DenseSnapshot) -> PartSnapshot:
        """Return a snapshot of the current values, without pieces.

        No update may be in flight, and the previous snapshot must be closed.

        Args:
            room: From `dense_room`.
        """
        dense = self._dense.freeze(room)
        frozen = {name: table.freeze() for name, table in self._tables.items()}
        slots = [slot.name for slot in self._config.slots]

        def chunks(table: Table) -> Chunks:
            max_rows = max(1, _CHUNK_BYTES // (8 + 4 * table.dim * (1 + len(slots))))

            def read() -> Iterator[TableChunk]:
                for ids, rows, of_rows in frozen[table.name].chunks(max_rows):
                    yield TableChunk(ids, rows, dict(zip(slots, of_rows, strict=True)))

            return read

        def close() -> None:
            for table in frozen.values():
                table.close()
            self._dense.thaw()

        return PartSnapshot(
            *self._origin[:2],
            (),
            *self._origin[2:],
            dense.trainable,
            dict(zip(slots, dense.slots, strict=True)),
            dense.non_trainable,
            self._described,
            {table.name: chunks(table) for table in self._described},
            {name: len(table) for name, table in frozen.items()},
            close,
        )

    def _rate(self, update: Update, step: int, staleness: int) -> float | None:
        if staleness <= 1:
            return update.learning_rate or None
        return (update.learning_rate or self._config.learning_rate(step)) / staleness

    def _table(self, name: str) -> Table:
        for table in self._described:
            if table.name == name:
                return table
        raise RequestError(f"this PS has no table {name!r}, only {sorted(self._tables)}")


def initial_snapshot(call: InitializeCall, buckets: Buckets) -> PartSnapshot:
    """Return a model before its first update, as described by a worker.

    Raises:
        RequestError: sizes are inconsistent.
    """
    header = call.header
    totals = header.total_trainable, header.total_non_trainable
    owned = tuple(num_floats(buckets, total) for total in totals)
    announced = header.num_trainable, header.num_non_trainable
    if not (len(call.trainable), len(call.non_trainable)) == announced == owned:
        raise RequestError(
            f"of {totals[0]} trainable and {totals[1]} other floats this PS holds {owned[0]} and {owned[1]}, "
            f"the call has {len(call.trainable)} and {len(call.non_trainable)}"
        )
    tables = tuple(table_from_message(table) for table in header.tables)
    piece = Piece(buckets, 0, pb.AppliedSet())
    return PartSnapshot(
        header.optimizer, header.seed, (piece,), *totals, call.trainable, {}, call.non_trainable, tables
    )


def adopt(restored: PartSnapshot, wanted: PartSnapshot) -> PartSnapshot:
    """Return the values of another job's checkpoint with the optimizer, seed and initializers of this job's model.

    Slots are kept if they have the same meaning in both optimizers; Ftrl's `linear` is computed from the values, which
    the first update would replace otherwise.  The step count continues from the newest part.  A job that only reads,
    without an optimizer, keeps the other job's seed: rows that were never trained have the same values as there.

    Raises:
        RequestError: the models differ.
    """
    check_same_model(shape_of(restored), shape_of(wanted))
    version = max(piece.version for piece in restored.pieces)
    optimizer = wanted.optimizer or restored.optimizer
    slots = _AdoptedSlots(restored.optimizer, optimizer, version + 1)
    return PartSnapshot(
        optimizer,
        wanted.seed if wanted.optimizer else restored.seed,
        tuple(Piece(piece.buckets, version, pb.AppliedSet()) for piece in wanted.pieces),
        wanted.total_trainable,
        wanted.total_non_trainable,
        restored.trainable,
        slots.of(restored.trainable, restored.trainable_slots),
        restored.non_trainable,
        wanted.tables,
        {name: slots.of_chunks(of_table) for name, of_table in restored.chunks.items()},
        restored.num_rows,
        restored.close,
    )


_WITH_MEANS_OF_GRADIENTS = {"Adam", "AdamW", "Nadam"}  # Adamax divides by a norm: its momentum alone would explode
_WITH_MEANS_OF_SQUARES = _WITH_MEANS_OF_GRADIENTS | {"RMSprop"}


def _means_the_same(slot: str, one: str, other: str) -> bool:
    """Return whether a slot has the same meaning in two optimizers; SGD's momentum is a step, Adam's a mean gradient.

    Ftrl's `linear` determines the weights only for one learning rate and regularization.
    """
    if not one or one == other:
        return True
    if slot == "linear":
        return False
    kinds = {json.loads(optimizer)["class_name"] for optimizer in (one, other)}
    return len(kinds) == 1 or kinds <= (_WITH_MEANS_OF_SQUARES if slot == "velocity" else _WITH_MEANS_OF_GRADIENTS)


class _AdoptedSlots:
    """The optimizer slots for the values of another job's checkpoint."""

    def __init__(self, theirs: str, ours: str, step: int) -> None:
        """
        Args:
            theirs, ours: Optimizers, as Keras configs.
            step: Number of the next update, from 1.
        """
        self._theirs, self._ours = theirs, ours
        self._config = OptimizerConfig.parse(ours)
        self._scalars = self._config.scalars(step)

    def of(self, values: Floats, slots: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return the slots that are kept, or follow from the values; the others get initial values."""
        kept = {slot: slots[slot] for slot in slots if _means_the_same(slot, self._theirs, self._ours)}
        if self._config.kind == "Ftrl" and "linear" not in kept:
            fresh = np.full_like(values, self._config.options["initial_accumulator_value"])
            kept["linear"] = self._config.ftrl_linear(values, kept.get("accumulator", fresh), self._scalars)
        return kept

    def of_chunks(self, chunks: Chunks) -> Chunks:
        """Return the chunks with the slots of this job's optimizer."""

        def adopted() -> Iterator[TableChunk]:
            for chunk in chunks():
                yield TableChunk(chunk.ids, chunk.rows, self.of(chunk.rows, chunk.slots))

        return adopted


def check_same_model(ours: str, theirs: str) -> None:
    """Raise unless two models have the same shape.

    Raises:
        RequestError: they differ; names both.
    """
    if ours != theirs:
        raise RequestError(f"another model is here: {ours}, the caller's has {theirs}")


def shape_of(snapshot: PartSnapshot) -> str:
    """Return the description of a snapshot's model; see `ModelPart.shape`."""
    return _shape(snapshot.total_trainable, snapshot.total_non_trainable, snapshot.tables)


def _shape(num_trainable: int, num_non_trainable: int, tables: Sequence[Table]) -> str:
    named = ", ".join(f"{t.name} × {t.dim}" for t in sorted(tables, key=lambda t: t.name)) or "none"
    return f"{num_trainable} trainable and {num_non_trainable} other floats, tables: {named}"


def _owners(work: Sequence[tuple[Buckets, int]], own: Buckets) -> Owners | None:
    """Return the position in `work` for each bucket, [1024]; None if one entry has all own buckets."""
    if len(work) == 1 and work[0][0] == own:
        return None
    owners = np.full(NUM_BUCKETS, len(work), np.uint16)
    for position, (share, _) in enumerate(work):
        for start, end in share:
            owners[start:end] = position
    return owners


def _check_ids(table: Table, ids: Ids) -> None:
    if table.input_dim and not _native.all_within(ids, table.input_dim):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise RequestError(f"the id {wrong} of table {table.name} is not in [0, {table.input_dim})")


def build_table(table: Table, config: OptimizerConfig, seed: int, expected_rows: int) -> _native.Table:
    """Return an empty table.

    Raises:
        ModelDefinitionError: its initializer or constraint, which is named, is not supported.
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
    """Return a table's constraint from its Keras config; it applies to each row, like Keras's axis 1 of the table.

    Raises:
        ModelDefinitionError: the constraint, which is named, is not supported.
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


_BLOCK = 1 << 16  # floats; small enough that moved values are still in the cache for the rule
_TOUCHED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseSnapshot:
    """Trainable values [t], each slot [t], non-trainable values [n]."""

    trainable: Floats
    slots: tuple[Floats, ...]
    non_trainable: Floats


class DenseValues:
    """The dense values of one PS.  Thread-safe: a reader never sees half of an update."""

    def __init__(
        self, trainable: Floats, slots: Mapping[str, Floats], non_trainable: Floats, config: OptimizerConfig
    ) -> None:
        """Copy the arguments; a missing slot gets its initial value."""
        self._lock = threading.Lock()
        self._rule = _native.Optimizer(config.kind, config.options)
        self._clip = config.clip_value
        weights = np.array(trainable, np.float32)
        self._trainable = _Vectors(
            [
                weights,
                *(
                    np.array(slots[slot.name], np.float32)
                    if slot.name in slots
                    else np.full_like(weights, np.float32(slot.initial))
                    for slot in config.slots
                ),
            ]
        )
        self._non_trainable = _Vectors([np.array(non_trainable, np.float32)])

    @property
    def shapes(self) -> tuple[tuple[int], tuple[int]]:
        """Shapes of the trainable and the non-trainable values."""
        return (self._trainable.size,), (self._non_trainable.size,)

    def apply(
        self,
        gradient: Floats,
        change: Floats,
        parts: Sequence[tuple[Sequence[slice], Sequence[slice], Sequence[float]]],
    ) -> None:
        """Apply an update.

        Args:
            gradient, change: For all values.
            parts: The slices of both vectors to change, with the optimizer's scalars.
        """
        with self._lock:
            for trainable, non_trainable, scalars in parts:
                for piece in self._trainable.moved(trainable):
                    weights, *slots = (vector[piece] for vector in self._trainable.vectors)
                    self._rule.apply(weights, slots, gradient[piece], scalars, self._clip)
                for piece in self._non_trainable.moved(non_trainable):
                    self._non_trainable.vectors[0][piece] += change[piece]

    def read(self) -> list[Floats]:
        """Return copies of the trainable and the non-trainable values."""
        with self._lock:
            return [self._trainable.first(), self._non_trainable.first()]

    def room(self, threads: Executor) -> DenseSnapshot:
        """Return memory for `freeze`, with its pages already mapped."""
        trainable, non_trainable = (
            [np.empty_like(vector) for vector in group.vectors] for group in (self._trainable, self._non_trainable)
        )
        blocks = (
            array[start : start + _TOUCHED_AT_ONCE]
            for array in (*trainable, *non_trainable)
            for start in range(0, len(array), _TOUCHED_AT_ONCE)
        )
        list(threads.map(lambda block: block.fill(0.0), blocks))
        return DenseSnapshot(trainable[0], tuple(trainable[1:]), non_trainable[0])

    def freeze(self, room: DenseSnapshot) -> DenseSnapshot:
        """Return the current values, which never change afterwards.  Takes `room` over."""
        self.thaw()
        with self._lock:
            trainable = self._trainable.freeze([room.trainable, *room.slots])
            (non_trainable,) = self._non_trainable.freeze([room.non_trainable])
        return DenseSnapshot(trainable[0], tuple(trainable[1:]), non_trainable)

    def thaw(self) -> None:
        """Release the frozen copy; its memory is freed with the last reference."""
        for group in (self._trainable, self._non_trainable):
            is_more = True
            while is_more:
                with self._lock:
                    is_more = group.settle()


class _Vectors:
    """Vectors of the same length that are changed at the same places.  Callers must hold a lock."""

    def __init__(self, vectors: list[Floats]) -> None:
        self.vectors = vectors
        self._frozen: list[Floats] = []
        self._waiting: set[int] = set()  # blocks whose values are still in the frozen memory

    @property
    def size(self) -> int:
        return len(self.vectors[0])

    def moved(self, parts: Iterable[slice]) -> Iterator[slice]:
        """Yield the parts in pieces, each once its values may be changed."""
        for part in parts:
            if not self._waiting:
                yield part
                continue
            for block in range(part.start // _BLOCK, -(-part.stop // _BLOCK)):
                self._move(block)
                yield slice(max(part.start, block * _BLOCK), min(part.stop, (block + 1) * _BLOCK))

    def first(self) -> Floats:
        """Return a copy of the first vector."""
        copied = self.vectors[0].copy()
        for block in self._waiting:
            place = slice(block * _BLOCK, (block + 1) * _BLOCK)
            copied[place] = self._frozen[0][place]
        return copied

    def freeze(self, room: list[Floats]) -> list[Floats]:
        self._frozen, self.vectors = self.vectors, room
        self._waiting = set(range(-(-self.size // _BLOCK)))
        return self._frozen

    def settle(self) -> bool:
        """Move one more block; return False when all have moved."""
        if self._waiting:
            self._move(next(iter(self._waiting)))
        if not self._waiting:
            self._frozen = []
        return bool(self._waiting)

    def _move(self, block: int) -> None:
        if block in self._waiting:
            place = slice(block * _BLOCK, (block + 1) * _BLOCK)
            for live, frozen in zip(self.vectors, self._frozen, strict=True):
                live[place] = frozen[place]
            self._waiting.remove(block)
