"""Several PS without a network, a model for them, and the same model in NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Ranges, Table
from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl.ps.partition import Partition, PartSnapshot
from elasticdl.ps.server.restoring import open_checkpoint
from elasticdl.ps.server.state import Exchanged, ServerState
from elasticdl.ps.server.synchronous import Confirmed, UpdateSettings
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PullCall, PushCall, table_message
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.kernels.reference import DictionaryTable
from tests.ps.parts import write_checkpoint
from tests.ps.reference_optimizers import apply_reference, fresh_slots
from tests.ps.scenes import config

NUM_TRAINABLE, NUM_NON_TRAINABLE = 1500, 37
TABLES = (Table("deep", 4, config("Zeros"), input_dim=50), Table("wide", 1, config("Zeros")))
SUMS = config("SGD", learning_rate=1.0)  # with integers as gradients the values say which names are in them
ALL_IDS: Mapping[str, Ids] = {"deep": np.arange(50, dtype=np.int64), "wide": np.arange(-30, 30, dtype=np.int64)}


@dataclass(frozen=True)
class Minibatch:
    """A push of a worker."""

    name: MinibatchName
    gradient: Floats
    change: Floats
    rows: Mapping[str, tuple[Ids, Floats]]
    num_records: int = 0
    unreached: Ranges = ()


@dataclass(frozen=True)
class Values:
    """The whole model, all ids of `ALL_IDS`."""

    trainable: Floats
    non_trainable: Floats
    rows: Mapping[str, Floats]


def integers(n: int, task: int = 0, epoch: int = 0, num_records: int = 0) -> Minibatch:
    """A minibatch whose gradients are small integers, so that sums are exact in any order; ids repeat."""
    random = np.random.default_rng([epoch, task, n])
    rows = {}
    for table in TABLES:
        ids = random.choice(ALL_IDS[table.name], 12)
        rows[table.name] = ids, random.integers(-8, 9, (12, table.dim)).astype(np.float32)
    return Minibatch(
        MinibatchName(epoch, task, n),
        random.integers(-8, 9, NUM_TRAINABLE).astype(np.float32),
        random.integers(-8, 9, NUM_NON_TRAINABLE).astype(np.float32),
        rows,
        num_records,
    )


def reals(n: int, num_records: int = 0) -> Minibatch:
    """The same with gradients of all kinds."""
    whole, random = integers(n, num_records=num_records), np.random.default_rng(n)

    def noise(like: Floats) -> Floats:
        return (random.standard_normal(like.shape) * 10.0 ** random.uniform(-2, 1)).astype(np.float32)

    rows = {table: (ids, noise(gradients)) for table, (ids, gradients) in whole.rows.items()}
    return Minibatch(whole.name, noise(whole.gradient), noise(whole.change), rows, num_records)


def empty(n: int, task: int = 0) -> Minibatch:
    """A minibatch that was skipped."""
    return Minibatch(MinibatchName(0, task, n), np.empty(0, np.float32), np.empty(0, np.float32), {})


@dataclass
class Fleet:
    """PS 0, 1, …, each with its share of the model."""

    states: list[ServerState]
    partition: Partition
    versions: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls, num_ps: int, optimizer: str = SUMS, updates: UpdateSettings | None = None, initialized: bool = True
    ) -> Fleet:
        message = pb.Partition(version=1, ps=[pb.PsAddress(ps_id=k, incarnation=10 + k) for k in range(num_ps)])
        partition = Partition.from_message(message)
        states = [ServerState(updates, server.buckets) for server in partition.servers]
        fleet = cls(states, partition, versions=[0] * num_ps)
        if initialized:
            for ps_id in range(num_ps):
                states[ps_id].initialize(fleet.initialize_call(ps_id, optimizer))
        return fleet

    def initialize_call(self, ps_id: int, optimizer: str = SUMS) -> InitializeCall:
        trainable = self.partition.dense_part(ps_id, np.zeros(NUM_TRAINABLE, np.float32))
        non_trainable = self.partition.dense_part(ps_id, np.zeros(NUM_NON_TRAINABLE, np.float32))
        header = pb.InitializeHeader(
            optimizer=optimizer,
            num_trainable=len(trainable),
            num_non_trainable=len(non_trainable),
            total_trainable=NUM_TRAINABLE,
            total_non_trainable=NUM_NON_TRAINABLE,
            tables=[table_message(table) for table in TABLES],
            seed=3,
        )
        return InitializeCall(header, trainable, non_trainable)

    def push_call(
        self, ps_id: int, minibatch: Minibatch, lease: int = 1, pulled_version: int = 0, learning_rate: float = 0.0
    ) -> PushCall:
        """One PS's part of a minibatch."""
        name, skipped = minibatch.name, not len(minibatch.gradient)
        header = pb.Push(
            lease=lease,
            epoch=name.epoch,
            task=name.task,
            minibatch=name.n,
            dense=not skipped,
            tables=list(minibatch.rows),
            pulled_version=pulled_version,
            learning_rate=learning_rate,
            num_records=minibatch.num_records,
        )
        if skipped:
            return PushCall(header, None, None, ())
        rows = []
        for table, (ids, gradients) in minibatch.rows.items():
            mine = self._mine(ps_id, ids)
            rows.append((table, ids[mine], gradients[mine]))
        unreached = self.partition.ranges_within(ps_id, minibatch.unreached, NUM_TRAINABLE)
        header.unreached.extend(pb.FloatRange(start=start, end=end) for start, end in unreached)
        gradient = self.partition.dense_part(ps_id, minibatch.gradient)
        return PushCall(header, gradient, self.partition.dense_part(ps_id, minibatch.change), tuple(rows))

    def push(
        self, minibatch: Minibatch, lease: int = 1, to: Iterable[int] | None = None, learning_rate: float = 0.0
    ) -> list[Exchanged]:
        """To all PS, or some; on the values of the last `read`."""
        done = []
        for ps_id in range(len(self.states)) if to is None else to:
            call = self.push_call(ps_id, minibatch, lease, self.versions[ps_id], learning_rate)
            done.append(self.states[ps_id].exchange(ExchangeCall(0, call, None)))
        return done

    def carry(self, rounds: Sequence[pb.Round], to: Iterable[int] | None = None, coordinator: int = 10) -> list[int]:
        """Tells all PS, or some, of rounds; the newest that each has applied."""
        call = ExchangeCall(0, None, None, rounds=pb.Rounds(coordinator=coordinator, rounds=rounds))
        asked = range(len(self.states)) if to is None else to
        return [self.states[ps_id].exchange(call).applied_round for ps_id in asked]

    def confirm(
        self, minibatch: Minibatch, lease: int = 1, known_round: int = 0, num_pushing: int | None = None
    ) -> Confirmed:
        """Asks PS 0 for the minibatch's round, and does not wait for it."""
        return self.states[0].confirm(
            lease, minibatch.name, self.versions[0], known_round, lambda: num_pushing, timeout_s=0.0
        )

    def read(self) -> Values:
        """Everything; creates no rows."""
        arrays = []
        for ps_id, state in enumerate(self.states):
            ids = tuple((table.name, ALL_IDS[table.name][self._mine(ps_id, ALL_IDS[table.name])]) for table in TABLES)
            pull = PullCall(pb.Pull(dense=True, read_only=True, tables=[table.name for table in TABLES]), ids)
            done = state.exchange(ExchangeCall(0, None, pull))
            assert done.status == pb.OK
            self.versions[ps_id] = done.version
            arrays.append(done.arrays)
        rows = {}
        for number, table in enumerate(TABLES, 2):
            rows[table.name] = np.empty((len(ALL_IDS[table.name]), table.dim), np.float32)
            for ps_id, of_ps in enumerate(arrays):
                rows[table.name][self._mine(ps_id, ALL_IDS[table.name])] = of_ps[number]
        trainable = self.partition.dense_whole([of_ps[0] for of_ps in arrays], NUM_TRAINABLE)
        return Values(trainable, self.partition.dense_whole([of_ps[1] for of_ps in arrays], NUM_NON_TRAINABLE), rows)

    def names(self, ps_id: int) -> list[MinibatchName]:
        """Return the content that a PS reports; every name is in it once."""
        applied = AppliedSet.from_message(self.states[ps_id].applied()[0])
        assert applied.num_applies == applied.num_names
        return list(applied)

    def _mine(self, ps_id: int, ids: Ids) -> Ids:
        return self.partition.split(ids)[ps_id].astype(np.int64)


