"""`elasticdl events`: the events of a job, as a table or as objects; with --follow also future ones.

It only reads: the job does not depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, describe, since
from elasticdl_client.jobs import words
from elasticdl_client.jobs.options import Options, seconds_of
from elasticdl_client.jobs.store import JobInfo, JobStore

WARNINGS = "warnings"  # a value of --kind: all kinds that are warnings
_LOOK_S = 0.5
_KIND_WIDTH = max(len(kind) for kind in EventKind)


def show(job: JobInfo, store: JobStore, options: Options) -> None:
    """Print the events of a job that the options select; with --follow also new ones, until the job has ended.

    Raises:
        FlagError: --kind names no kind.
        JobError: The events cannot be read.
    """
    wanted = _filter(options)
    if options.follow:
        for event in filter(wanted, _follow(job, store)):
            print(_document(event, options.output) if options.output else _line(event), flush=True)
        return
    history = store.journal(job).history
    events = list(filter(wanted, history.events))
    if options.output:
        print(words.structured([event.to_plain() for event in events], options.output))
    elif events:
        for line in _summary(history):
            print(line)
        print(table(events))
    else:
        print(f'No events of job "{job.name}" {job.where}.')


def table(events: Sequence[JobEvent]) -> str:
    """Return the events as a table, the oldest first."""
    rows = [(_time(e.at), str(e.number), _type(e), e.kind.value, e.subject, _message(e)) for e in events]
    return words.table([("TIME", "NUMBER", "TYPE", "KIND", "SUBJECT", "MESSAGE"), *rows])


def kinds_of(text: str) -> frozenset[EventKind]:
    """Return the kinds that --kind names; an empty set: all kinds.

    Raises:
        FlagError: there is no such kind.
    """
    kinds: set[EventKind] = set()
    known = {kind.value.lower(): kind for kind in EventKind}
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.lower() == WARNINGS:
            kinds |= {kind for kind in EventKind if JobEvent(0, 0.0, kind, "").is_trouble}
        elif name.lower() in known:
            kinds.add(known[name.lower()])
        else:
            near = known.get(nearest(name.lower(), list(known)))
            hint = f"Did you mean {near.value}?" if near else f"The kinds are {', '.join(EventKind)}, and {WARNINGS}."
            raise FlagError(f"--kind={name} is not a kind of event.", hint)
    return frozenset(kinds)


def _filter(options: Options) -> Callable[[JobEvent], bool]:
    kinds, age_s = kinds_of(options.kind), seconds_of(options.since)
    oldest = time.time() - age_s if age_s is not None else 0.0
    return lambda event: event.at >= oldest and (not kinds or event.kind in kinds)


def _follow(job: JobInfo, store: JobStore) -> Iterator[JobEvent]:
    """Yield each event of a job once, including new ones, until the job has ended or is deleted."""
    newest, pause = 0, threading.Event()
    while True:
        found = store.find(job.name)  # before the events: the last events are written before the phase changes
        for event in since(store.journal(job).history.events, newest):
            newest = event.number
            yield event
        if found is None or found.has_ended:
            return
        pause.wait(_LOOK_S)


def _document(event: JobEvent, form: str) -> str:
    """Return one object of a stream: a line of JSON, or a document of YAML."""
    plain = event.to_plain()
    return words.json_text(plain) if form == "json" else f"---\n{words.structured(plain, form)}"


def _line(event: JobEvent) -> str:
    return f"{_time(event.at)}   {event.kind.value.ljust(_KIND_WIDTH)}   {event.subject.ljust(9)}   {_message(event)}"


def _message(event: JobEvent) -> str:
    return describe(event) + (f" (follows from {event.cause})" if event.cause else "")


def _type(event: JobEvent) -> str:
    return "Warning" if event.is_trouble else "Normal"


def _time(at: float) -> str:
    """Return the local time of day, with the date if it is not today."""
    then, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def _summary(history: EventHistory) -> Iterable[str]:
    if history.summed_up:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(history.summed_up.items()))
        yield f"Older events, by kind: {counts}"
