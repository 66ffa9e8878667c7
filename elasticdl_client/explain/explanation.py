"""Explanation: all troubles of a job, alike ones as one, the newest first; and those that a question asks for.

`text`: an explanation as people read it, one paragraph a trouble, with its evidence.  Prints nothing.
"""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl_client import goodput
from elasticdl_client.explain import ends, failures, pending, slowness
from elasticdl_client.explain.diagnosis import PENDING, SLOW, Cost, Diagnosis, Facts, listed, plural
from elasticdl_client.job_events import ROUTINE, EventKind
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.progress import age

_DETECTORS: tuple[Callable[[Facts], Iterator[Diagnosis]], ...] = (
    ends.lost_pods,
    ends.master,
    ends.outages,
    pending.waiting_pods,
    pending.pods_without_events,
    failures.failed_tasks,
    failures.rejected_models,
    failures.losses,
    failures.excluded,
    failures.unreadable_data,
    failures.checkpoints,
    failures.exports,
    failures.stops,
    slowness.hangs,
    slowness.standing_workers,
    slowness.standing_groups,
    slowness.lost_leases,
    slowness.stragglers,
    slowness.input_bound,
    slowness.overloaded_servers,
    slowness.too_many_workers,
    slowness.ended_growth,
)


@dataclass(frozen=True, slots=True)
class Question:
    """The subject of an explanation; without any, all of the job.

    Attributes:
        pending: why pods do not start.
        slow: why it is not faster.
        pod: worker-3, ps-0 or master.
        epoch: from 1; 0: all.
    """

    pending: bool = False
    slow: bool = False
    pod: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer.

    Attributes:
        goodput: the useful share of the workers' time; None while there is none.
        summed_up: events that are not kept any more, so that no diagnosis counts them; without routine.
    """

    facts: Facts
    question: Question
    diagnoses: tuple[Diagnosis, ...]
    goodput: float | None
    summed_up: int

    def to_plain(self) -> dict[str, Any]:
        """Return the object of ``--output=json``; docs/troubles.md lists its keys."""
        job = self.facts.job
        return {
            **job.identity,
            "phase": job.phase.value,
            "goodput": self.goodput,
            "worker_seconds": dict(job.status.worker_seconds),
            "ps_seconds": dict(job.status.ps_seconds),
            "summed_up": self.summed_up,
            "troubles": [diagnosis.to_plain() for diagnosis in self.diagnoses],
        }


def explain(facts: Facts, question: Question | None = None) -> Explanation:
    """Return all troubles that the facts show, or those that a question asks for."""
    asked = question or Question()
    found = [diagnosis for detector in _DETECTORS for diagnosis in detector(facts)]
    found += failures.others(facts, found)
    shown = grouped(diagnosis for diagnosis in found if _concerns(facts, diagnosis, asked))
    seconds = facts.job.status.worker_seconds
    return Explanation(
        facts,
        asked,
        tuple(shown),
        round(goodput.goodput(seconds), 4) if seconds else None,
        sum(count for kind, count in facts.history.summed_up.items() if kind not in ROUTINE),
    )


def grouped(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Merge similar diagnoses into the newest one; sort the newest first, but first the cause of the job's end."""
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for diagnosis in diagnoses:
        groups.setdefault((diagnosis.trouble, diagnosis.key), []).append(diagnosis)
    merged = [_merged(sorted(group, key=lambda one: (one.at, one.events))) for group in groups.values()]
    return sorted(merged, key=lambda one: (not one.is_fatal, -one.at, one.trouble))


def _merged(group: Sequence[Diagnosis]) -> Diagnosis:
    newest = next((one for one in reversed(group) if one.is_fatal), group[-1])
    return dataclasses.replace(
        newest,
        subjects=tuple(dict.fromkeys(subject for one in (newest, *reversed(group)) for subject in one.subjects)),
        at=max(one.at for one in group),
        cost=sum((one.cost for one in group), Cost()),
        events=tuple(dict.fromkeys(number for one in group for number in one.events)),
        is_fatal=any(one.is_fatal for one in group),
        count=len(group),
    )


def _concerns(facts: Facts, diagnosis: Diagnosis, question: Question) -> bool:
    """Return whether a diagnosis belongs to the answer."""
    if question.pending and diagnosis.trouble not in PENDING:
        return False
    if question.slow and diagnosis.trouble not in SLOW and not diagnosis.cost.slot_seconds:
        return False
    if question.pod and not _is_about(facts, diagnosis, question.pod):
        return False
    return not question.epoch or _is_in_epoch(facts, diagnosis, question.epoch)


def _is_about(facts: Facts, diagnosis: Diagnosis, pod: str) -> bool:
    if pod in diagnosis.subjects:
        return True
    if pod.startswith("worker-") and str(diagnosis.evidence.get("worker", "")) == pod.removeprefix("worker-"):
        return True
    events = facts.history.by_number()
    chain = (one for number in diagnosis.events if number in events for one in facts.history.chain(events[number]))
    return any(event.subject == pod for event in chain)


