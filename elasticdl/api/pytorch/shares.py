"""Choose the minibatches that this member contributes to a step, and report them.

`LeasedShares`: one minibatch of the member's own leases per step.  `GlobalShares` (fixed_global_batch): step s always
consists of the minibatches sG … (s+1)G-1 in the epoch's order; rank 0 holds the leases and broadcasts them, each member
takes its contiguous piece, and rank 0 reports for all.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from elasticdl.api.data import DataShardService, Minibatch, Name
from elasticdl.api.pytorch.alone import SharesGroup
from elasticdl.api.pytorch.pipeline import LoaderPipeline
from elasticdl.ps.applied import MinibatchName
from elasticdl.worker.allreduce.schedule import NO_EPOCH, StepSchedule
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepParts, StepPlan

_AHEAD = 64  # minimum number of minibatches to draw ahead


class MinibatchPrefetcher:
    """Draws minibatches in a background thread, so that the training loop does not wait for leases."""

    def __init__(self, data: DataShardService, at_most: int) -> None:
        self._data = data
        self._at_most = max(_AHEAD, at_most)
        self._changed = threading.Condition()
        self._drawn: deque[Minibatch] = deque()
        self._error: Exception | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="drawer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether there are no more minibatches."""
        return self._has_ended and not self._drawn

    def take(self, timeout_s: float, num_waiting: int) -> list[Minibatch]:
        """Return all minibatches drawn so far; wait until there is at least one, or the timeout is over.

        Args:
            timeout_s: Maximum time to wait.
            num_waiting: Minibatches taken before and not trained yet; if there are too many, none is returned.

        Raises:
            ElasticDLError: The reason why no more minibatches can be drawn.
        """
        if num_waiting >= self._at_most:
            return []
        with self._changed:
            self._changed.wait_for(lambda: self._drawn or self._has_ended, timeout_s)
            taken = list(self._drawn)
            self._drawn.clear()
            self._changed.notify_all()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return taken

    def _run(self) -> None:
        try:
            for minibatch in self._data.minibatches():
                with self._changed:
                    self._changed.wait_for(lambda: len(self._drawn) < self._at_most)
                    self._drawn.append(minibatch)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  raised again by `take`
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


class ScriptBatchSource(StepParts, Protocol):
    """The minibatches of a script, and the reports on them.

    Attributes:
        num_per_step: Minibatches per step, over all members; 0: one per member.
    """

    num_per_step: int

    def minibatch(self, part: BatchRef) -> Minibatch: ...

    def applied(self, plan: StepPlan) -> None:
        """Handle that a step is in the model of this process."""
        ...

    def confirmed(self, names: Iterable[MinibatchName], loss: float | None) -> None:
        """Report this member's minibatches, which are now in the model of all members."""
        ...


class LeasedShares:
    """One minibatch of this member's own leases per step."""

    def __init__(
        self, data: DataShardService, drawer: MinibatchPrefetcher, pipeline: LoaderPipeline, group: SharesGroup
    ) -> None:
        self.wish = StepFlag.NOTHING
        self.num_per_step = 0
        self._data = data
        self._drawer = drawer
        self._pipeline = pipeline
        self._group = group
        self._queue: deque[Minibatch] = deque()
        self._begun: dict[Name, Minibatch] = {}  # applied minibatches of leases still held
        self._known: deque[Minibatch] = deque()  # in the model already, by another member

    @property
    def is_over(self) -> bool:
        return self._drawer.is_over and not self._queue

    def entered(self) -> None:
        applied = self._group.ledger.applied
        older = [m for m in self._begun.values() if MinibatchName(*m.name) not in applied and self._data.undone(m)]
        known = [m for m in self._known if MinibatchName(*m.name) in applied]
        older += [m for m in self._known if m not in known]
        self._known = deque(known)
        for minibatch in older:
            self._begun.pop(minibatch.name, None)
        self._queue.extendleft(reversed(older))

    def offer(self, patience_s: float) -> list[BatchRef]:
        self._draw(0.0)
        if not self._queue:
            self._draw(patience_s)
        if not self._queue:
            return []
        first = self._queue[0]
        return [BatchRef(MinibatchName(*first.name), len(first))]

    def agree(self, plan: StepPlan) -> bool:
        return bool(plan.all_parts)

    def minibatch(self, part: BatchRef) -> Minibatch:
        assert MinibatchName(*self._queue[0].name) == part.name
        return self._queue[0]

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        return plan.own

    def applied(self, plan: StepPlan) -> None:
        for part in plan.own:
            minibatch = self._queue.popleft()
            assert MinibatchName(*minibatch.name) == part.name
            self._pipeline.forget(minibatch.name)
            self._begun[minibatch.name] = minibatch

    def confirmed(self, names: Iterable[MinibatchName], loss: float | None) -> None:
        known, self._known = list(self._known), deque()
        for minibatch in known:
            self._data.done(minibatch)
        for name in names:
            minibatch = self._begun.get((name.epoch, name.task, name.n))  # type: ignore[assignment]
            if minibatch is not None:
                self._data.done(minibatch, loss)
        self._begun = {name: minibatch for name, minibatch in self._begun.items() if self._data.holds(minibatch)}

    def _draw(self, timeout_s: float) -> None:
        for minibatch in self._drawer.take(timeout_s, len(self._queue)):
            self._queue.append(minibatch)
            self._pipeline.ask(minibatch)
        while self._queue:
            first = self._queue[0]
            is_known = MinibatchName(*first.name) in self._group.ledger.applied
            if self._data.holds(first) and not is_known:
                return
            self._queue.popleft()
            self._pipeline.forget(first.name)
            if is_known:
                self._known.append(first)


