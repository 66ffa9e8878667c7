"""The output of the user's code in a job that is followed, for the terminal: of rank 0, or of all workers.

`elasticdl train` shows a part of it: log entries (ours, TensorFlow's, warnings) stay in the log, where `elasticdl logs`
shows them.  `elasticdl run` shows the whole.  In both tracebacks, which the job's error repeats, and overwritten
lines of a progress bar stay in the log.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.log_files import GrowingFile

MAX_LINES = 20  # a look; a script that prints every step would hide all else
_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")  # a second line shows where, behind two blanks
_STARTED_AGAIN = "---- started again "  # a line of the agent before a pod's next start
_LOG_ENTRY = re.compile(
    r'\{"time": "'  # --log_format=json
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+:? "  # of Python's logging, of TensorFlow
    r"|[IWEF]\d{4} \d\d:\d\d:\d+\.\d+ "  # of absl
    r"|\[?(rank\d+\]:)?\[?[IWEF]\d* ?\d{0,4}[-\d:. ]* \S+\.(cpp|py):\d+\]"  # of PyTorch
    rf"|{_STARTED_AGAIN}"
    rf"|{_WARNING.pattern}"
    r"|WARNING: All log messages before absl::InitializeLog"
    r"|To enable the following instructions: "
)
_PATIENCE_S = 1.5  # a line is shown so much later: a status is written once a second, an error in it is not shown twice
_TRACEBACK = "Traceback (most recent call last):"
_HINT = "  → "  # of an error of ours, on a line of its own
_NEXT_ERROR = ("The above exception was", "During handling of the above")  # between two tracebacks
_GRAPH_ERROR = "Graph execution error:"  # of TensorFlow: where its node was made follows, and the reason
_GRAPH_NODE = "\t [["  # the last line of that
_JSON_ENTRY = '{"time": "'  # of --log_format=json
_PROCESS = re.compile(r"\[process (\d+)\] ")  # begins each line of a process of a worker that has several
_PROCESS_OF_ENTRY = re.compile(r'\{"time": ".*?"process": (\d+), ')  # in a string its quotes are escaped


class Shown(Enum):
    """The part of the output that is shown."""

    GLANCE = auto()  # of rank 0, some lines at a time and no log entries
    RANK_0 = auto()
    ALL_WORKERS = auto()


class PrintedLines(Protocol):
    """The lines that one pod prints, as they come."""

    def lines(self, *, last: bool) -> list[str]:
        """Return the lines since the call before.

        Args:
            last: nothing more will be printed.
        """
        ...

    def close(self) -> None:
        """End the reading."""
        ...


class WorkerLogs(Protocol):
    """The logs of a job's workers, which are named worker-0, worker-1, …  Adapters: `LogFiles`, `PodLogs`."""

    def workers(self, status: JobStatus) -> list[str]:
        """Return the workers that may have printed."""
        ...

    def open(self, worker: str, *, from_now: bool) -> PrintedLines | None:
        """Begin to read a worker; return None while it has no log.

        Args:
            worker: its name.
            from_now: leave out what it has printed before.
        """
        ...


class LogFiles:
    """The logs of a local job: each pod prints to a file.

    Args:
        logs: the directory of the files.
        prefix: Prefix of the pods' names, `elasticdl-JOB-`.
    """

    def __init__(self, logs: Path, prefix: str) -> None:
        self._logs = logs
        self._prefix = prefix
        self._old = {path.stem: path.stat().st_size for path in self._of_workers()}  # a job that is resumed has some

    def workers(self, status: JobStatus) -> list[str]:
        return sorted(path.stem.removeprefix(self._prefix) for path in self._of_workers())

    def open(self, worker: str, *, from_now: bool) -> GrowingFile | None:
        path = self._logs / f"{self._prefix}{worker}.log"
        try:
            return GrowingFile(
                path, path.stat().st_size if from_now else self._old.get(path.stem, 0), keeps_overwritten=False
            )
        except FileNotFoundError:
            return None

    def _of_workers(self) -> Iterator[Path]:
        return self._logs.glob(f"{self._prefix}worker-*.log")


@dataclass(frozen=True, slots=True)
class _Held:
    """A printed line that is not shown yet."""

    read_at: float  # by the time of the status
    worker: str
    text: str


class _WorkerOutput:
    """The printed lines of one worker.

    Args:
        printed: all that it prints.
        shows_logs: log entries are shown, too.
    """

    def __init__(self, printed: PrintedLines, *, shows_logs: bool) -> None:
        self._all = printed
        self._shows_logs = shows_logs
        self._processes: dict[str, _ProcessOutput] = {}

    def read(self, num_processes: int, process: int | None, *, last: bool) -> list[str]:
        """Return the lines since the call before, as they are shown.

        Args:
            num_processes: Number of processes of the worker.
            process: the one that is shown; None: all, each line with its process.
            last: nothing more will be printed.
        """
        shown = []
        for text in self._all.lines(last=last):
            line = text.rstrip("\r\n").rpartition("\r")[2]
            found = _PROCESS.match(line) if num_processes > 1 else None
            if found is None and num_processes > 1 and not line.startswith(_JSON_ENTRY):
                continue  # the main process repeats at the end what one that has failed has printed
            of_process = found or (_PROCESS_OF_ENTRY.match(line) if num_processes > 1 else None)
            if of_process is not None and process is not None and int(of_process[1]) != process:
                continue
            origin = found[0] if found is not None else ""
            output = self._processes.setdefault(origin, _ProcessOutput(shows_logs=self._shows_logs))
            if (printed := output.printed(line.removeprefix(origin))) is not None:
                shown.append(f"{origin if process is None else ''}{printed}")
        return shown

    def close(self) -> None:
        self._all.close()


