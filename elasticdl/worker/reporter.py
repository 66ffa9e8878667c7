"""Reports to the master on tasks.

Progress (minibatches that are in the model, ends of tasks) is reported in the background and in order; the end of a
task comes after all its minibatches.  Reports that the master rejects, because the lease is lost, are dropped.

A failure is reported after the progress before it.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence

from elasticdl.cluster.cluster import frames_of_user
from elasticdl.frameworks.framework import NO_SURPLUS, FeedError, LabelError, Surplus
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.tasks import HeldLease, NotFinite, ProgressLink, TaskProgress, TaskStream
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
NO_MINIBATCH = -1  # for a task that failed outside of a minibatch
_MOST_AT_ONCE = 64  # few enough for the master to answer within a call's time-out


class Reporter:
    """A thread with a queue; progress is collected for a moment before it is reported, the end of a task is not.

    One message reports the whole queue, so a slow master gets fewer and larger messages.
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
        """Queue the report that a minibatch is in the model."""
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
        """Queue the report that all minibatches of a task are in the model."""
        with self._changed:
            self._queue.append(TaskProgress(lease, [], num_minibatches=num_minibatches, surplus=surplus))
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all reports are sent, or until the time-out."""
        with self._changed:
            self._num_draining += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)
            self._num_draining -= 1

    def _run(self) -> None:
        reported_at = float("-inf")
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue))
                self._changed.wait_for(self._is_urgent, max(0.0, reported_at + self._link.report_s - time.monotonic()))
                progress = [self._queue.popleft() for _ in range(min(len(self._queue), _MOST_AT_ONCE))]
                self._busy = True
            reported_at = time.monotonic()
            self._report(progress)

    def _is_urgent(self) -> bool:
        """Return whether to report at once: `drain` waits, or the queue is more than progress of a single task."""
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


class TaskFailures:
    """Reports tasks as failed, and drops their leases.

    Attributes:
        link: The connection to the master.
        reporter: Reports progress.
        clock: The activities of the worker.
    """

    def __init__(self, link: MasterLink, reporter: Reporter) -> None:
        self.link = link
        self.reporter = reporter
        self.clock = link.clock

    @classmethod
    def of(cls, spec: JobSpec, link: MasterLink) -> TaskFailures:
        """Return the failures of a job, with a new reporter."""
        return cls(link, Reporter(link, spec.log_loss_steps))

    def failed(self, held: HeldLease, error: Exception) -> None:
        """Report the exception being handled, which the work on a task raised."""
        if isinstance(error, NotFinite):
            self.not_finite(held, error)
        elif isinstance(error, DataError):
            if error is held.unreadable:  # it was logged where the records were read
                self.unreadable(held, error)
            else:
                self._data_failed(held, error)
        else:
            self.user_code_failed(held, error)

    def unreadable(self, held: HeldLease, error: DataError) -> None:
        """Report that the records of a task cannot be read."""
        self.reporter.drain()
        self.link.fail(held.id, NO_MINIBATCH, str(error), "", [])
        self.link.leases.remove(held.id)

    def _data_failed(self, held: HeldLease, error: DataError) -> None:
        """Report that records failed while in use, or that the output of a task cannot be written."""
        details = _users_traceback()
        _log.error("%s", details or error)
        self.reporter.drain()
        self.link.fail(held.id, _minibatch_of(held), str(error), details, [])
        self.link.leases.remove(held.id)

    def feed_failed(self, error: FeedError, tasks: TaskStream) -> None:
        """Report an error of the user's `feed`, unless the lease of its task is lost."""
        _log.error("%s", error.details or error)
        self.reporter.drain()
        held = self.link.leases.get(error.lease)
        if held is not None:
            self.link.fail(held.id, error.n, str(error), error.details, list(error.bad_records))
            self.link.leases.remove(held.id)
            tasks.close(held)

    def not_finite(self, held: HeldLease, error: NotFinite) -> None:
        """Report a minibatch that is not finite, which ends the job."""
        _log.error("Minibatch %d of %s: %s", error.minibatch, held.task_name, error)
        self.reporter.drain()
        what, arrow, advice = str(error).partition("\n  → ")
        what = f"{what}, in minibatch {error.minibatch}{arrow}{advice}"
        self.link.report_not_finite(held.id, what)
        self.link.leases.remove(held.id)

    def user_code_failed(self, held: HeldLease, error: Exception) -> None:
        """Report the exception being handled, which the user's model, loss or metrics raised."""
        _log.error("%s", traceback.format_exc())
        self.reporter.drain()
        self.link.fail(held.id, _minibatch_of(held), *describe_error(error, held), [])
        self.link.leases.remove(held.id)


def _minibatch_of(held: HeldLease) -> int:
    """Return the minibatch being computed; `NO_MINIBATCH` for a task without records, such as an export."""
    return held.minibatch if held.record_numbers else NO_MINIBATCH


def _users_traceback() -> str:
    """Return the traceback of the exception being handled if it passes through user code, else ""."""
    whole = traceback.format_exc()
    return whole if frames_of_user(whole) != whole else ""


def describe_error(error: Exception, held: HeldLease | None) -> tuple[str, str]:
    """Return the message of the exception being handled, and its traceback where that helps."""
    if not isinstance(error, LabelError):
        return f"{type(error).__name__}: {error}", traceback.format_exc()
    if held is None or error.sample is None or error.sample >= len(held.record_numbers):
        return str(error), ""
    return f"Record {held.record_numbers[error.sample]} of {held.lease.shard.name}: {error}", ""
