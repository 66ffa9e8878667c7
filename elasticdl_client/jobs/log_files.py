"""What the pods of a local job have printed, and print: files that grow, and new ones."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

from elasticdl_client.errors import JobError
from elasticdl_client.jobs import holders
from elasticdl_client.jobs.job import Job
from elasticdl_client.jobs.store import LogLine, LogRequest

_LOOK_S = 0.2
_BLOCK_BYTES = 1 << 20


class _GrowingFile:
    """The lines of a file as they come; the last one only when its end, or the job's, has come."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def lines(self, *, last: bool) -> list[str]:
        """The lines since the call before.

        Args:
            last: nothing more will come, so a line without its end is one, too.
        """
        parts = [self._rest]
        while block := self._file.read(_BLOCK_BYTES):
            parts.append(block)
        *lines, self._rest = b"".join(parts).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    @property
    def written_at(self) -> float:
        """When somebody wrote to it last."""
        return os.fstat(self._file.fileno()).st_mtime


def lines(job: Job, request: LogRequest) -> Iterator[LogLine]:
    """The lines that are wanted.

    Raises:
        JobError: there is no such pod.
    """
    logs = Path(job.directory) / "logs"
    pattern = f"elasticdl-{job.name}-{request.role or '*'}.log"
    if request.role and not request.follow and not (logs / pattern).exists():
        there = ", ".join(_role(job, path) for path in sorted(logs.glob(f"elasticdl-{job.name}-*.log")))
        raise JobError(
            f'pod "elasticdl-{job.name}-{request.role}" of job {job.name} has printed nothing, or there is none',
            f"There are logs of {there}." if there else "No pod of the job has a log yet.",
        )
    return _lines(job, request, logs, pattern)


def _lines(job: Job, request: LogRequest, logs: Path, pattern: str) -> Iterator[LogLine]:
    processes = holders.holders(Path(job.directory)) if request.follow else []
    files: dict[Path, _GrowingFile] = {}
    last = not processes
    while True:
        new = _new_files(logs, pattern, files)
        files |= new
        for path, file in sorted(files.items(), key=lambda item: item[1].written_at):
            found = file.lines(last=last)
            if path in new and request.tail >= 0:
                found = found[len(found) - min(request.tail, len(found)) :]
            yield from (LogLine(path.stem, line) for line in found)
        if last:
            return
        last = holders.wait_for_end(processes, _LOOK_S)  # then once more, for what they printed last


def _new_files(logs: Path, pattern: str, known: Container[Path]) -> dict[Path, _GrowingFile]:
    """Those that are not known yet; somebody may be deleting the job and them, so one that has just gone is none."""
    found = {}
    with suppress(FileNotFoundError):
        for path in logs.glob(pattern):
            if path not in known:
                with suppress(FileNotFoundError):
                    found[path] = _GrowingFile(path)
    return found


def _role(job: Job, path: Path) -> str:
    return path.stem.removeprefix(f"elasticdl-{job.name}-")
