"""EventLog: the events of the job, for users and for `elasticdl explain`; no decision depends on it.

It numbers events and sets their times.  It is kept in the snapshot, so that each event exists exactly once over all
generations of the master.  Its size is bounded: routine events are replaced by a count by kind first, then the older
half of the other events, except those kept to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elasticdl_client.job_events import (
    ROUTINE,
    Detail,
    EventHistory,
    EventKind,
    Extremes,
    JobEvent,
    event_row,
    from_journal,
    to_journal,
    with_metrics_of,
)

MAX_EVENTS = 400  # about 80 kB of the journal, 10 kB compressed
MAX_CHARACTERS = 200_000  # of messages and details; the journal of a job on Kubernetes may have 960 kB, compressed
MAX_TEXT = 2000  # characters of a message or detail
_MAX_FIRST_LINE = 500  # of a long text: lists show it; the end of the text is kept, where errors name their cause
_NUMBER = 20  # most characters of a number
KEPT = frozenset(
    {
        EventKind.JOB_STARTED,
        EventKind.JOB_STOP_REQUESTED,
        EventKind.JOB_SUCCEEDED,
        EventKind.JOB_FAILED,
        EventKind.DATA_UNREADABLE,
        EventKind.MODEL_REJECTED,
    }
)
_SUFFICES = 0.75  # of the bounds: if the log is larger without the older routine events, other events are dropped


class EventLog:
    """The events of a job.

    Attributes:
        now: Seconds since the Unix epoch, set by the owner before each event that it handles.
        totals: Sums over all events, see `EventTotals`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.totals = EventTotals()
        self._events: list[JobEvent] = []
        self._rows: list[list[Any]] = []  # rows for the journal, which is written much more often than events are added
        self._summed_up: dict[str, int] = {}
        self._next = 1
        self._num_characters = 0
        self._by_subject: dict[str, list[JobEvent]] = {}

    @property
    def history(self) -> EventHistory:
        return EventHistory(tuple(self._events), dict(self._summed_up), dict(self.totals.extremes))

    def add(self, kind: EventKind, subject: str, message: str = "", cause: int = 0, /, **details: Detail) -> int:
        """Add an event; return its number.

        Args:
            cause: Number of the event that caused it; 0 means none.
            details: See docs/events.md.
        """
        number, self._next = self._next, self._next + 1
        short = {name: _shortened(value) if isinstance(value, str) else value for name, value in details.items()}
        event = JobEvent(number, self.now, kind, subject, _shortened(message), cause, short)
        self._append(event)
        self.totals.add(event)
        if len(self._events) > MAX_EVENTS or self._num_characters > MAX_CHARACTERS:
            self._sum_up()
        return number

    def newest(self, subject: str) -> int:
        """Return the number of the newest event of a subject; 0 if none is kept."""
        about = self._by_subject.get(subject)
        return about[-1].number if about else 0

    def newest_of(self, *kinds: EventKind) -> int:
        """Return the number of the newest event of any of these kinds; 0 if none is kept."""
        return next((event.number for event in reversed(self._events) if event.kind in kinds), 0)

    def newest_about(self, subject: str, *kinds: EventKind) -> int:
        """Return the number of the newest event of any of these kinds about a subject; 0 if none is kept."""
        found = (event.number for event in reversed(self._by_subject.get(subject, ())) if event.kind in kinds)
        return next(found, 0)

    def _append(self, event: JobEvent) -> None:
        self._events.append(event)
        self._rows.append(event_row(event))
        self._by_subject.setdefault(event.subject, []).append(event)
        self._num_characters += _size(event)

    def _sum_up(self) -> None:
        half = len(self._events) // 2
        self._drop([event for event in self._events[:half] if event.kind in ROUTINE])
        if len(self._events) > _SUFFICES * MAX_EVENTS or self._num_characters > _SUFFICES * MAX_CHARACTERS:
            half = len(self._events) // 2
            self._drop([event for event in self._events[:half] if event.kind not in KEPT])

    def _drop(self, old: list[JobEvent]) -> None:
        for event in old:
            self._summed_up[event.kind.value] = self._summed_up.get(event.kind.value, 0) + 1
        gone = {event.number for event in old}
        self._keep([event for event in self._events if event.number not in gone])

    def _keep(self, events: list[JobEvent]) -> None:
        self._events, self._rows, self._by_subject, self._num_characters = [], [], {}, 0
        for event in events:
            self._append(event)

    def snapshot(self) -> dict[str, Any]:
        rest = to_journal(EventHistory((), self._summed_up, self.totals.extremes))
        return {**rest, "events": list(self._rows), "next": self._next, "totals": self.totals.snapshot()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore an earlier generation's events."""
        history = from_journal(saved)
        self._summed_up, self._next = dict(history.summed_up), saved["next"]
        self._keep(list(history.events))
        if "totals" in saved:
            self.totals = EventTotals.restored(saved["totals"])
        else:  # a journal of a version without totals
            self.totals = EventTotals(history.events, history.summed_up)
        self.totals.extremes |= history.extremes


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    first = text.partition("\n")[0][:_MAX_FIRST_LINE]
    return f"{first}\n…{text[len(first) + 1 - MAX_TEXT :]}"


def _size(event: JobEvent) -> int:
    """Return the size in characters.  An evaluation may have hundreds of metrics."""
    details = event.details.items()
    return len(event.message) + sum(len(name) + (len(v) if isinstance(v, str) else _NUMBER) for name, v in details)


class EventTotals:
    """Sums over all events of a job, dropped ones included; they only grow.

    Attributes:
        by_kind: Number of events by kind.
        pods_lost: Number of pods that ended unexpectedly or were given up, by role and reason.
        group_seconds: Seconds that the changes of AllReduce groups took.
        checkpoint_at: When the newest checkpoint was complete; 0 means that there is none.
        extremes: Extremes of the metrics over all evaluations; kept with the events.
    """

    def __init__(self, events: Iterable[JobEvent] = (), by_kind: Mapping[str, int] | None = None) -> None:
        """Sum up the given events.

        Args:
            events: The first events to count.
            by_kind: Counts of older events that are not kept.
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
            "by_kind": dict(self.by_kind),
            "pods_lost": {role: dict(reasons) for role, reasons in self.pods_lost.items()},
            "group_seconds": round(self.group_seconds, 3),
            "checkpoint_at": round(self.checkpoint_at, 3),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> EventTotals:
        found = cls(by_kind=saved["by_kind"])
        found.pods_lost = {role: dict(reasons) for role, reasons in saved["pods_lost"].items()}
        found.group_seconds, found.checkpoint_at = saved["group_seconds"], saved["checkpoint_at"]
        return found
