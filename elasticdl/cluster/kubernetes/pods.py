"""Converts a pod of the Kubernetes API to the port's `Pod`: its phase, why it is pending, why it has ended.

Pure: one object in, one value out.  For facts that need time or other objects, see watch.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from elasticdl.cluster.cluster import EndReason, Pod, PodPhase, explained, shows_error_of_script
from elasticdl.protocol import Role
from elasticdl_client.kubernetes.names import INDEX_LABEL, ROLE_LABEL, own_container
from elasticdl_client.kubernetes.resources import queue_of_gated, why_gated

Object = dict[str, Any]

PULL_FAILED = "ErrImagePull"
PULL_BACK_OFF = "ImagePullBackOff"
_BLOCKING = {
    PULL_BACK_OFF,
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "CreateContainerConfigError",
    "CreateContainerError",
}
_NOTHING_TO_SAY = {"ContainerCreating", "PodInitializing"}
_DISRUPTIONS = {
    "PreemptionByScheduler": EndReason.PREEMPTED,
    "PreemptionByKubeScheduler": EndReason.PREEMPTED,
    "EvictionByEvictionAPI": EndReason.EVICTED,
    "TerminationByKubelet": EndReason.EVICTED,
    "DeletionByTaintManager": EndReason.NODE_LOST,
    "DeletionByPodGC": EndReason.NODE_LOST,
}
_KUBELET_REASONS = {
    "Preempting": EndReason.PREEMPTED,  # for a critical pod
    "NodeLost": EndReason.NODE_LOST,
    "DeadlineExceeded": EndReason.ERROR,
}
_KEPT_BYTES, _KEPT_LINES = 2048, 80  # of a container's log that the kubelet keeps in the status
_KILLED = {128 + signal.SIGKILL, 128 + signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a pod has ended or must end, and a message; without a reason nothing is known."""

    reason: EndReason = EndReason.NONE
    message: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a container does not run: Kubernetes's reason and message."""

    reason: str = ""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason

    @property
    def blocked(self) -> bool:
        return self.reason in _BLOCKING


def read_pod(pod: Object) -> Pod | None:
    """Return the pod from its object only; None if it is not a pod of a job."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(ROLE_LABEL) not in set(Role) or not labels.get(INDEX_LABEL, "").isdecimal():
        return None
    phase, cause, exit_code, blocked = _phase(pod), Cause(), None, ""
    if phase is PodPhase.PENDING:
        cause = Cause(message=_why_pending(pod))
        blocked = cause.message if waiting(pod).blocked else ""
    elif phase is PodPhase.RUNNING:
        cause = Cause(message=_why_paused(pod))
    else:
        cause, exit_code = why_ended(pod), code_of(pod)
    return Pod(
        name=pod["metadata"]["name"],
        role=Role(labels[ROLE_LABEL]),
        index=int(labels[INDEX_LABEL]),
        uid=pod["metadata"]["uid"],
        phase=phase,
        labels=labels,
        reason=cause.reason,
        exit_code=exit_code,
        message=cause.message,
        restarts=(_main(pod) or {}).get("restartCount", 0),
        blocked=blocked,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        queue=queue_of_gated(pod) if phase is PodPhase.PENDING else "",
    )


def has_ended(pod: Pod) -> bool:
    return pod.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def deletion_of(pod: Object) -> tuple[str, float] | None:
    """Return when a pod in deletion must be gone, by the server's clock, and its grace in seconds; else None."""
    stamp = pod["metadata"].get("deletionTimestamp")
    return (stamp, float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)) if stamp else None


def ended_before_deletion(pod: Object) -> bool:
    """Return whether a pod's container had already ended for good when the pod was deleted.

    The kubelet shows a pod that was deleted between two runs as failed, with the end of the last run.
    """
    deletion, ended = deletion_of(pod), _terminated(pod)
    if deletion is None or ended is None or not ended.get("finishedAt"):
        return False
    if pod["spec"].get("restartPolicy") == "OnFailure" and ended["exitCode"] and not pod["status"].get("reason"):
        return False
    asked = datetime.fromisoformat(deletion[0]) - timedelta(seconds=deletion[1])
    return datetime.fromisoformat(ended["finishedAt"]) < asked


def code_of(pod: Object) -> int | None:
    """Return the exit code of a pod's container, if it has ended for good."""
    ended = _terminated(pod)
    return None if ended is None else int(ended["exitCode"])


def node_of(pod: Object) -> str:
    """Return the node of a pod; empty if it has none yet."""
    return str(pod["spec"].get("nodeName") or "")


def node_is_silent(pod: Object) -> bool:
    """Return whether the cluster has marked a pod as not ready, while its kubelet says that all containers are."""
    marked = any(one["type"] == "Ready" and one["status"] != "True" for one in _conditions(pod))
    statuses = _statuses(pod, "containerStatuses")
    return marked and bool(statuses) and all(status.get("ready") for status in statuses)


def container_of(pod: Object) -> str:
    """Return the container that does the work; a pod may have injected ones beside it."""
    return own_container(pod["metadata"]["name"], [container["name"] for container in pod["spec"]["containers"]])


