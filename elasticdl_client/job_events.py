"""JobEvent: an event of a job, in order, each with the event that it follows from.

The master's core makes events and the journal keeps them, so they survive the master; the client reads them there.
This module owns their kinds, their shape and their form in the journal.  It never decides what is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import StrEnum
from typing import Any

Detail = str | int | float


class EventKind(StrEnum):
    """The kinds of events of a job; docs/events.md has the details of each."""

    JOB_STARTED = "JobStarted"
    JOB_WAITING = "JobWaiting"
    JOB_SCALED = "JobScaled"
    SCALE_REFUSED = "ScaleRefused"
    JOB_STOP_REQUESTED = "JobStopRequested"
    JOB_SUCCEEDED = "JobSucceeded"
    JOB_FAILED = "JobFailed"
    JOB_RESUMED = "JobResumed"
    MASTER_RESTARTED = "MasterRestarted"
    JOURNAL_DELAYED = "JournalDelayed"
    DATA_UNREADABLE = "DataUnreadable"
    MODEL_REJECTED = "ModelRejected"

    POD_CREATED = "PodCreated"
    POD_NOT_CREATED = "PodNotCreated"
    POD_PENDING = "PodPending"
    POD_BLOCKED = "PodBlocked"
    POD_RUNNING = "PodRunning"
    POD_DRAINING = "PodDraining"
    POD_RESIZED = "PodResized"
    POD_NOT_RESIZED = "PodNotResized"
    POD_GIVEN_UP = "PodGivenUp"
    POD_LOST = "PodLost"
    POD_COMPLETED = "PodCompleted"
    POD_STOPPED = "PodStopped"

    WORKER_REGISTERED = "WorkerRegistered"
    WORKER_HUNG = "WorkerHung"
    WORKER_SLOW = "WorkerSlow"
    LEASE_LOST = "LeaseLost"
    PS_READY = "PsReady"
    GROUP_BROKEN = "GroupBroken"
    GROUP_FORMED = "GroupFormed"

    EPOCH_STARTED = "EpochStarted"
    EPOCH_REOPENED = "EpochReopened"
    EPOCH_COVERED = "EpochCovered"
    TASK_FAILED = "TaskFailed"
    RECORDS_EXCLUDED = "RecordsExcluded"
    LOSS_NOT_FINITE = "LossNotFinite"
    EVALUATION_FINISHED = "EvaluationFinished"
    CHECKPOINT_SAVED = "CheckpointSaved"
    CHECKPOINT_FAILED = "CheckpointFailed"
    CHECKPOINT_UNREADABLE = "CheckpointUnreadable"
    TRAINING_STOPPED = "TrainingStopped"
    MODEL_EXPORTED = "ModelExported"
    MODEL_NOT_EXPORTED = "ModelNotExported"


TROUBLES = frozenset(
    {
        EventKind.JOB_FAILED,
        EventKind.SCALE_REFUSED,
        EventKind.MASTER_RESTARTED,
        EventKind.JOURNAL_DELAYED,
        EventKind.DATA_UNREADABLE,
        EventKind.MODEL_REJECTED,
        EventKind.POD_NOT_CREATED,
        EventKind.POD_BLOCKED,
        EventKind.POD_NOT_RESIZED,
        EventKind.POD_GIVEN_UP,
        EventKind.POD_LOST,
        EventKind.WORKER_HUNG,
        EventKind.WORKER_SLOW,
        EventKind.LEASE_LOST,
        EventKind.GROUP_BROKEN,
        EventKind.EPOCH_REOPENED,
        EventKind.TASK_FAILED,
        EventKind.RECORDS_EXCLUDED,
        EventKind.LOSS_NOT_FINITE,
        EventKind.CHECKPOINT_FAILED,
        EventKind.CHECKPOINT_UNREADABLE,
        EventKind.MODEL_NOT_EXPORTED,
    }
)


ROUTINE = frozenset(
    {
        EventKind.EPOCH_STARTED,
        EventKind.EPOCH_COVERED,
        EventKind.EVALUATION_FINISHED,
        EventKind.CHECKPOINT_SAVED,
    }
)
"""Of older events these are summed up first; no trouble follows from them."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened.

    Attributes:
        number: from 1, over all generations of the master; without gaps in a job whose log was never shortened.
        at: Seconds since the Unix epoch.
        subject: the object affected: job, master, user, data, worker-3, ps-0, group-4, epoch-2, task-17,
            checkpoint-1200, evaluation-1200.
        message: one line, or several where a program's own error is quoted.
        cause: number of the event that it follows from; 0: none of the log.
        details: numbers and evidence by name, such as reason, exit_code, seconds.
    """

    number: int
    at: float
    kind: EventKind
    subject: str
    message: str = ""
    cause: int = 0
    details: Mapping[str, Detail] = field(default_factory=dict)

    @property
    def is_trouble(self) -> bool:
        """It is a warning, as Kubernetes has them."""
        return self.kind in TROUBLES

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``; docs/events.md lists its keys."""
        return {
            "number": self.number,
            "at": self.at,
            "kind": self.kind.value,
            "subject": self.subject,
            "message": self.message,
            "cause": self.cause,
            "details": dict(self.details),
        }


@dataclass(frozen=True, slots=True)
class Extremes:
    """The least and the greatest finite value of a metric, each with the step of the first model that had it."""

    least: float
    least_step: int
    greatest: float
    greatest_step: int


