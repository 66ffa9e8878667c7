"""`elasticdl status --watch`: a job's status to its end, redrawn on a terminal, elsewhere a line for each change.

Only looks: the job does not need it, and it goes on without an API server until that answers again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from elasticdl_client import progress
from elasticdl_client.errors import JobError
from elasticdl_client.jobs import words
from elasticdl_client.jobs.job import Job
from elasticdl_client.kubernetes.api import ClusterError

_LOOK_S = 1.0


class _View(Protocol):
    """Three verbs."""

    def show(self, job: Job) -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None: ...


def watch(job: Job, find: Callable[[], Job | None], form: str) -> int:
    """Shows a job until it has ended; the exit code is the job's.

    Args:
        find: the job as it is now.
        form: json or yaml, an object for each change; empty: text for people.

    Raises:
        JobError: the job was deleted.
        ClusterError: the cluster refuses to tell.
    """
    view = _view(sys.stdout, form)
    outage = False
    pause = threading.Event()
    try:
        while True:
            view.show(job)
            if job.has_ended:
                return job.status.exit_code or int(job.phase != "Succeeded")
            pause.wait(_LOOK_S)
            try:
                found = find()
            except ClusterError as error:
                if not error.unreachable:
                    raise
                if not outage:
                    view.say(f"{error.what} The job goes on; it is shown again as soon as the cluster answers.")
                outage = True
                continue
            if outage:
                view.say("The cluster answers again.")
                outage = False
            if found is None or found.created_at > job.created_at:
                raise JobError(f'job "{job.name}" was deleted while it was watched.')
            job = found
    finally:
        view.close()


def _view(stream: TextIO, form: str) -> _View:
    if form:
        return _Structured(form)
    return _Page(stream) if stream.isatty() else _Lines(stream)


class _Lines:
    """The lines of a job that is followed from its start, and each change of its phase."""

    def __init__(self, stream: TextIO) -> None:
        self._display = progress.PlainDisplay(stream)
        self._shown: tuple[str, ...] = ()

    def show(self, job: Job) -> None:
        said = (f"{job.name}: {job.phase}", *words.messages(job), words.waiting_for(job), words.what_to_do(job))
        for line in said:
            if line and line not in self._shown:
                self.say(line)
        self._shown = said
        if job.has_ended:
            for line in [progress.summary(job.status), *progress.coverage_lines(job.status)]:
                self.say(line)
        else:
            self._display.update(job.status)

    def say(self, line: str) -> None:
        self._display.say(line)

    def close(self) -> None:
        self._display.close()


class _Page:
    """The page of `elasticdl status`, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, job: Job) -> None:
        from rich.text import Text

        self._live.update(Text(words.page(job, time.time()), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def close(self) -> None:
        self._live.vertical_overflow = "visible"  # what stays is whole
        self._live.stop()


class _Structured:
    """An object whenever it is another one."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._shown = ""

    def show(self, job: Job) -> None:
        text = words.structured(job.to_plain(), self._form)
        if text != self._shown:
            self._shown = text
            print("---\n" + text if self._form == "yaml" else text, flush=True)

    def say(self, line: str) -> None:
        print(f"note: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is kept open."""
