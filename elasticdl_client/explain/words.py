"""An explanation as people read it: one paragraph a trouble, with its evidence.  Prints nothing."""

from __future__ import annotations

import textwrap
import time

from elasticdl_client import goodput
from elasticdl_client.durations import age
from elasticdl_client.explain.diagnosis import Diagnosis, Facts, listed, plural
from elasticdl_client.explain.explanation import Explanation, Question
from elasticdl_client.jobs.job import JobInfo, Phase

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
        explanation: of a job.
        width: of a line; evidence is never broken.
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
    """Where the time went."""
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
