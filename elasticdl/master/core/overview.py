"""Overview: a job's status, gathered from its parts.  It changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress

from elasticdl.master.core.accounting import Accounting
from elasticdl.master.core.event_totals import EventTotals
from elasticdl.master.core.fleet import Fleet
from elasticdl.master.core.pace import Pace
from elasticdl.master.core.ps_metrics import PsMetrics
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.status import coverage_of, records_by_fate
from elasticdl.master.core.work import Work
from elasticdl.master.core.workers import Workers
from elasticdl.master.core.world import WorkerGroups
from elasticdl_client.job_status import JobPhase, JobStatus

_ENDED = (JobPhase.SUCCEEDED, JobPhase.FAILED)


def with_progress(status: JobStatus, settings: JobSettings, work: Work, pace: Pace, all_have_left: bool) -> JobStatus:
    """Return the status with the records, tasks and epochs that are done and left.

    Args:
        status: with its phase.
        settings: of the job.
        work: what is planned and done.
        pace: of the records.
        all_have_left: the commands of all workers have ended: what is not trained will not be.
    """
    tasks = work.tasks
    is_over = [epoch.covered or all_have_left for epoch in tasks.epochs]
    coverage = tuple(
        coverage_of(epoch, not epoch.covered, settings.has_tensorflow_servers)
        for epoch in compress(tasks.epochs, is_over)
    )
    running = (epoch for epoch, over in zip(tasks.epochs, is_over, strict=True) if not over)
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
    """Return the status with how good the model is."""
    return replace(
        status,
        model_version=work.tasks.model_version,
        loss=work.losses.newest,
        learning_rate=work.losses.learning_rate,
        metrics=dict(work.evaluations.results),
        metrics_step=work.evaluations.results_step,
    )


def with_processes(
    status: JobStatus, workers: Workers, fleet: Fleet, worlds: WorkerGroups, loads: PsMetrics
) -> JobStatus:
    """Return the status with workers, parameter servers and groups."""
    return replace(
        status,
        workers_alive=len(workers.all()),
        workers_wanted=len(fleet.pods.worker_slots),
        ps_alive=fleet.num_serving,
        ps=loads.servers(),
        staleness=loads.staleness,
        gradients_refused=loads.refused,
        world=worlds.members,
        num_worlds=worlds.num_formed,
    )


def with_history(status: JobStatus, totals: EventTotals, accounting: Accounting, unix_now: float) -> JobStatus:
    """Return the status with the sums over all events, and where the time has gone.

    Args:
        status: of the job.
        totals: of its events.
        accounting: of its time.
        unix_now: time is accounted for up to here; seconds since the Unix epoch.
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
