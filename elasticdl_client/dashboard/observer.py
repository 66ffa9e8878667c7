"""Observer: looks at the jobs while a page is open, and keeps what it has seen of each.

One task looks, in a thread, as the stores wait for files and for the API server; pages wait for its next look.  A look
may take a fifth of the time: a slow cluster, or a machine of many jobs, is looked at less often.  The process ends
without waiting for a look.  It never acts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from elasticdl_client.choices import Runtime
from elasticdl_client.dashboard.access import Action, possible
from elasticdl_client.dashboard.lanes import Lane, lanes_of
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.explain.diagnosis import Diagnosis, Facts
from elasticdl_client.explain.explanation import explain
from elasticdl_client.goodput import PodTimes
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_series import JobSeries, SeriesPoint, joined
from elasticdl_client.jobs.store import JobInfo, JobStore, Phase
from elasticdl_client.jobs.stores import JobStores

logger = logging.getLogger("elasticdl.dashboard")

_INTERVALS_S = {Runtime.LOCAL: 1.0, Runtime.KUBERNETES: 2.0}  # a master writes its status once a second
_SHARE = 5  # of the time between two looks, a look takes at most one part in this number
_EXPLAINED_EVENTS = 500  # the newest; a journal keeps fewer
_EXPLAINED_S = 10  # a diagnosis by the numbers of the status may be as old
_OWN_POINTS = 600  # of a job that was looked at: ten minutes at one a second, then half as many


@dataclass(frozen=True, slots=True)
class JobDetail:
    """The content of a job's page besides the job itself.

    Attributes:
        points: Points of the journal, then those observed since.
        pod_times: how workers spent their time, from `began_at` on (seconds since the Unix epoch).
        actions: Actions that the client can take now.
        diagnoses: Diagnoses of `elasticdl explain`.
        problem: why the history cannot be read; may be empty.
    """

    history: EventHistory = field(default_factory=EventHistory)
    points: tuple[SeriesPoint, ...] = ()
    lanes: tuple[Lane, ...] = ()
    pod_times: PodTimes = field(default_factory=PodTimes)
    began_at: float = 0.0
    actions: frozenset[Action] = frozenset()
    diagnoses: tuple[Diagnosis, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """All that one look has found.

    Attributes:
        number: Number of the observation; 0: there is none yet.
        jobs: by id, the newest first.
        details: Details of the jobs that pages show.
        problems: places that do not answer, and why.
    """

    number: int = 0
    at: float = 0.0
    jobs: Mapping[str, JobInfo] = field(default_factory=dict)
    details: Mapping[str, JobDetail] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def id_of(job: JobInfo) -> str:
    """Return the name of a job in addresses: of fixed form, for any name and directory."""
    place = "\0".join((job.runtime.value, job.namespace, job.directory, job.name))
    return hashlib.sha256(place.encode()).hexdigest()[:16]


class Observer:
    """Looks at the jobs of some places as long as a page wants to know.

    Args:
        places: which.
        only: a job by its id: the others are not shown; empty: all are.
        offers_actions: pages may offer what the client could do.

    Attributes:
        is_closed: pages end, and there is no newer view for them.
    """

    def __init__(self, places: JobStores, only: str = "", *, offers_actions: bool = True) -> None:
        self._places = places
        self._offers_actions = offers_actions
        self._only = only
        self.is_closed = False
        self._view = View()
        self._begun = 0  # number of the newest look, which may be under way
        self._looked = asyncio.Condition()
        self._wake = asyncio.Event()
        self._pages: Counter[str] = Counter()  # by the id of the job that they show; "": of no job
        self._known: dict[Runtime, list[JobInfo]] = {}
        self._seen: dict[str, _Seen] = {}

    @property
    def view(self) -> View:
        """The newest view."""
        return self._view

    def store(self, job: JobInfo) -> JobStore:
        """Return the store in which a job was found."""
        return self._places.store(job)

    @contextmanager
    def page(self, job_id: str = "") -> Iterator[None]:
        """As long as a page is open; looks at once."""
        self._pages[job_id] += 1
        self._wake.set()
        try:
            yield
        finally:
            self._pages[job_id] -= 1
            self._pages += Counter()  # without those of which none is left

    def look_again(self) -> None:
        """Something was done to a job: look now."""
        self._wake.set()

    async def look(self) -> View:
        """Return the view of an observation that begins after this call, which a page waits for."""
        return await self.newer_than(self._begun)

    async def newer_than(self, number: int) -> View:
        """Wait for a view after that number, or for the observer's end; return the newest view."""
        async with self._looked:
            await self._looked.wait_for(lambda: self.is_closed or self._view.number > number)
            return self._view

    async def close(self) -> None:
        """Let the pages end."""
        async with self._looked:
            self.is_closed = True
            self._looked.notify_all()

    async def run(self) -> None:
        """Observe the jobs until cancelled."""
        while True:
            if not self._pages:
                await self._wake.wait()
            self._wake.clear()
            began = time.monotonic()
            self._begun += 1
            shown = frozenset(self._pages) - {""}
            view = await _in_daemon(lambda: self._look(shown))  # noqa: B023
            took = time.monotonic() - began
            async with self._looked:
                self._view = view
                self._looked.notify_all()
            interval = max(_INTERVALS_S[runtime] for runtime in self._places.stores or _INTERVALS_S)
            try:
                await asyncio.wait_for(self._wake.wait(), max(interval, _SHARE * took))
            except TimeoutError:
                continue

    # In a thread, one at a time ---------------------------------------------------------------------------------

    def _look(self, shown: frozenset[str]) -> View:
        found: dict[str, JobInfo] = {}
        problems = [self._places.unreachable] if self._places.unreachable else []
        for runtime, store in self._places.stores.items():
            try:
                self._known[runtime] = store.list()
            except ElasticDLError as error:  # show the previous state, with the reason
                problems.append(error.what)
            except OSError as error:  # a directory that is deleted while it is read
                problems.append(f"The jobs {self._places.words[runtime]} cannot be read: {error}.")
            found |= {id_of(job): job for job in self._known.get(runtime, ())}
        if self._only:
            found = {job_id: job for job_id, job in found.items() if job_id == self._only}
        now, details = time.time(), {}
        self._seen = {job_id: seen for job_id, seen in self._seen.items() if job_id in shown and job_id in found}
        for job_id in shown & found.keys():
            store, job = self._places.store(found[job_id]), found[job_id]
            found[job_id] = job = _nearer(store, job)
            seen = self._seen.get(job_id)
            if seen is None or seen.created_at != job.created_at:  # another job may have taken its place
                seen = self._seen[job_id] = _Seen(self._offers_actions, job.created_at)
            try:
                details[job_id] = seen.look(store, job, now)
            except Exception as error:  # a bug, or a journal of values that no master writes: the pages of others go on
                logger.exception("Job %s cannot be shown", job.name)
                problem = f"The dashboard cannot show the history of this job; its output says more: {error!r}."
                details[job_id] = JobDetail(problem=problem)
        newest = sorted(found.items(), key=lambda item: (item[1].created_at, item[1].name), reverse=True)
        return View(self._begun, now, dict(newest), details, tuple(problems))


