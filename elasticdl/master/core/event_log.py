"""EventLog: what happened to the job, for people and for `elasticdl explain`; nothing is decided by it.

It numbers events and says when they happened.  It is kept in the snapshot, so that each event exists exactly once over
all lives of the master.  It is bounded: the older half of what is not kept for good is summed up by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl_client.job_events import Detail, EventHistory, EventKind, JobEvent, from_journal, to_journal

MAX_EVENTS = 400  # about 80 kB of the journal, 10 kB compressed
MAX_MESSAGE = 2000  # characters; the end of a long text is kept, as errors stand there
KEPT = frozenset(
    {
        EventKind.JOB_STARTED,
        EventKind.JOB_STOP_REQUESTED,
        EventKind.JOB_SUCCEEDED,
        EventKind.JOB_FAILED,
        EventKind.DATA_UNREADABLE,
    }
)


class EventLog:
    """The events of a job.

    Attributes:
        now: seconds since the Unix epoch, set by the owner before each event that it handles.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[JobEvent] = []
        self._summed_up: dict[str, int] = {}
        self._next = 1
        self._newest: dict[str, int] = {}  # by subject

    @property
    def history(self) -> EventHistory:
        return EventHistory(tuple(self._events), dict(self._summed_up))

    def add(self, kind: EventKind, subject: str, message: str = "", cause: int = 0, **details: Detail) -> int:
        """Write an event down; return its number.

        Args:
            cause: the number of the event that it follows from; 0: none.
            details: see docs/events.md.
        """
        number, self._next = self._next, self._next + 1
        if len(message) > MAX_MESSAGE:
            message = "…" + message[-MAX_MESSAGE:]
        self._events.append(JobEvent(number, self.now, kind, subject, message, cause, details))
        self._newest[subject] = number
        if len(self._events) > MAX_EVENTS:
            self._sum_up()
        return number

    def newest(self, subject: str) -> int:
        """The number of the newest event of a subject; 0: none is kept."""
        return self._newest.get(subject, 0)

    def _sum_up(self) -> None:
        half = len(self._events) // 2
        old = [event for event in self._events[:half] if event.kind not in KEPT]
        for event in old:
            self._summed_up[event.kind.value] = self._summed_up.get(event.kind.value, 0) + 1
        gone = {event.number for event in old}
        self._events = [event for event in self._events if event.number not in gone]
        self._newest = {subject: number for subject, number in self._newest.items() if number not in gone}

    def snapshot(self) -> dict[str, Any]:
        return {**to_journal(self.history), "next": self._next}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over what an earlier life knew."""
        history = from_journal(saved)
        self._events, self._summed_up, self._next = list(history.events), dict(history.summed_up), saved["next"]
        self._newest = {event.subject: event.number for event in self._events}