@dataclass(frozen=True, slots=True)
class EventHistory:
    """All events of a job, as far as they are kept.

    Attributes:
        events: in order of number.
        summed_up: how many older ones of each kind are not kept any more.
        extremes: of each metric, over all evaluations, those that are not kept any more among them.
    """

    events: tuple[JobEvent, ...] = ()
    summed_up: Mapping[str, int] = field(default_factory=dict)
    extremes: Mapping[str, Extremes] = field(default_factory=dict)

    @property
    def has_no_model(self) -> bool:
        """Whether training has ended without the export of a model."""
        kinds = (EventKind.MODEL_EXPORTED, EventKind.MODEL_NOT_EXPORTED)
        newest = next((event.kind for event in reversed(self.events) if event.kind in kinds), None)
        return newest is EventKind.MODEL_NOT_EXPORTED

    def by_number(self) -> dict[int, JobEvent]:
        return {event.number: event for event in self.events}

    def chain(self, event: JobEvent) -> tuple[JobEvent, ...]:
        """Return the events that led to `event`, the nearest first, as far as they are kept."""
        known, found, number = self.by_number(), [], event.cause
        while number in known:  # a cause has a smaller number, so this ends
            found.append(known[number])
            number = known[number].cause
        return tuple(found)


def to_journal(history: EventHistory) -> dict[str, Any]:
    """Return the history as the master's core keeps it in its snapshot; of JSON's types only."""
    return {
        "events": [event_row(event) for event in history.events],
        "summed_up": dict(history.summed_up),
        "extremes": {name: list(astuple(one)) for name, one in history.extremes.items()},
    }


def event_row(event: JobEvent) -> list[Any]:
    """Return an event as `to_journal` has it."""
    details = dict(event.details)
    kind = event.kind.value
    return [event.number, round(event.at, 3), kind, event.subject, event.message, event.cause, details]


def from_journal(saved: Mapping[str, Any]) -> EventHistory:
    """Read the output of `to_journal`; events of a kind that only a newer version knows are left out.

    Raises:
        ValueError: it is not such a thing.
    """
    try:
        known = {kind.value for kind in EventKind}
        events = tuple(
            JobEvent(int(number), float(at), EventKind(kind), str(subject), str(message), int(cause), dict(details))
            for number, at, kind, subject, message, cause, details in saved["events"]
            if kind in known
        )
        extremes = {str(name): Extremes(*values) for name, values in saved.get("extremes", {}).items()}
        return EventHistory(events, {str(kind): int(count) for kind, count in saved["summed_up"].items()}, extremes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a history of events: {error!r}") from error


def with_metrics_of(evaluation: JobEvent, extremes: Mapping[str, Extremes]) -> dict[str, Extremes]:
    """Return the extremes of all metrics with those of an `EVALUATION_FINISHED` taken in."""
    found, step = dict(extremes), int(evaluation.subject.rpartition("-")[2])
    for name, value in evaluation.details.items():
        if isinstance(value, str) or not math.isfinite(value):
            continue
        before = found.get(name)
        if before is None:
            found[name] = Extremes(value, step, value, step)
        elif value < before.least:
            found[name] = replace(before, least=value, least_step=step)
        elif value > before.greatest:
            found[name] = replace(before, greatest=value, greatest_step=step)
    return found


def since(events: Sequence[JobEvent], number: int) -> list[JobEvent]:
    """Return the events after a number."""
    return [event for event in events if event.number > number]


def describe(event: JobEvent) -> str:
    """Return an event as one line for people: the first line of its message, or a sentence from its details."""
    first, details = event.message.partition("\n")[0], event.details
    match event.kind:
        case EventKind.JOB_STARTED:
            return "the job has started"
        case EventKind.JOB_SUCCEEDED:
            return "the job has succeeded"
        case EventKind.JOB_RESUMED:
            return f"resumed after {details.get('seconds', 0):,.0f} s"
        case EventKind.POD_STOPPED:
            return "ended with the stop of the job"
        case EventKind.MASTER_RESTARTED:
            return f"the master has restarted (restart {int(details.get('generation', 1)) - 1})"
        case EventKind.POD_CREATED:
            return "created"
        case EventKind.POD_RUNNING:
            return "running"
        case EventKind.POD_COMPLETED:
            return "completed"
        case EventKind.POD_LOST | EventKind.POD_PENDING:
            exit_code = f"exit code {details['exit_code']}" if "exit_code" in details else ""
            is_told = first.startswith("exit code") or not exit_code
            return ", ".join(filter(None, (str(details.get("reason", "")), "" if is_told else exit_code, first)))
        case EventKind.WORKER_REGISTERED:
            return f"{first} has registered with the master" if first else "registered with the master"
        case EventKind.PS_READY:
            return f"ready, {first}" if first else "ready"
        case EventKind.GROUP_BROKEN:
            return f"broken: {first}"
        case EventKind.GROUP_FORMED:
            members = "processes" if "processes" in details else "workers"
            return f"{details['before']} → {details['after']} {members} in {details['seconds']:.2f} s"
        case EventKind.EPOCH_STARTED:
            return f"started, {details['records']} records"
        case EventKind.EVALUATION_FINISHED:
            return ", ".join(f"{name} {value:.4g}" for name, value in details.items() if not isinstance(value, str))
        case _:
            return first
