"""The recovery of a job from faults, read from its events and its status.  Pure.

Seconds are counted between two events of the journal, so by one clock, where the loss of a pod is one; else from the
end of the fault to the first status in which training has continued, or to the first checkpoint on the disk, by the
clock of this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl_client.chaos.faults import Fault, FaultKind, Victim
from elasticdl_client.explain import diagnosis as explained
from elasticdl_client.explain.diagnosis import Facts, plural
from elasticdl_client.goodput import goodput, summary
from elasticdl_client.job_events import EventKind, JobEvent
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs import words
from elasticdl_client.jobs.store import Phase

_LOSSES = (EventKind.POD_LOST, EventKind.POD_GIVEN_UP, EventKind.POD_STOPPED)
_MASTERS = (EventKind.MASTER_RESTARTED, EventKind.JOB_RESUMED)
_LOSS_S = 15.0  # a loss that no event shows by then was none: the pod was leaving already


@dataclass(frozen=True, slots=True)
class Moment:
    """A job as it was at a time.

    Attributes:
        at: Seconds since the Unix epoch.
        event: the number of its newest event.
        checkpoint: the number of minibatches in its newest checkpoint, where that can be seen.
    """

    at: float
    event: int
    status: JobStatus
    checkpoint: int = 0

    @classmethod
    def of(cls, facts: Facts, checkpoint: int = 0) -> Moment:
        events = facts.history.events
        return cls(facts.now, events[-1].number if events else 0, facts.job.status, checkpoint)


@dataclass(slots=True)
class Injection:
    """A fault that was injected.

    Attributes:
        victim: None: a fault that is not one of pods.
        ended: when the fault was over; of a kill at once; None: it still lasts.
        seconds: the recovery took; None: it has not been seen.
        how: the recovery, in words.
    """

    fault: Fault
    victim: Victim | None
    began: Moment
    ended: Moment | None = None
    seconds: float | None = None
    how: str = ""

    @property
    def subject(self) -> str:
        return self.victim.subject if self.victim is not None else "the disk of the checkpoints"

    def look(self, facts: Facts, checkpoint: int = 0) -> bool:
        """Return whether the job has recovered, and take note of how.

        Args:
            checkpoint: see `Moment`.
        """
        found = _recovery(self, facts, checkpoint)
        if found is not None:
            self.seconds, self.how = max(0.0, found[0]), found[1]
        return found is not None

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``."""
        return {
            "fault": str(self.fault),
            "subject": self.subject,
            "at": self.began.at,
            "recovery_seconds": None if self.seconds is None else round(self.seconds, 3),
            "recovery": self.how,
        }


def _recovery(injection: Injection, facts: Facts, checkpoint: int) -> tuple[float, str] | None:
    """Return the seconds of a recovery and its description; None if it is not over."""
    began, ended = injection.began, injection.ended
    if ended is None:
        return None
    if injection.fault.kind is FaultKind.FILL_DISK:
        saved = next((event for event in facts.of(EventKind.CHECKPOINT_SAVED) if event.number > ended.event), None)
        if saved is not None:
            return saved.at - ended.at, f"{saved.subject} is complete"
        is_of_worker = not facts.job.status.ps_wanted  # of checkpoints within a second the newest has an event
        is_saved = is_of_worker and checkpoint > ended.checkpoint
        return (facts.now - ended.at, f"checkpoint-{checkpoint} is complete") if is_saved else None
    assert injection.victim is not None
    lost = _first(facts, began.event, injection.victim.subject, _LOSSES)
    if lost is not None:
        return _replacement(facts, lost)
    status = facts.job.status
    trains = status.updated_at > ended.status.updated_at and status.records_processed > ended.status.records_processed
    if not trains or not _is_whole(status, began.status):
        return None
    if injection.fault.role == "master" and injection.fault.kind is FaultKind.KILL:
        is_new = any(event.number > began.event for event in facts.of(*_MASTERS))
        return (facts.now - ended.at, "the master has restarted, and training continues") if is_new else None
    if injection.fault.kind is FaultKind.KILL and status.updated_at < began.status.updated_at + _LOSS_S:
        return None
    return facts.now - ended.at, "training continues"


def _replacement(facts: Facts, lost: JobEvent) -> tuple[float, str] | None:
    """From the loss of a pod to its successor at work; one that is lost before has a successor of its own."""
    first = lost
    while True:
        _, ready, again = explained.successor(facts, lost)
        if ready is not None:
            break
        if again is None:
            return None
        lost = again
    restored = ready.details.get("restored_from")
    how = f"{ready.subject} is ready" if ready.kind is EventKind.PS_READY else f"{ready.subject} took its place"
    how += f", restored from {restored}" if restored else ""
    if not facts.job.status.num_worlds or ready.kind is EventKind.PS_READY:
        return ready.at - first.at, how
    formed = next((event for event in facts.of(EventKind.GROUP_FORMED) if _has(event, ready)), None)
    if formed is None:
        return None
    members = "processes" if "processes" in formed.details else "workers"
    return formed.at - first.at, f"{how} in a group of {formed.details.get('after', '?')} {members}"


