"""PsMetrics: load of the parameter servers from their heartbeats: rates and sums for the status, two lines an epoch.

No decision depends on it.  The sums are journalled, so that they never fall when a server or the master restarts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import zip_longest
from typing import Any

from elasticdl.master.core.values import PsUsage
from elasticdl_client.job_status import PsStatus

WINDOW = 10.0  # seconds over which a rate is measured
SPACING = 1.0  # seconds between two samples; heartbeats may be more frequent
SHOWN = 8  # up to so many servers are listed one by one


@dataclass(slots=True)
class _PsProcess:
    """Load of one PS process, from its heartbeats to this generation of the master."""

    incarnation: int
    newest: PsUsage
    heard_at: float
    at_epoch_end: tuple[float, PsUsage]  # load at the end of the last epoch, or at its first heartbeat
    samples: deque[tuple[float, PsUsage]] = field(default_factory=deque)

    def on_heartbeat(self, load: PsUsage, clock: float) -> None:
        if not self.samples or clock - self.samples[-1][0] >= SPACING:
            self.samples.append((clock, load))
        while clock - self.samples[0][0] > WINDOW:
            self.samples.popleft()
        self.newest, self.heard_at = load, clock

    def rate(self, of: Callable[[PsUsage], float], since: tuple[float, PsUsage] | None = None) -> float:
        """Return the growth per second since `since`, or since the oldest sample; 0 for a process that has ended."""
        if since is None and not self.samples:
            return 0.0
        at, load = since or self.samples[0]
        return max(0.0, of(self.newest) - of(load)) / (self.heard_at - at) if self.heard_at > at else 0.0


class PsMetrics:
    """The newest load of every PS, and their sums."""

    def __init__(self) -> None:
        self._processes: dict[int, _PsProcess] = {}
        self._before: dict[int, tuple[int, PsUsage]] = {}  # incarnation and load, until its first heartbeat
        self._ended: dict[int, PsUsage] = {}  # sums over the ended incarnations of each PS
        self._logged_staleness: list[int] = []  # at the end of the last reported epoch
        self._logged_refused = 0

    def on_heartbeat(self, ps_id: int, incarnation: int, load: PsUsage, clock: float) -> None:
        """Add the load of a heartbeat."""
        process = self._processes.get(ps_id)
        if process is None or process.incarnation != incarnation:
            before = self._before.pop(ps_id, None) if process is None else (process.incarnation, process.newest)
            if before is not None and before[0] != incarnation:
                self._ended[ps_id] = _sum(self._ended.get(ps_id, PsUsage()), before[1])
            process = self._processes[ps_id] = _PsProcess(incarnation, load, clock, (clock, load))
        process.on_heartbeat(load, clock)

    def lost(self, ps_id: int) -> None:
        """Stop the rates of a PS: its process has ended or was given up."""
        if (process := self._processes.get(ps_id)) is not None:
            process.samples.clear()

    @property
    def staleness(self) -> tuple[int, ...]:
        """Number of applied gradients by how many updates they had missed, over all PS: 0, 1, 2, 3-4, 5-8, 9-16, …"""
        total: list[int] = []
        for ps_id in self._ids():
            total = _add(total, self._total(ps_id).staleness)
        return tuple(total)

    @property
    def refused(self) -> int:
        """Number of gradients rejected as too stale or too late."""
        return sum(self._total(ps_id).refused for ps_id in self._ids())

    def _ids(self) -> list[int]:
        return sorted({*self._processes, *self._before, *self._ended})

    def _newest(self, ps_id: int) -> PsUsage:
        """Return the last known load of a PS's present incarnation."""
        process = self._processes.get(ps_id)
        return process.newest if process is not None else self._before.get(ps_id, (0, PsUsage()))[1]

    def _total(self, ps_id: int) -> PsUsage:
        """Return the sum over all incarnations of a PS."""
        newest = self._newest(ps_id)
        return _sum(self._ended[ps_id], newest) if ps_id in self._ended else newest

    def servers(self) -> tuple[PsStatus, ...]:
        """Return the status of all servers, in order of id."""
        return tuple(self._server(ps_id) for ps_id in self._ids())

    def _server(self, ps_id: int) -> PsStatus:
        process, newest, total = self._processes.get(ps_id), self._newest(ps_id), self._total(ps_id)

        def rate(of: Callable[[PsUsage], float]) -> float:
            return 0.0 if process is None else process.rate(of)

        return PsStatus(
            id=ps_id,
            pushes_per_second=rate(lambda load: load.pushes),
            pulls_per_second=rate(lambda load: load.pulls),
            received_per_second=rate(lambda load: load.bytes_received),
            sent_per_second=rate(lambda load: load.bytes_sent),
            busy=rate(lambda load: load.busy_seconds),
            throttled=rate(lambda load: load.throttled_seconds),
            rows=newest.table_rows,
            table_bytes=newest.table_bytes,
            pushes=total.pushes,
            pulls=total.pulls,
            received_bytes=total.bytes_received,
            sent_bytes=total.bytes_sent,
            busy_seconds=total.busy_seconds,
        )

    def lines(self) -> list[str]:
        """Return the log lines at the end of an epoch, for the time since the previous call.

        Empty if a PS has sent no newer heartbeat since then: the lines of the next epoch then cover both.
        """
        if any(process.heard_at - process.at_epoch_end[0] < SPACING for process in self._processes.values()):
            return []
        staleness, refused = self.staleness, self.refused
        counts = [now - before for now, before in zip_longest(staleness, self._logged_staleness, fillvalue=0)]
        lines = (
            [_staleness_line(counts, refused - self._logged_refused)]
            if sum(counts) or refused > self._logged_refused
            else []
        )
        if self._processes:
            lines.append(self._load_line())
        self._logged_staleness, self._logged_refused = list(staleness), refused
        for process in self._processes.values():
            process.at_epoch_end = (process.heard_at, process.newest)
        return lines

    def snapshot(self) -> dict[str, Any]:
        processes = {
            **self._before,
            **{ps_id: (process.incarnation, process.newest) for ps_id, process in self._processes.items()},
        }
        return {
            "lives": [[ps_id, incarnation, astuple(load)] for ps_id, (incarnation, load) in processes.items()],
            "ended": [[ps_id, astuple(load)] for ps_id, load in self._ended.items()],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the totals, which count until servers report again; rates start anew."""
        self._before = {ps_id: (incarnation, _load(values)) for ps_id, incarnation, values in saved["lives"]}
        self._ended = {ps_id: _load(values) for ps_id, values in saved["ended"]}
        self._logged_staleness, self._logged_refused = list(self.staleness), self.refused

    def _load_line(self) -> str:
        processes = [process for _, process in sorted(self._processes.items())]
        busy = [process.rate(lambda load: load.busy_seconds, process.at_epoch_end) for process in processes]
        rows = [float(process.newest.table_rows) for process in processes]
        sizes = [float(process.newest.table_bytes) for process in processes]
        parts = [f"busy {_each(busy, lambda share: f'{share:.0%}')}"]
        if any(rows):
            parts.append(f"rows {_each(rows, lambda count: f'{count:,.0f}')}")
            parts.append(f"tables {_each(sizes, lambda size: f'{size / 1e6:,.0f} MB')}")
        return f"PS load: {', '.join(parts)}"


def _each(values: list[float], text: Callable[[float], str]) -> str:
    """Return every value as text, or the mean and the largest of more than `SHOWN`."""
    if len(values) <= SHOWN:
        return " ".join(map(text, values))
    largest = max(range(len(values)), key=values.__getitem__)
    return f"{text(sum(values) / len(values))} mean, {text(values[largest])} at most (PS {largest})"


def _staleness_line(counts: list[int], refused: int) -> str:
    total = max(1, sum(counts))
    shares = ", ".join(f"{_label(i)} {count / total:.0%}" for i, count in enumerate(counts) if count)
    line = f"Staleness of gradients: {shares or 'none taken'}"
    return line + (f"; refused {refused:,}" if refused else "")


def _label(position: int) -> str:
    """Return the label of a bin of the staleness histogram: 0, 1, 2, 3-4, 5-8, …"""
    return str(position) if position < 3 else f"{2 ** (position - 2) + 1}-{2 ** (position - 1)}"


def _load(values: Sequence[Any]) -> PsUsage:
    """Return a load from a journalled `astuple`; JSON has turned tuples into lists."""
    plain: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return PsUsage(*plain)


def _sum(ended: PsUsage, newest: PsUsage) -> PsUsage:
    """Return the sum over two incarnations of a PS; the sizes of tables are those of the newer one."""
    return PsUsage(
        pushes=ended.pushes + newest.pushes,
        pulls=ended.pulls + newest.pulls,
        bytes_received=ended.bytes_received + newest.bytes_received,
        bytes_sent=ended.bytes_sent + newest.bytes_sent,
        busy_seconds=ended.busy_seconds + newest.busy_seconds,
        staleness=tuple(_add(ended.staleness, newest.staleness)),
        refused=ended.refused + newest.refused,
        table_rows=newest.table_rows,
        table_bytes=newest.table_bytes,
        throttled_seconds=ended.throttled_seconds + newest.throttled_seconds,
    )


def _add(left: Iterable[int], right: Iterable[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
