"""The system's response to a trouble and its cost, read from the events that follow from it."""

from __future__ import annotations

from dataclasses import replace

from elasticdl_client.explain.diagnosis import Cost, Facts, listed, one_line, plural
from elasticdl_client.job_events import EventKind, JobEvent, describe

_READY = (EventKind.WORKER_REGISTERED, EventKind.PS_READY)


def evidence(facts: Facts, event: JobEvent) -> tuple[str, ...]:
    """An event and those that led to it, the nearest first, as lines of evidence."""
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
        sentences.append(f"the job was ended: {one_line(failed.message)}")
        cost = replace(cost, is_open=False)
    return as_sentences(sentences), cost


def as_sentences(parts: list[str]) -> str:
    """Parts as sentences."""
    return " ".join(f"{part[:1].upper()}{part[1:]}{'' if part.endswith('.') else '.'}" for part in parts if part)


def successor(facts: Facts, lost: JobEvent) -> tuple[JobEvent | None, JobEvent | None, JobEvent | None]:
    """Return the creation of a lost pod's successor, and what came first: its readiness, or its own loss.

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
    """How a group formed again after something, as a part of a sentence; empty: none did."""
    formed = next((event for event in follow if event.kind is EventKind.GROUP_FORMED), None)
    if formed is None:
        return []
    before, after = formed.details.get("before", 0), formed.details.get("after", 0)
    seconds = float(formed.details.get("seconds", 0.0))
    return [f"the group formed again in {seconds:.2f} s with {after} members, {before} before"]
