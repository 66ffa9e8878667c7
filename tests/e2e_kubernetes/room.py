"""Room on a node that only these tests use: an extended resource, independent of the machine's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.e2e_kubernetes.kubectl import core, the_node
from tests.e2e_kubernetes.locks import one_at_a_time
from tests.e2e_kubernetes.waiting import wait_until

ROOM = "example.com/gpu"


def make_room(places: int, node: str = "") -> None:
    """This number of pods with one `ROOM` each fits on a node; returns when its kubelet has taken notice."""
    name = node or the_node()
    path = "/status/capacity/" + ROOM.replace("/", "~1")
    core().patch_node_status(name, [{"op": "add", "path": path, "value": str(places)}])
    wait_until(
        f"{places} places on {name}",
        lambda: (core().read_node(name).status.allocatable or {}).get(ROOM) == str(places),
        60,
    )


@contextlib.contextmanager
def room(places: int) -> Iterator[None]:
    """While the node has it; tests that share it wait for each other."""
    with one_at_a_time("room"):
        make_room(places)
        try:
            yield
        finally:
            make_room(0)


def tenant(replicas: int, image: str) -> dict[str, Any]:
    """A Deployment of high priority, each of whose pods takes one place."""
    container = {
        "name": "tenant",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", "import signal; signal.pause()"],
        "resources": {"requests": {ROOM: "1"}, "limits": {ROOM: "1"}},
    }
    labels = {"app": "tenant"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "tenant"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "priorityClassName": "high",
                    "terminationGracePeriodSeconds": 0,
                    "containers": [container],
                },
            },
        },
    }


def priority_class(name: str, value: int) -> dict[str, Any]:
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
        "globalDefault": False,
    }
