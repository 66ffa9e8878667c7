"""A node without a machine: kubemark's kubelet, which reports pods as running and runs nothing.

Its process can be killed, which looks to the cluster as if the machine had died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

from kubernetes import watch
from kubernetes.client.exceptions import ApiException

from elasticdl_client.kubernetes.api import connect
from tests.core_api import core_api

_TAINT = "elasticdl.test/hollow"
_READY_S = 60


def kubemark() -> str:
    """The program: of the development cluster, or on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    home = Path(os.environ.get("CLUSTER_HOME", Path.home() / ".cache" / "devcluster"))
    found = shutil.which("kubemark", path=f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FileNotFoundError("kubemark is neither in $CLUSTER_HOME/bin nor on the PATH")
    return found


class HollowNode:
    """A node of a name of its own, on which only pods with its `placement` land; ready when this returns.

    Args:
        core: a CoreV1Api; by default of the current context.
    """

    def __init__(self, core: Any = None) -> None:
        self.name = f"hollow-{uuid.uuid4().hex[:8]}"
        self._core = core or core_api(connect())
        self._directory = Path(tempfile.mkdtemp(prefix="hollow-"))
        self._process = self._start()
        try:
            self._await_ready()
        except BaseException:
            self.remove()
            raise

    @property
    def placement(self) -> dict[str, Any]:
        """Return the fields of a pod's spec that place it here, and keep it for only a second once the node is lost."""
        lost = [
            {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
            for what in ("not-ready", "unreachable")
        ]
        return {
            "nodeSelector": {"kubernetes.io/hostname": self.name},
            "tolerations": [{"key": _TAINT, "operator": "Exists"}, *lost],
        }

    @property
    def log(self) -> str:
        return (self._directory / "kubemark.log").read_text(errors="replace")

    def kill(self) -> None:
        """The machine dies; its Node object stays."""
        self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        """The node leaves the cluster, and nothing of it stays."""
        if self._process.poll() not in (None, -signal.SIGKILL):
            _, reason, stacks = self.log.rpartition("\nfatal error: ")
            print(f"{self.name} ended by itself, with {self._process.returncode}: {reason}{stacks[:4000]}")
        self.kill()
        with contextlib.suppress(ApiException):  # it may never have registered, or be gone
            self._core.delete_node(self.name)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> HollowNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _start(self) -> subprocess.Popen[bytes]:
        port, read_only_port = _free_ports(2)
        command = [kubemark(), "--morph=kubelet", f"--name={self.name}"]
        command += [f"--kubeconfig={os.environ['KUBECONFIG']}"]
        command += [f"--kubelet-port={port}", f"--kubelet-read-only-port={read_only_port}"]
        command += [f"--register-with-taints={_TAINT}={self.name}:NoSchedule"]
        with (self._directory / "kubemark.log").open("wb") as log:
            # Threads of its runtime that stands in for Docker write to one map: it ended so in one run of three.
            environment = {**os.environ, "TMPDIR": str(self._directory), "GOMAXPROCS": "1"}
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def _await_ready(self) -> None:
        nodes = {"field_selector": f"metadata.name={self.name}", "timeout_seconds": _READY_S}
        for event in watch.Watch().stream(self._core.list_node, **nodes):
            node = event["raw_object"]
            conditions = node["status"].get("conditions") or []
            is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
            # Those of a node that was not ready go one after the other, later: the last one would evict a first pod.
            if is_ready and {one["key"] for one in node["spec"].get("taints") or []} == {_TAINT}:
                return
        raise TimeoutError(f"{self.name} has not become ready:\n{self.log[-2000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
