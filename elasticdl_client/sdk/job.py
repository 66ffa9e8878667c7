"""JobHandle: the handle of a job of either runtime.  It looks and asks; the job needs neither it nor this process.

`NotebookDisplay`: a bar and lines in the output of a notebook's cell, redrawn in place.
"""

from __future__ import annotations

import html
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TextIO

from elasticdl_client import progress, report, worker_range
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError, FlagError, JobError, JobFailed
from elasticdl_client.explain import explanation as explain_words
from elasticdl_client.explain.diagnosis import Facts, as_sentences
from elasticdl_client.explain.explanation import explain
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import Ended, JobStatus
from elasticdl_client.jobs.options import parse, role_of
from elasticdl_client.jobs.store import JobInfo, JobStore, LogRequest, Phase
from elasticdl_client.jobs.stores import JobStores
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.news import News
from elasticdl_client.progress import Display

_LOOK_S = 0.5
_WIDTH = 100
_STOP_TIMEOUT_S = 120.0  # a checkpoint is waited for for 60 s, and pods then have their grace
_DELETE_TIMEOUT_S = 300.0  # as `elasticdl delete`


class JobHandle:
    """A job that was started or found; safe to use from any thread.

    Args:
        store: Store of the job.
        info: the job as it was found.
        notes: messages from its start.
        progress: show it while `wait` waits.
        has_ended: set when the front of a local job that this process has started ends; None: another one has.

    Attributes:
        notes: messages from its start.
        is_kept: False: its directory is removed at its end, so `wait` shows no place in it.
    """

    def __init__(
        self,
        store: JobStore,
        info: JobInfo,
        *,
        notes: tuple[str, ...] = (),
        progress: bool = False,
        has_ended: threading.Event | None = None,
    ) -> None:
        self.notes = notes
        self.is_kept = True
        self._store = store
        self._info = info
        self._progress = progress
        self._has_ended = has_ended
        self._news = News()  # lines shown by one call of `wait` are not shown by the next

    @classmethod
    def of(
        cls,
        store: JobStore,
        name: str,
        *,
        notes: tuple[str, ...] = (),
        progress: bool = False,
        has_ended: threading.Event | None = None,
    ) -> JobHandle:
        """Return the job of a name in a store; see the class.

        Raises:
            ElasticDLError: there is none, or the store cannot be reached.
        """
        info = store.find(name)
        if info is None:
            raise JobError(f'job "{name}" was deleted as soon as it was started.')
        return cls(store, info, notes=notes, progress=progress, has_ended=has_ended)

    def __repr__(self) -> str:
        """Return name, place and the phase that was seen last; asks nothing."""
        return f"<Job {self.name} {self._info.where}: {self._info.phase}>"

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._info.name

    @property
    def runtime(self) -> Runtime:
        """Where its pods run."""
        return self._info.runtime

    @property
    def namespace(self) -> str:
        """The namespace; empty for a local job."""
        return self._info.namespace

    @property
    def directory(self) -> str:
        """The directory of a local job; empty on Kubernetes."""
        return self._info.directory

    @property
    def spec(self) -> JobSpec:
        """All flags of the job, with secrets hidden.

        Raises:
            JobError: they cannot be read any more.
        """
        if self._info.spec is None:
            raise JobError(f'The specification of job "{self.name}" {self._info.where} cannot be read.')
        return self._info.spec

    @property
    def phase(self) -> Phase:
        """The current phase of the job.

        Raises:
            JobError: the job was deleted before its end was seen.
            ClusterError: the cluster does not answer, or refuses.
        """
        return self._look().phase

    @property
    def status(self) -> JobStatus:
        """The last status of the job's master, with the current pods; see `phase` for errors."""
        return self._look().status

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the newest evaluation; empty before the first; see `phase` for what it raises."""
        return dict(self._look().status.metrics)

    @property
    def model_path(self) -> str | None:
        """Where a training job that has succeeded has exported its model.

        None: it has not (yet), as where the model does not fit into memory, or has no --output.  See `phase` for what
        it raises.
        """
        info = self._look()
        if info.phase is not Phase.SUCCEEDED or self.spec.job_type is not JobType.TRAIN:
            return None
        history = self._history(info)
        return None if history is not None and history.has_no_model else self.spec.output or None

    def explain(self) -> str:
        """Return what `elasticdl explain` prints.

        Raises:
            ElasticDLError: the events of the job cannot be read.
        """
        info = self._look()
        return explain_words.text(explain(Facts(info, self._store.journal(info).history, time.time())), _WIDTH)

    def wait(self, timeout: float | None = None) -> JobHandle:
        """Wait for the end of the job; an interrupt or a time-out ends the waiting alone.

        Args:
            timeout: seconds; None: without a limit.

        Returns:
            This job, so that `elasticdl.train(…).wait().metrics` works.

        Raises:
            JobFailed: the job has failed, or has stopped before its end.
            TimeoutError: it has not ended in time; it runs on.
            JobError: it was deleted, or does not start as it is.
            ClusterError: The cluster refuses a request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        display = open_display(sys.stdout, self._news) if self._progress else None
        try:
            info = self._wait(deadline, display)
        finally:
            if display is not None:
                display.close()
        if info is None:
            raise TimeoutError(f"job {self.name} has not ended in {timeout:g} s; it is {self._info.phase.lower()}")
        if info.phase is not Phase.SUCCEEDED:
            raise self._failure(info)
        if display is not None:
            ended = Ended(0, "", info.status)
            history = self._history(info)
            report.print_end(self.spec, ended, history, logs=info.logs, hint="", is_kept=self.is_kept)
        return self

    def logs(self, role: str = "master", *, follow: bool = False, tail: int = -1) -> Iterator[str]:
        """Yield the lines that pods of the job have printed.

        Args:
            role: master, worker-0, ps-1, …; worker, ps: of all pods of that role; all: of all pods.  Where several
                pods are meant, each line begins with its pod's name.
            follow: also those to come, to the job's end.
            tail: number of last lines of each pod so far; -1: all.

        Raises:
            ElasticDLError: there is no such pod, or the cluster does not answer.
        """
        whose = "--all" if role == "all" else f"--role={role}"
        options = parse("logs", [self.name, whose, f"--tail={tail}"])
        request = LogRequest(role_of(options), follow, options.tail)
        lines = self._store.logs(self._look(), request)
        return (f"[{line.pod}] {line.text}" if request.is_of_many else line.text for line in lines)

    def stop(self, timeout: float = _STOP_TIMEOUT_S) -> None:
        """End all processes of the job after a checkpoint where one can be written; `elasticdl resume` continues it.

        A job that has ended or stopped is left as it is.

        Args:
            timeout: seconds to wait for the end.

        Raises:
            JobError: it runs on Kubernetes without --checkpoint_dir, so that its training would be lost.
            TimeoutError: it has not ended in time; it still ends.
        """
        info = self._look()
        if info.has_ended or info.phase is Phase.STOPPED:
            return
        if not self._store.stop(info, timeout):
            raise TimeoutError(f"job {self.name} has not ended in {timeout:g} s")

    def scale(self, num_workers: int | str) -> None:
        """Change how many workers a running job has.

        Args:
            num_workers: a number, or a range such as "2:16" in which the number follows the gain.

        Raises:
            ElasticDLError: the job has ended, the number does not fit, or the cluster refuses.
        """
        info = self._look()
        if info.has_ended:
            raise JobError(f'job "{self.name}" {info.where} has ended ({info.phase}): it cannot be scaled.')
        self._store.scale(info, worker_range.parse_request(str(num_workers), self.spec))

    def delete(self, timeout: float = _DELETE_TIMEOUT_S) -> None:
        """End the job and remove what there is of it: pods, state and logs; its results stay.

        Args:
            timeout: seconds to wait for the end of its pods.

        Raises:
            ElasticDLError: something of it cannot be removed.
        """
        self._store.delete(self._look(), timeout)

    def _look(self) -> JobInfo:
        """Return the job as it is now; one that has ended stays as it was seen."""
        if self._info.has_ended:
            return self._info
        found = self._store.find(self.name)
        if found is None or found.created_at > self._info.created_at:
            raise JobError(f'job "{self.name}" {self._info.where} was deleted before its end was seen.')
        self._info = found
        return found

    def _wait(self, deadline: float | None, display: Display | None) -> JobInfo | None:
        """Return the job when it has ended, or has stopped; None: it has not in time."""
        pause, shown_at = self._has_ended or threading.Event(), -1.0
        while True:
            try:
                info = self._look()
            except ClusterError as error:
                if not error.unreachable:
                    raise
            else:
                if display is not None and info.status.updated_at != shown_at:
                    display.update(info.status, self._history(info))
                    shown_at = info.status.updated_at
                if info.has_ended or info.phase is Phase.STOPPED:
                    return info
                if info.runtime is Runtime.KUBERNETES:
                    _require_start(info)
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if left <= 0:
                return None
            if pause.wait(left):
                pause = threading.Event()  # its front has ended, its agent may still

    def _history(self, info: JobInfo) -> EventHistory | None:
        with suppress(ElasticDLError):
            return self._store.journal(info).history
        return None

    def _failure(self, info: JobInfo) -> JobFailed:
        history, explanation = self._history(info), ""
        if history is not None:
            found = explain(Facts(info, history, time.time()))
            explanation = explain_words.text(found, _WIDTH) if found.diagnoses else ""
        how = "failed" if info.has_ended else "has stopped"
        why = report.with_users_line(info.status.message) if info.has_ended else info.note
        hint = f"Its logs: {info.logs}." if info.has_ended else as_sentences([info.continuation])
        return JobFailed(
            f"Job {self.name} {how}: {why or 'it reported no reason.'}", hint, info.status.exit_code, explanation
        )


