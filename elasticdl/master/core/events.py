"""The events of a job: all inputs of the core, as frozen records.

A call of the servicer is an event with `call`, a number chosen by the shell that is unique in this generation of the
master.  It is answered by exactly one command ``Reply(call, answer)``, at once except for long polls:
`LeaseRequested`, `SampleRequested`, `GroupWatched`.  The answers are in commands.py; each event lists its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import (
    CpuUse,
    DataKind,
    MetricArrays,
    PodState,
    Position,
    PsUsage,
    ReportedLease,
    ScriptPlan,
    SessionEvent,
    Stacks,
    TaskType,
)
from elasticdl.protocol import Device, Role, Shard


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """The call of a worker's process.

    Attributes:
        incarnation: Random number that identifies the process.
    """

    call: int
    worker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SampleRequested(WorkerCall):
    """Sample, a long poll.  Answers: `SampleGiven`, `NoLeaseNow`, `JobOver`, `UnknownWorker`.

    Attributes:
        of_validation: Send validation data, on which the worker tries the metrics.
    """

    of_validation: bool = False


@dataclass(frozen=True, slots=True)
class ReadyForGroup(WorkerCall):
    """ReadyForGroup: a worker is in no group and can join one.  Answers: `Accepted`, `UnknownWorker`.

    Attributes:
        address: Address of the store that the worker opens if it becomes rank 0.
        left: Version of the group that the worker left or could not form; 0 means that it was in none.
        reason: Why the worker left that group.
    """

    address: str
    left: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupWatched(WorkerCall):
    """WatchGroup, a long poll.  Answers: `GroupPlanned`, `NoLeaseNow`, `JobOver`, `UnknownWorker`."""

    known_version: int = 0


@dataclass(frozen=True, slots=True)
class GroupFormed(WorkerCall):
    """GroupFormed, from rank 0: all members hold this model.  Answers: `Accepted`, `Refused` (leave), `UnknownWorker`.

    Attributes:
        applied: The minibatches in the model with which the members continue.
        steps: Number of updates in that model.
        restored_from: Directory of the restored checkpoint; empty means none.
        engine: Name of the all-reduce engine, for logs; empty for a group of one member.
    """

    version: int
    applied: CommittedSet
    steps: int = 0
    restored_from: str = ""
    engine: str = ""


@dataclass(frozen=True, slots=True)
class WorkerJoined(WorkerCall):
    """RegisterWorker.  Answers: `Registered`, `Refused` (the worker was replaced: leave).

    Attributes:
        held: After a restart of the master: every lease that the worker works on, with its commits under it.
        applied: Local strategy: everything that its model contains now (after a start: the content of its checkpoint);
            None if that is not known yet.
        restored_from: Local strategy: the checkpoint that the model was restored from; empty for initial values.
        restored_records: Records of an epoch of that checkpoint's data; 0 if unknown.
    """

    pod_name: str
    held: tuple[ReportedLease, ...] = ()
    applied: CommittedSet | None = None
    restored_from: str = ""
    restored_records: int = 0


@dataclass(frozen=True, slots=True)
class ModelReported(WorkerCall):
    """ReportModel.  Answers: `Accepted`, `UnknownWorker`.  The first report counts; an error fails the job.

    Attributes:
        has_metrics: Whether the module defines metrics; without metrics there is no evaluation.
        has_callbacks: Whether TRAIN_END has callbacks to run even without an export.
        shards: Shards of a custom data reader, by kind; the master lists the other kinds itself.
        plan: Plan of a user's own script, which replaces the flags.
        callbacks: Configuration of the user's callbacks, by which the master decides; see callbacks.py.
    """

    error: str = ""
    error_details: str = ""
    has_metrics: bool = False
    has_callbacks: bool = False
    shards: Mapping[DataKind, tuple[Shard, ...]] = field(default_factory=dict)
    plan: ScriptPlan | None = None
    callbacks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionReported(WorkerCall):
    """ReportSession, from TensorFlow's chief.  Answers: `Accepted`, `Refused`, `UnknownWorker`."""

    what: SessionEvent


