"""Reports of progress to the master, in the background and in order: minibatches that are in the model, ends of tasks.

A task's end is reported after all its minibatches.  Reports that the master refuses (a lease that is no longer ours)
are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from elasticdl.frameworks.framework import NO_SURPLUS, Surplus
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.tasks import ProgressLink, TaskProgress

_log = logging.getLogger("elasticdl.worker")
_MOST_AT_ONCE = 64  # the master answers them well within a call's time-out


class Reporter:
    """One thread and a queue; the minibatches of a moment are reported together, the end of a task at once.

    All that is queued goes in one message, so a master that answers slowly gets fewer and larger ones.
    """

    def __init__(self, link: ProgressLink, log_loss_steps: int) -> None:
        self._link = link
        self._log_loss_steps = max(1, log_loss_steps)
        self._logged_at = -1
        self._queue: deque[TaskProgress] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._num_draining = 0
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def committed(self, lease: int, minibatch: int, loss: float | None) -> None:
        """A minibatch is in the model."""
        self._link.leases.commit(lease, (minibatch,))
        with self._changed:
            newest = self._queue[-1] if self._queue else None
            if newest is not None and newest.lease == lease and newest.num_minibatches is None:
                newest.committed.append(minibatch)
                newest.loss = loss if loss is not None else newest.loss
            else:
                self._queue.append(TaskProgress(lease, [minibatch], loss))
                self._changed.notify_all()

    def finished(self, lease: int, num_minibatches: int, surplus: Surplus = NO_SURPLUS) -> None:
        """All minibatches of the task are in the model."""
        with self._changed:
            self._queue.append(TaskProgress(lease, [], num_minibatches=num_minibatches, surplus=surplus))
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all reports are sent, or the time is over."""
        with self._changed:
            self._num_draining += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)
            self._num_draining -= 1

    def _run(self) -> None:
        told_at = float("-inf")
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue))
                self._changed.wait_for(self._is_urgent, max(0.0, told_at + self._link.report_s - time.monotonic()))
                progress = [self._queue.popleft() for _ in range(min(len(self._queue), _MOST_AT_ONCE))]
                self._busy = True
            told_at = time.monotonic()
            self._report(progress)

    def _is_urgent(self) -> bool:
        """Whether a call waits for the report, or it is not progress of one task alone."""
        return self._num_draining > 0 or len(self._queue) > 1 or self._queue[0].num_minibatches is not None

    def _report(self, progress: Sequence[TaskProgress]) -> None:
        while progress:
            acks = self._link.report(progress)
            for one, ack in zip(progress, acks, strict=False):
                self._on_ack(one, ack)
            progress = progress[len(acks) :]

    def _on_ack(self, progress: TaskProgress, ack: pb.Ack) -> None:
        if progress.num_minibatches is not None:
            self._link.leases.remove(progress.lease)
        if not ack.accepted:
            _log.info("The master refuses a report of lease %d: %s", progress.lease, ack.reason)
            self._link.leases.revoke((progress.lease,))
        elif progress.loss is not None:
            self._log_loss(progress.loss, ack.model_version)

    def _log_loss(self, loss: float, steps: int) -> None:
        if steps // self._log_loss_steps > self._logged_at:
            self._logged_at = steps // self._log_loss_steps
            _log.info("Loss = %.6g, steps = %d", loss, steps)
