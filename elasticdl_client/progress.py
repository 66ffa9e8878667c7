"""Shows a job's status while it runs: a live bar on a terminal, plain lines elsewhere.  Never reads or waits.

Below it, text for the terminal: colors, none where they are not wanted, and lengths of time as kubectl writes them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import IO, Protocol, TextIO

from elasticdl_client import goodput
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_status import MASTER_RESTARTED, EpochCoverage, JobStatus
from elasticdl_client.news import Headline, News, metrics_text

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 2.0, 600.0
_INTERVAL_SHARE = 0.5  # of the time that the job is followed: a log of a long job is no longer than it is read


class Display(Protocol):
    """Three verbs."""

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        """Take a snapshot, with the events until then as far as they could be read; may show none of it."""
        ...

    def say(self, line: str) -> None:
        """Print a permanent line."""
        ...

    def close(self) -> None: ...


def open_display(stream: TextIO, news: News | None = None) -> Display:
    """Return the display for a stream: rich on a terminal, plain elsewhere.

    Args:
        news: so far, of a job that does not begin now.
    """
    return RichDisplay(stream, news) if stream.isatty() else PlainDisplay(stream, news)


def summary(status: JobStatus) -> str:
    """Return one line about the progress of the job."""
    return ", ".join(text for text in (_records(status), time_text(status), _state(status)) if text)


def time_text(status: JobStatus, *, with_eta: bool = True) -> str:
    """Return how long the job has run and how long its records still take; empty before its master has started."""
    if not status.elapsed_seconds:
        return ""
    elapsed = f"elapsed {age(status.elapsed_seconds)}"
    eta = status.eta_seconds if with_eta else None
    return elapsed if eta is None else f"{elapsed}, ETA {age(eta)}"


def _state(status: JobStatus) -> str:
    processes = processes_text(status)
    status = with_running_pods(status)
    parts = [f"workers {status.workers_alive}/{status.workers_wanted}" + (f" of {processes}" if processes else "")]
    if status.num_worlds:
        parts.append(f"group {status.num_worlds} of {len(status.world)}" if status.world else "no group now")
    if status.ps_wanted:
        parts.append(f"ps {status.ps_alive}/{status.ps_wanted}")
    if status.worker_seconds:
        parts.append(f"goodput {goodput.goodput(status.worker_seconds):.0%}")
    if status.epoch:
        parts.append(f"epoch {status.epoch}" + (f"/{status.num_epochs}" if status.num_epochs > 0 else ""))
    if status.model_version:
        parts.append(f"step {status.model_version}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.metrics:
        parts.append(metrics_text(status))
    return ", ".join(parts)


def with_running_pods(status: JobStatus) -> JobStatus:
    """Return the status with the pods that run, where its master has restarted and counts only the registered ones."""
    if not status.message.startswith(MASTER_RESTARTED):
        return status
    running = [pod.role for pod in status.pods if pod.phase == "Running"]
    return dataclasses.replace(
        status,
        workers_alive=max(status.workers_alive, running.count("worker")),
        ps_alive=max(status.ps_alive, running.count("ps")),
    )


def staleness_text(status: JobStatus) -> str:
    """Which share of the gradients missed how many updates, and how many were refused; empty if none was sent."""
    total = sum(status.staleness)
    shares = [f"{_missed(i)} {count / total:.0%}" for i, count in enumerate(status.staleness) if count]
    refused = [f"refused {status.gradients_refused:,}"] if status.gradients_refused else []
    return "; ".join([*([", ".join(shares)] if shares else []), *refused])


def group_text(status: JobStatus) -> str:
    """Return the current AllReduce group, and the engine that sums in it; empty if none has formed."""
    if not status.num_worlds:
        return ""
    if not status.world:
        return f"none stands, {status.num_worlds} have formed"
    workers = dict.fromkeys(str(member // status.processes_per_worker) for member in status.world)
    processes = f"{len(status.world)} processes of " if status.processes_per_worker > 1 else ""
    names = f"worker{'s' if len(workers) > 1 else ''} {', '.join(workers)}"
    engine = f"; it sums by {status.engine}" if status.engine else ""
    return f"number {status.num_worlds}, of {processes}{names}{engine}{_optimizer_text(status.optimizer_shares)}"


def _optimizer_text(shares: Sequence[float]) -> str:
    known = [share for share in shares if share]
    if not known:
        return ""
    least, most = f"{min(known):.0%}", f"{max(known):.0%}"
    return f"; optimizer's state: {least if least == most else f'{least} to {most}'} in each"


def devices_text(status: JobStatus) -> str:
    """Return the accelerators that the workers' models are on, and the most of their memory that one takes."""
    used: dict[tuple[str, int], list[int]] = {}
    for device in status.devices:
        used.setdefault((device.kind, device.total_bytes), []).append(device.used_bytes)
    users = ("worker", "workers") if status.processes_per_worker == 1 else ("process", "processes")
    return "; ".join(_devices(kind, total, sizes, users) for (kind, total), sizes in used.items())


def _devices(kind: str, total_bytes: int, used_bytes: Sequence[int], users: tuple[str, str]) -> str:
    memory = memory_text(max(used_bytes), total_bytes)
    if len(used_bytes) == 1:
        return f"1 {users[0]} on {kind}, {memory} in use"
    return f"{len(used_bytes)} {users[1]} on {kind}, up to {memory} in use by each"


