"""A namespace of a test's own, with what jobs need in it, and the directory that its jobs share with the test."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl_client.kubernetes.names import USER_ID
from tests.e2e_kubernetes.image import BUILD
from tests.e2e_kubernetes.job import KubernetesJob, elasticdl
from tests.e2e_kubernetes.kubectl import apply, core, kubectl
from tests.e2e_kubernetes.recorder import Recorder

NUM_DIGITS = 1437
KERAS = "paced.model.custom_model"  # 7 s of processor time until a worker's first gradient; in NumPy 0.7


@dataclass(slots=True)
class Space:
    """An open namespace.

    Attributes:
        data: data sets on this machine; pods have them as /data.
        directory: on this machine; each job has a directory in it as /job.
    """

    namespace: str
    image: str
    data: Path
    directory: Path
    recorder: Recorder

    @classmethod
    def open(cls, topic: str, image: str, data: Path, rights: bool = True) -> Space:
        namespace = f"e2e-{topic}-{secrets.token_hex(3)}"
        core().create_namespace({"metadata": {"name": namespace}})
        directory = BUILD / "spaces" / namespace
        directory.mkdir(parents=True)
        space = cls(namespace, image, data, directory, Recorder(namespace, directory / "logs").start())
        if rights:
            space.grant_rights()
        return space

    def grant_rights(self) -> None:
        """``elasticdl rbac --print | kubectl apply -f -``."""
        printed = elasticdl("rbac", "--print", f"--namespace={self.namespace}")
        assert printed.returncode == 0, printed.stderr
        kubectl("apply", "-f", "-", stdin=printed.stdout)

    def close(self, ended_well: bool) -> None:
        self.recorder.close()
        core().delete_namespace(self.namespace)
        if ended_well:
            shutil.rmtree(self.directory, ignore_errors=True)

    def apply(self, *manifests: dict[str, Any]) -> None:
        for manifest in manifests:
            manifest["metadata"].setdefault("namespace", self.namespace)
        apply(*manifests)

    def job(self, name: str, **flags: object) -> KubernetesJob:
        """A job on the paced digits, in NumPy by default: 2 workers and 2 parameter servers that ask for little."""
        directory = self.directory / name
        directory.mkdir()
        os.chown(directory, USER_ID, USER_ID)
        defaults: dict[str, object] = {
            "image_name": self.image,
            "image_pull_policy": "Never",
            "model_def": "paced.numpy_digits.custom_model",
            "training_data": "/data/digits/train",
            "validation_data": "/data/digits/validation",
            "volume": f"host_path={self.data},mount_path=/data;host_path={directory},mount_path=/job",
            "checkpoint_dir": "/job/checkpoints",
            "checkpoint_steps": 20,
            "num_epochs": 8,
            "minibatch_size": 32,
            "num_minibatches_per_task": 4,
            "log_loss_steps": 1,
            "num_workers": 2,
            "num_ps_pods": 2,
            "master_resource_request": "cpu=0.02,memory=128Mi",
            "master_resource_limit": "memory=512Mi",
            "ps_resource_request": "cpu=0.02,memory=128Mi",
            "ps_resource_limit": "memory=512Mi",
            "worker_resource_request": "cpu=0.02,memory=256Mi",
            "worker_resource_limit": "memory=2Gi",
        }
        job = KubernetesJob(self.namespace, name, {**defaults, **flags}, directory, self.recorder, NUM_DIGITS)
        job.set_pace(0.1)
        return job