def get(
    name: str,
    *,
    runtime: str = "",
    namespace: str = "",
    context: str = "",
    job_dir: str = "",
    progress: bool = False,
) -> JobHandle:
    """Find a job of this machine or of the cluster.

    Args:
        name: Name of the job.
        runtime: kubernetes or local; empty: both are searched.
        namespace: on Kubernetes; empty: the context's.
        context: of the kubeconfig; empty: the current one.
        job_dir: the directory of a local job.
        progress: show the job while `JobHandle.wait` waits.

    Raises:
        ElasticDLError: there is no such job, or there are two; the cluster does not answer.
    """
    given = {"runtime": runtime, "namespace": namespace, "context": context, "job_dir": job_dir}
    if not isinstance(name, str) or not name or name.startswith("-"):
        raise FlagError(f"{name!r} is not the name of a job.", "`elasticdl list` shows all jobs.")
    arguments = [name, *(f"--{option}={value}" for option, value in given.items() if value)]
    stores = JobStores.of(parse("status", arguments, os.environ))
    info = stores.find(name)
    return JobHandle(stores.store(info), info, progress=progress)


def _require_start(info: JobInfo) -> None:
    """Check that nothing keeps the master of a job from starting that does not go by itself.

    Raises:
        JobError: something does.
    """
    from elasticdl_client.kubernetes.follow import BLOCKED

    for pod in info.status.pods:
        reason = pod.message.partition(":")[0]
        if pod.role == "master" and pod.phase == "Pending" and reason in BLOCKED:
            raise JobError(
                f"The job {info.name} does not start; its master is pending: {pod.message}",
                f"The job is left as it is: `{info.command('delete')}` deletes it.",
            )


