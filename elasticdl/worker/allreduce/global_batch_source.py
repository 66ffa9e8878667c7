"""--fixed_global_batch: step s is always minibatches sG … (s+1)G-1 of the epoch's order, for any number of workers.

The master grants the training leases to rank 0 alone, in that order.  Rank 0 broadcasts their descriptions, so that all
members have the same queue; each member computes its own contiguous piece of every step.  Rank 0 reports for all.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.frameworks.framework import NO_SURPLUS, Batch, Surplus
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.prefetchers import (
    BatchPrefetcher,
    Broke,
    Failed,
    Item,
    LeasePrefetcher,
    LocalLeases,
    Other,
    Over,
    Unreadable,
)
from elasticdl.worker.allreduce.schedule import NO_EPOCH, StepSchedule
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan
from elasticdl.worker.reporter import TaskFailures, describe_error
from elasticdl.worker.tasks import HeldLease, NotFinite
from elasticdl_client.job_spec import JobSpec


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A minibatch in the order of steps."""

    name: MinibatchName
    lease: int


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """User code raised on a minibatch, in any member.  Its task may be under another lease when this is reported."""

    epoch: int
    task: int
    n: int
    error: str
    details: str
    bad_records: tuple[int, ...] = ()

    def is_of(self, task: MinibatchName | pb.Lease | BatchFailure) -> bool:
        return (task.epoch, task.task) == (self.epoch, self.task)


_log = logging.getLogger("elasticdl.worker")
_INPUT_S = 0.1  # wait for a minibatch that is still in the input pipeline


