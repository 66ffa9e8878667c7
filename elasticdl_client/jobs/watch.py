"""`elasticdl status --watch`: a job's status to its end, redrawn on a terminal, elsewhere a line for each change.

Only looks: the job does not need it, and it waits for an API server that is away.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from elasticdl_client import progress, terminal_text
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.jobs import words
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.news import MAX_UNTHINNED, News

_LOOK_S = 1.0


class _View(Protocol):
    """Three verbs."""

    def show(self, job: JobInfo, history: EventHistory | None) -> None:
        """A job as it is now, with its events as far as they could be read."""
        ...

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def watch(
    job: JobInfo, find: Callable[[], JobInfo | None], read_events: Callable[[JobInfo], EventHistory], form: str
) -> int:
    """Shows a job until it has ended; the exit code is the job's.

    Args:
        find: the job as it is now.
        read_events: returns its events.
        form: json or yaml, an object for each change; empty: text for people.

    Raises:
        JobError: the job was deleted.
        ClusterError: the cluster refuses to tell.
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
    """Return the events of a job; None where they cannot be read now."""
    try:
        return read_events(job)
    except ElasticDLError:
        return None


def _view(stream: TextIO, form: str, news: News) -> _View:
    if form:
        return _Structured(form)
    return _Page(stream, news) if stream.isatty() else _Lines(stream, news)


class _Lines:
    """The lines of a job that is followed from its start, and each change of its phase."""

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
    """The page of `elasticdl status`, redrawn in place, below what has happened since it was first shown."""

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
        page = terminal_text.paint_phases(words.page(job, time.time()), self._console.file)
        self._live.update(Text.from_ansi(page, no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def close(self) -> None:
        self._live.vertical_overflow = "visible"  # the last display stays, in full
        self._live.stop()


class _Structured:
    """An object whenever it is another one."""

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
