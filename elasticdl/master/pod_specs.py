"""The job's pods outside of the core: their specifications, and their states as the cluster reports them.

`PodSpecs` are command, environment and labels of PS and worker pods.  `PodView` keeps the pods for the log, which shows
each change once, and for the status that the client reads.  It creates nothing and decides nothing: the core decides
the consequences of an end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.local.script import COMMAND_MODULE
from elasticdl.cluster.local.standby import ENGINE, FRAMEWORK_VARIABLE
from elasticdl.master.core.commands import CreatePod
from elasticdl.master.core.events import PodChanged, PodsListed
from elasticdl.master.core.values import PodState
from elasticdl.model_def import framework_of
from elasticdl.protocol import Role
from elasticdl.rpc.channels import MASTER_TIMEOUT_VARIABLE
from elasticdl.rpc.handshake import ENCRYPT_VARIABLE
from elasticdl_client.choices import RUN_MODULE, DistributionStrategy, FrameworkName, JobType
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EpochCoverage, JobStatus, LostPod, PodStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.pods import tf_config

_MODULES = {Role.PS: "elasticdl.ps", Role.WORKER: "elasticdl.worker"}
_PROCESSES_MODULE = "elasticdl.worker.processes"
# The steps are TensorFlow's; KERAS_BACKEND and keras.json of the user or of an image may name another backend.
_KERAS = {"KERAS_BACKEND": "tensorflow"}
_ID_VARIABLES = {Role.PS: "PS_ID", Role.WORKER: "WORKER_ID"}
_OF_WORKERS = {  # read when torch is imported
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # at lower levels NCCL's watchdog prints the stacks of each lost member
    # OpenMP threads spin for some 50 µs when they wait for each other, then sleep. OpenMP's default of 3 ms makes a
    # step several times longer if other processes need the processors, too.
    "GOMP_SPINCOUNT": "5000",
}
_GRACE_S = {Role.PS: 30.0, Role.WORKER: 10.0}  # a terminating PS writes a checkpoint first


@dataclass(frozen=True, slots=True)
class PodSpecs:
    """Makes the specifications of one job's pods.

    Attributes:
        python: The Python interpreter in the pods.
        master_address: host:port at which pods reach the master.
        env: Variables of all pods that the runtime adds.
        ps_env: Variables of servers that the runtime adds.
        tf_addresses: Addresses of TensorFlow's own servers, if the runtime does not set TF_CONFIG itself.
    """

    spec: JobSpec
    python: str
    master_address: str
    env: Mapping[str, str] = field(default_factory=dict)
    ps_env: Mapping[str, str] = field(default_factory=dict)
    tf_addresses: Mapping[str, Sequence[str]] | None = None
    _framework: str = field(init=False)  # that a worker imports; unknown for a user's command, empty without a model

    def __post_init__(self) -> None:
        # Once, and not in the threads that create pods: CPython 3.11.2 may raise if two threads parse at a time.
        framework = framework_of(self.spec).value if self.spec.model_def else ""
        object.__setattr__(self, "_framework", framework)

    def of(self, command: CreatePod) -> PodSpec:
        """Return the specification of the pod of a command."""
        role = command.role
        labels = names.pod_labels(self.spec.job_name, role, command.index)
        framework = self._framework if role is Role.WORKER else ""
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
                **(_KERAS if framework == FrameworkName.TENSORFLOW else {}),
                ENCRYPT_VARIABLE: "true" if self.spec.encrypt else "",  # a local pod inherits the flag's variable
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
        """Return the command of a role's pods; a user's own command is passed word by word."""
        module: tuple[str, ...] = (_MODULES[role],)
        if self.spec.job_command:
            module = (COMMAND_MODULE, self.spec.model_zoo or ".", *shlex.split(self.spec.job_command))
        if role is Role.WORKER and self.spec.num_processes_per_worker > 1:
            numbers = (str(self.spec.num_processes_per_worker), str(self.spec.num_gpus_per_worker))
            module = (_PROCESSES_MODULE, *numbers, *module)
        return (self.python, *RUN_MODULE, *module)

    def _tf_config(self, command: CreatePod) -> dict[str, str]:
        if self.tf_addresses is None:
            return {}
        number = command.slot if command.role is Role.WORKER else command.index
        return {"TF_CONFIG": tf_config(self.tf_addresses, str(command.role), number)}

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


MAX_LOST = 20
MAX_ENDED = 50  # newest ended pods in the status; the others are in the log
_ROLES = (Role.PS, Role.WORKER)
_GONE = frozenset({PodState.SUCCEEDED, PodState.FAILED, PodState.DELETED})
_LOST = frozenset({PodState.FAILED, PodState.DELETED})
_EXPLAINED = frozenset({PodState.PENDING, PodState.FAILED})  # phases whose message is shown

logger = logging.getLogger("elasticdl.master")
MAX_EPOCHS = 100  # one by one, 20 kB of the status; it is written once a second, on Kubernetes into a ConfigMap


class PodView:
    """The newest event of each pod, by name, and the lost pods.

    Args:
        clock: Returns seconds since the Unix epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._pods: dict[str, PodChanged] = {}
        self._forgotten: set[str] = set()  # uids of older ended pods, which lists still contain
        self._lost: deque[LostPod] = deque(maxlen=MAX_LOST)
        self._clock = clock

    def changed(self, event: PodChanged) -> None:
        """Apply a change, and log it if it is new."""
        before = self._pods.get(event.name)
        is_over = before is not None and before.uid == event.uid and before.phase in _GONE
        if event.uid in self._forgotten or (is_over and event.phase not in _GONE):
            return  # a list that was taken before the pod's end
        if not is_over:
            self._pods.pop(event.name, None)  # move it to the end: ended pods are in the order of their ends
        self._pods[event.name] = event
        if before is not None and before.uid == event.uid and before.phase not in _GONE and event.phase in _LOST:
            self._lose(event, _why(_without_log(event)))
        if before is None or before.uid != event.uid:
            self._log(event, "new")
        elif before.phase is not event.phase:
            self._log(event, before.phase)
        elif event.phase is PodState.PENDING and (why := _why(event)) and why != _why(before):
            logger.info("Pod %s: still %s (%s)", event.name, event.phase, why)
        self._forget()

    def listed(self, event: PodsListed) -> None:
        """Apply a list of everything that exists; pods missing in it are gone."""
        names = {pod.name for pod in event.pods}
        for name in self.living():
            if name not in names:
                self._lose(self._pods[name], "gone from the cluster")
        self._pods = {name: pod for name, pod in self._pods.items() if name in names}
        self._forgotten &= {pod.uid for pod in event.pods}
        for pod in event.pods:
            self.changed(pod)

    def living(self) -> list[str]:
        """Return the names of the pods that have not ended."""
        return [name for name, pod in self._pods.items() if pod.phase not in _GONE]

    def statuses(self) -> tuple[PodStatus, ...]:
        """Return the status of servers, then of workers, each by number, without pods gone from the cluster."""
        shown = [pod for pod in self._pods.values() if pod.phase is not PodState.DELETED and pod.role in _ROLES]
        shown.sort(key=lambda pod: (_ROLES.index(pod.role), pod.index))
        return tuple(PodStatus(pod.name, pod.role, pod.phase, _why(pod)) for pod in shown)

    def lost(self) -> tuple[LostPod, ...]:
        """Return the newest pods that were seen alive and failed or were deleted, newest last."""
        return tuple(self._lost)

    def _lose(self, event: PodChanged, why: str) -> None:
        if event.role in _ROLES:
            self._lost.append(LostPod(event.name, event.role, self._clock(), why))

    def _forget(self) -> None:
        gone = [name for name, pod in self._pods.items() if pod.phase in _GONE]
        for name in gone[:-MAX_ENDED]:
            self._forgotten.add(self._pods.pop(name).uid)

    def _log(self, event: PodChanged, before: str) -> None:
        why = _why(event)
        logger.info("Pod %s: %s -> %s%s", event.name, before, event.phase, f" ({why})" if why else "")


