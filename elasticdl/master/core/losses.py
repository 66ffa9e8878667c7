"""Losses: those that workers report; one that is not finite ends the job, or its minibatch is left out."""

from __future__ import annotations

import math

from elasticdl.master.core.events import ProgressReported
from elasticdl.master.core.state import JobState
from elasticdl.master.core.tasks import Tasks
from elasticdl.master.core.values import Lease, Level
from elasticdl_client.choices import NanPolicy
from elasticdl_client.job_events import EventKind

_ADVICE = "\n  → "  # stands between what is wrong and what to do about it
MAX_SKIPS_TOLD = 20  # one by one; after that one of this number


class Losses:
    """The losses of the job, and the response to NaN.

    Attributes:
        newest: the newest that was finite; None: there was none yet.
        learning_rate: the newest that was reported.
    """

    def __init__(self, state: JobState) -> None:
        self._settings, self._ending, self._out = state.settings, state.ending, state.out
        self._num_skips = 0  # reported in this life
        self.newest: float | None = None
        self.learning_rate: float | None = None

    def reported(self, event: ProgressReported, lease: Lease, is_new: bool, tasks: Tasks) -> None:
        """Progress was reported, and taken in by the tasks; `is_new`: it names skips that were not known before."""
        is_finite = event.loss is None or math.isfinite(event.loss)
        self.learning_rate = event.learning_rate or self.learning_rate
        if event.loss is not None and is_finite:
            self.newest = event.loss
        if event.not_finite or not is_finite:
            self._not_finite(event, lease, is_new, tasks)

    def _not_finite(self, event: ProgressReported, lease: Lease, is_new: bool, tasks: Tasks) -> None:
        """Ends the job or, if the minibatch is left out, says so: of many only some, with the number so far."""
        minibatch = max(event.skipped or event.committed, default=None)
        is_skipped = minibatch is not None and tasks.epochs[lease.epoch].is_skipped(lease.task, minibatch)
        where = f"epoch {lease.epoch + 1}, task {lease.task}"
        where += "" if minibatch is None else f", minibatch {minibatch}"
        where += f", records {lease.shard.name}:{lease.shard.start}-{lease.shard.end - 1}"
        said, _, own_advice = event.not_finite.partition(_ADVICE)
        what = f"{said or f'The loss is {event.loss}'} ({where})"
        if self._settings.nan_policy is NanPolicy.FAIL or is_new:
            cause = self._out.events.add(
                EventKind.LOSS_NOT_FINITE,
                f"task-{lease.task}",
                said or f"The loss is {event.loss}",
                worker=event.worker_id,
                epoch=lease.epoch + 1,
                minibatch=-1 if minibatch is None else minibatch,
                records=f"{lease.shard.name}:{lease.shard.start}-{lease.shard.end}",
                policy=self._settings.nan_policy.value,
            )
        if self._settings.nan_policy is NanPolicy.FAIL:
            advice = (
                "Look at these records first: a missing cell of a table is NaN, to be filled in the data or in feed. "
            )
            advice += "If they are finite, lower the learning rate.  --nan_policy=skip leaves such minibatches out."
            self._ending.fail(f"{what}{_ADVICE}{own_advice or advice}", cause=cause)
        elif is_new:
            self._num_skips += 1
            if self._num_skips <= MAX_SKIPS_TOLD or self._num_skips % MAX_SKIPS_TOLD == 0:
                self._out.log(f"{what}; it is left out of the model, number {self._num_skips}", Level.WARNING)
        elif not is_skipped:
            self._out.log(what, Level.WARNING)
