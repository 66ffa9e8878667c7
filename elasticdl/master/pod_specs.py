"""Command, environment and labels of PS and worker pods.  It creates nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.local.standby import ENGINE, FRAMEWORK_VARIABLE
from elasticdl.master.core.commands import CreatePod
from elasticdl.model_def import framework_of
from elasticdl.protocol import Role
from elasticdl.rpc.handshake import ENCRYPT_VARIABLE
from elasticdl.rpc.patience import MASTER_TIMEOUT_VARIABLE
from elasticdl_client.choices import DistributionStrategy, FrameworkName, JobType
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.tf_config import tf_config

_MODULES = {Role.PS: "elasticdl.ps", Role.WORKER: "elasticdl.worker"}
_COMMAND_MODULE = "elasticdl.worker.command"
_PROCESSES_MODULE = "elasticdl.worker.processes"
_ID_VARIABLES = {Role.PS: "PS_ID", Role.WORKER: "WORKER_ID"}
_OF_WORKERS = {  # read when torch is imported
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # below, NCCL's watchdog prints the stacks of each member that is lost
    # Its threads spin for some 50 µs where they wait for each other, then sleep. The 3 ms that OpenMP takes by itself
    # make a step several times longer where others want the processors, too.
    "GOMP_SPINCOUNT": "5000",
}
_GRACE_S = {Role.PS: 30.0, Role.WORKER: 10.0}  # a terminating PS writes a checkpoint first


@dataclass(frozen=True, slots=True)
class PodSpecs:
    """Makes the specifications of one job's pods.

    Attributes:
        python: the interpreter where the pods run.
        master_address: host:port at which pods reach the master.
        env: of all pods, what the runtime adds.
        ps_env: of servers, the same.
        tf_addresses: where the job has TensorFlow's own servers, and the runtime does not set TF_CONFIG itself.
    """

    spec: JobSpec
    python: str
    master_address: str
    env: Mapping[str, str] = field(default_factory=dict)
    ps_env: Mapping[str, str] = field(default_factory=dict)
    tf_addresses: Mapping[str, Sequence[str]] | None = None

    def of(self, command: CreatePod) -> PodSpec:
        """The pod that the core wants."""
        role = command.role
        labels = names.pod_labels(self.spec.job_name, role, command.index)
        framework = self._framework() if role is Role.WORKER else ""
        num_processes = self.spec.num_processes_per_worker if role is Role.WORKER else 1
        if role is Role.WORKER:
            labels[names.SLOT_LABEL] = str(command.slot)
        return PodSpec(
            name=command.name,
            role=role,
            index=command.index,
            command=self._command(role),
            env={
                **(_OF_WORKERS if role is Role.WORKER else {}),
                **self._populated(os.environ),
                **self.spec.envs_dict(),
                **self.env,
                **(self.ps_env if role is Role.PS else {}),
                "MASTER_ADDR": self.master_address,
                MASTER_TIMEOUT_VARIABLE: f"{self.spec.master_timeout:g}",
                "ELASTICDL_POD_NAME": command.name,
                "WORKER_NUM": str(self.spec.num_workers * self.spec.num_processes_per_worker),
                _ID_VARIABLES[role]: str(command.index * num_processes),
                **({FRAMEWORK_VARIABLE: framework} if framework else {}),
                ENCRYPT_VARIABLE: "true" if self.spec.encrypt else "",  # a local pod inherits the variable of the flag
                **self._tf_config(command),
            },
            labels=labels,
            grace_s=_GRACE_S[role],
            framework=self._preloaded(framework),
            slot=command.slot,
            memory_factor=command.memory_factor,
            num_gpus=max(num_processes, self.spec.num_gpus_per_worker) if role is Role.WORKER else 0,
        )

    def _command(self, role: Role) -> tuple[str, ...]:
        """Of a role's pods; a user's own command is given word by word."""
        module: tuple[str, ...] = (_MODULES[role],)
        if self.spec.job_command:
            module = (_COMMAND_MODULE, self.spec.model_zoo or ".", *shlex.split(self.spec.job_command))
        if role is Role.WORKER and self.spec.num_processes_per_worker > 1:
            numbers = (str(self.spec.num_processes_per_worker), str(self.spec.num_gpus_per_worker))
            module = (_PROCESSES_MODULE, *numbers, *module)
        return (self.python, "-m", *module)

    def _tf_config(self, command: CreatePod) -> dict[str, str]:
        if self.tf_addresses is None:
            return {}
        number = command.slot if command.role is Role.WORKER else command.index
        return {"TF_CONFIG": tf_config(self.tf_addresses, str(command.role), number)}

    def _framework(self) -> str:
        """Return the framework that a worker imports; unknown for a user's command, empty without a model."""
        return "" if not self.spec.model_def else framework_of(self.spec).value

    def _preloaded(self, framework: str) -> str:
        """Return the imports of a standby process for its pods: collectives need torch, whatever the framework."""
        is_all_reduce = self.spec.distribution_strategy is DistributionStrategy.ALL_REDUCE
        has_collectives = is_all_reduce and self.spec.job_type is JobType.TRAIN
        uses_engine = has_collectives and framework in (FrameworkName.TENSORFLOW, FrameworkName.CUSTOM)
        return framework + ENGINE if uses_engine else framework

    def _populated(self, environment: Mapping[str, str]) -> dict[str, str]:
        if not self.spec.populate_env_names:
            return {}
        pattern = re.compile(self.spec.populate_env_names)
        return {name: value for name, value in environment.items() if pattern.fullmatch(name)}
