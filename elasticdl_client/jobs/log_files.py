"""The logs of a local job's pods, past and new lines: growing files, and files of new pods."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from elasticdl_client import job_dir
from elasticdl_client.errors import JobError
from elasticdl_client.jobs.store import JobInfo, LogLine, LogRequest

_LOOK_S = 0.2
_BLOCK_BYTES = 1 << 20
_MAX_REST = 1 << 16  # bytes of an incomplete line that are kept
_PATTERNS = {"": "*", "ps": "ps-*", "worker": "worker-*"}  # roles that stand for several pods
_NEXT_LIFE = re.compile(r"---- started again ")  # the agent writes it before the next run of a pod
_STAMP = re.compile(
    r'(?:---- started again |\{"time": "|\[process \d+\] )?'
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+[+-]\d\d:\d\d)?)"
)


class GrowingFile:
    """Reads the lines of a growing file.

    An incomplete last line is returned only when the job has ended or the line is very long.

    Args:
        path: The file.
        start: Offset of the first byte to read.
        keeps_overwritten: Keep, in a very long incomplete line, the text that a progress bar has overwritten.
    """

    def __init__(self, path: Path, start: int = 0, *, keeps_overwritten: bool = True) -> None:
        self._keeps_overwritten = keeps_overwritten
        self._file = path.open("rb")
        self._file.seek(start)
        self._rest = b""

    def lines(self, *, last: bool) -> list[str]:
        """Return the lines since the previous call.

        Args:
            last: The file is complete; return an incomplete last line, too.
        """
        parts = [self._rest]
        while block := self._file.read(_BLOCK_BYTES):
            parts.append(block)
        *lines, self._rest = b"".join(parts).split(b"\n")
        if len(self._rest) > _MAX_REST:  # a progress bar may overwrite one line for hours
            *overwritten, newest = self._rest.rsplit(b"\r", 1)
            lines += (overwritten if self._keeps_overwritten else []) if overwritten else [newest]
            self._rest = newest if overwritten else b""
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def skip_to_last(self, num_lines: int) -> None:
        """Skip what is far before the last lines: a log may have gigabytes."""
        start, num_ends = self._file.seek(0, os.SEEK_END), 0
        while start > 0 and num_ends <= num_lines:
            size = min(_BLOCK_BYTES, start)
            start = self._file.seek(start - size)
            num_ends += self._file.read(size).count(b"\n")
        self._file.seek(start)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def written_at(self) -> float:
        """The time of the last write."""
        return os.fstat(self._file.fileno()).st_mtime


def lines(job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
    """Yield the requested log lines.

    Raises:
        JobError: There is no such pod.
    """
    logs = Path(job.directory) / "logs"
    pattern = f"elasticdl-{job.name}-{_PATTERNS.get(request.role, request.role)}.log"
    if request.role and not request.follow and not any(logs.glob(pattern)):
        there = ", ".join(_role(job, path) for path in sorted(logs.glob(f"elasticdl-{job.name}-*.log")))
        raise JobError(
            f'pod "elasticdl-{job.name}-{request.role}" of job {job.name} has printed nothing, or there is none',
            f"There are logs of {there}." if there else "No pod of the job has a log yet.",
        )
    if request.previous:
        found = _lives_before(job, request, sorted(logs.glob(pattern)))
    else:
        found = _lines(job, request, logs, pattern)
    return _with_times(found) if request.timestamps else found


def _with_times(lines: Iterator[LogLine]) -> Iterator[LogLine]:
    """Yield the lines with their times; a line without a time gets that of the line before."""
    times: dict[str, str] = {}
    for line in lines:
        if (at := _time_of(line.text)) is not None:
            times[line.pod] = datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")
        yield LogLine(line.pod, line.text, times.get(line.pod, ""))


def _lines(job: JobInfo, request: LogRequest, logs: Path, pattern: str) -> Iterator[LogLine]:
    processes = job_dir.holders(Path(job.directory)) if request.follow else []
    files: dict[Path, GrowingFile] = {}
    is_first_look = True
    last = not processes
    while True:
        new = _new_files(logs, pattern, files)
        files |= new
        for path, file in sorted(files.items(), key=lambda item: item[1].written_at):
            if path in new and is_first_look and request.tail >= 0 and not request.since_s:
                file.skip_to_last(request.tail)
            found = file.lines(last=last)
            if path in new and is_first_look:
                found = _part(found, request, file.written_at)
            yield from (LogLine(path.stem, line) for line in found)
        if last:
            return
        is_first_look = False
        last = job_dir.wait_for_end(processes, _LOOK_S)  # then read once more, for the last lines


def _lives_before(job: JobInfo, request: LogRequest, paths: Sequence[Path]) -> Iterator[LogLine]:
    """Yield the lines of each pod's previous run.

    Raises:
        JobError: None of these pods was restarted.
    """
    found: list[LogLine] = []
    for path in paths:
        written = path.read_text(errors="replace").splitlines()
        begins = [0, *(number for number, line in enumerate(written) if _NEXT_LIFE.match(line))]
        if len(begins) > 1:
            part = _part(written[begins[-2] : begins[-1]], request, path.stat().st_mtime)
            found += [LogLine(path.stem, line) for line in part]
    if not found:
        raise JobError(
            f"No pod of these was started again, so there is no earlier log: {request.role or 'all pods'}.",
            f"`{job.command('logs')} --all` shows the logs of all pods.",
        )
    return iter(found)


def _part(found: list[str], request: LogRequest, written_at: float) -> list[str]:
    """Return the lines that `request` asks for; a line without a time gets that of the line before.

    Args:
        written_at: When the last line was written, in seconds since the Unix epoch.
    """
    if request.since_s:
        since = time.time() - request.since_s
        stamps = [(number, at) for number, line in enumerate(found) if (at := _time_of(line)) is not None]
        first = next((number for number, at in stamps if at >= since), None)
        if first is None:
            first = stamps[-1][0] + 1 if stamps else 0
            first = first if written_at >= since else len(found)
        found = found[first:]
    return found[len(found) - min(request.tail, len(found)) :] if request.tail >= 0 else found


def _time_of(line: str) -> float | None:
    """Return when a log entry of ours was written, in seconds since the Unix epoch; None: it has no time."""
    stamp = _STAMP.match(line)
    try:
        return None if stamp is None else datetime.fromisoformat(stamp[1]).timestamp()
    except ValueError:
        return None


def _new_files(logs: Path, pattern: str, known: Container[Path]) -> dict[Path, GrowingFile]:
    """Return the files that are not known yet; skip one that was just deleted, with its job."""
    found = {}
    with suppress(FileNotFoundError):
        for path in logs.glob(pattern):
            if path not in known:
                with suppress(FileNotFoundError):
                    found[path] = GrowingFile(path)
    return found


def _role(job: JobInfo, path: Path) -> str:
    return path.stem.removeprefix(f"elasticdl-{job.name}-")
