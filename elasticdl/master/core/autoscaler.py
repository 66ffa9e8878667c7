"""Autoscaler: adjusts the number of a job's workers by the gain, within the range of the flags or of the user.

It gives observations of the job to the `ScalingPolicy` and carries out its decisions.  A range that the user sets while
the job runs replaces that of the flags, over all generations of the master; a single number ends autoscaling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticdl.master.core.accounting import Accounting
from elasticdl.master.core.events import ScaleRequested
from elasticdl.master.core.fleet.fleet import Fleet
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.marginal_gain import MINIBATCHES, Decision, Observation, RateCurve, ScalingPolicy, Verdict
from elasticdl.master.core.state import JobState
from elasticdl_client.job_events import Detail
from elasticdl_client.job_status import ScalingStatus
from elasticdl_client.worker_range import WorkerRange

_OBSERVATIONS = 3  # per sample at most: each is a pass over all workers
_PAUSE_S = 0.1  # a longer pause of the master spoils a sample


class Autoscaler:
    """Adjusts a job's number of workers."""

    def __init__(self, state: JobState, fleet: Fleet, work: Work, accounting: Accounting) -> None:
        self._settings = settings = state.settings
        self._workers, self._ending, self._out = state.workers, state.ending, state.out
        self._fleet = fleet
        self._work = work
        self._accounting = accounting
        self._of_flags = WorkerRange(settings.num_workers, max(settings.num_workers, settings.max_workers))
        self._of_user: WorkerRange | None = None
        self._curve = RateCurve()
        self._decision: Decision | None = None
        self._observed_at = 0.0
        self._away = 0.0  # seconds by which the core's clock is behind the wall clock

    @property
    def _policy(self) -> ScalingPolicy:
        """The policy for the minibatches of the plan in force, which may be a script's own."""
        settings = self._work.tasks.settings
        return ScalingPolicy(settings.min_gain, settings.scaling_window, MINIBATCHES * settings.minibatch_size)

    @property
    def bounds(self) -> WorkerRange:
        """Bounds of the number of workers."""
        return self._of_user or self._of_flags

    def handle(self, event: ScaleRequested, clock: float) -> None:
        """Set the number of workers, or its range; every generation of the master repeats the event."""
        if self._ending.is_decided:
            return
        before, after = self.bounds, WorkerRange(event.num_workers, max(event.num_workers, event.max_workers))
        if after != before:
            self._decision = self._curve.settled = None
            if not after.is_fixed:
                self._out.log(f"The number of workers follows the gain, between {after.least} and {after.most}")
            elif not before.is_fixed:
                self._out.log("The user has fixed the number of workers: it does not follow the gain any more")
        self._of_user = after
        self._fleet.scale(after.nearest(self._fleet.pods.num_training), "user", "", clock)

    def tick(self, clock: float, unix_now: float, is_open: bool, seconds_left: float | None) -> None:
        """Observe the job, and scale it as the policy decides.

        Args:
            clock: Time of the core's clock.
            unix_now: End of the accounted time, in seconds since the Unix epoch.
            is_open: Whether tasks are handed out.
            seconds_left: See `Observation`.
        """
        if self.bounds.is_fixed or self._ending.is_decided:
            return
        nearest = self.bounds.nearest(self._fleet.pods.num_training)
        self._fleet.scale(nearest, "user", f"the range is {self.bounds} now", clock)  # other flags after a resume
        away, self._away = self._away, unix_now - clock
        if not is_open or self._away > away + _PAUSE_S:  # after a pause the reports of workers come in one burst
            self._curve.interrupt()
            return
        if clock < self._observed_at + self._policy.sample_s / _OBSERVATIONS:
            return
        self._observed_at = clock
        num_working = self._num_working()
        records, num_wanted = self._work.tasks.records_done, self._fleet.pods.num_training
        num_processes = self._settings.processes_per_worker
        seconds = {state: one / num_processes for state, one in self._accounting.worker_seconds(unix_now).items()}
        now = Observation(clock, records, num_working, num_wanted, seconds, seconds_left)
        if self._curve.observe(now, self._policy):
            self._follow(self._policy.decide(self._curve, now, self.bounds), clock)

    def _num_working(self) -> int:
        """Return the number of workers whose processes have all registered and are not stuck."""
        working = (one.id for one in self._workers.staying() if one.stuck_since is None)
        num_processes = Counter(map(self._settings.pod_of, working))
        return sum(number == self._settings.processes_per_worker for number in num_processes.values())

    def _follow(self, decision: Decision, clock: float) -> None:
        before = self._fleet.pods.num_training
        if decision.num_workers != before:
            self._curve.changed_at = clock
            details: dict[str, Detail] = {} if decision.gain is None else {"gain": round(decision.gain, 3)}
            if decision.bottleneck is not None:
                details["bottleneck"] = decision.bottleneck.value
            self._fleet.scale(decision.num_workers, "master", _why(decision), clock, details)
        if decision.gain is None and self._decision is not None:  # show the last known gain meanwhile
            decision = replace(decision, gain=self._decision.gain, bottleneck=self._decision.bottleneck)
        self._decision = decision

    # For the status and the journal ---------------------------------------------------------------------------------

    def status(self) -> ScalingStatus | None:
        """Return the state of the search; None while the number of workers is fixed."""
        if self.bounds.is_fixed:
            return None
        decision = self._decision or Decision(self._fleet.pods.num_training, Verdict.MEASURING)
        return ScalingStatus(
            workers=str(self.bounds),
            state=decision.verdict.value,
            gain=None if decision.gain is None else round(decision.gain, 3),
            bottleneck="" if decision.bottleneck is None else decision.bottleneck.value,
        )

    def snapshot(self, clock: float) -> dict[str, Any]:
        user = self._of_user
        return {
            "of_user": None if user is None else [user.least, user.most],
            "curve": None if self.bounds.is_fixed else self._curve.to_journal(clock),
        }

    def restore(self, saved: Mapping[str, Any], clock: float) -> None:
        """Restore an earlier generation's state."""
        self._of_user = None if saved["of_user"] is None else WorkerRange(*saved["of_user"])
        if saved["curve"] is not None:
            self._curve = RateCurve.from_journal(saved["curve"], clock)
            self._decision = self._curve.settled


def _why(decision: Decision) -> str:
    """Return the reason of a change, for the log."""
    if decision.gain is None:
        return "to measure what another worker adds"
    gain = f"{100 * max(0.0, decision.gain):.0f} % of a worker's rate"
    match decision.verdict:
        case Verdict.GROWING:
            return f"each of the last workers adds {gain}"
        case Verdict.SHRINKING if decision.bottleneck is not None:
            return f"each of the last workers adds {gain}, bottleneck: {decision.bottleneck}"
        case _:
            return f"between a number that gains enough and one at which each worker adds {gain}"
