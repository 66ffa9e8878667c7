"""Diagnosis: one trouble of a job with its evidence, and Facts: the input of a diagnosis.

Both runtimes give the same facts: the job as it was found, its history of events and its specification.  Nothing here
asks a cluster, reads a file or a clock, so an ended job is explained as a running one is.

`recovery`: the system's response to a trouble and its cost, read from the events that follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from elasticdl_client.job_events import Detail, EventHistory, EventKind, JobEvent, describe
from elasticdl_client.jobs.store import JobInfo, Phase


class Trouble(StrEnum):
    """The kinds of troubles of a job; docs/troubles.md has the cause and the cure of each."""

    # A pod has ended
    OUT_OF_MEMORY = "OutOfMemory"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    KILLED = "Killed"
    DELETED = "Deleted"
    PROGRAM_FAILED = "ProgramFailed"
    MASTER_KILLED = "MasterKilled"

    # A pod does not start
    IMAGE_NOT_FOUND = "ImageNotFound"
    IMAGE_WITHOUT_RUNTIME = "ImageWithoutRuntime"
    PULL_NOT_ALLOWED = "PullNotAllowed"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    QUOTA_EXCEEDED = "QuotaExceeded"
    NO_CPU = "NoCpu"
    NO_MEMORY = "NoMemory"
    NO_GPU = "NoGpu"
    NO_RESOURCE = "NoResource"
    TAINT_NOT_TOLERATED = "TaintNotTolerated"
    NO_MATCHING_NODE = "NoMatchingNode"
    SCHEDULING_GATED = "SchedulingGated"
    CLAIM_NOT_BOUND = "ClaimNotBound"
    RIGHT_MISSING = "RightMissing"
    POD_REFUSED = "PodRefused"
    API_SERVER_AWAY = "ApiServerAway"

    # The user's code and data
    MODEL_RAISED = "ModelRaised"
    LOSS_RAISED = "LossRaised"
    FEED_RAISED = "FeedRaised"
    CALLBACK_RAISED = "CallbackRaised"
    CODE_RAISED = "CodeRaised"
    LOSS_NOT_FINITE = "LossNotFinite"
    BAD_RECORD = "BadRecord"
    DATA_GONE = "DataGone"
    DATA_CHANGED = "DataChanged"
    VERSIONS_DIFFER = "VersionsDiffer"

    # Checkpoints and the journal
    DISK_FULL = "DiskFull"
    CHECKPOINT_NOT_WRITTEN = "CheckpointNotWritten"
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    MODEL_NOT_EXPORTED = "ModelNotExported"
    JOURNAL_NOT_WRITTEN = "JournalNotWritten"

    # Standing still, and slow
    CODE_HANGS = "CodeHangs"
    NO_CHANGE = "NoChange"
    COLLECTIVE_HANGS = "CollectiveHangs"
    WORKER_SILENT = "WorkerSilent"
    WORKER_THROTTLED = "WorkerThrottled"
    WORKER_SLOW = "WorkerSlow"
    INPUT_SLOW = "InputSlow"
    PS_OVERLOADED = "PsOverloaded"
    TOO_MANY_WORKERS = "TooManyWorkers"
    GROWTH_ENDED = "GrowthEnded"

    # The job as a whole
    STOPPED = "Stopped"
    JOB_FAILED = "JobFailed"


PENDING = frozenset(
    {
        Trouble.IMAGE_NOT_FOUND,
        Trouble.IMAGE_WITHOUT_RUNTIME,
        Trouble.PULL_NOT_ALLOWED,
        Trouble.CONTAINER_NOT_CREATED,
        Trouble.QUOTA_EXCEEDED,
        Trouble.NO_CPU,
        Trouble.NO_MEMORY,
        Trouble.NO_GPU,
        Trouble.NO_RESOURCE,
        Trouble.TAINT_NOT_TOLERATED,
        Trouble.NO_MATCHING_NODE,
        Trouble.SCHEDULING_GATED,
        Trouble.CLAIM_NOT_BOUND,
        Trouble.RIGHT_MISSING,
        Trouble.POD_REFUSED,
        Trouble.API_SERVER_AWAY,
    }
)
"""The answer to `--why_pending`."""

SLOW = frozenset(
    {
        Trouble.CODE_HANGS,
        Trouble.NO_CHANGE,
        Trouble.COLLECTIVE_HANGS,
        Trouble.WORKER_SILENT,
        Trouble.WORKER_THROTTLED,
        Trouble.WORKER_SLOW,
        Trouble.INPUT_SLOW,
        Trouble.PS_OVERLOADED,
        Trouble.TOO_MANY_WORKERS,
        Trouble.GROWTH_ENDED,
    }
)
"""The answer to `--why_slow`, beside where the time went."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a trouble, as far as the events give it.

    Attributes:
        slot_seconds: for which the pod's slot was not filled, summed over slots.
        tasks: Tasks that were reopened because the model had lost parts of them.
        records: left out of the model.
        repeated: records that the model had lost, and that are computed again.
        is_open: it still costs.
    """

    slot_seconds: float = 0.0
    tasks: int = 0
    records: int = 0
    repeated: int = 0
    is_open: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.slot_seconds + other.slot_seconds,
            self.tasks + other.tasks,
            self.records + other.records,
            self.repeated + other.repeated,
            self.is_open or other.is_open,
        )


_NO_COST = Cost()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One trouble, or several alike.

    Attributes:
        subjects: the objects affected, as events name them: worker-3, job, task-17; the newest first.
        at: when it was last seen; seconds since the Unix epoch.
        seen: the observation, one sentence.
        why: the evidence, the nearest cause first; an item may have several lines.
        done: the system's reaction; empty: none.
        advice: steps for the user; empty: nothing has to be done.
        evidence: the sources of `why`, by name: exit_code, reason, message, ….
        events: numbers of the events that show it.
        is_fatal: the job has ended by it.
        key: diagnoses of one trouble with one key are merged.
        count: how often it happened.
    """

    trouble: Trouble
    subjects: tuple[str, ...]
    at: float
    seen: str
    why: tuple[str, ...] = ()
    done: str = ""
    cost: Cost = field(default_factory=Cost)
    advice: str = ""
    evidence: Mapping[str, Detail] = field(default_factory=dict)
    events: tuple[int, ...] = ()
    is_fatal: bool = False
    key: str = ""
    count: int = 1

    @classmethod
    def of(
        cls,
        event: JobEvent,
        trouble: Trouble,
        seen: str,
        why: tuple[str, ...],
        done: str,
        advice: str = "",
        *,
        cost: Cost = _NO_COST,
        subject: str = "",
        found: Mapping[str, Detail] | None = None,
        is_fatal: bool = False,
        key: str = "",
    ) -> Self:
        """Return the diagnosis of one event.

        Args:
            subject: empty: that of the event.
            found: evidence beside that of the event.
        """
        evidence = {**evidence_of(event), **(found or {})}
        subjects, events = (subject or event.subject,), (event.number,)
        return cls(trouble, subjects, event.at, seen, why, done, cost, advice, evidence, events, is_fatal, key)

    @property
    def subject(self) -> str:
        """The newest subject."""
        return self.subjects[0]

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``; docs/troubles.md lists its keys."""
        return {
            "trouble": self.trouble.value,
            "subjects": list(self.subjects),
            "at": self.at,
            "count": self.count,
            "is_fatal": self.is_fatal,
            "seen": self.seen,
            "why": list(self.why),
            "done": self.done,
            "cost": {
                "slot_seconds": round(self.cost.slot_seconds, 3),
                "tasks": self.cost.tasks,
                "records": self.cost.records,
                "repeated": self.cost.repeated,
                "is_open": self.cost.is_open,
            },
            "advice": self.advice,
            "evidence": dict(self.evidence),
            "events": list(self.events),
        }


@dataclass(frozen=True)
class Facts:
    """Everything that is known of a job.

    Attributes:
        job: The job, with the last status of its master and the pods as the cluster shows them.
        history: its events, as far as they are kept.
        now: Seconds since the Unix epoch.
        master_log: the end of the log of a master that ends again and again; empty: it does not, or its log is gone.
    """

    job: JobInfo
    history: EventHistory
    now: float
    master_log: str = ""

    def of(self, *kinds: EventKind) -> list[JobEvent]:
        """Return the events of some kinds, the oldest first."""
        return [event for event in self.history.events if event.kind in kinds]

    def about(self, subject: str) -> list[JobEvent]:
        """Return the events of a subject, the oldest first."""
        return [event for event in self.history.events if event.subject == subject]

    def after(self, event: JobEvent, subject: str, *kinds: EventKind) -> JobEvent | None:
        """Return the first later event of some kinds about a subject."""
        later = (e for e in self.about(subject) if e.number > event.number and e.kind in kinds)
        return next(later, None)

    def consequences(self, *events: JobEvent) -> list[JobEvent]:
        """Return the direct and indirect consequences of some events, the oldest first."""
        found = {event.number for event in events}
        follow = []
        for event in self.history.events:  # in order of number, and a cause has a smaller one
            if event.cause in found:
                found.add(event.number)
                follow.append(event)
        return follow

    def has_ended_by(self, *events: JobEvent) -> bool:
        """Return whether the job has failed as a consequence of one of these events."""
        return any(event.kind is EventKind.JOB_FAILED for event in self.consequences(*events))

    def flag(self, name: str) -> Any:
        """Return the value of a flag; None if there is no specification."""
        return None if self.job.spec is None else getattr(self.job.spec, name)

    @property
    def is_over(self) -> bool:
        """The job has ended, or nothing of it runs."""
        return self.job.has_ended or self.job.phase is Phase.STOPPED

    @cached_property
    def end(self) -> float:
        """Until when things can have cost something: now, or the end of the job."""
        ended_at = self.job.status.updated_at
        return min(self.now, ended_at) if self.is_over and ended_at else self.now


def evidence_of(event: JobEvent) -> dict[str, Detail]:
    """Return the details of an event, by name."""
    return {**event.details, **({"message": event.message} if event.message else {})}


def one_line(text: str) -> str:
    """Return the first line of a text; its tail is in the evidence."""
    return text.strip().partition("\n")[0]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 task, 2 tasks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return names joined for a sentence: the first `most`, then the number of the others."""
    every = list(dict.fromkeys(names))
    shown = every[:most]
    if len(every) > most:
        return f"{', '.join(shown)} and {len(every) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


