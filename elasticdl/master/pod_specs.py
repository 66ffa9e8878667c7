"""What a PS or worker pod runs, with which environment and labels.  It creates nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl.cluster.cluster import PodSpec, Role
from elasticdl.rpc.tokens import TOKEN_FILE_VARIABLE
from elasticdl_client.job_spec import JobSpec

_MODULES = {Role.PS: "elasticdl.ps", Role.WORKER: "elasticdl.worker"}
_ID_VARIABLES = {Role.PS: "PS_ID", Role.WORKER: "WORKER_ID"}


@dataclass(frozen=True, slots=True)
class PodSpecs:
    """Makes the specifications of one job's pods.

    Attributes:
        master_address: host:port at which pods reach the master.
    """

    spec: JobSpec
    master_address: str
    token_file: str

    def of(self, name: str, role: Role, index: int) -> PodSpec:
        """A PS or a worker."""
        return PodSpec(
            name=name,
            role=role,
            index=index,
            command=(sys.executable, "-m", _MODULES[role]),
            env={
                **self._populated(os.environ),
                **self.spec.envs_dict(),
                "MASTER_ADDR": self.master_address,
                TOKEN_FILE_VARIABLE: self.token_file,
                "ELASTICDL_POD_NAME": name,
                "WORKER_NUM": str(self.spec.num_workers),
                _ID_VARIABLES[role]: str(index),
            },
            labels=labels(self.spec.job_name, role, index),
            framework="tensorflow" if role is Role.WORKER else "",
        )

    def _populated(self, environment: Mapping[str, str]) -> dict[str, str]:
        if not self.spec.populate_env_names:
            return {}
        pattern = re.compile(self.spec.populate_env_names)
        return {name: value for name, value in environment.items() if pattern.fullmatch(name)}


def labels(job_name: str, role: Role, index: int) -> dict[str, str]:
    """The labels by which `kubectl -l` finds a pod."""
    return {
        "app": "elasticdl",
        "elasticdl-job-name": job_name,
        "elasticdl-replica-type": str(role),
        "elasticdl-replica-index": str(index),
    }