class _ProcessOutput:
    """The lines of one process that are shown."""

    def __init__(self, *, shows_logs: bool) -> None:
        self._shows_logs = shows_logs
        self._is_in_traceback = False
        self._is_in_graph_error = False
        self._is_after_error = False
        self._is_after_warning = False

    def printed(self, line: str) -> str | None:
        """Return a line as a terminal would show it; None if it is not shown."""
        is_second, self._is_after_warning = self._is_after_warning and line.startswith("  "), False
        if self._is_of_error(line):
            return None
        if self._shows_logs:
            return None if line.startswith(_STARTED_AGAIN) else line
        if _LOG_ENTRY.match(line):
            self._is_after_warning = _WARNING.match(line) is not None
            self._is_after_error = True  # a hint may follow
            return None
        return line if line.strip() and not is_second else None

    def _is_of_error(self, line: str) -> bool:
        """Return whether a line is of a traceback, or of the error behind it."""
        if line.endswith(_TRACEBACK):  # of a log entry, too
            self._is_in_traceback = True
        elif self._is_in_traceback:  # its last line, the error, has no blanks before it
            self._is_in_traceback = line.startswith(" ") or not line
            self._is_after_error = not self._is_in_traceback
            self._is_in_graph_error = line.endswith(_GRAPH_ERROR)
        elif self._is_in_graph_error and not _LOG_ENTRY.match(line):  # the last line may be missing
            self._is_in_graph_error = not line.startswith(_GRAPH_NODE)
        else:
            self._is_in_graph_error = False
            self._is_after_error = self._is_after_error and (not line or line.startswith((_HINT, *_NEXT_ERROR)))
            return self._is_after_error
        return True


class ScriptOutput:
    """The printed lines of a job's workers: of rank 0 and, when that is lost, of its successor; or of all of them.

    Args:
        logs: Logs of the workers.
        prefix: Prefix of the pods' names, `elasticdl-JOB-`.
        num_workers: where there are several, a line begins with the one that has printed it.
        shown: the lines shown.
    """

    def __init__(self, logs: WorkerLogs, prefix: str, num_workers: int, shown: Shown = Shown.GLANCE) -> None:
        self._logs = logs
        self._prefix = prefix
        self._names_it = num_workers > 1
        self._shown = shown
        self._workers: dict[str, _WorkerOutput] = {}
        self._worker = ""
        self._held: deque[_Held] = deque()

    def lines(self, status: JobStatus, *, last: bool = False) -> list[str]:
        """Return what was printed since the call before.

        Args:
            status: Status of the job; it names rank 0.
            last: nothing more will be printed.
        """
        self._hold(status, last=last)
        if self._open_more(status, last=last):
            self._hold(status, last=last)
        reported = [status.message, *(pod.message for pod in status.pods if pod.phase == "Failed")]
        lines = []
        while self._held and (last or not 0 <= status.updated_at - self._held[0].read_at < _PATIENCE_S):
            held = self._held.popleft()
            if not any(_tells(message, held.text.strip()) for message in reported):
                lines.append(f"[{held.worker}] {held.text}" if self._names_it else held.text)
        return lines

    def _hold(self, status: JobStatus, *, last: bool) -> None:
        """Read lines and hold them back until the status shows whether they belong to an error that it reports."""
        num_processes = status.processes_per_worker
        rank_0 = status.world[0] % num_processes if status.world else 0
        process = None if self._shown is Shown.ALL_WORKERS else rank_0
        for worker, output in self._workers.items():
            found = output.read(num_processes, process, last=last)
            if self._shown is Shown.GLANCE and len(found) > MAX_LINES:
                hidden = len(found) - MAX_LINES
                found[MAX_LINES:] = [f"… {hidden} lines more: `elasticdl logs` with --pod={worker}"]
            self._held.extend(_Held(status.updated_at, worker, line) for line in found)

    def _open_more(self, status: JobStatus, *, last: bool) -> bool:
        """Open the logs of workers that are shown from now on; return whether there is one."""
        if self._shown is Shown.ALL_WORKERS:
            new = [name for name in self._logs.workers(status) if name not in self._workers]
            return bool([name for name in new if self._open(name)])
        phases = {"Running", "Succeeded", "Failed"} if last and not self._worker else {"Running"}
        rank_0 = self._rank_0(status, phases)
        if not rank_0 or rank_0 == self._worker or not self._open(rank_0):
            return False
        if self._worker:
            self._workers.pop(self._worker).close()
        self._worker = rank_0
        return True

    def _rank_0(self, status: JobStatus, phases: set[str]) -> str:
        workers = [pod for pod in status.pods if pod.role == "worker" and pod.phase in phases]
        names = [pod.name.removeprefix(self._prefix) for pod in workers]
        rank_0 = f"worker-{status.world[0] // status.processes_per_worker}" if status.world else ""
        if rank_0 in names:
            return rank_0
        if self._worker in names or not names:
            return self._worker
        return min(names, key=lambda name: int(name.rpartition("-")[2]))

    def _open(self, worker: str) -> bool:
        """Start to read a worker from its first line; if only rank 0 is shown, read its successor from now on."""
        is_successor = self._shown is not Shown.ALL_WORKERS and bool(self._worker)
        printed = self._logs.open(worker, from_now=is_successor)
        if printed is not None:
            self._workers[worker] = _WorkerOutput(printed, shows_logs=self._shown is not Shown.GLANCE)
        return printed is not None


def _tells(message: str, text: str) -> bool:
    """Return whether a message has a text as one of its lines, or as the error at the end of one."""
    lines = (end for line in message.splitlines() for end in (line.strip(), line.strip().removesuffix(")")))
    return any(line == text or line.endswith(f": {text}") for line in lines)
