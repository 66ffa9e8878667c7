"""A pod's JSON to `PodStatus`: its role, its phase, and why it is pending or has ended, in the API's words.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl_client.job_status import PodStatus
from elasticdl_client.kubernetes import names, placement

_ROLES = ("master", "ps", "worker")
_LONGEST_MESSAGE = 500
IN_THE_MAKING = ("ContainerCreating", "PodInitializing")


def label(pod: Mapping[str, Any], name: str) -> str:
    """A label of an object; empty if it has none."""
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def is_going(pod: Mapping[str, Any]) -> bool:
    """Whether it is being deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def sort_key(pod: Mapping[str, Any]) -> tuple[int, int, str]:
    """Master, servers, workers, each by their number."""
    role, index = label(pod, names.ROLE_LABEL), label(pod, names.INDEX_LABEL)
    number = int(index) if index.isdecimal() else 0
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), number, str(pod["metadata"]["name"]))


def container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the pod's own container, its first; empty while there is none."""
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    own = str(pod["spec"]["containers"][0]["name"])
    return next((status for status in statuses if status.get("name") == own), statuses[0])


def is_being_made(pod: Mapping[str, Any]) -> bool:
    """Whether its kubelet makes its container, or tries to: the object does not say what that waits for."""
    state = container(pod).get("state") or {}
    reason = (state.get("waiting") or {}).get("reason", "")
    is_placed = _phase(pod) == "Pending" and "nodeName" in pod["spec"] and not is_going(pod)
    return is_placed and reason in ("", *IN_THE_MAKING)


def pod_status(pod: Mapping[str, Any]) -> PodStatus:
    """Return the status of a pod."""
    status = pod.get("status", {})
    return PodStatus(
        name=str(pod["metadata"]["name"]),
        role=label(pod, names.ROLE_LABEL),
        phase=_phase(pod),
        message=_message(pod, status)[:_LONGEST_MESSAGE],
        restarts=int(container(pod).get("restartCount", 0)),
    )


def _phase(pod: Mapping[str, Any]) -> str:
    """Of the pod, or of its own container where that has ended for good and the pod's is still to be written."""
    phase = str(pod.get("status", {}).get("phase", "Pending"))
    ended = (container(pod).get("state") or {}).get("terminated")
    if phase == "Running" and ended and pod["spec"].get("restartPolicy") == "Never":
        return "Failed" if ended.get("exitCode") else "Succeeded"
    return phase


def _message(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    parts = ["Terminating"] if is_going(pod) else []
    state = container(pod).get("state") or {}
    waiting, terminated = state.get("waiting"), state.get("terminated")
    disrupted = _condition(status, "DisruptionTarget", "True")
    if disrupted:  # PreemptionByScheduler, EvictionByEvictionAPI, DeletionByTaintManager, TerminationByKubelet, …
        parts.append(_joined(disrupted))
    elif status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded
        parts.append(_joined(status))
    elif terminated:
        parts.append(_ending(terminated))
    elif waiting:
        before = (container(pod).get("lastState") or {}).get("terminated")
        parts.append(_joined(waiting) + (f"; before: {_ending(before)}" if before else ""))
    elif status.get("phase") == "Pending":
        parts.append(placement.why_gated(pod) or _joined(_condition(status, "PodScheduled", "False")))
    return "; ".join(part for part in parts if part)


def _condition(status: Mapping[str, Any], kind: str, value: str) -> Mapping[str, Any]:
    """A condition of a pod that has this value; empty if it has another, or there is none."""
    found = (one for one in status.get("conditions") or () if (one.get("type"), one.get("status")) == (kind, value))
    return next(found, {})


def _ending(terminated: Mapping[str, Any]) -> str:
    reason = str(terminated.get("reason") or "")
    code = terminated.get("exitCode", 0)
    return reason if reason == "Completed" or code == 0 else f"{reason or 'Error'}, exit code {code}"


def _joined(thing: Mapping[str, Any]) -> str:
    reason, message = str(thing.get("reason") or ""), str(thing.get("message") or "").strip()
    return f"{reason}: {message}" if reason and message else reason or message
