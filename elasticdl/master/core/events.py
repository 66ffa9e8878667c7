"""The events of a job: all input of the core, as frozen records.

A call of the servicer is an event with `call`, a number chosen by the shell that is unique in this generation of the
master; it is answered by exactly one command ``Reply(call, answer)``, at once except for long polls: `LeaseRequested`,
`SampleRequested`, `GroupWatched`.  The answers are in commands.py; each event names those that it may get.
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
        incarnation: random, one per process.
    """

    call: int
    worker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SampleRequested(WorkerCall):
    """Sample, a long poll.  Answers: `SampleGiven`, `NoLeaseNow`, `JobOver`, `UnknownWorker`.

    Attributes:
        of_validation: to try the metrics.
    """

    of_validation: bool = False


@dataclass(frozen=True, slots=True)
class ReadyForGroup(WorkerCall):
    """ReadyForGroup: a worker stands outside of every group.  Answers: `Accepted`, `UnknownWorker`.

    Attributes:
        address: of the store that it opens when it is rank 0.
        left: version of the group that it has left, or could not form; 0: it comes new.
        reason: why it left.
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
    """GroupFormed, from rank 0: every member holds this.  Answers: `Accepted`, `Refused` (leave it), `UnknownWorker`.

    Attributes:
        applied: the content of the model with which the members continue.
        steps: updates in it.
        restored_from: directory of the checkpoint taken; empty: none.
        engine: that sums in it, for people; empty: none, it has one member.
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
        held: after a restart of the master: every lease that it works on, with what it committed under it.
        applied: Local strategy: everything that its model holds now (after a start: the content of its checkpoint);
            None: that is not known as yet.
        restored_from: Local strategy: the checkpoint with which the model began; empty: initial values.
        restored_records: of an epoch of that checkpoint's data; 0: not known.
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
        has_metrics: the module defines metrics; without them there is no evaluation.
        has_callbacks: TRAIN_END has something to do even without an export.
        shards: of a custom data reader, by kind; the master lists the other kinds itself.
        plan: of a user's own script, instead of the flags.
        callbacks: the master's decisions for the user's; see callbacks.py.
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
        at_once: no long poll: `NoLeaseNow` if there is nothing now.
        only: nothing of another type.
        ahead: tasks that its own input processes make ready, beside the one being computed and the next.
        number: counts the requests of the process, from 1; 0: it does not say what it holds.
        oldest: its oldest request that is under way; what it was granted by earlier ones it holds, or never got.
        held: leases that it holds, of requests before `oldest` all of them.
    """

    at_once: bool = False
    only: TaskType | None = None
    ahead: int = 0
    number: int = 0
    oldest: int = 0
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallAbandoned:
    """The caller of a long poll has gone (deadline, cancellation).  No answer.

    Sent also when the answer was on its way already: a lease that was granted to it is then taken back.
    """

    call: int


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """Heartbeat.  Answer: `HeartbeatAnswer`.

    Attributes:
        positions: of every lease that the worker holds, prefetched ones too; a lease that is not named is not renewed.
        seconds: cumulative for the process, by activity.
        partition_version: newest seen.
        leaving: it was ended from outside: a worker has given up its leases and leaves now; a PS leaves when
            the answer says `stop`, after a checkpoint.
        load: of a PS.
        group_version: of the group that it is in; 0: in none.
        waiting_seconds: for so long it has been waiting inside one collective.
        memory_share: of its memory limit; 0: it has none.
        stacks: the answer to `HeartbeatAnswer.wants_stacks`.
        cpu: of a worker.
        device: of a worker; None: it computes on no accelerator.
        ended: a script ends by itself, while others of its pod may continue.
        optimizer_share: that it holds of the optimizer's state, where members divide that; else 0.
        ending: it was asked to end, and agrees with other members of its group on the last checkpoint before it leaves.
        checkpoint: the newest that the worker has written, or could not write; repeated until an answer has come, in
            each generation of the master.
        checkpoint_attempt: counts those of the process, from 1; 0: it does not count them.
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
        loss: of the newest minibatch among them; may be NaN.
        skipped: left out of the model; reported before they are committed.
        not_finite: the value that was not finite, and where; empty: none.
        learning_rate: of the newest minibatch among them; None: not known.
    """

    lease: int
    committed: tuple[int, ...]
    loss: float | None = None
    skipped: tuple[int, ...] = ()
    not_finite: str = ""
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class TaskFinished(WorkerCall):
    """Exchange: all of the task's minibatches are in the model.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    After `EvaluationReported` under the same lease it is accepted and changes nothing.

    Attributes:
        surplus: samples that `feed` has made of the task beyond one a record; negative: fewer.
        made_by: the operations of `feed` that make it, for people; empty: not known.
        not_exported: why no model was written, where one was to be.
    """

    lease: int
    num_minibatches: int
    surplus: int = 0
    made_by: str = ""
    not_exported: str = ""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Exchange: all that a worker has to report at a moment.  Answer: `MessageAnswer`.

    Attributes:
        parts: in order, all of this call; the first that is not accepted is the last that is handled.
        lease_request: of this call, too, and to be answered at once; it comes after the parts, accepted or not.
    """

    call: int
    parts: tuple[HeartbeatReceived | ProgressReported | TaskFinished, ...]
    lease_request: LeaseRequested | None = None