def processes_text(status: JobStatus) -> str:
    """Return how many processes each worker has; empty where it has one."""
    return f"{status.processes_per_worker} processes each" if status.processes_per_worker > 1 else ""


def memory_text(used_bytes: int, total_bytes: int) -> str:
    """Return how much of a device's memory is in use; the whole is left out where it is 0, not known."""
    total = f" of {total_bytes / (1 << 30):.1f}" if total_bytes else ""
    return f"{used_bytes / (1 << 30):.1f}{total} GiB"


def _missed(position: int) -> str:
    """Return the label of a place in the histogram: 0, 1, 2, 3-4, 5-8, …"""
    return str(position) if position < 3 else f"{2 ** (position - 2) + 1}-{2 ** (position - 1)}"


def coverage_lines(status: JobStatus, shown: int) -> list[str]:
    """Return a line for each of the newest epochs that are complete, after one for the sums of those before.

    Args:
        shown: how many get a line of their own; one more where the sum would be of one alone.
    """
    num_summed = len(status.coverage) - shown
    parts = status.coverage
    if num_summed > 1:
        parts = (EpochCoverage.total(parts[:num_summed]), *parts[num_summed:])
    return [f"{coverage.title}: {coverage}" for coverage in parts]


def _records(status: JobStatus) -> str:
    text = f"records {status.records_done:,}"
    if status.records_total:
        text += f"/{status.records_total:,} ({status.records_done / status.records_total:.0%})"
    if status.records_per_second:
        text += f", {status.records_per_second:,.0f} records/s"
    return text


class PlainDisplay:
    """News at once; where the job is in a line now and then, if that has changed."""

    def __init__(self, stream: TextIO, news: News | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._news = news or News()
        self._clock = clock
        self._begun_at = clock()
        self._shown = ""
        self._next_at = self._begun_at

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        for headline in self._news.lines(status, history):
            self.say(headline.text)
        text, now = _records(status) + _state(status), self._clock()
        if text != self._shown and now >= self._next_at:
            interval = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, _INTERVAL_SHARE * (now - self._begun_at)))
            self._shown, self._next_at = text, now + interval
            self.say(summary(status))

    def say(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            # ENOSPC or EIO of this log must not end a job whose own files can be written; the next line tries again.
            return

    def close(self) -> None:
        """Nothing is kept open."""


class RichDisplay:
    """A bar and a line that are redrawn in place; news scroll by above them."""

    def __init__(self, stream: TextIO, news: News | None = None) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._news = news or News()
        self._console = Console(file=stream, highlight=False, emoji=False)
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._line = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._line), console=self._console, refresh_per_second=4)
        self._live.start()

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        for headline in self._news.lines(status, history):
            self._print(headline)
        total = status.records_total or None
        self._bar.update(self._task, total=total, completed=status.records_done, description=_records(status))
        self._line.plain = ", ".join(text for text in (time_text(status), _state(status)) if text)

    def say(self, line: str) -> None:
        self._print(Headline(line))

    def _print(self, headline: Headline) -> None:
        self._console.print(headline.text, style="yellow" if headline.is_trouble else None, markup=False)

    def close(self) -> None:
        self._live.stop()


class Color(StrEnum):
    """SGR parameters of ECMA-48."""

    RED = "1;31"
    GREEN = "32"
    YELLOW = "33"
    CYAN = "36"


PHASES: Mapping[str, Color] = {
    "Running": Color.GREEN,
    "Succeeded": Color.CYAN,
    "Pending": Color.YELLOW,
    "Stopped": Color.YELLOW,
    "Failed": Color.RED,
}
_PHASE = re.compile(rf"(?<=  )({'|'.join(PHASES)})(?=  |$)", re.MULTILINE)  # a cell of a table, or behind a head
_LEVEL = re.compile(r"(?:\[[^\]]*\] )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (WARNING|ERROR|CRITICAL) ")


def are_wanted(stream: IO[str]) -> bool:
    """Return whether what is printed to a stream is colored."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, color: Color, stream: IO[str]) -> str:
    """Return a text in a color, if the stream is to have any."""
    return f"\x1b[{color}m{text}\x1b[0m" if are_wanted(stream) else text


def paint_phases(text: str, stream: IO[str]) -> str:
    """Return a table or a page with the phases in their colors."""
    return _PHASE.sub(lambda found: paint(found[1], PHASES[found[1]], stream), text)


def paint_log_line(line: str, stream: IO[str]) -> str:
    """Return a line of a log, in a color if it is a warning or an error."""
    level = _LEVEL.match(line)
    if level is None:
        return line
    return paint(line, Color.YELLOW if level[1] == "WARNING" else Color.RED, stream)


def age(seconds: float) -> str:
    """Return a length of time as kubectl writes it: 45s, 5m3s, 62m, 3h5m, 26h, 3d4h."""
    s = int(max(0.0, seconds))
    minutes, hours, days = s // 60, s // 3600, s // 86400
    if s < 120:
        return f"{s}s"
    if minutes < 10:
        return f"{minutes}m{s % 60}s" if s % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8 and hours % 24:
        return f"{days}d{hours % 24}h"
    return f"{days}d"