@dataclass(frozen=True, slots=True)
class LeaseRequested(WorkerCall):
    """RequestLease, a long poll.  Answers: `LeaseGranted`, `NoLeaseNow`, `JobOver`, `UnknownWorker`.

    Attributes:
        at_once: Do not wait: answer `NoLeaseNow` if there is no lease now.
        only: Grant only tasks of this type; None means any.
        ahead: Number of tasks that its own input processes prepare, beside the one being computed and the next.
        number: Number of this request of the process, from 1; 0 if the worker does not report what it holds.
        oldest: Number of its oldest pending request; of the grants to earlier ones, it holds those in `held` only.
        held: Ids of the leases that it holds; complete for requests before `oldest`.
    """

    at_once: bool = False
    only: TaskType | None = None
    ahead: int = 0
    number: int = 0
    oldest: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallAbandoned:
    """The caller of a long poll has gone (deadline, cancellation).  Not answered.

    Also sent when the answer was on its way already: then a lease in it is taken back.
    """

    call: int


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """Heartbeat.  Answer: `HeartbeatAnswer`.

    Attributes:
        positions: Position in every lease that the worker holds, prefetched ones included; only these are renewed.
        seconds: Seconds by activity, cumulative since the start of the process.
        partition_version: Version of the newest PS partition that the process has seen.
        leaving: The process was asked to end from outside: a worker has given up its leases and leaves now; a PS
            leaves when the answer says `stop`, after a checkpoint.
        load: Usage counts of a PS.
        group_version: Version of the group that the worker is in; 0 means none.
        waiting_seconds: How long the worker has been waiting inside the current collective.
        memory_share: Used share of the memory limit; 0 without a limit.
        stacks: Thread stacks, if `HeartbeatAnswer.wants_stacks` asked for them.
        cpu: Processor usage of a worker.
        device: Accelerator of a worker; None means that it computes on the CPU.
        ended: The process's script ends by itself, while others of its pod may continue.
        optimizer_share: Its share of the optimizer's state, if members shard it; else 0.
        ending: It was asked to end, and agrees with other members of its group on a last checkpoint before it leaves.
        checkpoint: The newest checkpoint that the worker has written, or failed to write; repeated until it is
            answered, in each generation of the master.
        checkpoint_attempt: Number of that attempt of the process, from 1; 0 if attempts are not counted.
    """

    call: int
    role: Role
    id: int
    incarnation: int
    positions: tuple[Position, ...] = ()
    activity: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    partition_version: int = 0
    leaving: bool = False
    load: PsUsage | None = None
    group_version: int = 0
    waiting_seconds: float = 0.0
    memory_share: float = 0.0
    stacks: Stacks | None = None
    cpu: CpuUse | None = None
    device: Device | None = None
    ended: bool = False
    optimizer_share: float = 0.0
    ending: bool = False
    checkpoint: CheckpointSaved | CheckpointFailed | None = None
    checkpoint_attempt: int = 0