_MAX_NEWS = 12  # lines that stay below the bar


def open_display(stream: TextIO, news: News) -> progress.Display:
    """Return the display of a job: a widget in a notebook, else what the stream can show."""
    return NotebookDisplay(news) if in_notebook() else progress.open_display(stream, news)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; a terminal's IPython is none."""
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """Shows a job in one output of a cell (see `Display`)."""

    def __init__(self, news: News) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._news = news
        self._lines: list[str] = []
        self._status: JobStatus | None = None
        self._handle = display(HTML("starting"), display_id=True)

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        """See `Display`."""
        self._status = status
        self._lines += [headline.text for headline in self._news.lines(status, history)]
        self._draw()

    def say(self, line: str) -> None:
        """See `Display`."""
        self._lines.append(line)
        self._draw()

    def close(self) -> None:
        """Keep the display as it is."""

    def _draw(self) -> None:
        del self._lines[:-_MAX_NEWS]
        parts = []
        if self._status is not None:
            done, total = self._status.records_done, self._status.records_total
            value = f' value="{done}" max="{total}"' if total else ""
            parts = [f'<progress style="width: 24em"{value}></progress>', html.escape(progress.summary(self._status))]
        self._handle.update(self._html("<br>".join([*parts, *map(html.escape, self._lines)])))
