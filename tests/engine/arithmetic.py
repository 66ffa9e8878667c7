"""A model that counts: how often each record of each epoch is in it; with the data that it is trained on.

A minibatch's name and the model's content are independent: the simulator compares the content with the plan.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.callback_rules import Rules
from elasticdl.frameworks.framework import (
    NUM_TOLD,
    Batch,
    FeedError,
    LocalGradient,
    MetricState,
    Mode,
    Share,
    Surplus,
    TaskRecords,
)
from elasticdl.protocol import Shard, derive_seed
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec

_NUM_SHARDS = 4  # so that no line of them looks like a header to `SimulatedGroup`
VALIDATION = Shard("validation", 0, 4)


class Violation(BaseException):
    """Something that must hold does not; the worker does not take it for an error of the user's code."""


class Ugly(Exception):
    """An exception of the simulated user code."""


@dataclass
class Troubles:
    """Faults in the data and in the user's code; the same in all members.

    Attributes:
        not_finite: records whose gradient is not finite.
        bad: records on which `feed` raises.
        dropped: records that the user's filter takes away.
        share_unreadable: of the attempts to read a shard, while there is trouble.
        share_raising: of the gradients and updates, while there is trouble.
        compute_s: a gradient takes up to this long.
        num_spoiled: updates from now on, of whichever members, that raise with the model half changed.
        is_feed_broken: `feed` raises on every training task, and on no record alone.
    """

    seed: random.Random
    not_finite: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    share_unreadable: float = 0.0
    share_raising: float = 0.0
    compute_s: float = 0.0
    num_spoiled: int = 0
    is_feed_broken: bool = False

    def end(self) -> None:
        """Stop all temporary faults."""
        self.share_unreadable = self.share_raising = 0.0
        self.num_spoiled = 0
        self.is_feed_broken = False

    def maybe_raise(self) -> None:
        if self.share_raising and self.seed.random() < self.share_raising:
            raise Ugly("the user's code raises")

    def maybe_spoil(self) -> None:
        if self.num_spoiled:
            self.num_spoiled -= 1
            raise Ugly("the update raises")


