"""Where and when pods are scheduled: --node_selector, --tolerations, --scheduler_name, and --queue for Kueue.

Every worker and parameter server is a workload of its own in the queue, so a job grows and shrinks with its quota.  The
master is none: a job whose master is taken away for a quota would stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elasticdl_client.errors import FlagError

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_QUEUE_GATES = ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SELECTOR_HINT = "For example disktype=ssd,topology.kubernetes.io/zone=eu-1; `kubectl get nodes --show-labels`."
_TOLERATIONS_HINT = (
    "As `kubectl taint` writes taints: key=value:Effect, key:Effect, key=value or key, with commas between; the effect "
    f"is one of {', '.join(_EFFECTS)}."
)


def parse_node_selector(text: str) -> dict[str, str]:
    """Return the labels of --node_selector; empty text is an empty dict.

    Raises:
        FlagError: one is no label.
    """
    found: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not _is_key(key) or not _is_value(value):
            raise FlagError(f"'{part}' is not a label of nodes, key=value", _SELECTOR_HINT)
        if key in found:
            raise FlagError(f"names the label {key} twice", _SELECTOR_HINT)
        found[key] = value
    return found


def parse_tolerations(text: str) -> list[dict[str, str]]:
    """Return the tolerations of --tolerations as the API takes them; empty text is an empty list.

    Raises:
        FlagError: one does not name a taint.
    """
    found = []
    for part in _parts(text):
        taint, colon, effect = (piece.strip() for piece in part.partition(":"))
        key, equals, value = (piece.strip() for piece in taint.partition("="))
        if not _is_key(key) or not _is_value(value) or (colon and effect not in _EFFECTS):
            raise FlagError(f"'{part}' does not name a taint", _TOLERATIONS_HINT)
        toleration = {"key": key, **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"})}
        found.append(toleration | ({"effect": effect} if effect else {}))
    return found


def check_name(text: str) -> str:
    """A check: the name of a scheduler or a queue, or nothing."""
    if not text or (len(text) <= 63 and _DOMAIN.fullmatch(text)):
        return ""
    return "is not a name: at most 63 lower-case letters, digits, dashes and dots"


def add_tolerations(pod_spec: dict[str, Any], tolerations: list[dict[str, Any]]) -> None:
    """Add tolerations; one for a taint that we tolerate for some seconds takes the place of ours."""
    if tolerations:
        keys = {toleration.get("key") for toleration in tolerations}
        kept = [toleration for toleration in pod_spec.get("tolerations", []) if toleration.get("key") not in keys]
        pod_spec["tolerations"] = kept + tolerations


def why_gated(pod: Mapping[str, Any]) -> str:
    """Return what a pod with scheduling gates waits for; empty for one without any."""
    gates = [str(gate["name"]) for gate in (pod.get("spec") or {}).get("schedulingGates") or []]
    if not gates:
        return ""
    queue = (pod["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
    if queue and any(gate in _QUEUE_GATES for gate in gates):
        return f"waiting in queue {queue}"
    return f"waiting for its scheduling gates: {', '.join(gates)}"


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_key(text: str) -> bool:
    domain, slash, name = text.rpartition("/")
    return bool(_PART.fullmatch(name) and (not slash or _DOMAIN.fullmatch(domain)))


def _is_value(text: str) -> bool:
    return not text or _PART.fullmatch(text) is not None