def _has(formed: JobEvent, joined: JobEvent) -> bool:
    """Return whether a worker is a member of a group that formed after it had registered."""
    return (
        formed.number > joined.number
        and joined.subject.removeprefix("worker-") in str(formed.details.get("workers", "")).split()
    )


def _first(facts: Facts, after: int, subject: str, kinds: Sequence[EventKind]) -> JobEvent | None:
    return next((event for event in facts.about(subject) if event.number > after and event.kind in kinds), None)


def _is_whole(now: JobStatus, before: JobStatus) -> bool:
    """Return whether as many pods work as before."""
    return (
        now.workers_alive >= min(before.workers_alive, now.workers_wanted)
        and now.ps_alive >= before.ps_alive
        and len(now.world) >= min(len(before.world), now.workers_wanted * now.processes_per_worker)
    )


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The faults of a run, and their cost from its first fault on.

    Attributes:
        facts: Facts about the job at the end of the run.
        begin: Moment at which the run began; None: no fault was injected.
        is_interrupted: the user has ended the run.
    """

    facts: Facts
    injections: tuple[Injection, ...]
    begin: Moment | None
    is_interrupted: bool = False

    @property
    def complaints(self) -> list[str]:
        """The reasons why the job has not survived the faults."""
        job, records, found = self.facts.job, self.records(), []
        if job.has_ended and job.phase is not Phase.SUCCEEDED:
            found.append("the job has failed")
        elif job.phase is Phase.STOPPED:
            found.append("the job has stopped: it has no master")
        if records["lost"]:
            found.append(f"{plural(records['lost'], 'record')} lost")
        if records["repeated"] and not self._is_bound:
            found.append(f"{plural(records['repeated'], 'record')} repeated")
        open_faults = [one for one in self.injections if one.seconds is None]
        if open_faults and not job.has_ended and not self.is_interrupted:
            found.append(f"no recovery from {plural(len(open_faults), 'fault')}")
        return found

    def records(self) -> dict[str, int]:
        """Return the records since the beginning of the run: lost, repeated in the model, and computed again."""
        now = self.facts.job.status
        before = self.begin.status if self.begin is not None else now
        found = {name: now.records.get(name, 0) - before.records.get(name, 0) for name in ("lost", "repeated")}
        again = [status.records_processed - status.records_done for status in (before, now)]
        return {**found, "computed_again": again[1] - again[0]}

    def worker_seconds(self) -> dict[str, float]:
        """Return the time of the workers since the beginning of the run, by `goodput.SlotState`."""
        before = self.begin.status.worker_seconds if self.begin is not None else {}
        now = self.facts.job.status.worker_seconds
        return {state: max(0.0, seconds - before.get(state, 0.0)) for state, seconds in now.items()}

    @property
    def _is_bound(self) -> bool:
        return any(epoch.is_bound for epoch in self.facts.job.status.coverage)

    def text(self) -> str:
        """Return a table of the faults, and the lines below it."""
        rows = [["FAULT", "INJECTED", "RECOVERED", "MEDIAN", "MAX"]]
        for name, one in self._by_fault().items():
            seconds = [_seconds(one[key]) for key in ("median_seconds", "max_seconds")]
            rows.append([name, str(one["injected"]), str(one["recovered"]), *seconds])
        lines = [words.table(rows)] if self.injections else ["No fault was injected."]
        if self.begin is not None:
            records, bound = self.records(), "at most " if self._is_bound else ""
            lines.append(
                f"records: lost {records['lost']}, repeated {bound}{records['repeated']}, "
                f"computed again {records['computed_again']:,}"
            )
            before = goodput(self.begin.status.worker_seconds)
            lines.append(f"goodput: {summary(self.worker_seconds())} ({100 * before:.0f} % useful before)")
        lines.append(f"job {self.facts.job.name}: {', '.join([self.facts.job.phase.value, *self.complaints])}")
        return "\n".join(lines)

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``; docs/chaos.md lists its keys."""
        job = self.facts.job
        return {
            **job.identity,
            "phase": job.phase.value,
            "complaints": self.complaints,
            "recovery": self._by_fault(),
            "records": self.records(),
            "goodput": goodput(self.worker_seconds()),
            "goodput_before": goodput(self.begin.status.worker_seconds) if self.begin is not None else 0.0,
            "worker_seconds": self.worker_seconds(),
            "faults": [injection.to_plain() for injection in self.injections],
        }

    def _by_fault(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in sorted({str(injection.fault) for injection in self.injections}):
            of_fault = [injection for injection in self.injections if str(injection.fault) == name]
            seconds = [injection.seconds for injection in of_fault if injection.seconds is not None]
            found[name] = {
                "injected": len(of_fault),
                "recovered": len(seconds),
                "median_seconds": round(statistics.median(seconds), 3) if seconds else None,
                "max_seconds": round(max(seconds), 3) if seconds else None,
            }
        return found


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
