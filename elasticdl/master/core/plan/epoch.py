"""Epoch: one pass over the data: its tasks, and their committed and skipped minibatches.

A task is todo, leased or done; leases themselves are in ledger/leases.py.  tasks.py combines the epochs of a job.

`PackedColumns`: numbers of each task of an epoch for the journal: small, and packed again only where they change.

They are packed in the order in which tasks are granted.  So done tasks come first and untouched ones last, and both
are long runs of one number: a million tasks take some kilobytes in every state of the epoch; in the order of the data
they took up to one megabyte, as much as a ConfigMap can hold.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import operator
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from elasticdl.master.core.applied import NOTHING, CommittedSet, CommittedTask, TaskName
from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Shard, task_order
from elasticdl.task_numbers import TaskNumbers
from elasticdl_client.job_status import EpochCoverage

UNKNOWN = -1  # number of minibatches of an unfinished task
FATES = ("committed", "repeated", "lost", "quarantined", "skipped", "filtered", "augmented", "unplanned")


class Epoch:
    """One pass over the data.  Tasks beyond the budget of minibatches are not planned; the last one is cut short."""

    def __init__(self, number: int, slices: Sequence[Shard], settings: JobSettings, budget: int | None) -> None:
        self.number = number
        self._slices = slices
        self._minibatch_size = settings.minibatch_size
        self._shortened: dict[int, Shard] = {}
        in_order = range(len(slices))
        order = array("i", task_order(settings.seed, number, len(slices)) if settings.trains else in_order)
        self._num_within_budget = self._cut(order, budget)
        self.verb = settings.verb
        self.records = sum(len(shard) for shard in slices)
        self._next = 0  # index in `order`: all earlier tasks are leased, done, or in `_again`
        self._again: list[tuple[int, int]] = []  # reopened tasks, a heap of (index in `order`, task)
        self.leased: set[int] = set()
        self.covered = False  # its coverage line is printed
        self.num_repeated = 0  # records of minibatches that were seen to be applied twice
        self.num_done = 0
        self.num_minibatches = 0  # committed ones
        self.committed_records = 0  # skipped ones included
        self.processed_records = 0  # counts records at each commit, so it only grows
        self.num_skipped = 0  # minibatches that are committed and empty
        self.skipped_records = 0
        self.num_filtered = 0  # records of done tasks that `feed` made no sample of
        self.num_augmented = 0  # samples of done tasks beyond one per record
        self._watermarks = array("i", [0]) * len(slices)
        self._sizes = array("i", [UNKNOWN]) * len(slices)
        self._surpluses = array("q", [0]) * len(slices)  # samples minus records; 0 for a task that is not done
        self._unplanned: frozenset[int] = frozenset()  # tasks cancelled when training was stopped
        self._columns = PackedColumns(
            order, {"watermarks": self._watermarks, "sizes": self._sizes, "surpluses": self._surpluses}
        )
        self.order, self.planned_records = self._planned()
        self._extras: dict[int, frozenset[int]] = {}
        self._excluded: dict[int, frozenset[int]] = {}
        self._num_quarantined: int | None = 0  # None: to be counted on demand
        self._skipped: dict[int, frozenset[int]] = {}  # minibatches that are, or are about to be, empty in the model
        self._saved: dict[str, Any] | None = None
        self._is_as_planned = False  # at the last packing: every task is done, with one sample per record

    def _cut(self, order: Sequence[int], budget: int | None) -> int:
        """Shorten the last task within the budget; return the number of tasks within it."""
        if budget is None:
            return len(order)
        for place, task in enumerate(order):
            if budget <= 0:
                return place
            records = budget * self._minibatch_size
            shard = self._slices[task]
            if len(shard) > records:
                self._shortened[task] = Shard(shard.name, shard.start, shard.start + records, shard.identity)
            budget -= -(-len(shard) // self._minibatch_size)
        return len(order)

    def _planned(self) -> tuple[array[int], int]:
        """Return the planned tasks in order, and the number of their records."""
        order = self._columns.order
        if not self._unplanned and not self._shortened and self._num_within_budget == len(order):
            return order, self.records
        if self._unplanned or self._num_within_budget < len(order):
            within_budget = itertools.islice(order, self._num_within_budget)
            order = array("i", (task for task in within_budget if task not in self._unplanned))
        return order, sum(len(self.slice(task)) for task in order)

    def stop(self) -> None:
        """Stop training: cancel all tasks that no worker has begun."""
        self._leave_out([task for task in self.todo() if self.applied(task) == NOTHING])

    def _leave_out(self, tasks: Iterable[int]) -> None:
        self._unplanned = self._unplanned.union(tasks)
        self._plan_again()

    def plan_again(self, held: CommittedSet) -> None:
        """Plan cancelled tasks again if the model contains a part of them."""
        again = frozenset(task for task in self._unplanned if len(held.of_task(self.number, task)))
        if again:
            self._unplanned -= again
            self._plan_again()

    def _plan_again(self) -> None:
        self.order, self.planned_records = self._planned()
        self._saved = self._num_quarantined = None
        self._queue()

    def slice(self, task: int) -> Shard:
        return self._shortened.get(task, self._slices[task])

    def excluded(self, task: int) -> frozenset[int]:
        """Quarantined records of a task, by record number in the shard."""
        return self._excluded.get(task, frozenset())

    def open_again(self, task: int) -> None:
        """Put a planned task back into the todo list at its place in the order, so before all later ones."""
        assert self._is_planned(task), f"task {task} is not planned"
        heapq.heappush(self._again, (self._columns.place(task), task))

    def _is_planned(self, task: int) -> bool:
        if task in self._unplanned or not 0 <= task < len(self._slices):
            return False
        return self._columns.place(task) < self._num_within_budget

    def cover(self) -> None:
        """Mark the coverage line as printed: the epoch changes only if the model is found to have lost some of it."""
        self.covered = True
        self._columns.forget_places()

    # Todo -----------------------------------------------------------------------------------------------------------

    def todo(self) -> list[int]:
        """Return the planned tasks that are neither leased nor done, in order."""
        return [task for task in self.order if self._is_open(task)]

    @property
    def num_todo(self) -> int:
        return len(self.order) - len(self.leased) - self.num_done

    def is_todo(self, task: int) -> bool:
        return self._is_planned(task) and self._is_open(task)

    def _is_open(self, task: int) -> bool:
        return task not in self.leased and not self.is_done(task)

    def take(self, task: int) -> None:
        """Take a task out of the todo list for a worker."""
        self.leased.add(task)

    def first_todo(self, allowed: Callable[[int], bool]) -> int | None:
        """Return the first task in order that is todo and allowed; None if there is none."""
        passed: list[int] = []
        while (task := self._front()) is not None and not allowed(task):
            passed.append(task)
            self._pass(task)
        for one in passed:
            self.open_again(one)
        return task

    def _front(self) -> int | None:
        """Return the first task in order that is todo; None if there is none."""
        while self._again and not self._is_open(self._again[0][1]):
            heapq.heappop(self._again)
        while self._next < len(self.order) and not self._is_open(self.order[self._next]):
            self._next += 1
        if self._next == len(self.order):
            return self._again[0][1] if self._again else None
        ahead = self.order[self._next]
        return min(self._again[0], (self._columns.place(ahead), ahead))[1] if self._again else ahead

    def _pass(self, task: int) -> None:
        """Remove the front task from the queues."""
        while self._again and self._again[0][1] == task:
            heapq.heappop(self._again)
        if self._next < len(self.order) and self.order[self._next] == task:
            self._next += 1

    def _queue(self) -> None:
        """Queue all planned tasks that are not done."""
        self._next, self._again = 0, []

    @property
    def num_quarantined(self) -> int:
        """Quarantined records of planned tasks; cached, since a status needs it of every epoch."""
        if self._num_quarantined is None:
            self._num_quarantined = sum(len(self.excluded(task)) for task in self.order) if self._excluded else 0
        return self._num_quarantined

    def exclude(self, task: int, records: Iterable[int]) -> None:
        """Exclude records of a task, unless the model contains a minibatch of it."""
        shard = self.slice(task)
        if not self.is_done(task) and self.applied(task) == NOTHING:
            inside = (record for record in records if shard.start <= record < shard.end)
            self._excluded[task] = self.excluded(task).union(inside)
            self._skipped.pop(task, None)
            self._saved = self._num_quarantined = None

    def skip(self, task: int, minibatches: Iterable[int]) -> int:
        """Record minibatches that the model skips; return the number of new ones."""
        known = self._skipped.get(task, frozenset())
        after = known.union(minibatches)
        if after != known:
            self._count(task, -1)
            self._skipped[task] = after
            self._count(task, 1)
            self._saved = None
        return len(after) - len(known)

    def is_skipped(self, task: int, minibatch: int) -> bool:
        return minibatch in self._skipped.get(task, ())

    def _skipped_in(self, task: int) -> list[int]:
        """Return committed minibatches of a task that are empty in the model."""
        if task not in self._skipped:
            return []
        applied = self.applied(task)
        return [n for n in self._skipped[task] if n in applied]

    def _count(self, task: int, sign: int) -> None:
        """Add a task to the sums of the epoch (`sign` 1), or subtract it (-1)."""
        skipped = self._skipped_in(task)
        self.num_done += sign * self.is_done(task)
        self.committed_records += sign * self.records_in(task)
        self.num_skipped += sign * len(skipped)
        self.skipped_records += sign * self._skipped_records(task, skipped)
        self.num_filtered += sign * max(0, -self._surpluses[task])
        self.num_augmented += sign * max(0, self._surpluses[task])

    def _skipped_records(self, task: int, skipped: Iterable[int]) -> int:
        """Return the records of skipped minibatches; at most the task's records that made a sample."""
        most = self._records_of(task) + min(0, self._surpluses[task])
        return min(most, sum(self._size_of(task, n) for n in skipped))

    def _records_of(self, task: int) -> int:
        return len(self.slice(task)) - len(self.excluded(task))

    def _size_of(self, task: int, n: int) -> int:
        """Return the samples of a minibatch, assuming one per record until the task's surplus is known."""
        samples = self._records_of(task) + self._surpluses[task]
        return max(0, min(self._minibatch_size, samples - n * self._minibatch_size))

    def applied(self, task: int) -> CommittedTask:
        return CommittedTask(self._watermarks[task], self._extras.get(task, frozenset()))

    def unlike(self, watermarks: TaskNumbers, others: Set[int]) -> list[int]:
        """Return the planned tasks whose commits are not just the minibatches below these watermarks, in order.

        Args:
            watermarks: Watermark of each task.
            others: Tasks to return in any case, if they are planned.
        """
        held = watermarks.of_epoch(self.number, len(self._watermarks))
        unlike = itertools.compress(itertools.count(), map(operator.ne, self._watermarks, held))
        return sorted(filter(self._is_planned, {*unlike, *self._extras, *others}), key=self._columns.place)

    def fill(self, watermarks: TaskNumbers, extras: dict[TaskName, frozenset[int]]) -> None:
        """Add the epoch's commits to those of other epochs."""
        watermarks.put(self.number, self._watermarks)
        extras.update(((self.number, task), above) for task, above in self._extras.items())

    def is_done(self, task: int) -> bool:
        """Return whether a task's size is known and all of its minibatches are committed."""
        return 0 <= self._sizes[task] <= self._watermarks[task]

    @property
    def complete(self) -> bool:
        return self.num_done == len(self.order)

    def change(self, task: int, applied: CommittedTask, size: int | None = None, surplus: int = 0) -> None:
        """Set the commits of a task, and its size once that is known; never moves it between the lists.

        A skipped minibatch that is no longer in the model is computed again, and may not be skipped then.

        Args:
            surplus: Given with a size: samples beyond one per record.
        """
        before, committed = self.applied(task), self.committed_records
        self._count(task, -1)
        if task in self._skipped:
            self._skipped[task] = frozenset(n for n in self._skipped[task] if n in applied or n not in before)
        self.num_minibatches += len(applied) - len(before)
        self._watermarks[task] = applied.watermark
        self._extras.pop(task, None)
        if applied.extras:
            self._extras[task] = applied.extras
        if size is not None:
            self._sizes[task] = size
            self._surpluses[task] = max(surplus, -self._records_of(task))
        self._count(task, 1)
        self.processed_records += max(0, self.committed_records - committed)
        self._columns.changed(task)
        self._saved = None

    def records_of_minibatches(self, task: int, minibatches: Iterable[int]) -> int:
        """Return the number of records of some minibatches of a task."""
        return sum(self._size_of(task, n) for n in minibatches)

    def records_in(self, task: int) -> int:
        """Return the records of a task's committed minibatches; of a done task all of them, filtered ones included."""
        if self.is_done(task):
            return self._records_of(task)
        samples = self._records_of(task) + self._surpluses[task]
        below = max(0, min(self._watermarks[task] * self._minibatch_size, samples))
        return below + self.records_of_minibatches(task, self._extras.get(task, ()))

    def snapshot(self) -> dict[str, Any]:
        counted = {"num_repeated": self.num_repeated, "processed_records": self.processed_records}
        return {**self._packed(), "covered": self.covered, **counted}

    def _packed(self) -> dict[str, Any]:
        if self._saved is None:
            self._saved = {
                **self._columns.pack(),
                "extras": {str(task): sorted(extras) for task, extras in self._extras.items()},
                "excluded": {str(task): sorted(excluded) for task, excluded in self._excluded.items()},
                "skipped": {str(task): sorted(skipped) for task, skipped in self._skipped.items() if skipped},
                "unplanned": sorted(self._unplanned),
            }
            lists = ("extras", "excluded", "skipped", "unplanned")
            self._is_as_planned = (
                self.complete
                and not any(self._saved[name] for name in lists)
                and not any(self._surpluses)
                and self._sizes == self._planned_sizes()
            )
        return self._saved

    @property
    def is_plain(self) -> bool:
        """Whether it is over, and each record was committed once: `finish` turns a new epoch into the same."""
        self._packed()
        is_once = self.num_repeated == 0 and self.processed_records == self.records
        return self.covered and is_once and self._is_as_planned

    def finish(self) -> None:
        """Commit all of an untouched epoch."""
        self._watermarks[:] = self._sizes[:] = self._planned_sizes()
        for task in self._columns.order[self._num_within_budget :]:
            self._watermarks[task], self._sizes[task] = 0, UNKNOWN
        self.num_done, self.num_minibatches = len(self.order), sum(self._watermarks)
        self.committed_records = self.processed_records = self.planned_records
        self._queue()
        self.cover()

    def _planned_sizes(self) -> array[int]:
        """Return the minibatches of each task for one sample per record; fast, as there may be millions."""
        most = self._minibatch_size
        sizes = array("i", [-(-(shard.end - shard.start) // most) for shard in self._slices])
        for task, shard in self._shortened.items():
            sizes[task] = -(-len(shard) // most)
        return sizes

    def restore(self, saved: Mapping[str, Any]) -> None:
        columns = self._columns.unpack(saved)
        watermarks, sizes, surpluses = (columns[name] for name in ("watermarks", "sizes", "surpluses"))
        extras = {int(task): above for task, above in saved["extras"].items()}
        self._leave_out(saved.get("unplanned", ()))
        for task in itertools.chain(self._unplanned, self._columns.order[self._num_within_budget :]):
            watermarks[task], sizes[task], surpluses[task] = 0, UNKNOWN, 0  # --max_step may have been lowered
            extras.pop(task, None)
        self._excluded = {int(task): frozenset(records) for task, records in saved["excluded"].items()}
        self._skipped = {int(task): frozenset(skipped) for task, skipped in saved["skipped"].items()}
        self._num_quarantined = None
        self.num_repeated = saved["num_repeated"]
        peculiar = {*extras, *self._excluded, *self._skipped, *itertools.compress(itertools.count(), surpluses)}
        changes = [(task, CommittedTask.of(watermarks[task], extras.get(task, ())), sizes[task]) for task in peculiar]
        for task in peculiar:
            watermarks[task], sizes[task] = 0, UNKNOWN
        self._commit_plain(watermarks, sizes)
        for task, applied, size in changes:
            if applied != NOTHING or size != UNKNOWN:
                self.change(task, applied, size, surpluses[task])
        self._queue()
        if saved["covered"]:
            self.cover()
        self.processed_records = saved.get("processed_records", self.processed_records)

    def _commit_plain(self, watermarks: array[int], sizes: array[int]) -> None:
        """Commit many tasks of an untouched epoch at once, with the result of `change`.

        Args:
            watermarks: Watermark of each task; 0 for those with extras, excluded records, skips or a surplus.
            sizes: Minibatches of each task; `UNKNOWN` for the same tasks.
        """
        self._watermarks[:], self._sizes[:] = watermarks, sizes
        for task, watermark, size in zip(itertools.count(), watermarks, sizes):
            if 0 <= size <= watermark:
                self.num_done += 1
                self.committed_records += len(self.slice(task))
            elif watermark:
                self.committed_records += min(len(self.slice(task)), watermark * self._minibatch_size)
        self.num_minibatches = sum(watermarks)
        self.processed_records = self.committed_records

    def validate(self) -> None:
        """Check that every planned task is todo, leased or done exactly once.

        Raises:
            AssertionError: A task is in none or in two of these states.
        """
        todo = self.todo()
        done = [task for task in self.order if self.is_done(task)]
        queued = {*self.order[self._next :], *(task for _, task in self._again)}
        assert queued.issuperset(todo), (self.number, queued, todo)
        assert sorted([*todo, *self.leased, *done]) == sorted(self.order), (self.number, todo, self.leased, done)
        assert self.num_todo == len(todo)
        assert self.num_done == len(done)
        assert self.committed_records == sum(map(self.records_in, self.order))
        extras = sum(len(self._extras.get(task, ())) for task in self.order)
        assert self.num_minibatches == extras + sum(self._watermarks[task] for task in self.order)
        assert self.num_quarantined == sum(len(self.excluded(task)) for task in self.order)
        assert 0 <= self.committed_records <= self.planned_records - self.num_quarantined <= self.records
        assert self.num_skipped == sum(len(self._skipped_in(task)) for task in self.order)
        assert self.num_filtered - self.num_augmented == -sum(self._surpluses)
        assert all(self.is_done(task) for task, surplus in enumerate(self._surpluses) if surplus)
        assert 0 <= self.skipped_records <= self.committed_records - self.num_filtered
        assert not self.covered or self.complete


def coverage_of(epoch: Epoch, is_over: bool = False, is_bound: bool = False) -> EpochCoverage:
    """Return what happened to the records of an epoch.

    Args:
        epoch: An epoch of the plan.
        is_over: Uncommitted records will not be trained any more.
        is_bound: See `EpochCoverage`.
    """
    skipped, quarantined, filtered = epoch.skipped_records, epoch.num_quarantined, epoch.num_filtered
    committed = epoch.committed_records - skipped - filtered
    planned = committed + skipped + quarantined + filtered if is_over else epoch.planned_records
    return EpochCoverage(
        epoch=epoch.number + 1,
        records=epoch.records,
        committed=committed,
        repeated=epoch.num_repeated,
        lost=planned - quarantined - skipped - filtered - committed,
        quarantined=quarantined,
        skipped=skipped,
        unplanned=epoch.records - planned,
        filtered=filtered,
        augmented=epoch.num_augmented,
        verb=epoch.verb,
        is_bound=is_bound,
    )


def coverage_line(coverage: EpochCoverage) -> str:
    """Return the coverage line for the log."""
    return f"{coverage.title.replace('epoch', 'Epoch')}: {coverage}"


def records_by_fate(covered: Iterable[EpochCoverage], running: Iterable[Epoch]) -> dict[str, int]:
    """Return what happened to the records of all epochs, in numbers.

    Args:
        covered: Coverage of the finished epochs.
        running: The other epochs; none of their records is lost or left out yet.
    """
    found = dict.fromkeys(FATES, 0)
    for coverage in covered:
        for fate in FATES:
            found[fate] += getattr(coverage, fate)
    for epoch in running:
        now = coverage_of(epoch)
        for fate in FATES:
            found[fate] += 0 if fate in ("lost", "unplanned") else getattr(now, fate)
    return found


_CHUNK = 1 << 14  # tasks that are packed together again when one of them changes, in a few milliseconds


class PackedColumns:
    """Arrays of one number per task, which their owner changes.

    Args:
        order: Order of the tasks; the same in every generation of the master.
        columns: Arrays by name.
    """

    def __init__(self, order: array[int], columns: Mapping[str, array[int]]) -> None:
        self.order = order
        self._places: array[int] | None = None  # place of each task in the order, computed on demand
        num_chunks = -(-len(order) // _CHUNK)
        self._columns = columns
        self._packed = {name: [""] * num_chunks for name in columns}
        self._changed = set(range(num_chunks))

    def place(self, task: int) -> int:
        """Return the place of a task in the order."""
        if self._places is None:
            self._places = array("i", bytes(self.order.itemsize * len(self.order)))
            for place, one in enumerate(self.order):
                self._places[one] = place
        return self._places[task]

    def forget_places(self) -> None:
        """Free the memory of the places until the next call of `place`."""
        self._places = None

    def changed(self, task: int) -> None:
        """Note that a number of this task has changed."""
        self._changed.add(self.place(task) // _CHUNK)

    def pack(self) -> dict[str, list[str]]:
        """Return all columns, in JSON types only."""
        for chunk in self._changed:
            tasks = self.order[chunk * _CHUNK : (chunk + 1) * _CHUNK]
            for name, column in self._columns.items():
                numbers = array(column.typecode, map(column.__getitem__, tasks))
                self._packed[name][chunk] = base64.b64encode(zlib.compress(numbers.tobytes())).decode()
        self._changed.clear()
        return {name: list(chunks) for name, chunks in self._packed.items()}

    def unpack(self, saved: Mapping[str, Any]) -> dict[str, array[int]]:
        """Return the columns of a journal by name; columns that an older version lacks keep their present numbers.

        Older versions packed each column as a whole, in the order of the tasks' numbers.
        """
        found = {}
        for name, column in self._columns.items():
            packed = saved.get(name)
            if packed is None:
                found[name] = column
            elif isinstance(packed, str):
                found[name] = _unpack(packed, column.typecode)
            else:
                found[name] = array(column.typecode, column)
                numbers = (number for chunk in packed for number in _unpack(chunk, column.typecode))
                for task, number in zip(self.order, numbers, strict=True):
                    found[name][task] = number
        return found


def _unpack(text: str, kind: str) -> array[int]:
    values = array(kind)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    return values
