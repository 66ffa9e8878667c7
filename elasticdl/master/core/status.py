"""Status: what a job looks like from outside; the shell makes a JobStatus of it.  Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticdl.master.core.epoch import Epoch
from elasticdl_client.job_status import EpochCoverage, PsStatus


def coverage_of(epoch: Epoch, is_over: bool = False, is_bound: bool = False) -> EpochCoverage:
    """Return what became of the records of an epoch.

    Args:
        epoch: of the plan.
        is_over: what is not committed will not be: it was not to be trained.
        is_bound: see `EpochCoverage`.
    """
    skipped, quarantined, filtered = epoch.skipped_records, epoch.num_quarantined, epoch.num_filtered
    committed = epoch.committed_records - skipped - filtered
    planned = committed + skipped + quarantined + filtered if is_over else epoch.planned_records
    return EpochCoverage(
        epoch=epoch.number + 1,
        records=epoch.records,
        committed=committed,
        repeated=epoch.num_repeated,
        lost=planned - quarantined - skipped - filtered - committed,
        quarantined=quarantined,
        skipped=skipped,
        unplanned=epoch.records - planned,
        filtered=filtered,
        augmented=epoch.num_augmented,
        verb=epoch.verb,
        is_bound=is_bound,
    )


def coverage_line(coverage: EpochCoverage) -> str:
    """Return the line of the log."""
    return f"{coverage.title.replace('epoch', 'Epoch')}: {coverage}"


FATES = ("committed", "repeated", "lost", "quarantined", "skipped", "filtered", "augmented", "unplanned")


def records_by_fate(covered: Iterable[EpochCoverage], running: Iterable[Epoch]) -> dict[str, int]:
    """Return what has become of the records of all epochs.

    Args:
        covered: of the epochs that are over.
        running: the others; of theirs none is lost or left out yet.
    """
    found = dict.fromkeys(FATES, 0)
    for coverage in covered:
        for fate in FATES:
            found[fate] += getattr(coverage, fate)
    for epoch in running:
        now = coverage_of(epoch)
        for fate in FATES:
            found[fate] += 0 if fate in ("lost", "unplanned") else getattr(now, fate)
    return found


@dataclass(frozen=True, slots=True)
class Status:
    """Fields are named as those of JobStatus.

    Attributes:
        phase: Pending until something is handed out, Running, Succeeded, Failed.
        message: why it waits or failed.
        epoch: the newest that has begun, from 1; 0 before the first.
        records_total: planned over all epochs; 0 while unknown or endless.
        coverage: of the epochs whose line is printed.
        tasks_total: planned over all epochs; 0 while unknown or endless.
        records_done: committed, skipped or filtered, over all epochs.
        eta_seconds: that the rest of the records takes; None while unknown, where it is endless, and after the end.
        records: by fate, see `records_by_fate`.
        records_processed: like `records_done`, with what is computed again counted again; it only grows.
        world: AllReduce: workers of the world that stands, in order of rank.
        num_worlds: AllReduce: how many have formed.
        world_seconds: AllReduce: that their changes took, altogether.
        staleness: gradients taken by the updates that they missed: 0, 1, 2, 3-4, 5-8, 9-16, …
        elapsed_seconds: since the job's submission.
        worker_seconds: by `goodput.SlotState`, summed over the wanted workers since the job's beginning.
        ps_seconds: by `goodput.PsState`, the same of the parameter servers.
        event_counts: how many events there were of each kind.
        pods_lost: how many have ended unasked, by role and reason.
        checkpoint_at: when the newest checkpoint was complete, since the Unix epoch; 0: there is none.
    """

    phase: str
    message: str
    generation: int
    epoch: int
    num_epochs: int
    records_done: int
    records: Mapping[str, int]
    records_processed: int
    records_total: int
    records_per_second: float
    eta_seconds: float | None
    workers_alive: int
    workers_wanted: int
    ps_alive: int
    ps_wanted: int
    model_version: int
    loss: float | None
    learning_rate: float | None
    metrics: Mapping[str, float]
    metrics_step: int
    coverage: tuple[EpochCoverage, ...]
    tasks_done: int
    tasks_total: int
    records_skipped: int
    ps: tuple[PsStatus, ...]
    world: tuple[int, ...]
    num_worlds: int
    world_seconds: float
    staleness: tuple[int, ...]
    gradients_refused: int
    elapsed_seconds: float
    worker_seconds: Mapping[str, float]
    ps_seconds: Mapping[str, float]
    event_counts: Mapping[str, int]
    pods_lost: Mapping[str, Mapping[str, int]]
    checkpoint_at: float
