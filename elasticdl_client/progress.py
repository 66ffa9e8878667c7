"""Shows a job's status while it runs: a live bar on a terminal, plain lines elsewhere.  Never reads or waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from elasticdl_client.durations import age
from elasticdl_client.job_status import JobPhase, JobStatus

_PLAIN_INTERVAL_S = 2.0


class Display(Protocol):
    """Three verbs."""

    def update(self, status: JobStatus) -> None:
        """Takes a snapshot; may show nothing of it."""
        ...

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        ...

    def close(self) -> None: ...


def open_display(stream: TextIO) -> Display:
    """The display for a stream: rich on a terminal, plain elsewhere."""
    return RichDisplay(stream) if stream.isatty() else PlainDisplay(stream)


def summary(status: JobStatus) -> str:
    """One line on where the job is."""
    return ", ".join(text for text in (_records(status), time_text(status), _state(status)) if text)


def time_text(status: JobStatus, *, with_eta: bool = True) -> str:
    """Return how long the job has run and how long its records still take; empty before its master has started."""
    if not status.elapsed_seconds:
        return ""
    elapsed = f"elapsed {age(status.elapsed_seconds)}"
    eta = status.eta_seconds if with_eta else None
    return elapsed if eta is None else f"{elapsed}, ETA {age(eta)}"


def _state(status: JobStatus) -> str:
    parts = [f"workers {status.workers_alive}/{status.workers_wanted}"]
    if status.num_worlds:
        parts.append(f"world {status.num_worlds} of {len(status.world)}" if status.world else "no world now")
    if status.ps_wanted:
        parts.append(f"ps {status.ps_alive}/{status.ps_wanted}")
    if status.epoch:
        parts.append(f"epoch {status.epoch}" + (f"/{status.num_epochs}" if status.num_epochs > 0 else ""))
    if status.model_version:
        parts.append(f"step {status.model_version}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    if status.metrics:
        parts.append(metrics_text(status))
    return ", ".join(parts)


def metrics_text(status: JobStatus) -> str:
    """The newest evaluation's metrics."""
    return ", ".join(f"{name} {value:.4g}" for name, value in status.metrics.items())


def staleness_text(status: JobStatus) -> str:
    """Which share of the gradients missed how many updates, and how many were refused; empty if none was sent."""
    total = sum(status.staleness)
    shares = [f"{_missed(i)} {count / total:.0%}" for i, count in enumerate(status.staleness) if count]
    refused = [f"refused {status.gradients_refused:,}"] if status.gradients_refused else []
    return "; ".join([*([", ".join(shares)] if shares else []), *refused])


def _missed(position: int) -> str:
    """Of a place in the histogram: 0, 1, 2, 3-4, 5-8, …"""
    return str(position) if position < 3 else f"{2 ** (position - 2) + 1}-{2 ** (position - 1)}"


def coverage_lines(status: JobStatus) -> list[str]:
    """One line for each epoch that has a coverage."""
    return [f"{coverage.title}: {coverage}" for coverage in status.coverage]


def news(before: JobStatus | None, now: JobStatus) -> list[str]:
    """What is worth a line of its own: lost pods and their successors, evaluations, complete epochs, why the job
    waits, a new master."""
    lines = [] if before is None or now.exit_code is not None else _pod_news(before, now)
    if before is not None and now.generation > before.generation > 0:
        lines.append(f"master restarted (generation {now.generation})")
    if now.message and now.phase is not JobPhase.FAILED and (before is None or now.message != before.message):
        lines.append(now.message)
    if now.metrics and (before is None or (now.metrics_step, now.metrics) != (before.metrics_step, before.metrics)):
        lines.append(f"evaluation at step {now.metrics_step}: {metrics_text(now)}")
    if now.exit_code is not None:  # the report at the end has them all
        return lines
    known = set() if before is None else {str(coverage) + str(coverage.epoch) for coverage in before.coverage}
    for coverage in now.coverage:
        if coverage.lost == 0 and coverage.records and str(coverage) + str(coverage.epoch) not in known:
            lines.append(f"{coverage.title}: {coverage}")
    return lines


def _pod_news(before: JobStatus, now: JobStatus) -> list[str]:
    known = {(pod.name, pod.at) for pod in before.lost_pods}
    lost = [pod for pod in now.lost_pods if (pod.name, pod.at) not in known]
    lines = [f"{_short(now, pod.name)} lost" + (f": {pod.message}" if pod.message else "") for pod in lost]
    if now.lost_pods:
        ran = _running(before).keys() - {pod.name for pod in lost}
        lines += [f"{_short(now, name)} runs" for name in _running(now) if name not in ran]
    return lines


def _running(status: JobStatus) -> dict[str, None]:
    """Names of the pods that run, in their order."""
    return {pod.name: None for pod in status.pods if pod.role != "master" and pod.phase == "Running"}


def _short(status: JobStatus, pod: str) -> str:
    return pod.removeprefix(f"elasticdl-{status.job_name}-")


def _records(status: JobStatus) -> str:
    text = f"records {status.records_done:,}"
    if status.records_total:
        text += f"/{status.records_total:,} ({status.records_done / status.records_total:.0%})"
    if status.records_per_second:
        text += f", {status.records_per_second:,.0f} records/s"
    return text


class PlainDisplay:
    """A line when something has changed, at most one every two seconds; news at once."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._status: JobStatus | None = None
        self._shown = ""
        self._shown_at = -_PLAIN_INTERVAL_S

    def update(self, status: JobStatus) -> None:
        for line in news(self._status, status):
            self.say(line)
        self._status = status
        text = _records(status) + _state(status)
        if text != self._shown and self._clock() - self._shown_at >= _PLAIN_INTERVAL_S:
            self._shown, self._shown_at = text, self._clock()
            self.say(summary(status))

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is kept open."""


class RichDisplay:
    """A bar and a line that are redrawn in place; news scroll by above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._status: JobStatus | None = None
        self._console = Console(file=stream, highlight=False)
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._line = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._line), console=self._console, refresh_per_second=4)
        self._live.start()

    def update(self, status: JobStatus) -> None:
        for line in news(self._status, status):
            self.say(line)
        self._status = status
        total = status.records_total or None
        self._bar.update(self._task, total=total, completed=status.records_done, description=_records(status))
        self._line.plain = ", ".join(text for text in (time_text(status), _state(status)) if text)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)

    def close(self) -> None:
        self._live.stop()
