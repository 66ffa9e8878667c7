"""A job's numbers over its whole run, in a bounded number of points, and the journal that keeps them, events and times
of pods.

The master's core records a `JobSeries`, so it survives the master; the dashboard records what it sees itself in
another.  `JobJournal` holds the parts for people of the journal that a job's master writes: the master's own state,
which is most of it, is read by masters alone (master/journal.py).  Nothing here has a clock.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticdl_client.goodput import PodTimes
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_events import from_journal as history_from_journal

MAX_METRICS = 32  # of evaluations, by name; all of the newest are in the status
MAX_POINTS = 240  # about 25 kB of the journal, 6 kB compressed; a page is not much wider in dots
MIN_GAP_S = 1.0  # a master's status is as old
_PLACES = 2  # decimals of times: a point is the state of about a second


class _ServerStatus(Protocol):
    @property
    def busy(self) -> float: ...


class _Status(Protocol):
    """The common part of `JobStatus` and the status of the master's core, as a point shows it."""

    @property
    def model_version(self) -> int: ...

    @property
    def records_done(self) -> int: ...

    @property
    def loss(self) -> float | None: ...

    @property
    def workers_alive(self) -> int: ...

    @property
    def ps_alive(self) -> int: ...

    @property
    def ps(self) -> Sequence[_ServerStatus]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def metrics_step(self) -> int: ...

    @property
    def worker_seconds(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """A job at one moment; counts and seconds are sums since its start.

    Attributes:
        at: Seconds since the Unix epoch.
        step: minibatches in the model.
        records: committed, skipped or filtered, over all epochs.
        loss: the newest finite one.
        workers: pods that run; on Kubernetes the page knows it of the pods, the master of those that are registered.
        ps: the same of parameter servers.
        ps_busy: threads of all parameter servers that are in calls.
        metrics: Metrics of the newest evaluation.
        metrics_step: Step of the model that was evaluated.
        worker_seconds: by `goodput.SlotState`.
    """

    at: float
    step: int = 0
    records: int = 0
    loss: float | None = None
    workers: int = 0
    ps: int = 0
    ps_busy: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_step: int = 0
    worker_seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, status: _Status, at: float) -> SeriesPoint:
        """Return the point for a status.

        Args:
            at: Seconds since the Unix epoch.
        """
        return cls(
            at=at,
            step=status.model_version,
            records=status.records_done,
            loss=status.loss,
            workers=status.workers_alive,
            ps=status.ps_alive,
            ps_busy=sum(server.busy for server in status.ps),
            metrics=status.metrics,
            metrics_step=status.metrics_step,
            worker_seconds=status.worker_seconds,
        )


