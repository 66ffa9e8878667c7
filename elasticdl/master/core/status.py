"""Coverage: what has become of the records of epochs, as the status and the log tell it."""

from __future__ import annotations

from collections.abc import Iterable

from elasticdl.master.core.epoch import Epoch
from elasticdl_client.job_status import EpochCoverage


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