def restored(
    parts: Sequence[PartSnapshot], num_ps: int, directory: Path, updates: UpdateSettings | None = None
) -> Fleet:
    """Another number of PS that go on from parts, each as it is; the parts are closed."""
    checkpoint = write_checkpoint(directory, 1, parts)
    for part in parts:
        part.close()
    fleet = Fleet.begin(num_ps, updates=updates, initialized=False)
    for ps_id, state in enumerate(fleet.states):
        state.restore(open_checkpoint(checkpoint, fleet.partition.servers[ps_id].buckets), parameters_only=False)
    return fleet


class Oracle:
    """The model in one place, one minibatch after the other."""

    def __init__(self, optimizer: str = SUMS) -> None:
        self.config = OptimizerConfig.parse(optimizer)
        self.step = 0
        self.trainable = np.zeros(NUM_TRAINABLE, np.float32)
        self.non_trainable = np.zeros(NUM_NON_TRAINABLE, np.float32)
        self._slots = fresh_slots(self.config, (NUM_TRAINABLE,))
        self._rate: float | None = None
        self._tables = {
            table.name: DictionaryTable(
                table.dim,
                lambda ids, dim: np.zeros((len(ids), dim), np.float32),
                lambda row, slots, gradient: apply_reference(self.config, row, slots, gradient, self.step, self._rate),
                [slot.initial for slot in self.config.slots],
            )
            for table in TABLES
        }

    def push(self, minibatch: Minibatch, learning_rate: float | None = None) -> None:
        self.step += 1
        self._rate = learning_rate
        apply_reference(self.config, self.trainable, self._slots, minibatch.gradient, self.step, learning_rate)
        self.non_trainable += minibatch.change
        for table, (ids, gradients) in minibatch.rows.items():
            self._tables[table].apply(ids, gradients)

    def read(self) -> Values:
        rows = {name: table.pull(ALL_IDS[name], create=False) for name, table in self._tables.items()}
        return Values(self.trainable, self.non_trainable, rows)


def assert_equal(ours: Values, theirs: Values) -> None:
    np.testing.assert_array_equal(ours.trainable, theirs.trainable)
    np.testing.assert_array_equal(ours.non_trainable, theirs.non_trainable)
    for table, rows in theirs.rows.items():
        np.testing.assert_array_equal(ours.rows[table], rows)


def assert_close(ours: Values, theirs: Values) -> None:
    np.testing.assert_allclose(ours.trainable, theirs.trainable, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.non_trainable, theirs.non_trainable, rtol=1e-5, atol=1e-5)
    for table, rows in theirs.rows.items():
        np.testing.assert_allclose(ours.rows[table], rows, rtol=1e-5, atol=1e-5)


def sums(minibatches: Iterable[Minibatch]) -> Values:
    """Return the result of `SUMS` for minibatches, in any order."""
    oracle = Oracle()
    for minibatch in minibatches:
        oracle.push(minibatch)
    return oracle.read()