class GlobalBatches:
    """A `BatchSource` whose members share the leases of rank 0."""

    def __init__(
        self,
        spec: JobSpec,
        session: GroupSession,
        lease_prefetcher: LeasePrefetcher,
        leases: LocalLeases,
        batch_prefetcher: BatchPrefetcher,
        failures: TaskFailures,
        num_per_epoch: int,
    ) -> None:
        """
        Args:
            leases: The leases that the prefetcher draws from.
            num_per_epoch: Minibatches of an epoch; 0 if not known.
        """
        self.wish = StepFlag.NOTHING
        self.is_over = False
        self._link, self._reporter = failures.link, failures.reporter
        self._session = session
        self._lease_prefetcher = lease_prefetcher
        self._local = leases
        self._batch_prefetcher = batch_prefetcher
        self._failures = failures
        self._minibatch_size = spec.minibatch_size
        num_per_step = spec.fixed_global_batch // spec.minibatch_size
        self._schedule: StepSchedule[StepOrder] = StepSchedule(num_per_step, num_per_epoch, lambda one: one.name)
        self._skips_not_finite = spec.skips_not_finite
        self._fed: set[int] = set()  # leases given to the prefetcher
        self._ended: dict[int, Batch] = {}  # the end of each lease whose minibatches were all made, by lease
        self._made_by = ""  # operations of `feed` that change the number of samples, once known
        self._batches: dict[MinibatchName, Batch] = {}  # of this member's piece of the next step
        self._others: deque[HeldLease] = deque()
        self._to_share: list[pb.Lease] = []
        self._closes = NO_EPOCH  # the epoch to close: tell all members that no more minibatches of it will come
        self._newest = 0  # the newest training lease drawn
        self._failure: BatchFailure | None = None
        self._loss: float | None = None
        self._offered: Sequence[StepOrder] = ()

    def start(self) -> None:
        self._lease_prefetcher.start()
        self._batch_prefetcher.start()

    def entered(self) -> None:
        """Rebuild the queue from the leases of rank 0."""
        self._session.most_parts = -(-self._schedule.num_per_step // self._session.size)
        self._schedule.clear()
        self._batches.clear()
        self._closes = NO_EPOCH
        self._restart_prefetcher()
        self._to_share = []
        if self._session.rank == 0 and self._session.is_begun_anew:
            self._link.drop_ended_leases()  # a failure under an ended lease could not be reported
        for held in self._link.leases.held():
            if held.lease.type == pb.TRAINING:
                self._take_over(held)

    def offer(self, patience_s: float) -> list[BatchRef]:
        self._draw(0.0)
        own = self._own()
        if not own and not self._to_share:  # otherwise the others wait for leases that are here
            self._draw(patience_s)
            own = self._own()
        self._set_wish()
        self._offered = own
        if self._is_failing:
            return []  # report the failure first
        parts = []
        for position in own:
            size = self._size(position)
            if size is None:
                return []
            parts.append(BatchRef(position.name, size))
        self._show_position(parts)
        return parts

    def take_other(self) -> HeldLease | None:
        return self._others[0] if self._others else None

    def other_is_done(self) -> None:
        self._others.popleft()

    def agree(self, plan: StepPlan) -> bool:
        step = [position.name for position in self._schedule.next()]
        if StepFlag.SHARING in plan.wishes:
            self._unpack(self._session.share(self._packed() if self._session.rank == 0 else None))
        if StepFlag.FAILED in plan.wishes:
            self._share_failure(plan.first_with(StepFlag.FAILED))
            return False
        return bool(step) and {part.name for part in plan.all_parts} == set(step)

    def batch(self, part: BatchRef) -> Batch:
        return self._batches[part.name]

    def next_part(self) -> tuple[MinibatchName, Batch] | None:
        return None  # the members agree on each step, so it is not known ahead

    def leave_out(self, flaws: Mapping[int, str]) -> bool:
        return True  # rank 0 reports it, in `settle`

    def settle(self, plan: StepPlan, flawed: Sequence[BatchRef], flaws: Mapping[int, str]) -> bool:
        """Report the minibatches that are not finite to the master (rank 0), before the step is applied."""
        first = next(rank for rank, parts in enumerate(plan.parts) if flawed[0] in parts)
        is_first = self._session.rank == first
        what = self._session.share(next(iter(flaws.values())).encode() if is_first else None, first).decode()
        marks = self._session.share(self._report_flawed(flawed, what) if self._session.rank == 0 else None)
        lost = {(part.name.epoch, part.name.task) for part, is_lost in zip(flawed, marks, strict=True) if is_lost}
        if lost:  # the step would be rejected until the tasks are granted again
            self._take_out(lambda task: (task.epoch, task.task) in lost)
        return self._skips_not_finite and not lost

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        return plan.all_parts if self._session.rank == 0 else ()

    def fail(self, error: Exception) -> None:
        if not self._offered:  # the step has only minibatches of other members: they are trained again
            _log.error("%s", traceback.format_exc())
            return
        first = self._offered[0].name
        self._failure = BatchFailure(first.epoch, first.task, first.n, *describe_error(error, None))

    def applied(self, plan: StepPlan, loss: float) -> None:
        self._loss = loss if plan.num_records else self._loss
        done = {position.lease for position in self._schedule.take_applied(self._session.ledger.applied)}
        for lease in done.difference(position.lease for position in self._schedule):
            self._local.leases.remove(lease)
            self._fed.discard(lease)
            self._ended.pop(lease, None)
        self._batches.clear()
        self._feed()

    def confirmed(self, names: Iterable[MinibatchName]) -> None:
        by_task: dict[tuple[int, int], list[int]] = {}
        for name in names:
            by_task.setdefault((name.epoch, name.task), []).append(name.n)
        for held in self._link.leases.held():
            done = by_task.get((held.lease.epoch, held.lease.task))
            if done and held.lease.type == pb.TRAINING:
                self._report(held, done, self._loss)

    # Leases ---------------------------------------------------------------------------------------------------------

    def _draw(self, timeout_s: float) -> None:
        for held in self._lease_prefetcher.take(timeout_s):
            if held is None:
                self.is_over = True
            elif held.lease.type != pb.TRAINING or held.lease.merged:
                self._others.append(held)
            elif held.id > self._newest and not held.revoked:  # older leases were queued when the group was entered
                self._take_over(held)

    def _take_over(self, held: HeldLease) -> None:
        """Queue a training lease for the group; report the minibatches of it that are in all models already."""
        self._newest = max(self._newest, held.id)
        done = [name.n for name in self._names(held.lease) if self._session.is_proven(name)]
        held.committed = set(done)
        self._to_share.append(held.lease)
        self._report(held, done, None)

    def _set_wish(self) -> None:
        """Set the flags of the next header: rank 0 has leases to share, or user code has failed here."""
        self.wish = StepFlag.NOTHING
        if self._session.rank == 0:
            if not self._to_share:
                applied = self._session.ledger.applied
                self._closes = self._schedule.epoch_to_close(
                    applied, lambda epoch: self._link.has_rest_of(epoch, self._newest)
                )
            if self._to_share or self._closes != NO_EPOCH:
                self.wish |= StepFlag.SHARING
        if self._is_failing:
            self.wish |= StepFlag.FAILED

    @property
    def _is_failing(self) -> bool:
        """Whether user code raised here on a queued task; a failure of another task waits until it is queued again."""
        failure = self._failure
        return failure is not None and any(failure.is_of(position.name) for position in self._schedule)

    def _packed(self) -> bytes:
        leases, self._to_share = self._to_share, []
        messages = [lease.SerializeToString() for lease in leases]
        head = json.dumps({"closes": self._closes, "sizes": [len(message) for message in messages]}).encode()
        return len(head).to_bytes(4, "little") + head + b"".join(messages)

    def _unpack(self, data: bytes) -> None:
        start = 4 + int.from_bytes(data[:4], "little")
        head: dict[str, Any] = json.loads(data[4:start])
        self._schedule.close(head["closes"])
        for size in head["sizes"]:
            lease = pb.Lease.FromString(data[start : start + size])
            start += size
            positions = [StepOrder(name, lease.id) for name in self._names(lease)]
            if self._schedule.add(positions, self._session.ledger.applied):
                self._local.leases.add(lease)
        self._feed()

    def _names(self, lease: pb.Lease) -> list[MinibatchName]:
        count = -(-_num_records(lease) // self._minibatch_size)
        return [MinibatchName(lease.epoch, lease.task, n) for n in range(count)]

    def _show_position(self, parts: Sequence[BatchRef]) -> None:
        """Update the position within rank 0's leases that heartbeats report."""
        for part in parts:
            for held in self._link.leases.held():
                if (held.lease.epoch, held.lease.task) == (part.name.epoch, part.name.task):
                    held.minibatch = part.name.n

    def _report(self, held: HeldLease, done: Sequence[int], loss: float | None) -> None:
        for n in done:
            self._reporter.committed(held.id, n, loss)
        length = len(self._names(held.lease))
        if len(held.committed) >= length:
            self._reporter.finished(held.id, length, self._surplus(held.lease))

    def _surplus(self, lease: pb.Lease) -> Surplus:
        """Return the surplus of a task that is completely in the model, from the ledger."""
        count = self._session.ledger.surplus_of(lease.epoch, lease.task, _num_records(lease))
        return Surplus(count, self._made_by) if count else NO_SURPLUS

    def _report_flawed(self, flawed: Sequence[BatchRef], what: str) -> bytes:
        """Report minibatches that are not finite to the master (rank 0).

        Returns:
            A byte for each minibatch: 1 if its lease is lost, else 0.
        """
        by_task = {(one.lease.epoch, one.lease.task): one for one in self._link.leases.held()}
        marks = bytearray(len(flawed))
        for k, part in enumerate(flawed):
            held = by_task.get((part.name.epoch, part.name.task))
            n = part.name.n
            if held is None:
                marks[k] = True
            elif self._skips_not_finite:
                _log.warning("Minibatch %d of %s is left out of the model: %s", n, held.task_name, what)
                marks[k] = not self._link.report_not_finite(held.id, what, [n]).accepted
            else:
                self._failures.not_finite(held, NotFinite(n, what))
        return bytes(marks)

    def _share_failure(self, rank: int) -> None:
        """Broadcast a failure, take its task out of the queue in all members, and report it to the master (rank 0)."""
        own = self._failure if self._session.rank == rank else None
        data = json.dumps(dataclasses.asdict(own)).encode() if own is not None else None
        failure = BatchFailure(**json.loads(self._session.share(data, rank)))
        if self._failure is not None and failure.is_of(self._failure):  # several members may fail on it at once
            self._failure = None
        self._take_out(failure.is_of)
        if self._session.rank == 0:
            self._report_failure(failure)

    def _take_out(self, is_out: Callable[[MinibatchName | pb.Lease], bool]) -> None:
        """Remove tasks from the queue; every member must do so in the same round."""
        self._schedule.remove(is_out)
        self._batches.clear()  # the steps are cut differently now
        kept = [held.lease for held in self._local.leases.held() if not is_out(held.lease)]
        self._restart_prefetcher()
        for lease in kept:
            self._local.leases.add(lease)
        self._feed()

    def _report_failure(self, failure: BatchFailure) -> None:
        for held in self._link.leases.held():
            if failure.is_of(held.lease):
                _log.error("%s", failure.details or failure.error)
                self._reporter.drain()
                self._link.fail(held.id, failure.n, failure.error, failure.details, list(failure.bad_records))
                self._link.leases.remove(held.id)

    def _restart_prefetcher(self) -> None:
        self._local.take_all_back()
        self._batch_prefetcher.restart(tuple)
        self._fed.clear()
        self._ended.clear()

    # Steps ----------------------------------------------------------------------------------------------------------

    def _piece(self, step: Sequence[StepOrder]) -> Sequence[StepOrder]:
        """Return this member's piece of a step."""
        return self._schedule.piece(step, self._session.rank, self._session.size)

    def _own(self) -> Sequence[StepOrder]:
        return self._piece(self._schedule.next())

    def _feed(self) -> None:
        """Give the leases of which this member has a piece to its input pipeline."""
        for step in self._schedule.steps():
            for position in self._piece(step):
                held = self._local.leases.get(position.lease)
                if position.lease not in self._fed and held is not None:
                    self._fed.add(position.lease)
                    self._local.give(held)

    def _size(self, wanted: StepOrder) -> int | None:
        """Return the number of samples of a minibatch of this member; None if it is not there, or user code raised."""
        held = self._local.leases.get(wanted.lease)
        is_last = held is not None and wanted.name == self._names(held.lease)[-1]
        while wanted.lease not in self._ended and (is_last or wanted.name not in self._batches):
            item = self._batch_prefetcher.take(_INPUT_S) if not self._is_failing else None
            if item is None or not self._sort(item):
                return None
        if held is not None and is_last and self._ended[wanted.lease].n > wanted.name.n + 1:
            self._failure = self._too_many(held.lease, self._ended[wanted.lease])
            return None
        batch = self._batches.get(wanted.name)
        return 0 if batch is None else batch.size  # None: the user's `filter` has removed all of its records

    def _too_many(self, lease: pb.Lease, end: Batch) -> BatchFailure:
        """Return the failure of a task with too many minibatches: the plan of steps has no place for them."""
        names = self._names(lease)
        what = f"{end.surplus.explained(_num_records(lease))}: {end.n} minibatches instead of {len(names)}"
        advice = "--fixed_global_batch plans its steps by records: make no more samples than records, or leave it out"
        return BatchFailure(lease.epoch, lease.task, len(names), f"{what}. {advice}.", "")

    def _sort(self, item: Item) -> bool:
        match item:
            case Batch(end=True):
                if item.lease in self._fed:
                    self._ended[item.lease] = item
                    self._made_by = item.surplus.made_by or self._made_by
            case Batch():
                held = self._local.leases.get(item.lease)
                if held is not None:
                    name = MinibatchName(held.lease.epoch, held.lease.task, item.n)
                    if any(position.name == name for position in self._own()):
                        self._batches[name] = item
            case Failed(error=error):
                failed = next((p.name for p in self._schedule if p.lease == error.lease), None)
                if failed is None:
                    self._batch_prefetcher.resume()  # an item of a task that has already failed
                    return True
                self._failure = BatchFailure(
                    failed.epoch, failed.task, error.n, str(error), error.details, error.bad_records
                )
                return False
            case Unreadable(held=held, error=cause):
                self._failure = BatchFailure(held.lease.epoch, held.lease.task, 0, str(cause), "")
                return False
            case Broke(error=end):
                raise end
            case Other() | Over():
                raise AssertionError("the prefetcher takes batches of shared leases only")
        return True


def _num_records(lease: pb.Lease) -> int:
    return lease.shard.end - lease.shard.start - len(lease.excluded)
