"""EventTotals: sums over all events of a job, those that are not kept any more among them; they only grow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elasticdl_client.job_events import EventKind, Extremes, JobEvent, with_metrics_of


class EventTotals:
    """Kept in the snapshot with the log of events.

    Attributes:
        by_kind: how many there were of each kind.
        pods_lost: by role and reason, how many pods have ended unasked, or were given up.
        group_seconds: that the changes of AllReduce groups took.
        checkpoint_at: when the newest checkpoint was complete; 0: there is none.
        extremes: of the metrics of all evaluations; kept with the events.
    """

    def __init__(self, events: Iterable[JobEvent] = (), by_kind: Mapping[str, int] | None = None) -> None:
        """
        Args:
            events: to begin with.
            by_kind: of older events, of which nothing else is known.
        """
        self.by_kind: dict[str, int] = dict(by_kind or {})
        self.pods_lost: dict[str, dict[str, int]] = {}
        self.group_seconds = 0.0
        self.checkpoint_at = 0.0
        self.extremes: dict[str, Extremes] = {}
        for event in events:
            self.add(event)

    def add(self, event: JobEvent) -> None:
        self.by_kind[event.kind.value] = self.by_kind.get(event.kind.value, 0) + 1
        if event.kind is EventKind.POD_LOST:
            self._lose(event.subject, str(event.details.get("reason") or "Unknown"))
        elif event.kind is EventKind.POD_GIVEN_UP:
            self._lose(event.subject, "GivenUp")
        elif event.kind is EventKind.GROUP_FORMED:
            self.group_seconds += float(event.details.get("seconds", 0.0))
        elif event.kind is EventKind.CHECKPOINT_SAVED:
            self.checkpoint_at = event.at
        elif event.kind is EventKind.EVALUATION_FINISHED:
            self.extremes = with_metrics_of(event, self.extremes)

    def _lose(self, subject: str, reason: str) -> None:
        of_role = self.pods_lost.setdefault(subject.rpartition("-")[0], {})
        of_role[reason] = of_role.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        return {
            "by_kind": self.by_kind,
            "pods_lost": self.pods_lost,
            "group_seconds": round(self.group_seconds, 3),
            "checkpoint_at": round(self.checkpoint_at, 3),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> EventTotals:
        found = cls(by_kind=saved["by_kind"])
        found.pods_lost = {role: dict(reasons) for role, reasons in saved["pods_lost"].items()}
        found.group_seconds, found.checkpoint_at = saved["group_seconds"], saved["checkpoint_at"]
        return found
