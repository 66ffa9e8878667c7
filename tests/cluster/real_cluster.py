"""Parts of the tests on a real Kubernetes: a namespace of their own, the adapter in it, and a hand that interferes."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

from kubernetes import watch

from elasticdl.cluster.cluster import Pod, PodSpec
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.kubernetes.api import connect
from elasticdl_client.kubernetes.names import USER_ID, pod_labels
from tests.core_api import core_api

IMAGE = "python:3.11-slim"
JOB = "contract"
TIMEOUT_S = 60
# Keeps a pod pending, whatever the taints of nodes that other tests add.
NOWHERE = {"nodeSelector": {"no-node-has": "this-label"}, "tolerations": [{"operator": "Exists"}]}


class Namespace:
    """A namespace that is deleted with all that is in it."""

    def __init__(self) -> None:
        self.connection = connect()
        self.core = core_api(self.connection)
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.core.create_namespace({"metadata": {"name": self.name}})
        self.await_object(
            lambda **more: self.core.list_namespaced_service_account(self.name, **more),
            lambda account: account["metadata"]["name"] == "default",
        )

    def await_object(self, listing: Any, expected: Any) -> dict[str, Any]:
        """Waits until one of the objects that are listed is as expected.

        Args:
            listing: called with the arguments of a watch.
            expected: called with each object, as the server shows it.
        """
        for event in watch.Watch().stream(listing, timeout_seconds=TIMEOUT_S):
            shown: dict[str, Any] = event["raw_object"]
            if event["type"] != "DELETED" and expected(shown):
                return shown
        raise TimeoutError("the condition has not become true")

    def delete(self) -> None:
        self.core.delete_collection_namespaced_pod(self.name, grace_period_seconds=1)
        self.core.delete_namespace(self.name)


class Manifests:
    """Makes pods of specifications: restricted, tiny, and with what a test adds.

    Args:
        directory: of this machine, which pods see under its own path.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self.spec: dict[str, Any] = {}  # added to what all pods from now on are
        self.container: dict[str, Any] = {}
        if directory is not None:
            directory.mkdir(exist_ok=True)
            directory.chmod(0o777)

    def of(self, spec: PodSpec) -> dict[str, Any]:
        labels = {**spec.labels, **pod_labels(JOB, spec.role, spec.index)}
        mounts, volumes = [], []
        if self._directory is not None:
            volumes = [{"name": "shared", "hostPath": {"path": str(self._directory)}}]
            mounts = [{"name": "shared", "mountPath": str(self._directory)}]
        container = {
            "name": spec.name,
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": list(spec.command),
            "env": [{"name": name, "value": value} for name, value in spec.env.items()],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
            "volumeMounts": mounts,
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        return {
            "metadata": {"name": spec.name, "labels": labels},
            "spec": {
                "restartPolicy": spec.restart_policy.value,
                "terminationGracePeriodSeconds": max(1, round(spec.grace_s)),
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "shareProcessNamespace": True,  # so that signals reach `sleep`, which is then not the first process
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER_ID,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container | self.container],
                "volumes": volumes,
                **self.spec,
            },
        }


class Pods:
    """Kubernetes, as the contract sees an adapter."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "shared"
        self.namespace = Namespace()
        self.manifests = Manifests(self.directory)
        self.cluster = KubernetesCluster(self.namespace.name, JOB, self.manifests.of)

    def signal(self, pod: Pod, number: signal.Signals) -> None:
        """Sends a signal to the container's process, from this machine."""
        shown = self.namespace.core.read_namespaced_pod(pod.name, self.namespace.name)
        container = shown.status.container_statuses[0].container_id.removeprefix("docker://")
        command = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
        os.kill(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout), number)

    def stop(self) -> None:
        self.cluster.close()

    def clean_up(self) -> None:
        self.stop()
        self.namespace.delete()