_READY = (EventKind.WORKER_REGISTERED, EventKind.PS_READY)


def evidence(facts: Facts, event: JobEvent) -> tuple[str, ...]:
    """Return an event and its causes, the nearest first, as lines of evidence."""
    chain = [event, *facts.history.chain(event)]
    return tuple(stated(one) for one in chain if one.kind is not EventKind.POD_CREATED)


def stated(event: JobEvent) -> str:
    """Return an event as evidence: kind, subject and message; a program's own error keeps its lines."""
    rest = event.message.partition("\n")[2]
    said = describe(event)
    return f"{event.kind} of {event.subject}{f': {said}' if said else ''}" + (f"\n{rest}" if rest else "")


def recovery(facts: Facts, *lost: JobEvent) -> tuple[str, Cost]:
    """Describe the recovery from the loss of a pod, and its cost."""
    follow = facts.consequences(*lost)
    sentences, cost = [], Cost()
    for event in lost:
        sentence, own = _successor(facts, event, follow)
        sentences += [sentence] if sentence else []
        cost += own
    sentences += group_change(follow)
    reopened = [event for event in follow if event.kind is EventKind.EPOCH_REOPENED]
    if reopened:
        tasks = sum(int(event.details.get("tasks", 0)) for event in reopened)
        records = sum(int(event.details.get("records", 0)) for event in reopened)
        cost += Cost(tasks=tasks, repeated=records)
        epochs = listed(event.subject.replace("-", " ") for event in reopened)
        what = plural(records, "record") if records else f"minibatches of {plural(tasks, 'task')}"
        sentences.append(f"{what} that the model had lost were planned again, in {epochs}")
    failed = next((event for event in follow if event.kind is EventKind.JOB_FAILED), None)
    if failed is not None:
        why = one_line(failed.message)
        if why.endswith("; its last lines:"):  # in parentheses; they are in the evidence
            why = f"{why.removesuffix('; its last lines:')})"
        sentences.append(f"the job was ended: {why}")
        cost = replace(cost, is_open=False)
    return as_sentences(sentences), cost


