"""Commands of the core, and the answers that `Reply` carries.

The shell executes the commands of one event in their order.  If a command can fail, an event reports the failure;
`Reply`, `DeletePod` and `Log` cannot fail.
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
    """Answer to `WorkerJoined`: the worker is registered.

    Attributes:
        partition: The PS partition; None until every PS is ready, and in jobs without PS.
        plan: Plan of a job that runs a command; None until its data are known.
    """

    partition: PsPartition | None
    plan: ScriptPlan | None = None


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    lease: Lease


@dataclass(frozen=True, slots=True)
class NoLeaseNow:
    """Answer to a long poll that timed out: ask again at once."""


@dataclass(frozen=True, slots=True)
class SampleGiven:
    """Records to try the user's code on; no lease.

    Attributes:
        shard: The records; an empty shard means that there is nothing to try.
        epoch: Number of the first epoch that is not whole; -1 if no worker has the model.
    """

    shard: Shard
    epoch: int


@dataclass(frozen=True, slots=True)
class GroupPlanned:
    """A group newer than the caller's.  A worker that is not in it leaves its group and waits for the next."""

    group: WorkerGroup


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is over: leave with exit code 0.

    Attributes:
        formed: In the answer to GroupWatched: version of the last formed group, whose members hold the trained model.
    """

    formed: int = 0


@dataclass(frozen=True, slots=True)
class UnknownWorker:
    """The worker must register (again); `Refused` is the answer to that if it has been replaced."""

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
        known: False means that the process must register again.
        revoked: Ids of leases named in the heartbeat that are no longer valid.
        partition: The PS partition, if it is newer than the one that the caller has seen.
        stop: The process must exit now.
        num_pushing: In the answer to a PS: number of workers that train now.
        group_version: Version of the newest planned group.
        whole_epochs: With a fixed global batch: of this number of epochs, all tasks are done or this worker's.
        newest_lease: With a fixed global batch: id of its newest training lease; to a PS: the newest of all workers.
        wants_stacks: The worker must send the next heartbeat at once, with the stacks of all its threads.
        checkpoint_request: Number of the newest request; a change asks the worker to write a checkpoint of its model.
        pace: Intervals of the worker's messages.
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
        parts: The answers to the message's parts, up to the first rejected one.
        lease: The answer to the message's lease request.
    """

    parts: tuple[HeartbeatAnswer | Accepted | Refused | UnknownWorker, ...]
    lease: LeaseAnswer | None = None


@dataclass(frozen=True, slots=True)
class PsAdmitted:
    """Answer to `PsJoined`.

    Attributes:
        restore_from: Directory of the checkpoint to restore; empty means none.
        parameters_only: The checkpoint belongs to another job: start with an empty applied set.
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
    """Answer the call of an event."""

    call: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Persist:
    """Write ``Job.snapshot()`` to disk before the commands after this one are executed."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Start a PS or a worker pod; replace an ended pod of the same name.  On failure: `PodNotCreated`.

    Attributes:
        slot: Slot in its role, from 0: a PS's id; a worker takes its predecessor's, if it has one.
        memory_factor: Multiple of the memory that the job's flags give to the role.
    """

    name: str
    role: Role
    index: int
    slot: int = 0
    memory_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ResizePod:
    """Give a running pod more memory in place.  Answered by `PodResized` or `PodNotResized`.

    Attributes:
        pod: The command that would create the pod with the new memory.
    """

    pod: CreatePod


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod.  `grace_s` None means the pod's own grace period."""

    name: str
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class ListShards:
    """List the shards of a data source.  Answered by `ShardsListed` or `ShardsUnreadable`."""

    kind: DataKind


@dataclass(frozen=True, slots=True)
class ReadAppliedSets:
    """Ask every PS for its applied set.  Answered by `AppliedSetsRead` or `AppliedSetsUnreadable`."""

    question: int
    ps: tuple[PsAddress, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Have every PS write its part, then write the manifest, which names the incarnations.

    The directory is ``version-<version>`` of the job's checkpoint directory; versions grow.  Never two at a time.
    Answered by `CheckpointSaved` or `CheckpointFailed`.
    """

    version: int
    ps: tuple[PsAddress, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Request a `Tick` after this time, earlier than the next regular one."""

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
        message: The reason, for the log; empty if the job succeeded.
        pod: Name of the pod whose last log lines are added to the message; may be empty.
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
