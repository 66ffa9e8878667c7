"""Why a kubelet cannot start a pod: volumes, networks and images that it waits for are in Events alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path

COMPONENT = "elasticdl"  # the source of the Events that a master creates


def newest(connection: Connection, namespace: str, uids: Sequence[str]) -> dict[str, str]:
    """Return the newest Event of each pod, by its uid, if it is a warning, or that an image is being pulled.

    It is a help for people, never needed: a question that is refused or not answered counts as not asked.
    """
    if not uids:
        return {}
    only = f"involvedObject.uid={uids[0]}" if len(uids) == 1 else "involvedObject.kind=Pod"
    try:
        with connection.doing(f"list the events of the namespace {namespace}"):
            path = object_path("events", namespace=namespace)
            events = connection.get(path, [("fieldSelector", only)])["items"]
    except ClusterError:
        return {}
    others = [event for event in events if (event.get("source") or {}).get("component") != COMPONENT]
    found = {str(event["involvedObject"].get("uid")): event for event in sorted(others, key=_age)}
    return {uid: _said(found[uid]) for uid in uids if uid in found and _tells(found[uid])}


def _age(event: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a sort key: by time, to the second, and within a second a warning last."""
    series = event.get("series") or {}
    stamp = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    return str(stamp)[:19], event.get("type") == "Warning"


def _tells(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "Warning" or event.get("reason") == "Pulling"


def _said(event: Mapping[str, Any]) -> str:
    message = " ".join((event.get("message") or "").split())
    return f"{event.get('reason')}: {message}" if event.get("type") == "Warning" else message
