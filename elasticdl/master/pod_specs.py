"""What a PS or worker pod runs, with which environment and labels.  It creates nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticdl.cluster.cluster import PodSpec, Role
from elasticdl.master.core.commands import CreatePod
from elasticdl.rpc.patience import MASTER_TIMEOUT_VARIABLE
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names

_MODULES = {Role.PS: "elasticdl.ps", Role.WORKER: "elasticdl.worker"}
_ID_VARIABLES = {Role.PS: "PS_ID", Role.WORKER: "WORKER_ID"}
_GRACE_S = {Role.PS: 30.0, Role.WORKER: 10.0}  # a PS that is told to leave writes a checkpoint first


@dataclass(frozen=True, slots=True)
class PodSpecs:
    """Makes the specifications of one job's pods.

    Attributes:
        python: the interpreter where the pods run.
        master_address: host:port at which pods reach the master.
        env: of all pods, what the runtime adds.
        ps_env: of servers, the same.
    """

    spec: JobSpec
    python: str
    master_address: str
    env: Mapping[str, str] = field(default_factory=dict)
    ps_env: Mapping[str, str] = field(default_factory=dict)

    def of(self, command: CreatePod) -> PodSpec:
        """The pod that the core wants."""
        role = Role(command.role)
        labels = names.pod_labels(self.spec.job_name, role, command.index)
        if role is Role.WORKER:
            labels[names.SLOT_LABEL] = str(command.slot)
        return PodSpec(
            name=command.name,
            role=role,
            index=command.index,
            command=(self.python, "-m", _MODULES[role]),
            env={
                **self._populated(os.environ),
                **self.spec.envs_dict(),
                **self.env,
                **(self.ps_env if role is Role.PS else {}),
                "MASTER_ADDR": self.master_address,
                MASTER_TIMEOUT_VARIABLE: f"{self.spec.master_timeout:g}",
                "ELASTICDL_POD_NAME": command.name,
                "WORKER_NUM": str(self.spec.num_workers),
                _ID_VARIABLES[role]: str(command.index),
            },
            labels=labels,
            grace_s=_GRACE_S[role],
            framework="tensorflow" if role is Role.WORKER else "",
            slot=command.slot,
            memory_factor=command.memory_factor,
        )

    def _populated(self, environment: Mapping[str, str]) -> dict[str, str]:
        if not self.spec.populate_env_names:
            return {}
        pattern = re.compile(self.spec.populate_env_names)
        return {name: value for name, value in environment.items() if pattern.fullmatch(name)}