def _in_daemon(look: Callable[[], View]) -> asyncio.Future[View]:
    """Return a new view, read in a daemon thread: at its end, a process waits for threads of asyncio."""
    found: Future[View] = Future()

    def run() -> None:
        found.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            found.set_result(look())
        except Exception as error:  # noqa: BLE001  it is the caller's
            found.set_exception(error)

    threading.Thread(target=run, name="look", daemon=True).start()
    return asyncio.wrap_future(found)


def _nearer(store: JobStore, job: JobInfo) -> JobInfo:
    """Return a job of a cluster with the reasons why its pods are pending, which a list does not read."""
    if job.runtime is Runtime.LOCAL or all(pod.phase != "Pending" for pod in job.status.pods):
        return job
    try:
        again = store.find(job.name)
    except ElasticDLError:
        return job
    return again if again is not None and id_of(again) == id_of(job) else job


def _possible(job: JobInfo, store: JobStore) -> frozenset[Action]:
    """None where the cluster does not say what its user may do."""
    try:
        return possible(job, store)
    except ElasticDLError:
        return frozenset()


class _Seen:
    """The observations of a job since its page was first shown."""

    def __init__(self, offers_actions: bool, created_at: float) -> None:
        self.created_at = created_at
        self._offers_actions = offers_actions
        self._actions: frozenset[Action] = frozenset()
        self._series = JobSeries(limit=_OWN_POINTS)
        self._before: tuple[SeriesPoint, ...] | None = None  # of the journal; None: not read yet
        self._history = EventHistory()
        self._pod_times, self._began_at = PodTimes(), 0.0
        self._read_at: tuple[float, Phase] | None = None  # the status with which the journal was read
        self._problem = ""
        self._explained: object = None
        self._diagnoses: tuple[Diagnosis, ...] = ()

    def look(self, store: JobStore, job: JobInfo, now: float) -> JobDetail:
        state = (job.status.updated_at, job.phase)
        if self._offers_actions and (self._read_at is None or self._read_at[1] is not job.phase):
            self._actions = _possible(job, store)
        if state != self._read_at:
            self._read(store, job)
            self._read_at = state
        if job.status.updated_at and not job.has_ended and job.phase is not Phase.STOPPED:
            self._series.add(SeriesPoint.of(job.status, job.status.updated_at))
        until = now
        if job.has_ended or job.phase is Phase.STOPPED:
            newest = self._history.events[-1].at if self._history.events else 0.0
            until = max(job.status.updated_at, newest) or now
        points = joined(self._before or (), self._series.points)
        lanes = lanes_of(job.status, self._history, until)
        self._explain(job, now)
        return JobDetail(
            self._history, tuple(points), lanes, self._pod_times, self._began_at,
            self._actions, self._diagnoses, self._problem,
        )  # fmt: skip

    def _explain(self, job: JobInfo, now: float) -> None:
        """Anew only if there is something new to explain; the status always is, and is explained now and then."""
        newest = self._history.events[-1].number if self._history.events else 0
        pods = tuple((pod.name, pod.phase, pod.message) for pod in job.status.pods)
        what = (newest, job.phase, pods, job.status.updated_at // _EXPLAINED_S)
        if what == self._explained:
            return
        self._explained = what
        history = replace(self._history, events=self._history.events[-_EXPLAINED_EVENTS:])
        self._diagnoses = explain(Facts(job, history, now)).diagnoses

    def _read(self, store: JobStore, job: JobInfo) -> None:
        try:
            journal = store.journal(job)
            self._history = journal.history
            self._pod_times, self._began_at = journal.pod_times(), journal.began_at
            if self._before is None or job.has_ended:
                self._before = journal.series.points
            self._problem = ""
        except ElasticDLError as error:
            self._problem = error.what
        except ValueError as error:
            self._problem = f"The times of the job's pods in its journal cannot be read: {error}."