def _without_log(event: PodChanged) -> PodChanged:
    """Return an event without the pod's last output: if that fails the job, the job's error shows it, once."""
    return dataclasses.replace(event, message="") if event.message.startswith("exit code") else event


def _why(event: PodChanged) -> str:
    """Return why a pod is pending or has ended, in one line."""
    details = [event.reason] if event.reason else []
    lines = event.message.strip().splitlines() if event.phase in _EXPLAINED else []
    is_error = bool(lines) and lines[0].startswith("exit code") and not lines[0].endswith("its last lines:")
    if event.exit_code is not None and not is_error:
        details.append(f"exit code {event.exit_code}")
    if event.blocked:
        details.append(event.blocked)
    elif lines:
        details.append(lines[0] if is_error else lines[-1])
    return ", ".join(details)


def to_job_status(
    status: JobStatus, started_at: float, pods: tuple[PodStatus, ...] = (), lost_pods: tuple[LostPod, ...] = ()
) -> JobStatus:
    """Return the core's present status, with the pods as the cluster has reported them."""
    earlier, newest = status.coverage[:-MAX_EPOCHS], status.coverage[-MAX_EPOCHS:]
    return dataclasses.replace(
        status,
        coverage=(EpochCoverage.total(earlier), *newest) if earlier else newest,
        pods=pods,
        lost_pods=lost_pods,
        started_at=started_at,
        updated_at=time.time(),
    )
