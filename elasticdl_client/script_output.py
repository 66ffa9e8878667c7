"""The output of the user's code in rank 0 of a local job, for the terminal: its lines, without those of logs.

Each pod prints to a file; here the first worker's is read as it grows.  Log entries (ours, TensorFlow's, warnings),
tracebacks and what a progress bar has overwritten stay in the file, where `elasticdl logs` shows them.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.log_files import GrowingFile

MAX_LINES = 20  # a look; a script that prints every step would hide all else
_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")  # a second line shows where, behind two blanks
_LOG_ENTRY = re.compile(
    r'\{"time": "'  # --log_format=json
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d+:? "  # of Python's logging, of TensorFlow
    r"|[IWEF]\d{4} \d\d:\d\d:\d+\.\d+ "  # of absl
    r"|\[?(rank\d+\]:)?\[?[IWEF]\d* ?\d{0,4}[-\d:. ]* \S+\.(cpp|py):\d+\]"  # of PyTorch
    r"|---- started again "
    rf"|{_WARNING.pattern}"
    r"|WARNING: All log messages before absl::InitializeLog"
    r"|To enable the following instructions: "
)
_PATIENCE_S = 1.5  # a line is shown so much later: a status is written once a second, an error in it is not shown twice
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class _Held:
    """A printed line that is not shown yet."""

    read_at: float  # by the time of the status
    worker: str
    text: str


class ScriptOutput:
    """The printed lines of one worker at a time: rank 0, and when that is lost its successor.

    Args:
        logs: the directory of the pods' logs.
        prefix: of the workers' names, `elasticdl-JOB-`.
        num_workers: where there are several, a line begins with the one that has printed it.
    """

    def __init__(self, logs: Path, prefix: str, num_workers: int) -> None:
        self._logs = logs
        self._prefix = prefix
        self._names_it = num_workers > 1
        self._old = {path.stem: path.stat().st_size for path in logs.glob(f"{prefix}worker-*.log")}
        self._worker = ""
        self._file: GrowingFile | None = None
        self._held: deque[_Held] = deque()
        self._is_in_traceback = False
        self._is_after_warning = False

    def lines(self, status: JobStatus, *, last: bool = False) -> list[str]:
        """Return what was printed since the call before.

        Args:
            status: of the job, which names rank 0.
            last: nothing more will be printed.
        """
        self._hold(status, self._read(last=last))
        phases = {"Running", "Succeeded", "Failed"} if last and not self._worker else {"Running"}
        rank_0 = self._rank_0(status, phases)
        if rank_0 and rank_0 != self._worker and self._open(rank_0):
            self._hold(status, self._read(last=last))
        reported = [status.message, *(pod.message for pod in status.pods if pod.phase == "Failed")]
        lines = []
        while self._held and (last or not 0 <= status.updated_at - self._held[0].read_at < _PATIENCE_S):
            held = self._held.popleft()
            if not any(_tells(message, held.text.strip()) for message in reported):
                lines.append(f"[{held.worker}] {held.text}" if self._names_it else held.text)
        return lines

    def _hold(self, status: JobStatus, lines: list[str]) -> None:
        """Keeps lines back until the status says whether they are an error, which it tells itself."""
        self._held.extend(_Held(status.updated_at, self._worker, line) for line in lines)

    def _rank_0(self, status: JobStatus, phases: set[str]) -> str:
        workers = [pod for pod in status.pods if pod.role == "worker" and pod.phase in phases]
        names = [pod.name.removeprefix(self._prefix) for pod in workers]
        if status.world and f"worker-{status.world[0]}" in names:
            return f"worker-{status.world[0]}"
        if self._worker in names or not names:
            return self._worker
        return min(names, key=lambda name: int(name.rpartition("-")[2]))

    def _open(self, worker: str) -> bool:
        """Begins to read a worker: the first one from its beginning, another from here on."""
        path = self._logs / f"{self._prefix}{worker}.log"
        try:
            old = path.stat().st_size if self._worker else self._old.get(path.stem, 0)
            self._file = GrowingFile(path, old, keeps_overwritten=False)
        except FileNotFoundError:
            return False
        self._worker, self._is_in_traceback, self._is_after_warning = worker, False, False
        return True

    def _read(self, *, last: bool) -> list[str]:
        """The printed lines of the worker that is read, as they are shown."""
        if self._file is None:
            return []
        found = [line for text in self._file.lines(last=last) if (line := self._printed(text)) is not None]
        if len(found) > MAX_LINES:
            hidden = len(found) - MAX_LINES
            found[MAX_LINES:] = [f"… {hidden} lines more: `elasticdl logs` with --pod={self._worker}"]
        return found

    def _printed(self, text: str) -> str | None:
        """A line as a terminal would show it; None if it is no printed one."""
        line = text.rstrip("\r\n").rpartition("\r")[2]
        is_second, self._is_after_warning = self._is_after_warning and line.startswith("  "), False
        if line == _TRACEBACK:
            self._is_in_traceback = True
            return None
        if self._is_in_traceback:  # its last line, the error, has no blanks before it
            self._is_in_traceback = line.startswith(" ") or not line
            return None
        if _LOG_ENTRY.match(line):
            self._is_after_warning = _WARNING.match(line) is not None
            return None
        return line if line.strip() and not is_second else None


def _tells(message: str, text: str) -> bool:
    """Return whether a message has a text as one of its lines, or as the error at the end of one."""
    lines = (end for line in message.splitlines() for end in (line.strip(), line.strip().removesuffix(")")))
    return any(line == text or line.endswith(f": {text}") for line in lines)