@dataclass(frozen=True, slots=True)
class TaskFailed(WorkerCall):
    """FailTask: user code raised.  Answers: `Accepted`, `Refused`, `UnknownWorker`.

    Attributes:
        minibatch: -1: it failed in none, as a task whose records cannot be read.
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
        states: answer to a lease with records.
        results: answer to a lease with merged states.
        surplus: as in `TaskFinished`.
        made_by: the same.
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
    """ConfirmLease: is it still mine?  Answers: `Accepted`, `Refused`, `UnknownWorker`."""

    lease: int


@dataclass(frozen=True, slots=True)
class PsJoined:
    """RegisterPs.  Answers: `PsAdmitted`, `Refused` (leave).

    Attributes:
        nonce: random, one per process; a repeated call gets the same incarnation.
        held_incarnation: not 0: after a restart of the master, the incarnation that it has.
    """

    call: int
    ps_id: int
    pod_name: str
    address: str
    nonce: int
    held_incarnation: int = 0


@dataclass(frozen=True, slots=True)
class PsReady:
    """PsReady: restored, serving; or that it cannot be.  Answers: `Accepted`, `Refused` (leave).

    Attributes:
        restored_from: directory of the checkpoint taken; empty: none.
        damaged: checkpoints passed over: the fault of each.
        error: not empty: no checkpoint can be restored.
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
    """The cluster's watch: a pod was added, modified or (phase `DELETED`) is gone.

    Attributes:
        reason: `EndReason` of the port Cluster, as text: "", Completed, Error, Killed, OOMKilled, Preempted, …
        blocked: why a pending pod cannot start without intervention (an image that cannot be pulled); else empty.
        node: where it is, if the cluster has nodes.
        has_slot: there is room for it, where the cluster has no nodes.
        queue: that has not admitted it yet.
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
    """All pods of the job that exist, ended ones included: the first event of every generation of the master.

    Sent again after each later re-list.  A pod that the core knows and that is not among them is gone; so the list
    must be taken after all earlier `CreatePod` commands were executed.
    """

    pods: tuple[PodChanged, ...]


@dataclass(frozen=True, slots=True)
class PodNotCreated:
    """A `CreatePod` command failed; it is tried again later."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class PodResized:
    """A `ResizePod` command was carried out.

    Attributes:
        memory_factor: that of the command.
        memory_bytes: the limit that is in force.
    """

    name: str
    memory_factor: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PodNotResized:
    """A `ResizePod` command failed.

    Attributes:
        message: why; the same for all pods where it is the same.
        is_final: no pod of the job can be resized here.
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
    """Answer to the command `ReadAppliedSets`: some PS did not answer, or under another incarnation."""

    question: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """Answer to the command `SaveCheckpoint`: every part and the manifest are on disk."""

    version: int
    directory: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """Answer to the command `SaveCheckpoint`: nothing usable was written."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A checkpoint is to be written as soon as one can be: the user is about to end the job."""


@dataclass(frozen=True, slots=True)
class JournalDelayed:
    """The journal could not be written for this number of seconds, and now it can be again."""

    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A request to end the job (Ctrl-C, `elasticdl delete`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """The user wants another number of workers that train, or the same: said again in every generation of the master.

    Attributes:
        max_workers: the number follows the gain from `num_workers` up to this; 0: it is fixed.
    """

    num_workers: int
    max_workers: int = 0


@dataclass(frozen=True, slots=True)
class ScaleRefused:
    """The user wants a number of workers that the job cannot have; the same reason may come again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: twice a second.

    Attributes:
        unix_offset: seconds from the clock of `Job.handle` to the time since the Unix epoch, which may have been set,
            or have passed while the machine slept; None: as it was before.
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
