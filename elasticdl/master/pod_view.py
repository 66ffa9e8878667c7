"""The job's pods as the cluster reports them, for the log, each change once, and the status that the client reads.

It decides nothing; the core decides the consequences of an end.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable

from elasticdl.master.core.events import PodChanged, PodsListed
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role
from elasticdl_client.job_status import EpochCoverage, JobStatus, LostPod, PodStatus

MAX_LOST = 20
MAX_ENDED = 50  # the newest of those that have ended; the others are in the log
_ROLES = (Role.PS, Role.WORKER)
_GONE = frozenset({PodState.SUCCEEDED, PodState.FAILED, PodState.DELETED})
_LOST = frozenset({PodState.FAILED, PodState.DELETED})
_EXPLAINED = frozenset({PodState.PENDING, PodState.FAILED})  # phases whose message says something

logger = logging.getLogger("elasticdl.master")
MAX_EPOCHS = 100  # one by one, 20 kB of the status; it is written once a second, on Kubernetes into a ConfigMap


class PodView:
    """The newest event of each pod, by name, and the pods that were lost.

    Args:
        clock: seconds since the Unix epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._pods: dict[str, PodChanged] = {}
        self._lost: deque[LostPod] = deque(maxlen=MAX_LOST)
        self._clock = clock

    def changed(self, event: PodChanged) -> None:
        """Takes a change in, and logs it if it says something new."""
        before = self._pods.get(event.name)
        if before is not None and before.uid == event.uid and before.phase in _GONE and event.phase not in _GONE:
            return  # from a list that was taken before its end
        self._pods.pop(event.name, None)
        self._pods[event.name] = event  # at the end: ended pods are in the order of their ends
        if before is not None and before.uid == event.uid and before.phase not in _GONE and event.phase in _LOST:
            self._lose(event, _why(_without_log(event)))
        if before is None or before.uid != event.uid:
            self._log(event, "new")
        elif before.phase is not event.phase:
            self._log(event, before.phase)
        elif event.phase is PodState.PENDING and (why := _why(event)) and why != _why(before):
            logger.info("Pod %s: still %s (%s)", event.name, event.phase, why)
        self._forget()

    def listed(self, event: PodsListed) -> None:
        """Apply a list of everything that exists; pods missing in it are gone."""
        names = {pod.name for pod in event.pods}
        for name in self.living():
            if name not in names:
                self._lose(self._pods[name], "gone from the cluster")
        self._pods = {name: pod for name, pod in self._pods.items() if name in names}
        for pod in event.pods:
            self.changed(pod)

    def living(self) -> list[str]:
        """Names of the pods that have not ended."""
        return [name for name, pod in self._pods.items() if pod.phase not in _GONE]

    def statuses(self) -> tuple[PodStatus, ...]:
        """Of servers, then of workers, each by number; pods that are gone from the cluster are left out."""
        shown = [pod for pod in self._pods.values() if pod.phase is not PodState.DELETED and pod.role in _ROLES]
        shown.sort(key=lambda pod: (_ROLES.index(pod.role), pod.index))
        return tuple(PodStatus(pod.name, pod.role, pod.phase, _why(pod)) for pod in shown)

    def lost(self) -> tuple[LostPod, ...]:
        """The newest that were seen alive and failed or were deleted, newest last."""
        return tuple(self._lost)

    def _lose(self, event: PodChanged, why: str) -> None:
        if event.role in _ROLES:
            self._lost.append(LostPod(event.name, event.role, self._clock(), why))

    def _forget(self) -> None:
        gone = [name for name, pod in self._pods.items() if pod.phase in _GONE]
        for name in gone[:-MAX_ENDED]:
            del self._pods[name]

    def _log(self, event: PodChanged, before: str) -> None:
        why = _why(event)
        logger.info("Pod %s: %s -> %s%s", event.name, before, event.phase, f" ({why})" if why else "")


def _without_log(event: PodChanged) -> PodChanged:
    """Without what its program said at its end: if that fails the job, the job's error says it, once."""
    return dataclasses.replace(event, message="") if event.message.startswith("exit code") else event


def _why(event: PodChanged) -> str:
    """Why it is pending, or why it ended; in one line."""
    details = [event.reason] if event.reason else []
    lines = event.message.strip().splitlines() if event.phase in _EXPLAINED else []
    is_error = bool(lines) and lines[0].startswith("exit code") and not lines[0].endswith("its last lines:")
    if event.exit_code is not None and not is_error:
        details.append(f"exit code {event.exit_code}")
    if event.blocked:
        details.append(event.blocked)
    elif lines:
        details.append(lines[0] if is_error else lines[-1])
    return ", ".join(details)


def to_job_status(
    status: JobStatus, started_at: float, pods: tuple[PodStatus, ...] = (), lost_pods: tuple[LostPod, ...] = ()
) -> JobStatus:
    """Return the core's view as of now, with the pods as the cluster has shown them."""
    earlier, newest = status.coverage[:-MAX_EPOCHS], status.coverage[-MAX_EPOCHS:]
    return dataclasses.replace(
        status,
        coverage=(EpochCoverage.total(earlier), *newest) if earlier else newest,
        pods=pods,
        lost_pods=lost_pods,
        started_at=started_at,
        updated_at=time.time(),
    )
