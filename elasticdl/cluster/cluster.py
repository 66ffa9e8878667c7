"""The port `Cluster`: pods that can be created, deleted, listed and watched.

Adapters: local/adapter.py and kubernetes/adapter.py.  Below this port there are only primitives: master/core
decides which pods to create when, and the consequences of a pod's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class PodPhase(StrEnum):
    """Kubernetes's phases, with the same meaning."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EndReason(StrEnum):
    """Why a pod is no longer running."""

    NONE = ""  # it has not ended
    COMPLETED = "Completed"
    ERROR = "Error"  # a non-zero exit code, or a crash signal (SEGV, ABRT, BUS, ILL, FPE): its own fault
    KILLED = "Killed"  # SIGKILL or SIGTERM from outside
    OOM_KILLED = "OOMKilled"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    DELETED = "Deleted"
    NODE_LOST = "NodeLost"


class RestartPolicy(StrEnum):
    NEVER = "Never"
    ON_FAILURE = "OnFailure"


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The process to run.  `command` is an argument vector, never a shell string."""

    name: str
    role: Role
    index: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    grace_s: float = 10.0  # between SIGTERM and SIGKILL at deletion
    framework: str = ""  # a name of `standby.PRELOADED`: may be started from a standby process that has imported it
    slot: int = 0  # of a worker: the place among the wanted ones that it fills, its predecessor's if it has one
    memory_factor: float = 1.0  # times the memory that the job's flags give to the role
    num_gpus: int = 0  # local runtime: GPUs that the process sees, at most those of the machine


def check_spec(spec: PodSpec) -> None:
    """Refuse a spec that no adapter accepts.

    Raises:
        ElasticDLError: the name is not one, or there is no command.
    """
    if not _NAME.fullmatch(spec.name):
        raise ElasticDLError(
            f"{spec.name!r} cannot be the name of a pod.",
            "Use lower-case letters, digits, '-' and '.', at most 253, a letter or digit at both ends.",
        )
    if not spec.command:
        raise ElasticDLError(f"Pod {spec.name} has no command.")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as observed at one moment."""

    name: str
    role: Role
    index: int
    uid: str  # differs between two pods of the same name
    phase: PodPhase
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: EndReason = EndReason.NONE
    exit_code: int | None = None  # 128 + signal number after a signal
    message: str = ""  # for people: why it is pending, or why it ended
    restarts: int = 0
    blocked: str = ""  # why a pending pod cannot start without intervention: its image cannot be pulled, …
    pid: int = 0  # local runtime only
    node: str = ""  # where it is; empty before it has a place, and in the local runtime
    has_slot: bool = False  # local runtime only: there is room for it, it runs or is about to


class CannotResize(ElasticDLError):
    """Pods cannot be given more memory while they run."""


class EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class PodEvent:
    type: EventType
    pod: Pod


class Cluster(Protocol):
    """Six verbs.  All raise `ElasticDLError` when the cluster cannot be reached or refuses."""

    def create(self, spec: PodSpec) -> Pod:
        """Accepts a pod; it may stay Pending.  A second pod of a living one's name is refused."""
        ...

    def delete(self, name: str, grace_s: float | None = None) -> None:
        """SIGTERM, grace, SIGKILL, then DELETED.  Deleting what does not exist is not an error.  Does not wait."""
        ...

    def resize(self, spec: PodSpec) -> int:
        """Gives a running pod the memory of `spec`; returns when it is in force, and how many bytes that are.

        Raises:
            CannotResize: no pod of this cluster can be resized.
            ElasticDLError: this one is not, or not in time.
        """
        ...

    def list(self) -> list[Pod]:
        """Every pod of this job that exists, ended ones included, the master's own among them."""
        ...

    def watch(self) -> Iterator[PodEvent]:
        """First one ADDED for every pod that exists, then every change, until `close`."""
        ...

    def logs(self, name: str) -> str:
        """Return the output of the pod so far; of an ended pod too."""
        ...
