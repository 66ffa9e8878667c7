"""Overview: a job's status and the points of its series, made from the core's parts; and the pace of its records."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, replace

from elasticdl.master.core.accounting import Accounting
from elasticdl.master.core.event_log import EventTotals
from elasticdl.master.core.fleet.fleet import Fleet
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.plan.epoch import coverage_of, records_by_fate
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.state import JobState
from elasticdl.master.core.workers import Workers
from elasticdl.protocol import Role
from elasticdl_client.job_series import SeriesPoint
from elasticdl_client.job_status import DeviceStatus, JobPhase, JobStatus, UncreatedPods

_ENDED = (JobPhase.SUCCEEDED, JobPhase.FAILED)
RATE_WINDOW = 30.0  # seconds over which the throughput is measured
MIN_WINDOW = 20.0  # least seconds over which the pace is measured, once so many have passed
MIN_MEASURED = 2.0  # seconds of work before there is any forecast
MIN_SETTLED, MAX_SETTLED = 3.0, 30.0  # seconds after which another number of workers counts as lasting
MAX_REASON = 500  # characters of an API server's reason: the size of the status is limited
MAX_SAMPLES = 512  # of a whole job; the longer the job, the longer their intervals


def with_progress(status: JobStatus, settings: JobSettings, work: Work, pace: Pace, all_have_left: bool) -> JobStatus:
    """Return the status with its records, tasks and epochs, done and remaining.

    Args:
        status: Status that has its phase already.
        settings: Settings of the job.
        work: The planned and finished tasks.
        pace: Pace of the records.
        all_have_left: The commands of all workers have ended: untrained records stay untrained.
    """
    tasks = work.tasks
    unsettled = tasks.unsettled()
    over = [epoch for epoch in unsettled if epoch.covered or all_have_left]
    running = [epoch for epoch in unsettled if not (epoch.covered or all_have_left)]
    newest = (coverage_of(epoch, not epoch.covered, settings.has_tensorflow_servers) for epoch in over)
    coverage = (*tasks.settled_coverage(), *newest)
    has_eta = status.phase not in _ENDED and tasks.planned_records > 0
    return replace(
        status,
        epoch=len(tasks.epochs) if settings.trains else 0,
        num_epochs=tasks.settings.num_epochs if settings.trains else 0,
        records_done=tasks.records_done,
        records=records_by_fate(coverage, running),
        records_processed=tasks.records_processed,
        records_skipped=tasks.skipped_records,
        records_total=tasks.planned_records,
        records_per_second=pace.records_per_second(),
        eta_seconds=pace.seconds_for(tasks.records_left_out) if has_eta else None,
        tasks_done=tasks.num_done,
        tasks_total=tasks.planned_tasks,
        coverage=coverage,
    )


def with_model(status: JobStatus, work: Work) -> JobStatus:
    """Return the status with the quality of the model."""
    return replace(
        status,
        model_version=work.tasks.model_version,
        loss=work.losses.newest,
        learning_rate=work.losses.learning_rate,
        metrics=dict(work.evaluations.results),
        metrics_step=work.evaluations.results_step,
    )


def with_processes(status: JobStatus, state: JobState, fleet: Fleet, groups: WorkerGroups) -> JobStatus:
    """Return the status with workers, parameter servers and groups."""
    settings, workers, loads = state.settings, state.workers, state.ps_metrics
    return replace(
        status,
        workers_alive=_num_workers(state),
        processes_per_worker=settings.processes_per_worker,
        devices=_devices(workers, settings),
        workers_wanted=len(fleet.pods.worker_slots),
        ps_alive=fleet.num_serving,
        not_created=() if state.ending.outcome is not None else _not_created(fleet),
        ps=loads.servers(),
        staleness=loads.staleness,
        gradients_refused=loads.refused,
        world=groups.members,
        num_worlds=groups.num_formed,
        engine=groups.engine,
        optimizer_shares=_optimizer_shares(workers, groups.members) if settings.shard_optimizer else (),
    )


def _not_created(fleet: Fleet) -> tuple[UncreatedPods, ...]:
    """Return the refused pods of each role, with the reason for the newest one."""
    found = dict[Role, UncreatedPods]()
    for name, (role, why) in fleet.pods.refusals().items():
        count = found[role].count + 1 if role in found else 1
        found[role] = UncreatedPods(role.value, count, name, " ".join(why.split())[:MAX_REASON])
    return tuple(found.values())


def _optimizer_shares(workers: Workers, members: Sequence[int]) -> tuple[float, ...]:
    known = (workers.get(worker_id) for worker_id in members)
    return tuple(0.0 if one is None else round(one.optimizer_share, 4) for one in known)


def _devices(workers: Workers, settings: JobSettings) -> tuple[DeviceStatus, ...]:
    found = (
        DeviceStatus(settings.pod_of(one.id), **asdict(one.device), process=settings.number_in_pod(one.id))
        for one in workers.all()
        if one.device is not None
    )
    return tuple(sorted(found, key=lambda device: (device.worker, device.process)))


def with_history(status: JobStatus, totals: EventTotals, accounting: Accounting, unix_now: float) -> JobStatus:
    """Return the status with sums over all events, and the time by state.

    Args:
        status: Status of the job.
        totals: Sums over the job's events.
        accounting: Accounting of the job's time.
        unix_now: End of the accounted time, in seconds since the Unix epoch.
    """
    return replace(
        status,
        world_seconds=totals.group_seconds,
        event_counts=dict(totals.by_kind),
        pods_lost={role: dict(reasons) for role, reasons in totals.pods_lost.items()},
        checkpoint_at=totals.checkpoint_at,
        elapsed_seconds=accounting.elapsed_seconds(unix_now),
        worker_seconds=accounting.worker_seconds(unix_now),
        ps_seconds=accounting.ps_seconds(unix_now),
    )


def series_point(state: JobState, work: Work, fleet: Fleet, accounting: Accounting, unix_now: float) -> SeriesPoint:
    """Return what `SeriesPoint.of` returns for the present status, but much faster: each tick adds a point.

    Args:
        state: State of the job.
        work: The planned and finished tasks.
        fleet: Pods of the job.
        accounting: Accounting of the job's time.
        unix_now: Seconds since the Unix epoch.
    """
    return SeriesPoint(
        at=accounting.moment(unix_now),
        step=work.tasks.model_version,
        records=work.tasks.records_done,
        loss=work.losses.newest,
        workers=_num_workers(state),
        ps=fleet.num_serving,
        ps_busy=sum(server.busy for server in state.ps_metrics.servers()),
        metrics=dict(work.evaluations.results),
        metrics_step=work.evaluations.results_step,
        worker_seconds=accounting.worker_seconds(unix_now),
    )


def _num_workers(state: JobState) -> int:
    """Return the number of pods with registered processes."""
    return len({state.settings.pod_of(worker.id) for worker in state.workers.all()})


class Pace:
    """Rate at which a job processes records, and the time that the remaining ones will take.  Informative only.

    The time before the first record is start-up and in neither number.  Records that are computed again count again:
    losses do not recur every minute, so the pace covers all computed records and the forecast only those still missing.
    Times are seconds on any clock that only grows.
    """

    def __init__(self) -> None:
        self._recent: list[tuple[float, int]] = []  # (time, records done) within `RATE_WINDOW`
        self._times: list[float] = []  # of the samples, from the first record of this generation of the master on
        self._taken: list[int] = []  # records computed up to the sample of the same index
        self._spacing = 0.0
        self._records = 0
        self._num_workers = 0
        self._differs_since: float | None = None
        self._steady_since = 0.0

    def sample(self, now: float, records: int, num_workers: int) -> None:
        """Add a sample; called at every tick.

        Args:
            now: Time of the sample.
            records: Number of records done, over all epochs; decreases if the model loses some.
            num_workers: Number of registered workers.
        """
        self._recent.append((now, records))
        while now - self._recent[0][0] > RATE_WINDOW:
            self._recent.pop(0)
        taken, self._records = max(0, records - self._records), records
        if not self._times:
            if not taken:
                return
            self._steady_since, self._num_workers = now, num_workers
            taken = 0  # these records were computed in the time of an earlier generation of the master
        self._follow(now, num_workers)
        self._append(now, taken)

    def records_per_second(self) -> float:
        """Return the throughput of the last seconds."""
        if len(self._recent) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._recent[0], self._recent[-1]
        return max(0, last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def seconds_for(self, records: int) -> float | None:
        """Return the seconds that a number of further records will take; None while that is unknown."""
        if records <= 0:
            return 0.0
        if not self._times or not self._num_workers:
            return None
        now = self._times[-1]
        begin = max(self._steady_since, now - max(MIN_WINDOW, (now - self._steady_since) / 2))
        first = max(0, bisect_left(self._times, begin))
        measured, taken = now - self._times[first], self._taken[-1] - self._taken[first]
        return records * measured / taken if measured >= MIN_MEASURED and taken else None

    def _follow(self, now: float, num_workers: int) -> None:
        """Restart the measurement once another number of workers has lasted."""
        if num_workers == self._num_workers:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        elif now - self._differs_since >= min(MAX_SETTLED, max(MIN_SETTLED, (now - self._steady_since) / 10)):
            self._num_workers, self._steady_since, self._differs_since = num_workers, self._differs_since, None

    def _append(self, now: float, taken: int) -> None:
        total = (self._taken[-1] if self._taken else 0) + taken
        if len(self._times) > 1 and now - self._times[-2] < self._spacing:
            self._times[-1], self._taken[-1] = now, total
            return
        self._times.append(now)
        self._taken.append(total)
        if len(self._times) > MAX_SAMPLES:
            self._spacing = 2 * (self._times[-1] - self._times[0]) / MAX_SAMPLES
            self._times[:-1], self._taken[:-1] = self._times[:-1:2], self._taken[:-1:2]
