"""The values that events and commands carry: enums and frozen records, mirrors of the wire messages.

This module owns shapes only.  Nothing here decides or keeps anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elasticdl.protocol import HEARTBEAT_S, REPORT_S, Role, Shard

Place = tuple[Role, int]  # role, slot
NUM_BUCKETS = 1024  # of the id space of every table, and of the flat dense vectors


class PodState(StrEnum):
    """Phases of a pod; the same values as in the port `Cluster`, and `DELETED` for a pod that no longer exists."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"


class TaskType(StrEnum):
    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    TRAIN_END = "TRAIN_END"
    CALLBACK = "CALLBACK"


class DataKind(StrEnum):
    """A kind of data source of a job."""

    TRAINING = "training"
    VALIDATION = "validation"
    PREDICTION = "prediction"


class SessionEvent(StrEnum):
    """A report of TensorFlow's chief on the model."""

    SAVING = "saving"
    SAVED = "saved"
    RESTORED = "restored"


class Level(StrEnum):
    """Severity of a log line."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ScriptPlan:
    """A user script's own plan for its data, as it reports it.

    Attributes:
        num_epochs: None means the value of the flag.
        num_records: Records of an epoch; 0 in a report.
        num_minibatches: Minibatches of an epoch; 0 in a report.
    """

    minibatch_size: int
    num_minibatches_per_task: int
    num_epochs: int | None = None
    num_records: int = 0
    num_minibatches: int = 0


@dataclass(frozen=True, slots=True)
class Array:
    """An array of float64, little-endian, in C order."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class MetricArrays:
    """One metric's variables.  Additive ones are summed element-wise; else `num_states` states are concatenated."""

    name: str
    arrays: tuple[Array, ...]
    additive: bool = True
    num_states: int = 1


@dataclass(frozen=True, slots=True)
class Occasion:
    """A task of one worker for the user's callbacks, during training.

    Attributes:
        save_to: Path to write the model to; empty means to call `on_epoch_end` instead.
        epoch: Number of the epoch that has ended, from 0.
        logs: Pairs (name, value) for the callback's `logs`.
    """

    save_to: str
    epoch: int
    logs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """A task given to one worker incarnation.

    Attributes:
        id: Fencing token: generation << 32 | counter.
        epoch: Number of the epoch, from 0; for an EVALUATION the number of the evaluation.
        task: Index in the epoch's unpermuted list of tasks.
        shard: The slice of records; empty (``Shard("", 0, 0)``) for TRAIN_END and for an EVALUATION with `merged`;
            for the TRAIN_END of a prediction, from 0 to the number of predicted records.
        excluded: Quarantined records of the slice, by record number in the shard.
        merged: For an EVALUATION: if not empty, compute the results from these states and read no records.
        committed: For a job that runs a command: minibatches that need not be computed.
        occasion: The work of a CALLBACK task.
    """

    id: int
    type: TaskType
    epoch: int
    task: int
    shard: Shard
    excluded: tuple[int, ...] = ()
    model_version: int = 0
    merged: tuple[MetricArrays, ...] = ()
    committed: tuple[int, ...] = ()
    occasion: Occasion | None = None


@dataclass(frozen=True, slots=True)
class ReportedLease:
    """A lease that a worker reports when it registers again, with its commits under it."""

    lease: Lease
    committed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's position in a lease that it holds: the minibatch being computed, or the next one."""

    lease: int
    minibatch: int


@dataclass(frozen=True, slots=True)
class MessagePace:
    """Intervals of a worker's messages.

    Attributes:
        heartbeat: Seconds between two heartbeats.
        report: Least number of seconds between two progress reports.
    """

    heartbeat: float = HEARTBEAT_S
    report: float = REPORT_S


@dataclass(frozen=True, slots=True)
class Member:
    """A worker in a group.

    Attributes:
        address: host:port of the store that it opens if it is rank 0.
        is_source: Whether it was in the last formed group, so other members may copy the model from it.
    """

    worker_id: int
    incarnation: int
    address: str
    is_source: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The group of an AllReduce job, in order of rank.  Versions grow over all generations of the master."""

    version: int
    members: tuple[Member, ...]
    _ids: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {one.worker_id: one.incarnation for one in self.members})

    @property
    def ids(self) -> Mapping[int, int]:
        """The incarnation of each member by its worker id, in order of rank."""
        return self._ids

    def has(self, worker_id: int, incarnation: int) -> bool:
        return self._ids.get(worker_id) == incarnation


@dataclass(frozen=True, slots=True)
class BucketRange:
    """Buckets `start` (inclusive) to `end` (exclusive) of `NUM_BUCKETS`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PsUsage:
    """Counts of a PS since its start; all but the sizes of its tables only grow.

    Attributes:
        busy_seconds: Seconds that its threads have spent in calls.
        throttled_seconds: Seconds of throttling by its CPU limit.
        staleness: Applied pushes by the number of updates that they missed: 0, 1, 2, 3-4, 5-8, 9-16, …
        refused: Number of rejected pushes, too stale or too late.
    """

    pushes: int = 0
    pulls: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    busy_seconds: float = 0.0
    staleness: tuple[int, ...] = ()
    refused: int = 0
    table_rows: int = 0
    table_bytes: int = 0
    throttled_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PsAddress:
    """One parameter server, and its buckets."""

    ps_id: int
    address: str
    incarnation: int
    buckets: tuple[BucketRange, ...] = ()


@dataclass(frozen=True, slots=True)
class PsPartition:
    """All parameter servers in order of id, all of them ready.  Versions grow over all generations of the master.

    Each bucket is owned by exactly one of them.
    """

    version: int
    ps: tuple[PsAddress, ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of all threads of a worker.

    Attributes:
        where: The innermost line of user code, "file:line in function"; empty if there is none.
        text: Stacks of all threads, those with user code first.
    """

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor usage of a worker and its machine; the seconds are cumulative.

    Attributes:
        throttled_seconds: Seconds of throttling of its control group by its CPU limit.
        steal_seconds: Seconds in which the hypervisor ran something else, per processor of the machine.
        load: Load average of the machine over one minute.
        cores: Number of processor cores of the machine.
    """

    throttled_seconds: float
    steal_seconds: float
    load: float
    cores: float
