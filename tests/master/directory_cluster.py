"""A cluster whose pods are files: they outlive a master, run nothing, and end when a test says so."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from elasticdl.cluster.cluster import CannotResize, EventType, Pod, PodEvent, PodPhase, PodSpec
from elasticdl.cluster.local.adapter import pod_from_message
from elasticdl_client.errors import ElasticDLError

_LOOK_S = 0.02


class DirectoryCluster:
    """`Cluster` in a directory; several processes may use it at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closed = threading.Event()
        directory.mkdir(exist_ok=True)

    def create(self, spec: PodSpec) -> Pod:
        if any(pod.name == spec.name and pod.phase is PodPhase.RUNNING for pod in self.list()):
            raise ElasticDLError(f"Pod {spec.name} exists already.")
        pod = Pod(spec.name, spec.role, spec.index, uuid.uuid4().hex, PodPhase.RUNNING, dict(spec.labels))
        (self._directory / f"{spec.name}.spec").write_text(json.dumps([list(spec.command), dict(spec.env)]))
        self.put(pod)
        return pod

    def put(self, pod: Pod) -> None:
        """Makes a pod look like this."""
        new = self._directory / f".{pod.name}"
        new.write_text(json.dumps(asdict(pod)))
        new.replace(self._directory / f"{pod.name}.pod")

    def delete(self, name: str, grace_s: float | None = None) -> None:
        (self._directory / f"{name}.pod").unlink(missing_ok=True)

    def resize(self, spec: PodSpec) -> int:
        raise CannotResize("Only real pods have a memory.")

    def list(self) -> list[Pod]:
        pods = []
        for path in sorted(self._directory.glob("*.pod")):
            with contextlib.suppress(FileNotFoundError):  # deleted by another process just now
                pods.append(pod_from_message(json.loads(path.read_text())))
        return pods

    def watch(self) -> Iterator[PodEvent]:
        known: dict[str, Pod] = {}
        while not self._closed.is_set():
            found = {pod.name: pod for pod in self.list()}
            for name, pod in known.items():
                if name not in found:
                    yield PodEvent(EventType.DELETED, pod)
            for name, pod in found.items():
                if name not in known:
                    yield PodEvent(EventType.ADDED, pod)
                elif known[name] != pod:
                    yield PodEvent(EventType.MODIFIED, pod)
            known = found
            self._closed.wait(_LOOK_S)

    def logs(self, name: str) -> str:
        return f"the log of {name}"

    def spec(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Command and environment that a pod was created with."""
        command, env = json.loads((self._directory / f"{name}.spec").read_text())
        return command, env

    def close(self) -> None:
        self._closed.set()
