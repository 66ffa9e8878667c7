"""From a minibatch and values to the push that brings it into the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticdl.frameworks.framework import Batch, Floats, Framework, Parameters, Step
from elasticdl.ps.client import Push
from elasticdl.worker.activity import Activity, ActivityClock
from elasticdl.worker.input.batches import LeaseLost, NotFinite
from elasticdl.worker.leases import HeldLease
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.seeds import derive_seed

_log = logging.getLogger("elasticdl.worker")


@dataclass(frozen=True, slots=True)
class Computed:
    """A minibatch whose push is still to come.

    Attributes:
        loss: None: the minibatch is left out of the model, its push is empty.
    """

    batch: Batch
    loss: float | None
    push: Push


class Gradients:
    """Computes minibatches; what is not finite never leaves the worker."""

    def __init__(
        self, framework: Framework, link: MasterLink, seed: int, skips_not_finite: bool, clock: ActivityClock
    ) -> None:
        """
        Args:
            seed: the job's.
            skips_not_finite: a minibatch with a NaN or an infinity is left out of the model, otherwise it ends the job.
        """
        self._framework = framework
        self._link = link
        self._seed = seed
        self._skips_not_finite = skips_not_finite
        self._clock = clock
        self._compiled = False

    def compute(
        self,
        held: HeldLease,
        batch: Batch,
        parameters: Parameters,
        rows: Mapping[str, Floats],
        versions: Sequence[int],
        activity: Activity = Activity.COMPUTE,
    ) -> Computed:
        """
        Args:
            versions: of the values, by PS.
            activity: what the time counts as.

        Raises:
            NotFinite: the loss or a gradient is not finite, which ends the job.
            LeaseLost: the master refuses to hear that a minibatch is left out.
        """
        lease = held.lease
        held.minibatch = batch.n
        seed = derive_seed(self._seed, lease.epoch, lease.task, batch.n)
        with self._clock.during(activity if self._compiled else Activity.COMPILE):
            step = self._framework.gradients(batch, parameters, rows, seed)
        self._compiled = True
        what = _not_finite(step)
        if not what:
            return Computed(batch, step.loss, self._push(held, batch, step, versions))
        if not self._skips_not_finite:
            raise NotFinite(batch.n, what)
        _log.warning("Minibatch %d of %s is left out of the model: %s", batch.n, held.task_name, what)
        # Before the push: the model must not hold a name whose records are not in it, unknown to all.
        if not self._link.report_progress(held.id, [], None, skipped=[batch.n], not_finite=what).accepted:
            raise LeaseLost
        return Computed(batch, None, Push(held.id, lease.epoch, lease.task, batch.n, None, None, {}, versions))

    def _push(self, held: HeldLease, batch: Batch, step: Step, versions: Sequence[int]) -> Push:
        lease = held.lease
        return Push(
            lease=held.id,
            epoch=lease.epoch,
            task=lease.task,
            minibatch=batch.n,
            gradient=step.gradient,
            change=step.change,
            row_gradients={name: (batch.ids[name], rows) for name, rows in step.row_gradients.items()},
            pulled_versions=versions,
            learning_rate=self._framework.learning_rate(lease.epoch, max(versions, default=0)),
            num_records=batch.size,
        )


def _not_finite(step: Step) -> str:
    """Describe the values of a step that are not finite; empty if all are."""
    if math.isfinite(step.loss):
        return step.not_finite
    return step.not_finite.replace("the loss", "The loss", 1) or f"The loss is {step.loss}"
