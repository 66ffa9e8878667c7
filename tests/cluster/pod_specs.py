"""Specifications of the pods that tests create."""

from __future__ import annotations

from typing import Any

from elasticdl.cluster.cluster import PodSpec
from elasticdl.protocol import Role

FOREVER = "exec sleep 1000"


def worker(name: str, script: str = FOREVER, **more: Any) -> PodSpec:
    """A pod that runs a shell script; its first and only one, unless told otherwise."""
    fields: dict[str, Any] = {"role": Role.WORKER, "index": 0, "command": ("sh", "-c", script)}
    return PodSpec(name, **(fields | more))


def master(name: str, script: str = FOREVER, **more: Any) -> PodSpec:
    return worker(name, script, role=Role.MASTER, **more)