def as_sentences(parts: list[str]) -> str:
    """Return parts as sentences."""
    return " ".join(f"{part[:1].upper()}{part[1:]}{'' if part.endswith('.') else '.'}" for part in parts if part)


def successor(facts: Facts, lost: JobEvent) -> tuple[JobEvent | None, JobEvent | None, JobEvent | None]:
    """Return the creation of a lost pod's successor, and the first of its readiness and its own loss.

    Each is None while it has not happened.
    """
    created = next((e for e in facts.of(EventKind.POD_CREATED) if e.cause == lost.number), None)
    if created is None:
        return None, None, None
    ready = facts.after(created, created.subject, *_READY)
    again = facts.after(created, created.subject, EventKind.POD_LOST, EventKind.POD_GIVEN_UP)
    if ready is not None and again is not None:
        ready, again = (ready, None) if ready.number < again.number else (None, again)
    return created, ready, again


def _successor(facts: Facts, lost: JobEvent, follow: list[JobEvent]) -> tuple[str, Cost]:
    """Describe the successor of a lost pod, and how long its slot was empty."""
    created, ready, again = successor(facts, lost)
    ended = next((e for e in follow if e.kind is EventKind.JOB_FAILED), None)
    until = facts.end if ended is None else ended.at
    if created is None:
        is_open = ended is None and not facts.is_over
        if ended is not None:
            return "", Cost()
        return ("no successor has been created yet" if is_open else ""), Cost(
            max(0.0, until - lost.at), is_open=is_open
        )
    name = created.subject if created.subject != lost.subject else f"a new process of {created.subject}"
    if ready is not None:
        seconds = ready.at - lost.at
        restored = str(ready.details.get("restored_from") or "")
        source = f", restored from {restored}" if restored else ""
        return f"its place was taken by {name} after {seconds:.1f} s{source}", Cost(seconds)
    if again is not None:
        return f"a successor, {name}, was created, and was lost before it was ready", Cost(max(0.0, again.at - lost.at))
    seconds = max(0.0, until - lost.at)
    is_open = ended is None and not facts.is_over
    what = "has not registered yet" if is_open else "had not registered at the end of the job"
    return f"a successor, {name}, was created and {what}", Cost(seconds, is_open=is_open)


def group_change(follow: list[JobEvent]) -> list[str]:
    """Return how a group formed again after an event, as part of a sentence; empty: none did."""
    formed = next((event for event in follow if event.kind is EventKind.GROUP_FORMED), None)
    if formed is None:
        return []
    before, after = formed.details.get("before", 0), formed.details.get("after", 0)
    seconds = float(formed.details.get("seconds", 0.0))
    return [f"the group formed again in {seconds:.2f} s with {after} members, {before} before"]