def _is_in_epoch(facts: Facts, diagnosis: Diagnosis, epoch: int) -> bool:
    """Return whether an event names the epoch, or happened between the epoch's start and its coverage."""
    if "epoch" in diagnosis.evidence:
        return diagnosis.evidence["epoch"] == epoch
    subject = f"epoch-{epoch}"
    about = facts.about(subject)
    started = next((event.at for event in about if event.kind is EventKind.EPOCH_STARTED), None)
    if started is None:
        return False
    covered = [event.at for event in about if event.kind is EventKind.EPOCH_COVERED]
    return started <= diagnosis.at <= (covered[-1] if covered else facts.end)


_HEAD_WIDTH = 9
_MAX_LINES = 16  # of one piece of evidence; the others are in --output=json
_STATES = {
    Phase.PENDING: "is pending",
    Phase.RUNNING: "is running",
    Phase.SUCCEEDED: "has succeeded",
    Phase.FAILED: "has failed",
    Phase.STOPPED: "has stopped",
}


def text(explanation: Explanation, width: int) -> str:
    """Return the output of `elasticdl explain`.

    Args:
        explanation: Explanation of a job.
        width: Maximum characters of a line; lines of evidence are never broken.
    """
    lines = [_head(explanation)]
    if explanation.question.slow and (spent := _spent(explanation.facts.job)):
        lines += ["", *spent]
    for number, diagnosis in enumerate(explanation.diagnoses, 1):
        lines += ["", *_paragraph(number, diagnosis, explanation.facts, width)]
    if explanation.summed_up:
        older = plural(explanation.summed_up, "older event")
        lines += ["", f"{older} of the job are not kept any more, and not explained."]
    return "\n".join(lines)


def _head(explanation: Explanation) -> str:
    job, question = explanation.facts.job, explanation.question
    start = f"Job {job.name} {_STATES[job.phase]}"
    if explanation.goodput is not None:
        start += f"; {100 * explanation.goodput:.0f} % of its workers' time was useful"
    count = len(explanation.diagnoses)
    if count:
        newest = ", the newest first" if count > 1 else ""
        return f"{start}. {plural(count, 'trouble')}{_asked(question)}{newest}:"
    if job.note:
        return f"{start}. {job.note}"
    return f"{start}. No trouble{_asked(question)} is known."


def _asked(question: Question) -> str:
    parts = [f" of {question.pod}"] if question.pod else []
    parts += [f" in epoch {question.epoch}"] if question.epoch else []
    parts += [" that keeps pods from starting"] if question.pending else []
    parts += [" that takes time"] if question.slow else []
    return "".join(parts)


def _spent(job: JobInfo) -> list[str]:
    """Return one line per role about how its time was spent."""
    pairs = (("workers", job.status.worker_seconds), ("parameter servers", job.status.ps_seconds))
    return [f"Time of the {name}: {goodput.summary(seconds)}." for name, seconds in pairs if seconds]


def _paragraph(number: int, diagnosis: Diagnosis, facts: Facts, width: int) -> list[str]:
    parts = [
        ("Seen", _seen(diagnosis, facts.now)),
        ("Done", diagnosis.done),
        ("Cost", _cost(diagnosis)),
        ("To do", diagnosis.advice),
    ]
    lines = {name: _wrapped(name, said, width) for name, said in parts if said}
    why = [line for piece in diagnosis.why for line in _piece(piece)]
    evidence = [f"{'Why:' if k == 0 else '':<{_HEAD_WIDTH}}{line}" for k, line in enumerate(why)]
    body = [*lines.pop("Seen"), *evidence, *(line for piece in lines.values() for line in piece)]
    return [f"{number}. {diagnosis.trouble.value}", *(f"   {line}" for line in body)]


def _seen(diagnosis: Diagnosis, now: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(diagnosis.at))
    ago = f"{when}, {age(now - diagnosis.at)} ago" if diagnosis.at else ""
    seen = diagnosis.seen.rstrip(".")
    if diagnosis.count > 1:
        others = f" ({listed(diagnosis.subjects)})" if len(diagnosis.subjects) > 1 else ""
        return f"{seen}. This happened {diagnosis.count} times{others}, last at {ago}."
    return f"{seen} ({ago})." if ago else f"{seen}."


def _piece(piece: str) -> list[str]:
    lines = piece.splitlines()
    shown = lines[-_MAX_LINES:]
    return ["…", *shown] if len(lines) > _MAX_LINES else shown


def _cost(diagnosis: Diagnosis) -> str:
    cost, role = diagnosis.cost, diagnosis.subject.partition("-")[0]
    parts = []
    if cost.slot_seconds >= 0.05:
        slots = {"worker": "of worker slots", "ps": "of server slots"}.get(role, "of the workers' time")
        parts.append(f"{cost.slot_seconds:,.1f} s {slots}{' so far' if cost.is_open else ''}")
    if cost.repeated:
        parts.append(f"{plural(cost.repeated, 'record')} computed again")
    elif cost.tasks:
        parts.append(f"minibatches of {plural(cost.tasks, 'task')} were computed again")
    if cost.records:
        parts.append(f"{plural(cost.records, 'record')} left out of the model")
    return f"{'; '.join(parts)}." if parts else ""


def _wrapped(name: str, said: str, width: int) -> list[str]:
    head = f"{name + ':':<{_HEAD_WIDTH}}"
    room = max(40, width - 3)
    return textwrap.wrap(
        said, room, initial_indent=head, subsequent_indent=" " * _HEAD_WIDTH, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
