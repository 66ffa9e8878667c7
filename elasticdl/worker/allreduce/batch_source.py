"""The source of a member's minibatches, and the reports on them.

`BatchSource` is the port.  With `LeasedBatches`, every member trains the minibatches of the leases that the master
grants to it, and reports them itself; with --fixed_global_batch see global_batch_source.py.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from elasticdl.frameworks.framework import Batch
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.prefetchers import BatchPrefetcher, Broke, Failed, Item, Other, Over, Unreadable
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepParts, StepPlan
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, NotFinite, TaskStream

_log = logging.getLogger("elasticdl.worker")


class OtherLeases(Protocol):
    """The leases of a member that are not for training, one at a time."""

    def take_other(self) -> HeldLease | None:
        """Return the current lease, None if there is none."""
        ...

    def other_is_done(self) -> None:
        """Drop the current lease: its work is done or has failed."""
        ...


class FlawedSteps(Protocol):
    """Reports on minibatches that are not finite, or on which user code raises."""

    def leave_out(self, flaws: Mapping[int, str]) -> bool:
        """Report, before the reduction, that own minibatches will be left out of the model (--nan_policy skip).

        Args:
            flaws: The values that are not finite, by position among this member's parts.

        Returns:
            Whether the master has accepted the report.
        """
        ...

    def settle(self, plan: StepPlan, flawed: Sequence[BatchRef], flaws: Mapping[int, str]) -> bool:
        """Decide, after the reduction, whether a step with minibatches that are not finite is applied without them.

        Args:
            flawed: The minibatches of all members that are not finite.
            flaws: The values that are not finite among this member's parts; may be empty.
        """
        ...

    def fail(self, error: Exception) -> None:
        """Report the exception being handled: user code raised it, maybe in a step without parts of this member."""
        ...


class BatchSource(StepParts, OtherLeases, FlawedSteps, Protocol):
    """The minibatches that a member trains, and the reports on them."""

    def start(self) -> None: ...

    def batch(self, part: BatchRef) -> Batch:
        """Return the minibatch behind a part of this member."""
        ...

    def next_part(self) -> tuple[MinibatchName, Batch] | None:
        """Return the minibatch that this member will probably offer next; None if it is not known."""
        ...

    def applied(self, plan: StepPlan, loss: float) -> None:
        """Record that the step is in the model of this process."""
        ...

    def confirmed(self, names: Iterable[MinibatchName]) -> None:
        """Record that minibatches of this member are in the model of every member."""
        ...


class LeasedBatches:
    """The minibatches of the leases that this member holds."""

    def __init__(
        self,
        session: GroupSession,
        batch_prefetcher: BatchPrefetcher,
        tasks: TaskStream,
        failures: TaskFailures,
        skips_not_finite: bool,
    ) -> None:
        """
        Args:
            skips_not_finite: Whether minibatches with NaN or infinity are left out of the model; else they end the job.
        """
        self.wish = StepFlag.NOTHING
        self.is_over = False
        self._link, self._reporter = failures.link, failures.reporter
        self._leases = self._link.leases
        self._session = session
        self._batch_prefetcher = batch_prefetcher
        self._tasks = tasks
        self._failures = failures
        self._skips_not_finite = skips_not_finite
        self._at_hand: tuple[MinibatchName, Batch] | None = None
        self._other: HeldLease | None = None
        self._ends: dict[int, Batch] = {}  # the end of each lease whose minibatches were all given, by lease
        self._known: deque[tuple[int, int]] = deque()  # (lease, n): another member has brought it into the model
        self._loss: float | None = None
        self._names: dict[MinibatchName, int] = {}  # brought by this member, not confirmed yet -> its lease
        self._is_unsure = False  # whether the master may have ended the leases held

    def start(self) -> None:
        self._batch_prefetcher.start()

    def entered(self) -> None:
        """Queue again the minibatches that the model of the new group lacks."""
        self._is_unsure = self._session.is_begun_anew
        applied = self._session.ledger.applied
        is_older = any(name not in applied for name in self._names)
        for held in self._leases.held():
            done = {n for n in held.committed if MinibatchName(held.lease.epoch, held.lease.task, n) in applied}
            is_older = is_older or done != held.committed
            held.committed = done
        if is_older:
            self._begin_again()
        elif self._at_hand is not None and self._at_hand[0] in applied:
            self._pass(self._at_hand[1])

    def offer(self, patience_s: float) -> list[BatchRef]:
        if self._is_unsure:
            return []
        while self._at_hand is None and self._other is None and not self.is_over:
            item = self._batch_prefetcher.take(patience_s)
            if item is None:
                break
            self._sort(item)
        if self._at_hand is None:
            return []
        name, batch = self._at_hand
        held = self._leases.get(batch.lease)
        if held is None:
            self._at_hand = None
            return []
        held.minibatch = name.n
        return [BatchRef(name, batch.size)]

    def take_other(self) -> HeldLease | None:
        return self._other

    def other_is_done(self) -> None:
        self._other = None
        self._batch_prefetcher.resume()

    def agree(self, plan: StepPlan) -> bool:
        if self._is_unsure:  # a report under an ended lease would be rejected, and end this group as well
            self._is_unsure = False  # the first headers have come, so the master knows of the group
            self._link.drop_ended_leases()
        return bool(plan.all_parts)

    def batch(self, part: BatchRef) -> Batch:
        assert self._at_hand is not None
        assert self._at_hand[0] == part.name
        return self._at_hand[1]

    def next_part(self) -> tuple[MinibatchName, Batch] | None:
        batch = self._batch_prefetcher.next_batch()
        held = None if batch is None else self._leases.get(batch.lease)
        if batch is None or held is None:
            return None
        return MinibatchName(held.lease.epoch, held.lease.task, batch.n), batch

    def leave_out(self, flaws: Mapping[int, str]) -> bool:
        held, n = self._held_at_hand()
        if held is None:
            return False
        what = next(iter(flaws.values()))
        _log.warning("Minibatch %d of %s is left out of the model: %s", n, held.task_name, what)
        if self._link.report_not_finite(held.id, what, [n]).accepted:
            return True
        self._leases.revoke((held.id,))
        self._at_hand = None
        return False

    def settle(self, plan: StepPlan, flawed: Sequence[BatchRef], flaws: Mapping[int, str]) -> bool:
        if self._skips_not_finite:
            return True
        held, n = self._held_at_hand()
        if flaws and held is not None:
            self._failures.not_finite(held, NotFinite(n, next(iter(flaws.values()))))
            self._at_hand = None
        return False

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        return plan.own

    def fail(self, error: Exception) -> None:
        held, _ = self._held_at_hand()
        self._at_hand = None
        if held is None:  # the step has only minibatches of other members: they are trained again
            _log.error("%s", traceback.format_exc())
        else:
            self._forget(held.id)
            self._failures.user_code_failed(held, error)

    def applied(self, plan: StepPlan, loss: float) -> None:
        self._loss = loss if plan.num_records else self._loss
        if self._at_hand is None:
            return
        name, batch = self._at_hand
        if name not in self._session.ledger.applied:
            return
        if any(part.name == name for part in plan.own):
            self._names[name] = batch.lease
            self._at_hand = None
        else:
            self._pass(batch)

    def confirmed(self, names: Iterable[MinibatchName]) -> None:
        for name in names:
            lease = self._names.pop(name, None)
            if lease is not None:
                self._reporter.committed(lease, name.n, self._loss)
        while self._known:
            self._reporter.committed(*self._known.popleft(), None)
        for lease, end in list(self._ends.items()):
            held = self._leases.get(lease)
            if held is None:
                del self._ends[lease]
            elif len(held.committed) >= end.n:
                del self._ends[lease]
                self._reporter.finished(lease, end.n, end.surplus)

    def _begin_again(self) -> None:
        _log.info("The model is an older one: prefetched tasks are read again")
        self._at_hand = None
        self._ends.clear()
        self._known.clear()
        self._names.clear()
        self._batch_prefetcher.restart(lambda: [held for held in self._leases.held() if held.lease.type == pb.TRAINING])

    def _sort(self, item: Item) -> None:
        match item:
            case Batch(end=True):
                self._ends[item.lease] = item
            case Batch():
                held = self._leases.get(item.lease)
                if held is None:
                    return  # the lease is lost
                name = MinibatchName(held.lease.epoch, held.lease.task, item.n)
                if name in self._session.ledger.applied:
                    self._pass(item)
                else:
                    self._at_hand = name, item
            case Other(held=other):
                self._other = other
            case Failed(error=error):
                self._forget(error.lease)
                self._failures.feed_failed(error, self._tasks)
                self._batch_prefetcher.resume()
            case Unreadable(held=unread, error=cause):
                self._forget(unread.id)
                self._failures.unreadable(unread, cause)
            case Over():
                self.is_over = True
            case Broke(error=end):
                raise end

    def _pass(self, batch: Batch) -> None:
        """Queue a minibatch that another member has brought into the model, to be reported once all members hold it."""
        self._at_hand = None
        self._known.append((batch.lease, batch.n))

    def _forget(self, lease: int) -> None:
        """Forget a failed task: the next holder of its lease reports which of its minibatches the model holds."""
        self._ends.pop(lease, None)
        self._names = {name: held for name, held in self._names.items() if held != lease}

    def _held_at_hand(self) -> tuple[HeldLease | None, int]:
        if self._at_hand is None:
            return None, 0
        name, batch = self._at_hand
        return self._leases.get(batch.lease), name.n
