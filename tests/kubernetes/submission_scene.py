"""Parts of the tests of submission: a namespace of their own, users with chosen rights, and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from kubernetes import watch

from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import objects, rbac
from elasticdl_client.kubernetes.api import Connection, connect
from elasticdl_client.kubernetes.rbac import Right
from tests.core_api import core_api
from tests.e2e_kubernetes.waiting import wait_until
from tests.ready_client import elasticdl

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
NO_ROOM = "cpu=90,memory=64Mi"  # keeps a pod pending: no node of a test cluster has so much
KINDS = "configmaps,secrets,services,networkpolicies,pods"


class Scene:
    """A namespace that is deleted with all that is in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.connection: Connection = connect(force_kube_config=True)
        self.core = core_api(self.connection)
        self.namespace = f"submission-{uuid.uuid4().hex[:8]}"
        self.core.create_namespace({"metadata": {"name": self.namespace}})

    def grant_master(self) -> None:
        """The service account elasticdl, with the rights of a master."""
        self.apply(*rbac.manifests(self.namespace, "elasticdl"))

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text=objects.to_yaml(list(manifests)))

    def kubectl(self, *arguments: str, text: str = "", check: bool = True) -> str:
        """Run kubectl in the namespace; return its output."""
        command = ["kubectl", f"--namespace={getattr(self, 'namespace', 'default')}", *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def flags(self, **more: str) -> dict[str, str]:
        return {
            "job_name": "job",
            "namespace": self.namespace,
            "image_name": "python:3.11-slim",
            "image_pull_policy": "IfNotPresent",
            "model_def": "m.model",
            "training_data": "/data",
            "checkpoint_dir": "/tmp/checkpoints",
            "master_resource_request": NO_ROOM,
            "worker_resource_request": "cpu=10m,memory=32Mi",
            "ps_resource_request": "cpu=10m,memory=32Mi",
        } | more

    def spec(self, **more: str) -> JobSpec:
        return JobSpec.from_flags("train", self.flags(**more))

    def words(self, **more: str) -> list[str]:
        """`train` with flags for a job whose master has no room, and these."""
        return ["train", *(f"--{name}={value}" for name, value in self.flags(**more).items())]

    def command(self, **more: str) -> list[str]:
        """The same as the command of a process."""
        return [sys.executable, "-m", "elasticdl_client.main", *self.words(**more)]

    def train(self, config: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        env = {**os.environ, **({"KUBECONFIG": str(config)} if config else {})}
        return elasticdl(*self.words(**more), environment=env, timeout_s=TIMEOUT_S)

    def take_away(self, pod: str) -> None:
        """Deletes a pod without its node's consent, so at once.

        A kubelet of 1.20 may take more than a minute for it: if a pod is deleted before the kubelet has noted that its
        container runs, it looks at the pod again after 60 to 90 s.
        """
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    def left(self) -> list[str]:
        """Everything that a job has made and that is not being deleted."""
        items = json.loads(self.kubectl("get", KINDS, "-l", "elasticdl-job-name", "-o", "json"))["items"]
        return [
            f"{item['kind']} {item['metadata']['name']}"
            for item in items
            if "deletionTimestamp" not in item["metadata"]
        ]

    def wait_until_gone(self) -> None:
        """Waits for the garbage collector."""
        for kind in KINDS.split(","):
            for name in self.kubectl("get", kind, "-l", "elasticdl-job-name", "-o", "name").split():
                self.kubectl("wait", "--for=delete", name, f"--timeout={TIMEOUT_S}s", check=False)
        assert self.left() == []

    def forbid(self, resource: str) -> None:
        """From now on, none of that resource can be created."""
        self.kubectl("create", "quota", "none", f"--hard={resource}=0")
        quotas = self.core.list_namespaced_resource_quota
        for event in watch.Watch().stream(quotas, self.namespace, timeout_seconds=TIMEOUT_S):
            if event["raw_object"]["status"].get("hard"):  # it counts from then on
                return
        raise TimeoutError("the quota is not in force")

    def limit_containers(self, **limits: dict[str, str]) -> None:
        """From now on containers have these limits, and no earlier ones."""
        spec = {"limits": [{"type": "Container", **limits}]}
        self.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "limits"}, "spec": spec})
        limit = next(iter(limits.values()))["cpu"]  # is the default, too, where no other is given
        tried = ("run", "tried", "--image=python:3.11-slim", "--dry-run=server", "--output=yaml")
        wait_until("the limits", lambda: f"cpu: {limit}" in self.kubectl(*tried), TIMEOUT_S)

    def user(self, rights: Sequence[Right], name: str = "user") -> Path:
        """The kubeconfig of a user with these rights in the namespace and no others."""
        self.apply(*rbac.manifests(self.namespace, name))
        rules = [{"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)} for r in rights]
        self.apply(
            {
                "apiVersion": f"{rbac.RBAC_GROUP}/v1",
                "kind": "Role",
                "metadata": {"name": name, "namespace": self.namespace},
                "rules": rules,
            }
        )
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
        made = self.core.create_namespaced_service_account_token(name, self.namespace, request)
        return self.kubeconfig(name, {"token": made.status.token})

    def kubeconfig(self, name: str, user: dict[str, str] | None = None, server: str = "") -> Path:
        """A kubeconfig of the context `name` for the same cluster, with another user or server."""
        config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        chosen = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == chosen["cluster"])
        found = user or next(u["user"] for u in config["users"] if u["name"] == chosen["user"])
        path = self.directory / f"{name}.kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": name,
                    "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {**cluster, **({"server": server} if server else {})}}],
                    "users": [{"name": "u", "user": found}],
                }
            )
        )
        return path

    def end(self) -> None:
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        self.core.delete_namespace(self.namespace)
