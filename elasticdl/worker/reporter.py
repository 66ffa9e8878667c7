"""Tells the master of progress in the background, in order, without holding up the training thread.

A task's end is reported after all its minibatches.  Reports that the master refuses (a lease that is no longer ours)
are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from elasticdl.frameworks.framework import NO_SURPLUS, Surplus
from elasticdl.worker.leases import PacedLink

_log = logging.getLogger("elasticdl.worker")


@dataclass(slots=True)
class _News:
    lease: int
    committed: list[int]
    loss: float | None = None
    num_minibatches: int | None = None  # not None: the task is done
    surplus: Surplus = NO_SURPLUS


class Reporter:
    """One thread and a queue; the minibatches of a moment are reported together, the end of a task at once."""

    def __init__(self, link: PacedLink, log_loss_steps: int) -> None:
        self._link = link
        self._log_loss_steps = max(1, log_loss_steps)
        self._logged_at = -1
        self._news: deque[_News] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._num_draining = 0
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def committed(self, lease: int, minibatch: int, loss: float | None) -> None:
        """A minibatch is in the model."""
        self._link.leases.commit(lease, (minibatch,))
        with self._changed:
            newest = self._news[-1] if self._news else None
            if newest is not None and newest.lease == lease and newest.num_minibatches is None:
                newest.committed.append(minibatch)
                newest.loss = loss if loss is not None else newest.loss
            else:
                self._news.append(_News(lease, [minibatch], loss))
                self._changed.notify_all()

    def finished(self, lease: int, num_minibatches: int, surplus: Surplus = NO_SURPLUS) -> None:
        """All minibatches of the task are in the model."""
        with self._changed:
            self._news.append(_News(lease, [], num_minibatches=num_minibatches, surplus=surplus))
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all reports are sent, or the time is over."""
        with self._changed:
            self._num_draining += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._news and not self._busy, timeout_s)
            self._num_draining -= 1

    def _run(self) -> None:
        told_at = float("-inf")
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._news))
                self._changed.wait_for(self._is_urgent, max(0.0, told_at + self._link.report_s - time.monotonic()))
                news = self._news.popleft()
                self._busy = True
            told_at = time.monotonic()
            self._tell(news)

    def _is_urgent(self) -> bool:
        """Whether a call waits for the report, or it is not progress of one task alone."""
        return self._num_draining > 0 or len(self._news) > 1 or self._news[0].num_minibatches is not None

    def _tell(self, news: _News) -> None:
        if news.num_minibatches is not None:
            ack = self._link.finish(news.lease, news.num_minibatches, news.surplus)
            self._link.leases.remove(news.lease)
        else:
            ack = self._link.report_progress(news.lease, news.committed, news.loss)
        if not ack.accepted:
            _log.info("The master refuses a report of lease %d: %s", news.lease, ack.reason)
            self._link.leases.revoke((news.lease,))
        elif news.loss is not None:
            self._log_loss(news.loss, ack.model_version)

    def _log_loss(self, loss: float, steps: int) -> None:
        if steps // self._log_loss_steps > self._logged_at:
            self._logged_at = steps // self._log_loss_steps
            _log.info("Loss = %.6g, steps = %d", loss, steps)
