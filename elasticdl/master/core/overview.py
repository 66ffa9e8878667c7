"""Overview: a job's status, gathered from its parts.  It changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress

from elasticdl.master.core.ending import Ending
from elasticdl.master.core.event_totals import EventTotals
from elasticdl.master.core.load import Loads
from elasticdl.master.core.pace import Pace
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.status import Status, coverage_of, records_by_fate
from elasticdl.master.core.work import Work
from elasticdl.master.core.workers import Workers
from elasticdl.master.core.world import Worlds


def look_at(
    settings: JobSettings,
    generation: int,
    phase: str,
    why_waiting: str,
    work: Work,
    worlds: Worlds,
    workers: Workers,
    num_wanted: int,
    num_serving: int,
    loads: Loads,
    ending: Ending,
    totals: EventTotals,
    pace: Pace,
    all_have_left: bool,
    elapsed_seconds: float,
    worker_seconds: Mapping[str, float],
    ps_seconds: Mapping[str, float],
) -> Status:
    """Return what a job looks like now.

    Args:
        num_wanted: workers.
        why_waiting: shown while the job is not decided.
        all_have_left: the commands of all workers have ended: what is not trained will not be.
    """
    outcome = ending.outcome
    is_over = [epoch.covered or all_have_left for epoch in work.tasks.epochs]
    coverage = tuple(
        coverage_of(epoch, not epoch.covered, settings.has_tensorflow_servers)
        for epoch in compress(work.tasks.epochs, is_over)
    )
    running = (epoch for epoch, over in zip(work.tasks.epochs, is_over, strict=True) if not over)
    return Status(
        phase=phase,
        message=outcome.message if outcome is not None else why_waiting,
        generation=generation,
        epoch=len(work.tasks.epochs) if settings.trains else 0,
        num_epochs=work.tasks.settings.num_epochs if settings.trains else 0,
        records_done=work.tasks.records_done,
        records=records_by_fate(coverage, running),
        records_processed=work.tasks.records_processed,
        records_total=work.tasks.planned_records,
        records_per_second=pace.records_per_second(),
        eta_seconds=_eta(work, ending, pace),
        workers_alive=len(workers.all()),
        workers_wanted=num_wanted,
        ps_alive=num_serving,
        ps_wanted=settings.num_ps,
        model_version=work.tasks.model_version,
        loss=work.losses.newest,
        learning_rate=work.losses.learning_rate,
        metrics=dict(work.evaluations.results),
        metrics_step=work.evaluations.results_step,
        tasks_done=work.tasks.num_done,
        tasks_total=work.tasks.planned_tasks,
        coverage=coverage,
        records_skipped=work.tasks.skipped_records,
        ps=loads.servers(),
        world=worlds.members,
        num_worlds=worlds.num_formed,
        world_seconds=totals.group_seconds,
        staleness=loads.staleness,
        gradients_refused=loads.refused,
        elapsed_seconds=elapsed_seconds,
        worker_seconds=worker_seconds,
        ps_seconds=ps_seconds,
        event_counts=dict(totals.by_kind),
        pods_lost={role: dict(reasons) for role, reasons in totals.pods_lost.items()},
        checkpoint_at=totals.checkpoint_at,
    )


def _eta(work: Work, ending: Ending, pace: Pace) -> float | None:
    if ending.is_decided or not work.tasks.planned_records:
        return None
    return pace.seconds_for(work.tasks.records_left_out)