class JobSeries:
    """Points in order of time, at most `limit` of them, a second or more apart but for the newest.

    When there would be more, every second one goes, and from then on points must be twice as far apart: an old job has
    coarse points, all of its run is in them, and the newest is always there.

    Args:
        limit: even, so that halving leaves half of it.
    """

    def __init__(self, points: Iterable[SeriesPoint] = (), limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._points: list[SeriesPoint] = []
        self._gap_s = MIN_GAP_S
        self._saved: dict[str, Any] | None = None  # for the journal, which is written more often than there are points
        self._columns: tuple[list[str], list[str]] = [], []  # of the journal: names of metrics, and of states
        self._rows: dict[float, list[Any]] = {}  # of the journal, by time: each point is rounded once
        for point in points:
            self.add(point)

    @property
    def points(self) -> tuple[SeriesPoint, ...]:
        return tuple(self._points)

    @property
    def gap_s(self) -> float:
        """How far apart points must be."""
        return self._gap_s

    def add(self, point: SeriesPoint) -> None:
        """Take a point in; one that is too near to the one before the newest takes the newest's place.

        A point that is not newer than the newest is left out: the clock of a master's successor may be behind.
        """
        if self._points and point.at <= self._points[-1].at:
            return
        self._saved = None
        if len(self._points) > 1 and self._points[-1].at - self._points[-2].at < self._gap_s:
            self._points[-1] = point
        else:
            self._points.append(point)
        if len(self._points) > self._limit:
            newest = self._points[-1]
            self._points = self._points[::2]
            if self._points[-1] is not newest:
                self._points.append(newest)
            self._gap_s = max(2 * self._gap_s, (newest.at - self._points[0].at) / (len(self._points) - 1))

    def to_journal(self) -> dict[str, Any]:
        """The series as the master's core keeps it in its snapshot; of JSON's types only, and not to be changed."""
        if self._saved is None:
            self._saved = self._to_plain()
        return self._saved

    def _to_plain(self) -> dict[str, Any]:
        metrics = sorted(set().union(*(point.metrics for point in self._points)))[:MAX_METRICS]
        states = sorted(set().union(*(point.worker_seconds for point in self._points)))
        if self._columns != (metrics, states):
            self._columns, self._rows = (metrics, states), {}
        self._rows = {point.at: self._rows.get(point.at) or self._row(point) for point in self._points}
        points = list(self._rows.values())
        return {"gap_s": self._gap_s, "metrics": metrics, "states": states, "points": points}

    def _row(self, point: SeriesPoint) -> list[Any]:
        metrics, states = self._columns
        return [
            round(point.at, _PLACES),
            point.step,
            point.records,
            point.loss,
            point.workers,
            point.ps,
            round(point.ps_busy, _PLACES),
            point.metrics_step,
            [point.metrics.get(name) for name in metrics],
            [round(point.worker_seconds.get(state, 0.0), _PLACES) for state in states],
        ]

    @classmethod
    def from_journal(cls, saved: Mapping[str, Any], limit: int = MAX_POINTS) -> JobSeries:
        """Read the output of `to_journal`.

        Raises:
            ValueError: it is not such a thing.
        """
        try:
            series = cls(limit=limit)
            series._gap_s = float(saved["gap_s"])
            metrics, states = [str(name) for name in saved["metrics"]], [str(state) for state in saved["states"]]
            series._points = [
                SeriesPoint(
                    at=float(at),
                    step=int(step),
                    records=int(records),
                    loss=None if loss is None else float(loss),
                    workers=int(workers),
                    ps=int(ps),
                    ps_busy=float(busy),
                    metrics={n: float(v) for n, v in zip(metrics, values, strict=True) if v is not None},
                    metrics_step=int(metrics_step),
                    worker_seconds={s: float(v) for s, v in zip(states, seconds, strict=True)},
                )
                for at, step, records, loss, workers, ps, busy, metrics_step, values, seconds in saved["points"]
            ]
            return series
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a series: {error!r}") from error


def joined(before: Iterable[SeriesPoint], own: Iterable[SeriesPoint]) -> list[SeriesPoint]:
    """Return the points of a journal that are older than the first of `own`, followed by those."""
    later = list(own)
    return [point for point in before if not later or point.at < later[0].at] + later


def shown_part(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a master's state that `JobJournal` reads; its size has a bound, whatever the job's."""
    core = snapshot.get("core", {})
    return {"core": {name: core[name] for name in ("events", "series", "accounting") if name in core}}


@dataclass(frozen=True, slots=True)
class JobJournal:
    """The events of a job, and its numbers since its start; empty before its master has begun it.

    Attributes:
        saved_pod_times: as `PodTimes.to_journal` made them; empty: there are none.
        began_at: the moment from which the times of pods count, in seconds since the Unix epoch.
    """

    history: EventHistory = field(default_factory=EventHistory)
    series: JobSeries = field(default_factory=JobSeries)
    saved_pod_times: Mapping[str, Any] = field(default_factory=dict)
    began_at: float = 0.0

    def pod_times(self) -> PodTimes:
        """Parse the times of pods, which only the dashboard needs.

        Raises:
            ValueError: they are damaged.
        """
        return PodTimes.from_journal(self.saved_pod_times) if self.saved_pod_times else PodTimes()

    @classmethod
    def read(cls, data: bytes) -> JobJournal:
        """Parse the bytes of ``journal.json``; fields that an older version did not write are empty.

        Raises:
            ValueError: it is not a journal.
        """
        document = json.loads(data)
        try:
            core = document["snapshot"]["core"]
            history, series, accounting = core.get("events"), core.get("series"), core.get("accounting", {})
            pod_times, began_at = accounting.get("pods", {}), float(accounting.get("began_at", 0.0))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a journal: {error!r}") from error
        return cls(
            history_from_journal(history) if history is not None else EventHistory(),
            JobSeries.from_journal(series) if series is not None else JobSeries(),
            pod_times,
            began_at,
        )

    @classmethod
    def unpack(cls, text: str) -> JobJournal:
        """From a ConfigMap, which holds the same bytes compressed, in base64; empty: there is none yet.

        Raises:
            ValueError: it is not a journal.
        """
        if not text:
            return cls()
        try:
            return cls.read(zlib.decompress(base64.b64decode(text)))
        except zlib.error as error:
            raise ValueError(f"not a journal: {error}") from error