@dataclass(frozen=True, slots=True)
class ProgressReported(WorkerCall):
    """Exchange: minibatches that every PS has applied.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    Attributes:
        loss: Loss of the newest of these minibatches; may be NaN.
        skipped: Minibatches left out of the model; reported before they are committed.
        not_finite: Describes the value that was not finite and its place; empty means none.
        learning_rate: Learning rate of the newest of these minibatches; None if unknown.
    """

    lease: int
    committed: tuple[int, ...]
    loss: float | None = None
    skipped: tuple[int, ...] = ()
    not_finite: str = ""
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class TaskFinished(WorkerCall):
    """Exchange: the model contains all of the task's minibatches.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    After `EvaluationReported` under the same lease it is accepted and changes nothing.

    Attributes:
        surplus: Number of samples that `feed` has made beyond one per record; negative if it made fewer.
        made_by: The operations of `feed` that cause the surplus, for the log; empty if unknown.
        not_exported: Why the requested export wrote no model; empty otherwise.
    """

    lease: int
    num_minibatches: int
    surplus: int = 0
    made_by: str = ""
    not_exported: str = ""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Exchange: everything that a worker reports in one call.  Answer: `MessageAnswer`.

    Attributes:
        parts: The parts of this call, in order; handling ends with the first one that is not accepted.
        lease_request: A lease request in the same call, answered at once; handled after the parts, accepted or not.
    """

    call: int
    parts: tuple[HeartbeatReceived | ProgressReported | TaskFinished, ...]
    lease_request: LeaseRequested | None = None


@dataclass(frozen=True, slots=True)
class TaskFailed(WorkerCall):
    """FailTask: user code raised.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    Attributes:
        minibatch: Number of the failed minibatch; -1 if the task failed outside of one, such as on reading records.
    """

    lease: int
    minibatch: int
    error: str
    details: str = ""
    bad_records: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationReported(WorkerCall):
    """ReportEvaluation, which ends the lease.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    Attributes:
        states: Metric states, if the lease had records.
        results: Metric values, if the lease had merged states.
        surplus: As in `TaskFinished`.
        made_by: As in `TaskFinished`.
    """

    lease: int
    states: tuple[MetricArrays, ...] = ()
    results: Mapping[str, float] = field(default_factory=dict)
    surplus: int = 0
    made_by: str = ""


@dataclass(frozen=True, slots=True)
class MetricsReported(WorkerCall):
    """ReportMetrics: metrics computed by a user's own script.  Answers: `Accepted`, `UnknownWorker`."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingStopRequested(WorkerCall):
    """StopTraining: the user's code ends training early.  Answers: `Accepted`, `Refused`, `UnknownWorker`."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseQuestioned(WorkerCall):
    """ConfirmLease: asks whether a lease is still valid.  Answers: `Accepted`, `Refused`, `UnknownWorker`."""

    lease: int


@dataclass(frozen=True, slots=True)
class PsJoined:
    """RegisterPs.  Answers: `PsAdmitted`, `Refused` (leave).

    Attributes:
        nonce: Random number that identifies the process; a repeated call gets the same incarnation.
        held_incarnation: After a restart of the master, the PS's present incarnation; else 0.
    """

    call: int
    ps_id: int
    pod_name: str
    address: str
    nonce: int
    held_incarnation: int = 0


@dataclass(frozen=True, slots=True)
class PsReady:
    """PsReady: the PS has restored and serves, or cannot restore.  Answers: `Accepted`, `Refused` (leave).

    Attributes:
        restored_from: Directory of the restored checkpoint; empty means none.
        damaged: Errors of the damaged checkpoints that were skipped.
        error: Why no checkpoint can be restored; empty on success.
    """

    call: int
    ps_id: int
    incarnation: int
    initialized: bool = False
    restored_from: str = ""
    damaged: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class PodChanged:
    """From the cluster's watch: a pod was added or modified, or is gone (phase `DELETED`).

    Attributes:
        reason: `EndReason` of the port Cluster, as text: "", Completed, Error, Killed, OOMKilled, Preempted, …
        blocked: Why a pending pod cannot start without intervention (an image that cannot be pulled); else empty.
        node: Name of the pod's node, if the cluster has nodes.
        has_slot: In a cluster without nodes: whether there is room for the pod.
        queue: Name of the queue that has not admitted the pod yet; empty otherwise.
    """

    name: str
    role: Role
    index: int
    uid: str
    phase: PodState
    reason: str = ""
    exit_code: int | None = None
    message: str = ""
    blocked: str = ""
    node: str = ""
    has_slot: bool = False
    queue: str = ""


@dataclass(frozen=True, slots=True)
class PodsListed:
    """All existing pods of the job, ended ones included: the first event of every generation of the master.

    Sent again after each later re-list.  A pod that the core knows and the list lacks is gone; so the list must be
    taken after all earlier `CreatePod` commands were executed.
    """

    pods: tuple[PodChanged, ...]


@dataclass(frozen=True, slots=True)
class PodNotCreated:
    """A `CreatePod` command failed; the core tries again later.

    Attributes:
        lacks_quota: The reason is a used-up quota, which other pods of the job may use.
    """

    name: str
    message: str
    lacks_quota: bool = False


@dataclass(frozen=True, slots=True)
class PodResized:
    """A `ResizePod` command was carried out.

    Attributes:
        memory_factor: The factor from the command.
        memory_bytes: The memory limit now in force.
    """

    name: str
    memory_factor: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PodNotResized:
    """A `ResizePod` command failed.

    Attributes:
        message: The reason, in the same words for all pods with the same reason.
        is_final: Whether no pod of the job can be resized in this cluster.
    """

    name: str
    message: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class ShardsListed:
    """Answer to the command `ListShards`."""

    kind: DataKind
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class ShardsUnreadable:
    """Answer to the command `ListShards`: the source cannot be read; the job fails with this message."""

    kind: DataKind
    message: str


@dataclass(frozen=True, slots=True)
class AppliedSetsRead:
    """Answer to the command `ReadAppliedSets`: one set per PS, by PS id."""

    question: int
    sets: Mapping[int, CommittedSet]


@dataclass(frozen=True, slots=True)
class AppliedSetsUnreadable:
    """Answer to the command `ReadAppliedSets`: a PS did not answer, or answered as another incarnation."""

    question: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """Answer to the command `SaveCheckpoint`: every part and the manifest are on disk."""

    version: int
    directory: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """Answer to the command `SaveCheckpoint`: no usable checkpoint was written."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user is about to end the job and requests a checkpoint as soon as possible."""


@dataclass(frozen=True, slots=True)
class JournalDelayed:
    """The journal can be written again, after this number of seconds in which it could not."""

    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A request to end the job (Ctrl-C, `elasticdl delete`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """The number of training workers that the user wants; repeated, even unchanged, in every generation of the master.

    Attributes:
        max_workers: Upper bound for autoscaling from `num_workers`; 0 means a fixed number of workers.
    """

    num_workers: int
    max_workers: int = 0


@dataclass(frozen=True, slots=True)
class ScaleRefused:
    """The user wants a number of workers that the job cannot have; may be repeated with the same reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent twice a second.

    Attributes:
        unix_offset: Seconds from the clock of `Job.handle` to the time since the Unix epoch, which changes if the
            system clock is set or the machine sleeps; None means unchanged.
    """

    unix_offset: float | None = None


Event = (
    WorkerJoined
    | ModelReported
    | SessionReported
    | LeaseRequested
    | SampleRequested
    | ReadyForGroup
    | GroupWatched
    | GroupFormed
    | CallAbandoned
    | HeartbeatReceived
    | ProgressReported
    | TaskFinished
    | MessageReceived
    | TaskFailed
    | EvaluationReported
    | MetricsReported
    | TrainingStopRequested
    | LeaseQuestioned
    | PsJoined
    | PsReady
    | PodChanged
    | PodsListed
    | PodNotCreated
    | PodResized
    | PodNotResized
    | ShardsListed
    | ShardsUnreadable
    | AppliedSetsRead
    | AppliedSetsUnreadable
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointRequested
    | JournalDelayed
    | StopRequested
    | ScaleRequested
    | ScaleRefused
    | Tick
)
