"""A job in a namespace of its own whose master runs on this machine; its pods fit on no node, so they stay pending."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.objects import job_manifests
from tests.cluster.real_cluster import Namespace
from tests.master.actors import REPOSITORY, MasterJob
from tests.master.life import TOKEN

JOB = "digits"
_TERM = {"matchExpressions": [{"key": "no-node-has", "operator": "In", "values": ["this-label"]}]}
_NOWHERE = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}}}


class KubernetesJob(MasterJob):
    """Its objects are made as `kubectl apply` makes them, without owners."""

    def __init__(self, directory: Path, **flags: object) -> None:
        self.namespace = Namespace()
        given: dict[str, object] = {
            "runtime": "kubernetes",
            "namespace": self.namespace.name,
            "service_account": "default",
            "image_name": "none",
            "tls": "false",  # its pods are played by processes without the Secret
            "cluster_spec_json": json.dumps({"pod_spec": {"affinity": _NOWHERE}}),
            **flags,
        }
        super().__init__(directory, **given)
        self.token_file = self.path / "token"
        self.token_file.write_text(TOKEN)
        self.kubeconfig = Path(os.environ["KUBECONFIG"])
        spec = JobSpec.from_json((self.path / "spec.json").read_text())
        objects = {"apiVersion": "v1", "kind": "List", "items": job_manifests(spec, TOKEN)}
        subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=json.dumps(objects), text=True, check=True, capture_output=True
        )
        self.cluster = KubernetesCluster(  # type: ignore[assignment]
            self.namespace.name, JOB, lambda pod: {}, self.namespace.connection.client
        )

    def start(self) -> KubernetesJob:
        log = (self.path / "master.log").open("a")
        environment = {
            "ELASTICDL_NAMESPACE": self.namespace.name,
            "ELASTICDL_JOB_NAME": JOB,
            "ELASTICDL_TOKEN_FILE": str(self.token_file),
            "MASTER_PORT": str(self.port),
            "KUBECONFIG": str(self.kubeconfig),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elasticdl.master"],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        return self

    def end(self) -> None:
        super().end()
        self.namespace.delete()

    def state(self) -> Any:
        """The ConfigMap that the master writes."""
        return self.namespace.core.read_namespaced_config_map(names.state_object(JOB), self.namespace.name)

    def status(self) -> JobStatus:
        return JobStatus.from_json(self.state().data[names.STATUS_KEY])

    def has_status(self) -> bool:
        return names.STATUS_KEY in (self.state().data or {})

    def master_pod(self) -> Any:
        name = names.pod_name(JOB, "master", 0)
        return self.namespace.core.read_namespaced_pod(name, self.namespace.name)

    def label(self) -> str:
        """Return the master's status in `kubectl get pods -L status`."""
        return str(self.master_pod().metadata.labels[names.STATUS_LABEL])

    def pods(self) -> dict[str, str]:
        """Name → uid of servers and workers."""
        return {pod.name: pod.uid for pod in self.cluster.list() if not pod.name.endswith("-master")}
