"""A pod's JSON to `PodStatus`: its role, its phase, and why it is pending or has ended, in the API's words.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl_client.job_status import PodStatus
from elasticdl_client.kubernetes import names

_ROLES = ("master", "ps", "worker")
_LONGEST_MESSAGE = 500


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


def pod_status(pod: Mapping[str, Any]) -> PodStatus:
    """What there is to say of a pod."""
    status = pod.get("status", {})
    return PodStatus(
        name=str(pod["metadata"]["name"]),
        role=label(pod, names.ROLE_LABEL),
        phase=str(status.get("phase", "Pending")),
        message=_message(pod, status)[:_LONGEST_MESSAGE],
        restarts=int(container(pod).get("restartCount", 0)),
    )


def _message(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    parts = ["Terminating"] if is_going(pod) else []
    state = container(pod).get("state") or {}
    waiting, terminated = state.get("waiting"), state.get("terminated")
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded
        parts.append(_joined(status))
    elif terminated:
        parts.append(_ending(terminated))
    elif waiting:
        before = (container(pod).get("lastState") or {}).get("terminated")
        parts.append(_joined(waiting) + (f"; before: {_ending(before)}" if before else ""))
    elif status.get("phase") == "Pending":
        parts.append(_unscheduled(status))
    return "; ".join(part for part in parts if part)


def _unscheduled(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _joined(condition)
    return ""


def _ending(terminated: Mapping[str, Any]) -> str:
    reason = str(terminated.get("reason") or "")
    code = terminated.get("exitCode", 0)
    return reason if reason == "Completed" or code == 0 else f"{reason or 'Error'}, exit code {code}"


def _joined(thing: Mapping[str, Any]) -> str:
    reason, message = str(thing.get("reason") or ""), str(thing.get("message") or "").strip()
    return f"{reason}: {message}" if reason and message else reason or message
