"""Views of jobs, redrawn on a terminal: `elasticdl top`, `elasticdl list --watch`, `elasticdl status --watch`.

Without a terminal, `top` prints one state, `list --watch` prints a row when it changes, as kubectl does, and `status
--watch` prints a line for each change until the job has ended.  They only read: no job depends on them, and they
continue when an unreachable cluster answers again.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from elasticdl_client import goodput, progress
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.jobs import words
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.news import MAX_UNTHINNED, News
from elasticdl_client.progress import age

_LOOK_S = 1.0


class _View(Protocol):
    """Shows the states of one job."""

    def show(self, job: JobInfo, history: EventHistory | None) -> None:
        """Show the current state of a job, with its events as far as they could be read."""
        ...

    def say(self, line: str) -> None:
        """Print a permanent line."""
        ...

    def close(self) -> None: ...


def watch(
    job: JobInfo, find: Callable[[], JobInfo | None], read_events: Callable[[JobInfo], EventHistory], form: str
) -> int:
    """Show a job until it has ended; return the job's exit code.

    Args:
        find: Returns the current state of the job, None once it is deleted.
        read_events: Returns its events.
        form: json or yaml: an object for each change; empty: text for people.

    Raises:
        JobError: The job was deleted.
        ClusterError: The cluster refuses a request.
    """
    history = None if form else _events(job, read_events)
    view = _view(sys.stdout, form, News(job.status, history))
    outage = False
    pause = threading.Event()
    try:
        while True:
            view.show(job, history)
            if job.has_ended:
                return job.status.exit_code or int(job.phase != "Succeeded")
            pause.wait(_LOOK_S)
            try:
                found = find()
            except ClusterError as error:
                if not error.unreachable:
                    raise
                if not outage:
                    view.say(f"{error.what} The job keeps running; it is shown again as soon as the cluster answers.")
                outage = True
                continue
            if outage:
                view.say("The cluster answers again.")
                outage = False
            if found is None or found.created_at > job.created_at:
                raise JobError(f'job "{job.name}" was deleted while it was watched.')
            if not form and found.status.updated_at != job.status.updated_at:
                history = _events(found, read_events)
            job = found
    finally:
        view.close()


def _events(job: JobInfo, read_events: Callable[[JobInfo], EventHistory]) -> EventHistory | None:
    """Return the events of a job; None if they cannot be read now."""
    try:
        return read_events(job)
    except ElasticDLError:
        return None


def _view(stream: TextIO, form: str, news: News) -> _View:
    if form:
        return _Structured(form)
    return _Page(stream, news) if stream.isatty() else _Lines(stream, news)


class _Lines:
    """Prints the news of a job that is followed from its start, and each change of its phase."""

    def __init__(self, stream: TextIO, news: News) -> None:
        self._news = news
        self._display = progress.PlainDisplay(stream, news)
        self._shown: tuple[str, ...] = ()

    def show(self, job: JobInfo, history: EventHistory | None) -> None:
        said = (f"{job.name}: {job.phase}", *words.messages(job), words.waiting_for(job), words.what_to_do(job))
        for line in said:
            if line and line not in self._shown:
                self.say(line)
        self._shown = said
        if job.has_ended:
            for headline in self._news.lines(job.status, history):
                self.say(headline.text)
            for line in [progress.summary(job.status), *progress.coverage_lines(job.status, MAX_UNTHINNED)]:
                self.say(line)
        else:
            self._display.update(job.status, history)

    def say(self, line: str) -> None:
        self._display.say(line)

    def close(self) -> None:
        self._display.close()


class _Page:
    """The page of `elasticdl status`, redrawn in place, below the news since it was first shown."""

    def __init__(self, stream: TextIO, news: News) -> None:
        from rich.console import Console
        from rich.live import Live

        self._news = news
        self._console = Console(file=stream, highlight=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, job: JobInfo, history: EventHistory | None) -> None:
        from rich.text import Text

        for headline in self._news.lines(job.status, history):
            self._console.print(headline.text, style="yellow" if headline.is_trouble else None, markup=False)
        page = progress.paint_phases(words.page(job, time.time()), self._console.file)
        self._live.update(Text.from_ansi(page, no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def close(self) -> None:
        self._live.vertical_overflow = "visible"  # leave the last page on the screen, in full
        self._live.stop()


class _Structured:
    """Prints the job as an object whenever it changes."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._shown = ""

    def show(self, job: JobInfo, history: EventHistory | None) -> None:
        text = words.structured(job.to_plain(), self._form)
        if text != self._shown:
            self._shown = text
            print("---\n" + text if self._form == "yaml" else text, flush=True)

    def say(self, line: str) -> None:
        print(f"note: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is kept open."""


LOOK_S = 1.0
_NONE = "-"
_ORDER = (Phase.RUNNING, Phase.PENDING, Phase.STOPPED, Phase.FAILED, Phase.SUCCEEDED)
_MAX_MESSAGE = 80

Table = Callable[[Sequence[JobInfo]], str]


def top(list_jobs: Callable[[], Sequence[JobInfo]], form: str) -> int:
    """Show all jobs, and the pods of those that have not ended, until Ctrl-C; return the exit code.

    Args:
        list_jobs: Returns the current state of all jobs.
        form: json or yaml: print the objects once; empty: text for people.

    Raises:
        ElasticDLError: a runtime cannot be reached, or refuses.
    """
    if form:
        print(words.structured([job.to_plain() for job in list_jobs()], form))
    elif sys.stdout.isatty():
        _redraw(list_jobs, lambda jobs: screen(jobs, time.time()), sys.stdout)
    else:
        print(screen(list_jobs(), time.time()))
    return 0


def watch_list(list_jobs: Callable[[], Sequence[JobInfo]], table: Table, form: str) -> int:
    """Show the table of `elasticdl list` until Ctrl-C; return the exit code.

    Args:
        list_jobs: Returns the current state of all jobs.
        table: Formats it; the first line has the column names.
        form: json: print a list of objects on one line whenever it changes; else text for people.

    Raises:
        ElasticDLError: a runtime cannot be reached, or refuses.
    """
    if form != "json" and sys.stdout.isatty():
        _redraw(list_jobs, table, sys.stdout)
        return 0
    shown: set[str] = set()
    pause = threading.Event()
    while True:
        jobs = _try(list_jobs)
        if jobs is not None:
            lines = [_objects(jobs)] if form == "json" else table(jobs).splitlines()
            ageless = [dataclasses.replace(job, created_at=0.0) for job in jobs]  # a growing age is no change
            keys = lines if form == "json" else table(ageless).splitlines()
            for key, line in zip(keys, lines, strict=True):
                if key not in shown:
                    print(line, flush=True)
            shown = set(keys)
        pause.wait(LOOK_S)


def screen(jobs: Sequence[JobInfo], now: float) -> str:
    """Return the tables of `elasticdl top`: the jobs, running ones first, and the pods of those that have not ended.

    Args:
        now: Seconds since the Unix epoch.
    """
    ordered = sorted(jobs, key=lambda job: (_ORDER.index(job.phase), -job.created_at))
    heads = ["JOB", "WHERE", "PHASE", "RECORDS", "RATE", "ETA", "GOODPUT", "WORKERS", "PS", "STEP", "LOSS", "AGE"]
    by_phase = collections.Counter(job.phase for job in ordered)
    counts = ", ".join(f"{count} {phase.value.lower()}" for phase, count in by_phase.items())
    lines = [f"{time.strftime('%H:%M:%S', time.localtime(now))}   jobs: {counts or 'none'}", ""]
    lines += words.table([heads, *(_job_row(job, now) for job in ordered)]).splitlines()
    going = [job for job in ordered if not job.has_ended]
    with_devices = any(job.status.devices for job in going)
    pods = [row for job in going for row in _pod_rows(job, with_devices)]
    if pods:
        device = ["GPU MEMORY"] if with_devices else []
        lines += ["", *words.table([["JOB", "POD", "PHASE", "RESTARTS", *device, "MESSAGE"], *pods]).splitlines()]
    return "\n".join(lines)


def _job_row(job: JobInfo, now: float) -> list[str]:
    status, runs = job.status, job.phase is Phase.RUNNING
    share = f"{status.records_done / status.records_total:.0%}" if status.records_total else f"{status.records_done:,}"
    eta = status.eta_seconds if runs else None
    return [
        job.name,
        job.namespace or job.runtime.value,
        job.phase.value,
        share,
        f"{status.records_per_second:,.0f}/s" if runs else _NONE,
        _NONE if eta is None else age(eta),
        f"{goodput.goodput(status.worker_seconds):.0%}" if status.worker_seconds else _NONE,
        f"{status.workers_alive}/{status.workers_wanted}",
        f"{status.ps_alive}/{status.ps_wanted}" if status.ps_wanted else _NONE,
        f"{status.model_version:,}",
        _NONE if status.loss is None else f"{status.loss:.4g}",
        age(now - job.created_at) if job.created_at else _NONE,
    ]


def _pod_rows(job: JobInfo, with_devices: bool) -> list[list[str]]:
    prefix = f"elasticdl-{job.name}-"
    memory: dict[str, tuple[int, int]] = {}  # used and total bytes of all devices of a pod
    for one in job.status.devices:
        used, total = memory.get(name := f"{prefix}worker-{one.worker}", (0, 0))
        memory[name] = (used + one.used_bytes, total + one.total_bytes)
    devices = {name: progress.memory_text(*sizes) for name, sizes in memory.items()}
    return [
        [
            job.name,
            pod.name.removeprefix(prefix),
            pod.phase,
            str(pod.restarts),
            *([devices.get(pod.name, _NONE)] if with_devices else []),
            " ".join(pod.message.split())[:_MAX_MESSAGE],
        ]
        for pod in job.status.pods
        if pod.phase in ("Pending", "Running", "Failed")
    ]


def _objects(jobs: Sequence[JobInfo]) -> str:
    return words.json_text([job.to_plain() for job in jobs])


def _try(list_jobs: Callable[[], Sequence[JobInfo]]) -> Sequence[JobInfo] | None:
    """Return the jobs; None while a cluster cannot be reached.

    Raises:
        ElasticDLError: The cluster refuses.
    """
    try:
        return list_jobs()
    except ElasticDLError as error:
        if not isinstance(error, ClusterError) or not error.unreachable:
            raise
        return None


def _redraw(list_jobs: Callable[[], Sequence[JobInfo]], table: Table, stream: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, highlight=False, emoji=False)
    pause = threading.Event()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", screen=True) as live:
        while True:
            jobs = _try(list_jobs)
            shown = table(jobs) if jobs is not None else "The cluster does not answer; it is asked again."
            text = Text.from_ansi(progress.paint_phases(shown, stream), no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)
            pause.wait(LOOK_S)