@dataclass
class Plan:
    """The records of a job, the names of their minibatches, and the user's callbacks.

    Attributes:
        rules: of the callbacks; None: there are none.
        calls: the callbacks' that came to their end: epoch (-1: the end of training), and the model then.
        epochs: by the seed of a share.
    """

    spec: JobSpec
    shards: tuple[Shard, ...]
    rules: Rules | None = None
    calls: list[tuple[int, npt.NDArray[np.int64]]] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        length = spec.minibatch_size * spec.num_minibatches_per_task
        num_tasks = sum(-(-len(shard) // length) for shard in self.shards)
        for epoch in range(spec.num_epochs):
            for task in range(num_tasks):
                for n in range(spec.num_minibatches_per_task):
                    self.epochs[derive_seed(spec.seed, epoch, task, n)] = epoch

    @property
    def num_records(self) -> int:
        return max(shard.end for shard in self.shards)


class Records:
    """The readers of a member: each record is its own number."""

    def __init__(self, plan: Plan, troubles: Troubles) -> None:
        self._plan = plan
        self._troubles = troubles

    def of(self, task_type: pb.TaskType) -> Records:
        return self

    def read(self, shard: Shard) -> list[bytes]:
        troubles = self._troubles
        if troubles.share_unreadable and troubles.seed.random() < troubles.share_unreadable:
            raise DataError(f"the records from {shard.start} on cannot be read")
        return [str(number).encode() for number in range(shard.start, shard.end)]

    def metadata(self) -> Metadata:
        return Metadata()


class Arithmetic:
    """The parts of a framework that a worker needs.

    Attributes:
        counts: [epochs, records]; read by the simulator.
        num_loaded: models taken over from another member or from a checkpoint.
    """

    device = "cpu"

    def __init__(self, plan: Plan, troubles: Troubles, sleep: Callable[[float], None]) -> None:
        self._plan = plan
        self._troubles = troubles
        self._sleep = sleep
        self._length = plan.spec.num_epochs * plan.num_records
        self.counts = np.zeros(self._length, np.int64)
        self.history = np.zeros(1, np.int64)  # of the steps, in their order
        self.is_compiled = False
        self.num_loaded = 0

    @property
    def witness(self) -> int:
        """Equal in two members if their models are."""
        return int(self.history[0])

    def report(self) -> Any:
        return SimpleNamespace(rules=SimpleNamespace(export_paths=[]))

    def rate_in_use(self) -> float | None:
        return None

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return None

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        size, troubles = self._plan.spec.minibatch_size, self._troubles
        for task in tasks:
            if troubles.is_feed_broken and mode is Mode.TRAINING and len(task.records) > 1:
                raise FeedError(task.lease, 0, "feed raises") from ValueError("feed raises")
            numbers = [int(record) for record in task.records]
            if mode is Mode.TRAINING:
                numbers = [number for number in numbers if number not in troubles.dropped]
            starts = range(0, len(numbers), size)
            for n, start in enumerate(starts):
                found = numbers[start : start + size]
                if mode is Mode.TRAINING and (bad := troubles.bad.intersection(found)):
                    raise FeedError(task.lease, n, f"ugly {min(bad)}") from ValueError(f"ugly {min(bad)}")
                yield Batch(task.lease, n, size=len(found), data=found)
            yield Batch(task.lease, len(starts), end=True, surplus=Surplus(len(numbers) - len(task.records)))

    def local_gradient(self, shares: Sequence[Share], ready: Callable[[Any], None]) -> LocalGradient:
        if self.is_compiled:
            self._sleep(self._troubles.seed.random() * self._troubles.compute_s)
            self._troubles.maybe_raise()
        whole, told = np.zeros(self._length, np.float32), np.zeros(NUM_TOLD, np.float32)
        flaws = {}
        for k, share in enumerate(shares):
            if self._troubles.not_finite.intersection(share.batch.data):
                flaws[k] = "The loss is nan"
                told[2] += 1
                continue
            epoch = self._plan.epochs[share.seed] if self.is_compiled else 0
            whole[[epoch * self._plan.num_records + number for number in share.batch.data]] += 1
            told[:2] += 0.5 * share.scale, share.scale
        ready(whole[: self._length // 2])
        last = np.concatenate([whole[self._length // 2 :], told])
        return LocalGradient([whole[: self._length // 2], last], lambda: last[-NUM_TOLD:], flaws)

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        if not self.is_compiled:
            return
        first, last = gradient.buffers
        added = np.concatenate([first, last[:-NUM_TOLD]]).astype(np.int64)
        try:
            self._troubles.maybe_raise()
            self._troubles.maybe_spoil()
        except Ugly:
            self.counts[::2] += added[::2]  # the model is neither what it was nor what it was to become
            self.history += 1
            raise
        self.counts += added
        if self.counts.max() > 1:
            raise Violation(f"in the model twice: {np.flatnonzero(self.counts > 1)}")
        self.history = np.array([zlib.crc32(added.tobytes(), int(self.history[0]))], np.int64)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"counts": self.counts.copy(), "history": self.history.copy()}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.counts, self.history = state["counts"].copy(), state["history"].copy()
        self.num_loaded += self.is_compiled

    def evaluation(self) -> Arithmetic:
        return self

    def update(self, batch: Batch, parameters: Any, rows: Any) -> None:
        pass

    def states(self) -> list[MetricState]:
        return [MetricState("accuracy", (np.ones(1),))]

    def results(self, merged: Sequence[MetricState]) -> dict[str, float]:
        return {"accuracy": 0.5}

    def end_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        if self._plan.rules is not None:
            self._troubles.maybe_raise()

    def end_epoch(self, parameters: Any, epoch: int, logs: Mapping[str, float]) -> None:
        self._sleep(self._troubles.seed.random() * self._troubles.compute_s)
        self._troubles.maybe_raise()
        self._plan.calls.append((epoch, self.counts.copy()))

    def end_training(self, parameters: Any, output: str) -> None:
        self.end_epoch(parameters, -1, {})


class ShardedArithmetic(Arithmetic):
    """The same as a model of four parameters, each a part of the counts; see `ShardsOptimizer`.

    The optimizer's state of a parameter equals the expected value: where the two differ, a shard or a value is stale.
    """

    def __init__(self, plan: Plan, troubles: Troubles, sleep: Callable[[float], None]) -> None:
        super().__init__(plan, troubles, sleep)
        ends = [self._length * part // _NUM_SHARDS for part in range(_NUM_SHARDS + 1)]
        self._parts = [slice(*pair) for pair in pairwise(ends)]
        self._kept: frozenset[int] = frozenset()
        self._shards: dict[int, npt.NDArray[np.int64]] = {}
        self._sent: list[npt.NDArray[np.int64]] = []

    @property
    def witness(self) -> int:
        return zlib.crc32(self.counts.tobytes(), int(self.history[0]))

    def apply_gradient(self, gradient: LocalGradient, learning_rate: float | None) -> None:
        before = self.counts.copy()
        super().apply_gradient(gradient, learning_rate)
        for number, part in enumerate(self._parts):
            if number not in self._kept:
                self.counts[part] = before[part]
                continue
            shard = self._shards.get(number, np.zeros_like(before[part]))
            if (shard != before[part]).any():
                raise Violation(f"stale: parameter {number} is {before[part]}, its shard {shard}")
            self._shards[number] = self.counts[part].copy()

    def shard_sizes(self) -> list[int]:
        return [part.stop - part.start for part in self._parts]

    def keep_shards(self, numbers: Collection[int]) -> None:
        self._kept = frozenset(numbers)
        self._shards = {number: self._shards[number] for number in self._kept & self._shards.keys()}

    def shard(self, number: int) -> dict[str, npt.NDArray[Any]]:
        return {f"shard {number}": self._shards[number].copy()} if number in self._shards else {}

    def parameter(self, number: int) -> dict[str, npt.NDArray[Any]]:
        return {"parameter": self.counts[self._parts[number]].copy()}

    def load_shards(self, shards: Mapping[int, Mapping[str, npt.NDArray[Any]]]) -> None:
        for number, arrays in shards.items():
            if "parameter" in arrays:
                self.counts[self._parts[number]] = arrays["parameter"]
            if f"shard {number}" in arrays and number in self._kept:
                self._shards[number] = arrays[f"shard {number}"].copy()

    def shards_of(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, dict[str, npt.NDArray[Any]]]:
        names = {number: f"shard {number}" for number in range(_NUM_SHARDS)}
        return {number: {name: state[name]} for number, name in names.items() if name in state}

    def shard_bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards.values())

    def shared_state(self) -> dict[str, npt.NDArray[Any]]:
        return super().state()

    def load_shared_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().load_state(state)

    def begin_exchange(self, owner_of: Sequence[int], rank: int) -> list[tuple[int, Any]]:
        pairs = list(zip(self._parts, owner_of, strict=True))
        self._sent = [self.counts[part] * (owner == rank) for part, owner in pairs]
        return list(zip(owner_of, self._sent, strict=True))

    def end_exchange(self) -> None:
        for number, (part, sent) in enumerate(zip(self._parts, self._sent, strict=True)):
            if number in self._kept and (self.counts[part] != sent).any():
                raise Violation(f"holders differ: parameter {number} is {self.counts[part]}, and was sent as {sent}")
            self.counts[part] = sent

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return super().state() | {f"shard {number}": shard.copy() for number, shard in self._shards.items()}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().load_state(state)
        self._shards = {}
        self.load_shards(self.shards_of(state))

    def check_checkpoint(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Check that a checkpoint is whole."""
        for number, part in enumerate(self._parts):
            shard = state.get(f"shard {number}", np.zeros_like(state["counts"][part]))
            assert (shard == state["counts"][part]).all(), f"a checkpoint without shard {number}: {state}"
