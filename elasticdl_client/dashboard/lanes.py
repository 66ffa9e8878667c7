"""Lanes: the runs of each pod of a job as spans of time, from the job's events and its pods.  Values only, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, describe
from elasticdl_client.job_status import JobStatus, LostPod, PodStatus

MAX_LANES = 400  # a page of more is no overview; the oldest that have ended go first


class LaneState(StrEnum):
    """The state of a pod during a span."""

    WAITING = "waiting"  # created, and does not run yet
    STARTING = "starting"  # its process runs, and has not registered
    WORKING = "working"
    LEAVING = "leaving"  # it was asked to end


class LaneEnd(StrEnum):
    """How a run of a pod ended."""

    DONE = "done"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Span:
    """A pod in one state; times are seconds since the Unix epoch."""

    state: LaneState
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class LaneEnding:
    """The end of one run of a pod.

    Attributes:
        why: in the cluster's or the master's words; may be empty.
        event: its number; 0: it is known from the status alone.
    """

    how: LaneEnd
    at: float
    why: str = ""
    event: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """The runs of a pod; a parameter server's successor has the same name.

    Attributes:
        name: worker-3, ps-0, master; events have it as their subject.
    """

    name: str
    spans: tuple[Span, ...]
    endings: tuple[LaneEnding, ...]


_BEGINS = {
    EventKind.POD_CREATED: LaneState.WAITING,
    EventKind.POD_PENDING: LaneState.WAITING,
    EventKind.POD_BLOCKED: LaneState.WAITING,
    EventKind.POD_RUNNING: LaneState.STARTING,
    EventKind.WORKER_REGISTERED: LaneState.WORKING,
    EventKind.PS_READY: LaneState.WORKING,
    EventKind.JOB_STARTED: LaneState.WORKING,  # of the master
    EventKind.JOB_RESUMED: LaneState.WORKING,
    EventKind.MASTER_RESTARTED: LaneState.WORKING,
    EventKind.POD_DRAINING: LaneState.LEAVING,
    EventKind.POD_GIVEN_UP: LaneState.LEAVING,
}
_OF_MASTER = (EventKind.JOB_STARTED, EventKind.JOB_RESUMED, EventKind.MASTER_RESTARTED)
_ENDS = {EventKind.POD_COMPLETED: LaneEnd.DONE, EventKind.POD_STOPPED: LaneEnd.DONE, EventKind.POD_LOST: LaneEnd.LOST}
_ORDER = {LaneState.WAITING: 0, LaneState.STARTING: 1, LaneState.WORKING: 2, LaneState.LEAVING: 3}
_PHASES = {"Pending": LaneState.WAITING, "Running": LaneState.WORKING}


def lanes_of(status: JobStatus, history: EventHistory, until: float) -> tuple[Lane, ...]:
    """Return the lanes of a job: master, parameter servers, workers, each by number.

    A pod without events, of a job without a journal, is shown as far as the status tells.

    Args:
        until: where spans that have not ended end; now, or the job's end.
    """
    by_pod: dict[str, list[JobEvent]] = defaultdict(list)
    for event in history.events:
        name = "master" if event.kind in _OF_MASTER else event.subject
        if _is_pod(name) and (event.kind in _BEGINS or event.kind in _ENDS):
            by_pod[name].append(event)
    prefix = f"elasticdl-{status.job_name}-"
    pods = {pod.name.removeprefix(prefix): pod for pod in status.pods}
    lost: dict[str, list[LostPod]] = defaultdict(list)
    for pod in status.lost_pods:
        lost[pod.name.removeprefix(prefix)].append(pod)
    lanes = [_of_events(name, events, pods.get(name), until) for name, events in by_pod.items()]
    begin = status.updated_at - status.elapsed_seconds if status.elapsed_seconds else status.started_at or until
    for name in dict.fromkeys([*pods, *lost]):
        if name not in by_pod:
            lanes.append(_of_status(name, pods.get(name), lost[name], begin, until))
    return tuple(sorted(_newest(lanes), key=lambda lane: _sort_key(lane.name)))


def _of_events(name: str, events: Iterable[JobEvent], pod: PodStatus | None, until: float) -> Lane:
    spans: list[Span] = []
    endings: list[LaneEnding] = []
    state: LaneState | None = None
    began = 0.0
    for event in events:
        if (how := _ENDS.get(event.kind)) is not None:
            if state is not None:
                spans.append(Span(state, began, event.at))
            endings.append(LaneEnding(how, event.at, describe(event), event.number))
            state = None
            continue
        following = _BEGINS[event.kind]
        if state is None:
            state, began = following, event.at
        elif _ORDER[following] > _ORDER[state] or following is LaneState.WAITING:
            if following is not state:
                spans.append(Span(state, began, event.at))
                began = event.at
            state = following
    if state is not None:
        spans.append(Span(state, began, max(began, until)))
        if pod is not None and pod.phase in ("Succeeded", "Failed"):
            how = LaneEnd.DONE if pod.phase == "Succeeded" else LaneEnd.LOST
            endings.append(LaneEnding(how, until, pod.message))
    return Lane(name, tuple(span for span in spans if span.end > span.begin), tuple(endings))


def _of_status(name: str, pod: PodStatus | None, lost: Iterable[LostPod], begin: float, until: float) -> Lane:
    spans: list[Span] = []
    endings: list[LaneEnding] = []
    for one in lost:
        spans.append(Span(LaneState.WORKING, begin, max(begin, one.at)))
        endings.append(LaneEnding(LaneEnd.LOST, one.at, one.message))
        begin = one.at
    if pod is not None:
        if pod.phase in ("Succeeded", "Failed"):
            how = LaneEnd.DONE if pod.phase == "Succeeded" else LaneEnd.LOST
            spans.append(Span(LaneState.WORKING, begin, until))
            endings.append(LaneEnding(how, until, pod.message))
        else:
            spans.append(Span(_PHASES.get(pod.phase, LaneState.WAITING), begin, until))
    return Lane(name, tuple(span for span in spans if span.end > span.begin), tuple(endings))


def _newest(lanes: list[Lane]) -> list[Lane]:
    if len(lanes) <= MAX_LANES:
        return lanes
    return sorted(lanes, key=lambda lane: lane.spans[-1].end if lane.spans else 0.0)[-MAX_LANES:]


def _is_pod(name: str) -> bool:
    role, _, number = name.partition("-")
    return name == "master" or (role in ("worker", "ps") and number.isdecimal())


def _sort_key(name: str) -> tuple[int, int]:
    role, _, number = name.partition("-")
    return {"master": 0, "ps": 1}.get(role, 2), int(number) if number.isdecimal() else 0
