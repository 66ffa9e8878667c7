"""Commands of the core, and the answers that `Reply` carries.

The shell executes the commands of one event in their order.  Where a command can fail there is an event that says so;
`Reply`, `DeletePod` and `Log` cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticdl.master.core.values import (
    DataKind,
    Lease,
    Level,
    MessagePace,
    PsAddress,
    PsPartition,
    ScriptPlan,
    WorkerGroup,
)
from elasticdl.protocol import Role, Shard

# Answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker is known now.

    Attributes:
        partition: None until every PS is ready, and without PS.
        plan: of a job that runs a command; None until its data are known.
    """

    partition: PsPartition | None
    plan: ScriptPlan | None = None


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class NoLeaseNow:
    """Ask again at once: the long poll was long enough."""


@dataclass(frozen=True, slots=True)
class SampleGiven:
    """Records to try the user's code on; no lease.

    Attributes:
        shard: without records: there is nothing to try.
        epoch: the first that is not whole; -1: no worker has the model.
    """

    shard: Shard
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupPlanned:
    """A group newer than the known one.  A worker that is not in it leaves its group and waits for the next."""

    group: WorkerGroup


@dataclass(frozen=True, slots=True)
class JobOver:
    """Leave with exit code 0.

    Attributes:
        formed: to GroupWatched: version of the last group that formed, whose members have the trained model.
    """

    formed: int = 0


@dataclass(frozen=True, slots=True)
class UnknownWorker:
    """The worker must register (again); `Refused` then tells whether it has been replaced."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    model_version: int


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Answer to a heartbeat.

    Attributes:
        known: False: register again.
        revoked: of the leases named in the heartbeat.
        partition: only when newer than the one seen.
        stop: leave now.
        num_pushing: to a PS: workers that train now.
        group_version: the newest that is planned.
        whole_epochs: with a fixed global batch: of this number of epochs every planned task is done or this worker's.
        newest_lease: with a fixed global batch: the newest training lease that it holds; to a PS: the newest of all.
        wants_stacks: the next heartbeat is to bring the stacks of all threads, at once.
        checkpoint_request: another number than before asks a worker for a checkpoint of the model that it holds.
        pace: of a worker's messages.
    """

    known: bool
    revoked: tuple[int, ...] = ()
    partition: PsPartition | None = None
    stop: bool = False
    num_pushing: int = 0
    group_version: int = 0
    whole_epochs: int = 0
    newest_lease: int = 0
    wants_stacks: bool = False
    checkpoint_request: int = 0
    pace: MessagePace = field(default_factory=MessagePace)


LeaseAnswer = LeaseGranted | NoLeaseNow | JobOver | UnknownWorker


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """Answer to `MessageReceived`.

    Attributes:
        parts: the answers to its parts, up to the first that is not accepted.
        lease: the answer to its request for a lease.
    """

    parts: tuple[HeartbeatAnswer | Accepted | Refused | UnknownWorker, ...]
    lease: LeaseAnswer | None = None


@dataclass(frozen=True, slots=True)
class PsAdmitted:
    """Answer to `PsJoined`.

    Attributes:
        restore_from: directory of a checkpoint, or empty.
        parameters_only: it is another job's: start with an empty applied set.
    """

    incarnation: int
    restore_from: str = ""
    parameters_only: bool = False


Answer = (
    Registered
    | LeaseGranted
    | SampleGiven
    | GroupPlanned
    | NoLeaseNow
    | JobOver
    | UnknownWorker
    | Accepted
    | Refused
    | HeartbeatAnswer
    | MessageAnswer
    | PsAdmitted
)

# Commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers the call of an event."""

    call: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Persist:
    """``Job.snapshot()`` must be on disk before the commands after this one are executed."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Starts a PS or a worker.  A pod of that name that has ended is replaced.  Failure: `PodNotCreated`.

    Attributes:
        slot: the place, from 0, that it fills in its role: of a PS its id, of a worker its predecessor's if it has one.
        memory_factor: times the memory that the job's flags give to the role.
    """

    name: str
    role: Role
    index: int
    slot: int = 0
    memory_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ResizePod:
    """Gives a pod that runs more memory in place.  Answered by `PodResized` or `PodNotResized`.

    Attributes:
        pod: as it would be created with that memory.
    """

    pod: CreatePod


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Ends a pod.  `grace_s` None: the pod's own."""

    name: str
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class ListShards:
    """Lists the shards of a data source.  Answered by `ShardsListed` or `ShardsUnreadable`."""

    kind: DataKind


@dataclass(frozen=True, slots=True)
class ReadAppliedSets:
    """Asks every PS for its applied set.  Answered by `AppliedSetsRead` or `AppliedSetsUnreadable`."""

    question: int
    ps: tuple[PsAddress, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Every PS writes its part; then the manifest, naming the incarnations.

    The directory is ``version-<version>`` of the job's checkpoint directory; versions grow.  Never two at a time.
    Answered by `CheckpointSaved` or `CheckpointFailed`.
    """

    version: int
    ps: tuple[PsAddress, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Wake:
    """A `Tick` is wanted after this time, before the next one that comes by itself."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Log:
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of an evaluation, for logs and TensorBoard."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EndJob:
    """The last command of a job: all replies are out, all pods are terminating.

    Attributes:
        message: why, for people; empty when all went well.
        pod: the end of this pod's log belongs to the message; may be empty.
    """

    exit_code: int
    message: str = ""
    pod: str = ""


Command = (
    Reply
    | Persist
    | CreatePod
    | ResizePod
    | DeletePod
    | ListShards
    | ReadAppliedSets
    | SaveCheckpoint
    | Wake
    | Log
    | Measured
    | EndJob
)
