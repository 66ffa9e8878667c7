"""The plan of a job and its ledger as the master knows it: epochs, tasks, and committed minibatches.

Each epoch's own part is in epoch.py, leases are in ledger/leases.py.  The ledger here is a summary: the model is
authoritative, and `Tasks.reconcile` takes its content over.  This module calls no process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from elasticdl.master.core.applied import NOTHING, CommittedSet, CommittedTask, TaskName
from elasticdl.master.core.plan.epoch import UNKNOWN, Epoch, coverage_of
from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Shard
from elasticdl.task_numbers import TaskNumbers
from elasticdl_client.job_status import EpochCoverage

MAX_UNKNOWN_EPOCHS = 10_000  # that may have begun since the journal was written, or before the checkpoint
MAX_COVERAGES = 200  # of covered epochs; a status lists half as many one by one
MAX_TASKS = 20_000_000  # per epoch; each takes some 100 bytes


def num_cut(shards: Iterable[Shard], records_per_task: int) -> int:
    """Return the number of slices that `cut` makes."""
    return sum(-(-len(shard) // records_per_task) for shard in shards)


def cut(shards: Iterable[Shard], records_per_task: int) -> tuple[Shard, ...]:
    """Cut shards into slices of at most `records_per_task` records; a slice's index is the number of the task."""
    return tuple(
        Shard(shard.name, start, min(start + records_per_task, shard.end), shard.identity)
        for shard in sorted(shards)
        for start in range(shard.start, shard.end, records_per_task)
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """The part of a task that was committed and that the model has lost.

    Attributes:
        records: Number of records to be computed again.
        is_reopened: Whether the task was done and is todo again.
    """

    epoch: int
    task: int
    records: int
    is_reopened: bool


_SUMMED = (
    *("committed_records", "processed_records", "num_minibatches", "num_done"),
    *("num_quarantined", "num_skipped", "skipped_records"),
)  # of an epoch, over all of which there are sums
_PLAIN = "plain"  # in the journal: a number of epochs, see `Epoch.is_plain`


class Tasks:
    """All epochs of a job over one list of shards."""

    def __init__(self, settings: JobSettings, shards: Iterable[Shard]) -> None:
        self._settings = settings
        self.slices = cut(shards, settings.records_per_task)
        self._minibatches = sum(-(-len(shard) // settings.minibatch_size) for shard in self.slices)
        self.planned_records, self.planned_tasks = self._planned()  # over all epochs; 0 for an endless job
        self.epochs: list[Epoch] = []
        self._num_settled = 0  # number of leading epochs that are all covered: they change only by `reconcile`
        self._settled = Counter[str]()  # `_SUMMED` over these: an endless job has many
        self._coverage: list[EpochCoverage] = []  # of these, first the sums of the oldest
        self._runs: list[dict[str, Any]] = []  # these epochs for the journal
        self.model_version = settings.model_version  # number of committed minibatches, if the job trains
        self._quarantine: dict[int, frozenset[int]] = {}  # by task, for this and later epochs
        self._is_stopped = False
        self._fresh: dict[TaskName, CommittedTask] | None = None  # commits since the model was last queried
        self.num_fallen_back = 0  # committed minibatches that the model was seen to have lost

    @property
    def settings(self) -> JobSettings:
        """Settings with the plan in force, which may be a script's own."""
        return self._settings

    def _budget(self, epoch: int) -> int | None:
        return self._settings.max_step - epoch * self._minibatches if self._settings.max_step > 0 else None

    def _planned(self) -> tuple[int, int]:
        """Return the numbers of planned records and tasks."""
        settings = self._settings
        in_epoch = sum(len(shard) for shard in self.slices)
        steps = settings.num_epochs * self._minibatches
        if not self._minibatches or settings.max_step <= 0 or 0 < steps <= settings.max_step:
            num_epochs = max(0, settings.num_epochs)
            return in_epoch * num_epochs, len(self.slices) * num_epochs
        whole, rest = divmod(settings.max_step, self._minibatches)
        last = Epoch(whole, self.slices, settings, rest)
        return whole * in_epoch + last.planned_records, whole * len(self.slices) + len(last.order)

    def is_planned(self, epoch: int) -> bool:
        if not self.slices or 0 < self._settings.num_epochs <= epoch:
            return False
        budget = self._budget(epoch)
        return budget is None or budget > 0

    def begin_epoch(self) -> Epoch:
        number = len(self.epochs)
        epoch = Epoch(number, self.slices, self._settings, self._budget(number))
        for task, records in self._quarantine.items():
            epoch.exclude(task, records)
        self.epochs.append(epoch)
        return epoch

    def begin_until(self, epoch: int) -> None:
        """Begin the epochs up to one that a member has reported, as far as they are planned.

        At most as many as may have begun without the journal's knowledge.
        """
        last = min(epoch, len(self.epochs) + MAX_UNKNOWN_EPOCHS)
        while len(self.epochs) <= last and self.can_begin:
            self.begin_epoch()

    def quarantined(self) -> list[tuple[str, int]]:
        """Return (shard, record) of all quarantined records."""
        return [
            (self.slices[task].name, r) for task in sorted(self._quarantine) for r in sorted(self._quarantine[task])
        ]

    def quarantine(self, task: int, records: Iterable[int]) -> None:
        """Exclude records of a task in every epoch in which the model lacks them and no worker has the task."""
        self._quarantine[task] = self._quarantine.get(task, frozenset()).union(records)
        for epoch in self.epochs:
            if task not in epoch.leased:
                epoch.exclude(task, self._quarantine[task])

    @property
    def can_begin(self) -> bool:
        return not self._is_stopped and self.is_planned(len(self.epochs))

    def stop(self) -> None:
        """Plan no task beyond those that workers have begun."""
        self._is_stopped = True
        for epoch in self.epochs:
            epoch.stop()
        self._plan_what_is_left()

    def _plan_what_is_left(self) -> None:
        self.planned_records = sum(epoch.planned_records for epoch in self.epochs)
        self.planned_tasks = sum(len(epoch.order) for epoch in self.epochs)

    def unsettled(self) -> list[Epoch]:
        """Return the epochs from the first uncovered one on."""
        while self._num_settled < len(self.epochs) and (epoch := self.epochs[self._num_settled]).covered:
            self._settle(epoch)
            self._num_settled += 1
        return self.epochs[self._num_settled :]

    def _settle(self, epoch: Epoch) -> None:
        self._settled.update({name: getattr(epoch, name) for name in _SUMMED})
        _add_to_runs(self._runs, epoch)
        self._coverage.append(coverage_of(epoch, is_bound=self._settings.has_tensorflow_servers))
        if len(self._coverage) > MAX_COVERAGES:
            half = MAX_COVERAGES // 2
            self._coverage[:half] = [EpochCoverage.total(self._coverage[:half])]

    def _unsettle(self) -> None:
        """Sum up all epochs anew, because a covered one changes."""
        self._num_settled = 0
        self._settled.clear()
        self._coverage.clear()
        self._runs.clear()

    def settled_coverage(self) -> list[EpochCoverage]:
        """Return the coverage of all but the `unsettled` epochs; for many, the sums of the oldest come first."""
        self.unsettled()
        return list(self._coverage)

    def _sum(self, name: str) -> int:
        """Return one of `_SUMMED` over all epochs."""
        unsettled: int = sum(getattr(epoch, name) for epoch in self.unsettled())
        return self._settled[name] + unsettled

    @property
    def num_covered(self) -> int:
        """Number of leading epochs that are all covered; a later epoch may be covered before an earlier one."""
        return len(self.epochs) - len(self.unsettled())

    @property
    def all_done(self) -> bool:
        return not self.can_begin and all(epoch.complete for epoch in self.unsettled())

    @property
    def records_done(self) -> int:
        """Number of records that are committed, skipped ones included, over all epochs."""
        return self._sum("committed_records")

    @property
    def records_processed(self) -> int:
        """Number of commits of records over all epochs: it never falls, whatever the model loses."""
        return self._sum("processed_records")

    @property
    def num_committed(self) -> int:
        """Number of committed minibatches, over all epochs."""
        return self._sum("num_minibatches")

    @property
    def records_left_out(self) -> int:
        """Number of planned records neither in a model nor quarantined; 0 if training was stopped or is endless."""
        if self._is_stopped:
            return 0
        return max(0, self.planned_records - self.records_done - self._sum("num_quarantined"))

    @property
    def num_done(self) -> int:
        """Number of done tasks over all epochs."""
        return self._sum("num_done")

    @property
    def num_remaining(self) -> int:
        """Number of unfinished tasks of the begun epochs."""
        return sum(len(epoch.order) - epoch.num_done for epoch in self.unsettled())

    def take(self, allowed: Callable[[int, int], bool]) -> TaskName | None:
        """Take and return the next task that is `allowed(epoch, task)`; None if the begun epochs have none."""
        for epoch in self.unsettled():
            if epoch.num_todo and (task := epoch.first_todo(partial(allowed, epoch.number))) is not None:
                return self.take_this((epoch.number, task))
        return None

    @property
    def num_todo(self) -> int:
        """Number of tasks of the begun epochs that are neither done nor leased."""
        return sum(epoch.num_todo for epoch in self.unsettled())

    @property
    def has_todo(self) -> bool:
        return any(epoch.num_todo for epoch in self.unsettled())

    def num_whole(self, own: Container[TaskName]) -> int:
        """Return of how many leading epochs every planned task is done or one of `own`."""

        def is_whole(epoch: Epoch) -> bool:
            return not epoch.num_todo and all((epoch.number, task) in own for task in epoch.leased)

        unsettled = self.unsettled()
        return len(self.epochs) - len(unsettled) + sum(1 for _ in itertools.takewhile(is_whole, unsettled))

    def take_this(self, name: TaskName) -> TaskName:
        self.epochs[name[0]].take(name[1])
        return name

    def is_todo(self, name: TaskName) -> bool:
        return name[0] < len(self.epochs) and self.epochs[name[0]].is_todo(name[1])

    def give_back(self, name: TaskName) -> None:
        """Give back the task of a lost lease: it is the next one to be granted."""
        epoch, task = self.epochs[name[0]], name[1]
        if self._settings.has_tensorflow_servers:  # they may contain more than was reported, and cannot report it
            epoch.num_repeated += len(epoch.slice(task)) - epoch.records_in(task)
        epoch.leased.remove(task)
        epoch.open_again(task)

    def commit(self, name: TaskName, minibatches: Iterable[int]) -> int:
        """Commit minibatches that the model contains now; return the number of new ones."""
        return self._commit(name, CommittedTask.of(0, minibatches))

    def _commit(self, name: TaskName, reported: CommittedTask) -> int:
        epoch, task = self.epochs[name[0]], name[1]
        before = epoch.applied(task)
        if self._fresh is not None:
            self._fresh[name] = self._fresh.get(name, NOTHING) | reported
        after = before | reported
        new = len(after) - len(before)
        if new and not epoch.is_done(task):
            epoch.change(task, after)
            self.model_version += new if self._settings.trains else 0
        return new

    def skip(self, name: TaskName, minibatches: Iterable[int]) -> int:
        """Record minibatches that the model skips; return the number of new ones."""
        return self.epochs[name[0]].skip(name[1], minibatches)

    @property
    def num_skipped(self) -> int:
        """Number of committed and empty minibatches, over all epochs."""
        return self._sum("num_skipped")

    @property
    def skipped_records(self) -> int:
        return self._sum("skipped_records")

    def remarks(self, not_evaluated: Iterable[tuple[str, int]] = ()) -> list[str]:
        """Return the log lines about records that the model was not trained or evaluated on, for the end of the job."""
        remarks = []
        quarantined = dict.fromkeys([*self.quarantined(), *not_evaluated])
        if quarantined:
            names = ", ".join(f"{shard}:{record}" for shard, record in quarantined)
            where = self._settings.bad_records_dir
            remarks.append(
                f"Quarantined records: {names}" + (f"; they and their errors are in {where}" if where else "")
            )
        if self.num_skipped:
            remarks.append(
                f"Minibatches left out by --nan_policy=skip: {self.num_skipped} ({self.skipped_records} records)"
            )
        return remarks

    def finish(self, name: TaskName, num_minibatches: int, surplus: int = 0) -> int:
        """Finish a leased task: all its minibatches are committed, with `surplus` samples beyond one per record.

        Returns:
            The number of minibatches that are new.
        """
        new = self._commit(name, CommittedTask.of(num_minibatches))
        epoch, task = self.epochs[name[0]], name[1]
        epoch.change(task, epoch.applied(task), num_minibatches, surplus)
        epoch.leased.remove(task)
        return new

    @property
    def has_surplus(self) -> bool:
        """Whether `feed` has made more or fewer samples of some task than it has records."""
        return any(epoch.num_filtered or epoch.num_augmented for epoch in self.epochs)

    def num_missing(self, name: TaskName) -> int:
        """Return the number of uncommitted minibatches of a task, assuming that `feed` filters no record."""
        epoch, task = self.epochs[name[0]], name[1]
        size = len(epoch.slice(task)) - len(epoch.excluded(task))
        return max(0, -(-size // self._settings.minibatch_size) - len(epoch.applied(task)))

    def sample(self) -> Shard | None:
        """Return the first minibatch of the first task without quarantined records, if any; None without data."""
        if not self.slices:
            return None
        task = next((task for task in range(len(self.slices)) if not self._quarantine.get(task)), 0)
        return self.slices[task].first(self._settings.minibatch_size)

    def ledger(self) -> CommittedSet:
        """Return all commits that are known here."""
        watermarks, extras = TaskNumbers(), dict[TaskName, frozenset[int]]()
        for epoch in self.epochs:
            epoch.fill(watermarks, extras)
        return CommittedSet(watermarks, 0, extras)

    def begin_reading(self) -> None:
        """Note that the model is being queried: the answer may lack later commits."""
        self._fresh = {}

    def reconcile(self, truth: CommittedSet) -> list[Loss]:
        """Set the ledger to the model's content and the commits since `begin_reading`.

        Returns:
            The losses of tasks of which the model has lost something.
        """
        fresh, self._fresh = self._fresh or {}, None
        if self._is_stopped:
            self._unsettle()
            for epoch in self.epochs:
                epoch.plan_again(truth)
            self._plan_what_is_left()
        self.begin_until(truth.last_epoch)
        named: dict[int, set[int]] = {}
        for epoch_number, task in (*fresh, *truth.extras, *truth.skipped):
            named.setdefault(epoch_number, set()).add(task)
        return [
            loss
            for epoch in self.epochs
            for task in epoch.unlike(truth.watermarks, named.get(epoch.number, frozenset()))
            if (loss := self._reconcile_task(epoch, task, truth, fresh.get((epoch.number, task), NOTHING))) is not None
        ]

    def _reconcile_task(self, epoch: Epoch, task: int, truth: CommittedSet, fresh: CommittedTask) -> Loss | None:
        was, was_done = epoch.applied(task), epoch.is_done(task)
        holds = truth.of_task(epoch.number, task) | fresh
        num_new_skips = epoch.skip(task, truth.skipped_in(epoch.number, task))
        if holds == was and not num_new_skips:
            return None
        if epoch.number < self._num_settled:
            self._unsettle()
        self.model_version += len(holds) - len(holds & was)
        lost = [n for n in was if n not in holds]
        self.num_fallen_back += len(lost)
        records = epoch.records_of_minibatches(task, lost)
        epoch.change(task, holds)
        if was_done and not epoch.is_done(task):
            epoch.change(task, holds, UNKNOWN)
            epoch.covered = False
            epoch.open_again(task)
            return Loss(epoch.number, task, records, True)
        return Loss(epoch.number, task, records, False) if lost else None

    def snapshot(self) -> dict[str, Any]:
        return {
            "model_version": self.model_version,
            "is_stopped": self._is_stopped,
            "epochs": self._epochs_in_runs(),
            "quarantine": [[task, sorted(records)] for task, records in self._quarantine.items()],
        }

    def _epochs_in_runs(self) -> list[dict[str, Any]]:
        """Return the epochs for the journal; consecutive plain ones, the most frequent, as their number."""
        unsettled = self.unsettled()
        found = [*self._runs[:-1], *map(dict, self._runs[-1:])]
        for epoch in unsettled:
            _add_to_runs(found, epoch)
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.model_version = saved["model_version"]
        for epoch in saved["epochs"]:
            if _PLAIN in epoch:
                for _ in range(epoch[_PLAIN]):
                    self.begin_epoch().finish()
            else:
                self.begin_epoch().restore(epoch)
        self._is_stopped = saved.get("is_stopped", False)
        if self._is_stopped:
            self._plan_what_is_left()
        self._quarantine = {task: frozenset(records) for task, records in saved["quarantine"]}

    def validate(self) -> None:
        assert all(epoch.covered for epoch in self.epochs[: self._num_settled])
        for name in _SUMMED:
            assert self._sum(name) == sum(getattr(epoch, name) for epoch in self.epochs), name
        for epoch in self.epochs:
            epoch.validate()


def _add_to_runs(runs: list[dict[str, Any]], epoch: Epoch) -> None:
    """Add an epoch in the format of the journal; a plain one increases the number of those before it."""
    if not epoch.is_plain:
        runs.append(epoch.snapshot())
    elif runs and _PLAIN in runs[-1]:
        runs[-1][_PLAIN] += 1
    else:
        runs.append({_PLAIN: 1})
