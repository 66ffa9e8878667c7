"""The protocol of the agent and its clients over the Unix socket: one JSON object a line.

A request is ``{"verb": …, …}``, an answer ``{"ok": …}`` or ``{"error": {"what": …, "hint": …}}``; after the verb
``watch`` the connection carries events only.  This module knows the words, never the sockets.
"""

from __future__ import annotations

import json
from typing import Any

from elasticdl.cluster.cluster import EndReason, EventType, Pod, PodEvent, PodPhase, PodSpec, RestartPolicy
from elasticdl.protocol import Role

Message = dict[str, Any]

MAX_LINE_BYTES = 16 << 20


def encode(message: Message) -> bytes:
    """One line, its newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The object of one line.

    Raises:
        ValueError: the line is not a JSON object.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"not an object: {line[:80]!r}")
    return message


def spec_to_message(spec: PodSpec) -> Message:
    return {
        "name": spec.name,
        "role": spec.role,
        "index": spec.index,
        "command": list(spec.command),
        "env": dict(spec.env),
        "labels": dict(spec.labels),
        "restart_policy": spec.restart_policy,
        "grace_s": spec.grace_s,
        "framework": spec.framework,
        "num_gpus": spec.num_gpus,
    }


def spec_from_message(message: Message) -> PodSpec:
    """The inverse of `spec_to_message`.

    Raises:
        KeyError, ValueError: a field is missing or has no such value.
    """
    return PodSpec(
        name=message["name"],
        role=Role(message["role"]),
        index=message["index"],
        command=tuple(message["command"]),
        env=message["env"],
        labels=message["labels"],
        restart_policy=RestartPolicy(message["restart_policy"]),
        grace_s=message["grace_s"],
        framework=message["framework"],
        num_gpus=message["num_gpus"],
    )


def pod_to_message(pod: Pod) -> Message:
    return {
        "name": pod.name,
        "role": pod.role,
        "index": pod.index,
        "uid": pod.uid,
        "phase": pod.phase,
        "labels": dict(pod.labels),
        "reason": pod.reason,
        "exit_code": pod.exit_code,
        "message": pod.message,
        "restarts": pod.restarts,
        "pid": pod.pid,
        "has_slot": pod.has_slot,
    }


def pod_from_message(message: Message) -> Pod:
    """The inverse of `pod_to_message`."""
    return Pod(
        name=message["name"],
        role=Role(message["role"]),
        index=message["index"],
        uid=message["uid"],
        phase=PodPhase(message["phase"]),
        labels=message["labels"],
        reason=EndReason(message["reason"]),
        exit_code=message["exit_code"],
        message=message["message"],
        restarts=message["restarts"],
        pid=message["pid"],
        has_slot=message["has_slot"],
    )


def event_to_message(event: PodEvent) -> Message:
    return {"type": event.type, "pod": pod_to_message(event.pod)}


def event_from_message(message: Message) -> PodEvent:
    """The inverse of `event_to_message`."""
    return PodEvent(EventType(message["type"]), pod_from_message(message["pod"]))