def disruption_of(pod: Object) -> Cause:
    """Return the cause of an end from outside, as reported by servers since version 1.26, or by the kubelet."""
    for condition in _conditions(pod):
        if condition["status"] != "True":
            continue
        said = condition.get("message") or condition.get("reason") or ""
        if condition["type"] == "DisruptionTarget":
            return Cause(_DISRUPTIONS.get(condition.get("reason", ""), EndReason.EVICTED), said)
        if condition["type"] == "TerminationTarget":  # set by Kueue, before it deletes a pod for its quota
            return Cause(EndReason.PREEMPTED if "reempt" in said else EndReason.EVICTED, said)
    word = pod["status"].get("reason") or ""
    said = pod["status"].get("message") or word
    if word in _KUBELET_REASONS:
        return Cause(_KUBELET_REASONS[word], said)
    if word and pod["status"].get("phase") == PodPhase.FAILED:
        return Cause(EndReason.EVICTED, said)  # Evicted, OutOfcpu, NodeAffinity, Shutdown, …
    return Cause()


def error_is_cut_off(pod: Object) -> bool:
    """Return whether the object has only the end of a log, without the user's frames of its error."""
    kept = (_terminated(pod) or {}).get("message") or ""
    # The kubelet may cut inside of a character: up to 3 bytes less.
    is_part = len(kept.encode()) > _KEPT_BYTES - 4 or len(kept.splitlines()) >= _KEPT_LINES
    return is_part and not shows_error_of_script(kept)


def why_ended(pod: Object, log: str = "") -> Cause:
    """Return why a pod has ended, as far as its object shows; a deletion shows as the signal that it sent.

    Args:
        log: The end of its container's log; empty: use the part in the object.
    """
    disruption, ended = disruption_of(pod), _terminated(pod)
    if disruption.reason is not EndReason.NONE:
        return disruption
    if ended is None:
        unknown = "its status does not say how its containers ended, or whether they ran"
        return Cause(EndReason.ERROR, pod["status"].get("message") or unknown)
    code = int(ended["exitCode"])
    if code == 0:
        return Cause(EndReason.COMPLETED)
    text = _describe_code(code)
    if ended.get("reason") == "OOMKilled":
        return Cause(EndReason.OOM_KILLED, f"killed because memory ran out{_describe_limit(pod)}")
    if code in _KILLED:
        return Cause(EndReason.KILLED, text)
    return Cause(EndReason.ERROR, explained(text, log or ended.get("message") or ""))


def waiting(pod: Object) -> Waiting:
    """Return why the first container waits that cannot start; blocked containers come first."""
    found = []
    for status in [*_statuses(pod, "initContainerStatuses"), *_statuses(pod, "containerStatuses")]:
        state = status.get("state", {}).get("waiting")
        if state:
            found.append(Waiting(state.get("reason") or "", (state.get("message") or "").strip()))
    found.sort(key=lambda one: (not one.blocked, one.reason in _NOTHING_TO_SAY))
    return found[0] if found else Waiting()


def _phase(pod: Object) -> PodPhase:
    phase = pod["status"].get("phase") or PodPhase.PENDING
    if pod["status"].get("reason") == "NodeLost":
        return PodPhase.FAILED
    if phase == PodPhase.RUNNING and pod["spec"].get("restartPolicy") == "Never" and (ended := _terminated(pod)):
        return PodPhase.FAILED if ended["exitCode"] else PodPhase.SUCCEEDED  # an injected container may never end
    return PodPhase.RUNNING if phase == "Unknown" else PodPhase(phase)


def _why_pending(pod: Object) -> str:
    wait = waiting(pod)
    if wait.reason:
        return str(wait)
    if gated := why_gated(pod):
        return gated
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _why_paused(pod: Object) -> str:
    """Return why the container of a running pod waits for its next start, and how the last run ended; or ""."""
    status = _main(pod) or {}
    wait = status.get("state", {}).get("waiting")
    if not wait:
        return ""
    last = status.get("lastState", {}).get("terminated")
    said = f"; {explained(_describe_code(int(last['exitCode'])), last.get('message') or '')}" if last else ""
    return f"{Waiting(wait.get('reason') or '', wait.get('message') or '')}{said}"


def _conditions(pod: Object) -> list[Object]:
    return pod["status"].get("conditions") or []


def _statuses(pod: Object, kind: str) -> list[Object]:
    return pod["status"].get(kind) or []


def _main(pod: Object) -> Object | None:
    statuses = _statuses(pod, "containerStatuses")
    name = container_of(pod)
    return next((status for status in statuses if status["name"] == name), None)


def _terminated(pod: Object) -> Object | None:
    """Return how a pod's container ended; if it succeeded and the pod failed, how the failed container ended."""
    main = _main(pod)
    ended: Object | None = main.get("state", {}).get("terminated") if main else None
    if pod["status"].get("phase") == PodPhase.FAILED and (ended is None or ended["exitCode"] == 0):
        # Native sidecars are init containers that run beside the others; their end does not matter for the pod.
        starters = pod["spec"].get("initContainers") or []
        sidecars = {one["name"] for one in starters if one.get("restartPolicy") == "Always"}
        for status in [*_statuses(pod, "initContainerStatuses"), *_statuses(pod, "containerStatuses")]:
            if status["name"] in sidecars:
                continue  # a sidecar, which the kubelet ends after the others
            other: Object | None = status.get("state", {}).get("terminated")
            if other and other["exitCode"] != 0:
                return other
    return ended


def _describe_code(code: int) -> str:
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name}"
        except ValueError:  # not the number of a signal
            return f"exit code {code}"
    return f"exit code {code}"


def _describe_limit(pod: Object) -> str:
    name = container_of(pod)
    for container in pod["spec"]["containers"]:
        limit = (container.get("resources", {}).get("limits") or {}).get("memory")
        if container["name"] == name and limit:
            return f" (limit {limit})"
    return ""
