"""EventLog: the events of the job, for people and for `elasticdl explain`; nothing is decided by it.

It numbers events and says when they happened.  It is kept in the snapshot, so that each event exists exactly once over
all generations of the master.  It is bounded: routine events are summed up by kind first, then the older half of the
rest except those kept to the end.
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
MAX_CHARACTERS = 200_000  # of messages and details; the journal of a job on Kubernetes has 960 kB, compressed
MAX_TEXT = 2000  # characters of a message or detail
_MAX_FIRST_LINE = 500  # of a long text, which lists show; the rest is its end, where errors name their cause
_NUMBER = 20  # characters that a number may take
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
_SUFFICES = 0.75  # of the bounds: if it is still more without the older half of the routine, other events go, too


class EventLog:
    """The events of a job.

    Attributes:
        now: seconds since the Unix epoch, set by the owner before each event that it handles.
        totals: see `EventTotals`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.totals = EventTotals()
        self._events: list[JobEvent] = []
        self._rows: list[list[Any]] = []  # of the journal, which is written much more often than events come
        self._summed_up: dict[str, int] = {}
        self._next = 1
        self._num_characters = 0
        self._by_subject: dict[str, list[JobEvent]] = {}

    @property
    def history(self) -> EventHistory:
        return EventHistory(tuple(self._events), dict(self._summed_up), dict(self.totals.extremes))

    def add(self, kind: EventKind, subject: str, message: str = "", cause: int = 0, /, **details: Detail) -> int:
        """Write an event down; return its number.

        Args:
            cause: the number of the event that it follows from; 0: none.
            details: see docs/events.md.
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
        """The number of the newest event of a subject; 0: none is kept."""
        about = self._by_subject.get(subject)
        return about[-1].number if about else 0

    def newest_of(self, *kinds: EventKind) -> int:
        """The number of the newest event of some kinds; 0: none is kept."""
        return next((event.number for event in reversed(self._events) if event.kind in kinds), 0)

    def newest_about(self, subject: str, *kinds: EventKind) -> int:
        """The number of the newest event of some kinds about a subject; 0: none is kept."""
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
        """Takes over what an earlier generation knew."""
        history = from_journal(saved)
        self._summed_up, self._next = dict(history.summed_up), saved["next"]
        self._keep(list(history.events))
        if "totals" in saved:
            self.totals = EventTotals.restored(saved["totals"])
        else:  # written before there were totals
            self.totals = EventTotals(history.events, history.summed_up)
        self.totals.extremes |= history.extremes


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    first = text.partition("\n")[0][:_MAX_FIRST_LINE]
    return f"{first}\n…{text[len(first) + 1 - MAX_TEXT :]}"


def _size(event: JobEvent) -> int:
    """In characters.  An evaluation may have hundreds of metrics."""
    details = event.details.items()
    return len(event.message) + sum(len(name) + (len(v) if isinstance(v, str) else _NUMBER) for name, v in details)


class EventTotals:
    """Sums over all events of a job, those that are not kept any more among them; they only grow.

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