class GlobalShares:
    """This member's piece of a step with a fixed number of minibatches."""

    def __init__(
        self,
        data: DataShardService,
        drawer: MinibatchPrefetcher,
        pipeline: LoaderPipeline,
        group: SharesGroup,
        num_per_step: int,
    ) -> None:
        """
        Args:
            num_per_step: Minibatches per step, over the whole group.
        """
        self.wish = StepFlag.NOTHING
        self._data = data
        self._drawer = drawer
        self._pipeline = pipeline
        self._group = group
        self.num_per_step = num_per_step
        self._schedule: StepSchedule[Minibatch] = StepSchedule(
            num_per_step, data.get_minibatch_count_per_epoch(), lambda minibatch: MinibatchName(*minibatch.name)
        )
        self._held: dict[Name, Minibatch] = {}  # drawn here
        self._unshared: list[Minibatch] = []
        self._closes = NO_EPOCH  # epoch to announce as complete: it has no more minibatches
        self._newest = 0  # the newest lease with all minibatches drawn

    @property
    def is_over(self) -> bool:
        return self._drawer.is_over and not self._schedule and not self._unshared

    def entered(self) -> None:
        """Rebuild the queue from the minibatches of rank 0; called after a group was entered."""
        group = self._group
        group.most_parts = -(-self.num_per_step // group.size)
        for minibatch in self._schedule:
            self._pipeline.forget(minibatch.name)
        self._schedule.clear()
        self._closes = NO_EPOCH
        self._held = {name: m for name, m in self._held.items() if self._data.holds(m)}
        for name, minibatch in self._held.items():
            if MinibatchName(*name) in group.ledger.applied:
                self._data.done(minibatch)
            else:
                self._data.undone(minibatch)
        self._unshared = list(self._held.values()) if group.rank == 0 else []

    def offer(self, patience_s: float) -> list[BatchRef]:
        self._draw(0.0)
        if not self._schedule.next() and not self._unshared:  # else do not let the others wait
            self._draw(patience_s)
        self.wish = StepFlag.SHARING if self._has_news() else StepFlag.NOTHING
        return [BatchRef(MinibatchName(*m.name), len(m)) for m in self._piece(self._schedule.next())]

    def agree(self, plan: StepPlan) -> bool:
        step = self._schedule.next()
        if plan.wishes & StepFlag.SHARING:
            self._unpack(self._group.share(self._packed() if self._group.rank == 0 else None))
        return bool(step) and {part.name for part in plan.all_parts} == {MinibatchName(*m.name) for m in step}

    def minibatch(self, part: BatchRef) -> Minibatch:
        return next(m for m in self._schedule if MinibatchName(*m.name) == part.name)

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        return plan.all_parts if self._group.rank == 0 else ()

    def applied(self, plan: StepPlan) -> None:
        for minibatch in self._schedule.take_applied(self._group.ledger.applied):
            self._pipeline.forget(minibatch.name)
        self._ask()

    def confirmed(self, names: Iterable[MinibatchName], loss: float | None) -> None:
        for name in names:
            minibatch = self._held.get((name.epoch, name.task, name.n))
            if minibatch is not None:
                self._data.done(minibatch, loss)
        self._held = {name: minibatch for name, minibatch in self._held.items() if self._data.holds(minibatch)}

    def _draw(self, timeout_s: float) -> None:
        for minibatch in self._drawer.take(timeout_s, len(self._schedule) + len(self._unshared)):
            self._held[minibatch.name] = minibatch
            if minibatch.ends_lease:
                self._newest = max(self._newest, minibatch.lease)
            name = MinibatchName(*minibatch.name)
            if self._group.is_proven(name):
                self._data.done(minibatch)  # reports under an earlier lease were refused
            elif self._group.rank == 0 and name not in self._group.ledger.applied:
                self._unshared.append(minibatch)

    def _has_news(self) -> bool:
        """Return whether this member is rank 0 and has something to broadcast."""
        if self._group.rank:
            return False
        if not self._unshared:
            self._closes = self._schedule.epoch_to_close(self._group.ledger.applied, self._has_rest_of)
        return bool(self._unshared) or self._closes != NO_EPOCH

    def _has_rest_of(self, epoch: int) -> bool:
        return self._drawer.is_over or self._data.has_rest_of(epoch, self._newest)

    def _packed(self) -> bytes:
        new, self._unshared = self._unshared, []
        rows = [[m.lease, m.epoch, m.task, m.n, m.shard, m.indices, m.identity] for m in new]
        return json.dumps({"closes": self._closes, "minibatches": rows}).encode()

    def _unpack(self, data: bytes) -> None:
        news: dict[str, Any] = json.loads(data)
        self._schedule.close(news["closes"])
        minibatches = [
            self._held.get((epoch, task, n)) or Minibatch(lease, epoch, task, n, shard, indices, identity=identity)
            for lease, epoch, task, n, shard, indices, identity in news["minibatches"]
        ]
        self._schedule.add(minibatches, self._group.ledger.applied)
        self._ask()

    def _ask(self) -> None:
        """Send this member's minibatches of the queued steps to its pipeline."""
        for step in self._schedule.steps():
            for minibatch in self._piece(step):
                self._pipeline.ask(self._with_records(minibatch))

    def _with_records(self, minibatch: Minibatch) -> Minibatch:
        """Rank 0 broadcasts descriptions only; load the records locally."""
        if minibatch.records or minibatch.name in self._held:
            return minibatch
        records = self._data.records_of(minibatch.shard, minibatch.indices, minibatch.identity)
        return dataclasses.replace(minibatch, records=records)

    def _piece(self, step: Sequence[Minibatch]) -> Sequence[Minibatch]:
        """Return this member's piece of a step."""
        return self._schedule.piece(step, self._group.rank, self._group.size)
