from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    MASTER: _ClassVar[Role]
    PS: _ClassVar[Role]
    WORKER: _ClassVar[Role]

class TaskType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_TYPE_UNSPECIFIED: _ClassVar[TaskType]
    TRAINING: _ClassVar[TaskType]
    EVALUATION: _ClassVar[TaskType]
    PREDICTION: _ClassVar[TaskType]
    TRAIN_END: _ClassVar[TaskType]
    CALLBACK: _ClassVar[TaskType]

class SessionEvent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_EVENT_UNSPECIFIED: _ClassVar[SessionEvent]
    SAVING: _ClassVar[SessionEvent]
    SAVED: _ClassVar[SessionEvent]
    RESTORED: _ClassVar[SessionEvent]

class PsStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[PsStatus]
    WRONG_INCARNATION: _ClassVar[PsStatus]
    OLD_GENERATION: _ClassVar[PsStatus]
    LEASE_REFUSED: _ClassVar[PsStatus]
    UNINITIALIZED: _ClassVar[PsStatus]
    OLD_PARTITION: _ClassVar[PsStatus]
    TOO_STALE: _ClassVar[PsStatus]

class WireType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FLOAT32: _ClassVar[WireType]
    FLOAT16: _ClassVar[WireType]
    BFLOAT16: _ClassVar[WireType]
ROLE_UNSPECIFIED: Role
MASTER: Role
PS: Role
WORKER: Role
TASK_TYPE_UNSPECIFIED: TaskType
TRAINING: TaskType
EVALUATION: TaskType
PREDICTION: TaskType
TRAIN_END: TaskType
CALLBACK: TaskType
SESSION_EVENT_UNSPECIFIED: SessionEvent
SAVING: SessionEvent
SAVED: SessionEvent
RESTORED: SessionEvent
OK: PsStatus
WRONG_INCARNATION: PsStatus
OLD_GENERATION: PsStatus
LEASE_REFUSED: PsStatus
UNINITIALIZED: PsStatus
OLD_PARTITION: PsStatus
TOO_STALE: PsStatus
FLOAT32: WireType
FLOAT16: WireType
BFLOAT16: WireType

class WorkerMessage(_message.Message):
    __slots__ = ("heartbeat", "reports", "lease_request")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    heartbeat: HeartbeatRequest
    reports: _containers.RepeatedCompositeFieldContainer[TaskReport]
    lease_request: LeaseRequest
    def __init__(self, heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[TaskReport, _Mapping]]] = ..., lease_request: _Optional[_Union[LeaseRequest, _Mapping]] = ...) -> None: ...

class TaskReport(_message.Message):
    __slots__ = ("progress", "finished")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    progress: ProgressReport
    finished: FinishedTask
    def __init__(self, progress: _Optional[_Union[ProgressReport, _Mapping]] = ..., finished: _Optional[_Union[FinishedTask, _Mapping]] = ...) -> None: ...

class MasterMessage(_message.Message):
    __slots__ = ("heartbeat", "acks", "lease")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    heartbeat: HeartbeatReply
    acks: _containers.RepeatedCompositeFieldContainer[Ack]
    lease: LeaseReply
    def __init__(self, heartbeat: _Optional[_Union[HeartbeatReply, _Mapping]] = ..., acks: _Optional[_Iterable[_Union[Ack, _Mapping]]] = ..., lease: _Optional[_Union[LeaseReply, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("accepted", "reason", "generation", "model_version")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    generation: int
    model_version: int
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., model_version: _Optional[int] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("version", "ps")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PS_FIELD_NUMBER: _ClassVar[int]
    version: int
    ps: _containers.RepeatedCompositeFieldContainer[PsAddress]
    def __init__(self, version: _Optional[int] = ..., ps: _Optional[_Iterable[_Union[PsAddress, _Mapping]]] = ...) -> None: ...

class PsAddress(_message.Message):
    __slots__ = ("ps_id", "address", "incarnation", "buckets")
    PS_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ps_id: int
    address: str
    incarnation: int
    buckets: _containers.RepeatedCompositeFieldContainer[BucketRange]
    def __init__(self, ps_id: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[BucketRange, _Mapping]]] = ...) -> None: ...

class BucketRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class AppliedTask(_message.Message):
    __slots__ = ("epoch", "task", "watermark", "extras", "num_samples", "skipped")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    task: int
    watermark: int
    extras: _containers.RepeatedScalarFieldContainer[int]
    num_samples: int
    skipped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., task: _Optional[int] = ..., watermark: _Optional[int] = ..., extras: _Optional[_Iterable[int]] = ..., num_samples: _Optional[int] = ..., skipped: _Optional[_Iterable[int]] = ...) -> None: ...

class AppliedRun(_message.Message):
    __slots__ = ("epoch", "first_task", "num_tasks", "watermark")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_task: int
    num_tasks: int
    watermark: int
    def __init__(self, epoch: _Optional[int] = ..., first_task: _Optional[int] = ..., num_tasks: _Optional[int] = ..., watermark: _Optional[int] = ...) -> None: ...

class AppliedSet(_message.Message):
    __slots__ = ("tasks", "num_applies", "runs")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_APPLIES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[AppliedTask]
    num_applies: int
    runs: _containers.RepeatedCompositeFieldContainer[AppliedRun]
    def __init__(self, tasks: _Optional[_Iterable[_Union[AppliedTask, _Mapping]]] = ..., num_applies: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[AppliedRun, _Mapping]]] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pod_name", "held", "applied", "restored_from", "restored_records")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    RESTORED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    pod_name: str
    held: _containers.RepeatedCompositeFieldContainer[HeldLease]
    applied: AppliedSet
    restored_from: str
    restored_records: int
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., pod_name: _Optional[str] = ..., held: _Optional[_Iterable[_Union[HeldLease, _Mapping]]] = ..., applied: _Optional[_Union[AppliedSet, _Mapping]] = ..., restored_from: _Optional[str] = ..., restored_records: _Optional[int] = ...) -> None: ...

class HeldLease(_message.Message):
    __slots__ = ("lease", "committed")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    committed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., committed: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterWorkerReply(_message.Message):
    __slots__ = ("accepted", "reason", "generation", "job_spec", "partition", "plan")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    JOB_SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    generation: int
    job_spec: str
    partition: Partition
    plan: Plan
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., job_spec: _Optional[str] = ..., partition: _Optional[_Union[Partition, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "of_validation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OF_VALIDATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    of_validation: bool
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., of_validation: bool = ...) -> None: ...

class SampleReply(_message.Message):
    __slots__ = ("wait", "shard", "epoch")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    shard: ShardMessage
    epoch: int
    def __init__(self, wait: bool = ..., shard: _Optional[_Union[ShardMessage, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "shape", "trainable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    trainable: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., trainable: bool = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "dim", "initializer", "input_dim", "constraint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    INPUT_DIM_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    initializer: str
    input_dim: int
    constraint: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., initializer: _Optional[str] = ..., input_dim: _Optional[int] = ..., constraint: _Optional[str] = ...) -> None: ...

class ShardMessage(_message.Message):
    __slots__ = ("name", "start", "end", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: int
    end: int
    identity: str
    def __init__(self, name: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., identity: _Optional[str] = ...) -> None: ...

class ModelReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "error", "error_details", "variables", "tables", "optimizer", "metrics", "has_training_shards", "training_shards", "has_validation_shards", "validation_shards", "has_prediction_shards", "prediction_shards", "has_callbacks", "plan", "callbacks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAILS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    HAS_TRAINING_SHARDS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SHARDS_FIELD_NUMBER: _ClassVar[int]
    HAS_VALIDATION_SHARDS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_SHARDS_FIELD_NUMBER: _ClassVar[int]
    HAS_PREDICTION_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_SHARDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CALLBACKS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CALLBACKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    error: str
    error_details: str
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    optimizer: str
    metrics: _containers.RepeatedScalarFieldContainer[str]
    has_training_shards: bool
    training_shards: _containers.RepeatedCompositeFieldContainer[ShardMessage]
    has_validation_shards: bool
    validation_shards: _containers.RepeatedCompositeFieldContainer[ShardMessage]
    has_prediction_shards: bool
    prediction_shards: _containers.RepeatedCompositeFieldContainer[ShardMessage]
    has_callbacks: bool
    plan: Plan
    callbacks: str
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., error: _Optional[str] = ..., error_details: _Optional[str] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., optimizer: _Optional[str] = ..., metrics: _Optional[_Iterable[str]] = ..., has_training_shards: bool = ..., training_shards: _Optional[_Iterable[_Union[ShardMessage, _Mapping]]] = ..., has_validation_shards: bool = ..., validation_shards: _Optional[_Iterable[_Union[ShardMessage, _Mapping]]] = ..., has_prediction_shards: bool = ..., prediction_shards: _Optional[_Iterable[_Union[ShardMessage, _Mapping]]] = ..., has_callbacks: bool = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., callbacks: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("minibatch_size", "num_minibatches_per_task", "has_num_epochs", "num_epochs", "num_records", "num_minibatches")
    MINIBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_MINIBATCHES_PER_TASK_FIELD_NUMBER: _ClassVar[int]
    HAS_NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NUM_MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    minibatch_size: int
    num_minibatches_per_task: int
    has_num_epochs: bool
    num_epochs: int
    num_records: int
    num_minibatches: int
    def __init__(self, minibatch_size: _Optional[int] = ..., num_minibatches_per_task: _Optional[int] = ..., has_num_epochs: bool = ..., num_epochs: _Optional[int] = ..., num_records: _Optional[int] = ..., num_minibatches: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "at_once", "only", "ahead", "number", "oldest", "held")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    at_once: bool
    only: TaskType
    ahead: int
    number: int
    oldest: int
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., at_once: bool = ..., only: _Optional[_Union[TaskType, str]] = ..., ahead: _Optional[int] = ..., number: _Optional[int] = ..., oldest: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "type", "epoch", "task", "shard", "excluded", "model_version", "merged", "committed", "occasion")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    OCCASION_FIELD_NUMBER: _ClassVar[int]
    id: int
    type: TaskType
    epoch: int
    task: int
    shard: ShardMessage
    excluded: _containers.RepeatedScalarFieldContainer[int]
    model_version: int
    merged: _containers.RepeatedCompositeFieldContainer[MetricState]
    committed: _containers.RepeatedScalarFieldContainer[int]
    occasion: Occasion
    def __init__(self, id: _Optional[int] = ..., type: _Optional[_Union[TaskType, str]] = ..., epoch: _Optional[int] = ..., task: _Optional[int] = ..., shard: _Optional[_Union[ShardMessage, _Mapping]] = ..., excluded: _Optional[_Iterable[int]] = ..., model_version: _Optional[int] = ..., merged: _Optional[_Iterable[_Union[MetricState, _Mapping]]] = ..., committed: _Optional[_Iterable[int]] = ..., occasion: _Optional[_Union[Occasion, _Mapping]] = ...) -> None: ...

class Occasion(_message.Message):
    __slots__ = ("save_to", "epoch", "logs")
    class LogsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAVE_TO_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    save_to: str
    epoch: int
    logs: _containers.ScalarMap[str, float]
    def __init__(self, save_to: _Optional[str] = ..., epoch: _Optional[int] = ..., logs: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("generation", "lease", "wait", "end", "unknown")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    lease: Lease
    wait: bool
    end: bool
    unknown: str
    def __init__(self, generation: _Optional[int] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., wait: bool = ..., end: bool = ..., unknown: _Optional[str] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("lease", "minibatch")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    lease: int
    minibatch: int
    def __init__(self, lease: _Optional[int] = ..., minibatch: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("role", "id", "incarnation", "positions", "activity", "seconds", "partition_version", "leaving", "load", "group_version", "waiting_seconds", "memory_share", "stacks", "cpu", "device", "ended", "optimizer_share", "ending", "checkpoint")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GROUP_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHARE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_SHARE_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    role: Role
    id: int
    incarnation: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    activity: str
    seconds: _containers.ScalarMap[str, float]
    partition_version: int
    leaving: bool
    load: PsLoad
    group_version: int
    waiting_seconds: float
    memory_share: float
    stacks: Stacks
    cpu: CpuUse
    device: Device
    ended: bool
    optimizer_share: float
    ending: bool
    checkpoint: WrittenCheckpoint
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., id: _Optional[int] = ..., incarnation: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., activity: _Optional[str] = ..., seconds: _Optional[_Mapping[str, float]] = ..., partition_version: _Optional[int] = ..., leaving: bool = ..., load: _Optional[_Union[PsLoad, _Mapping]] = ..., group_version: _Optional[int] = ..., waiting_seconds: _Optional[float] = ..., memory_share: _Optional[float] = ..., stacks: _Optional[_Union[Stacks, _Mapping]] = ..., cpu: _Optional[_Union[CpuUse, _Mapping]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., ended: bool = ..., optimizer_share: _Optional[float] = ..., ending: bool = ..., checkpoint: _Optional[_Union[WrittenCheckpoint, _Mapping]] = ...) -> None: ...

class WrittenCheckpoint(_message.Message):
    __slots__ = ("version", "directory", "error", "attempt")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    version: int
    directory: str
    error: str
    attempt: int
    def __init__(self, version: _Optional[int] = ..., directory: _Optional[str] = ..., error: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Stacks(_message.Message):
    __slots__ = ("where", "text")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    where: str
    text: str
    def __init__(self, where: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class CpuUse(_message.Message):
    __slots__ = ("throttled_seconds", "steal_seconds", "load", "cores")
    THROTTLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    throttled_seconds: float
    steal_seconds: float
    load: float
    cores: float
    def __init__(self, throttled_seconds: _Optional[float] = ..., steal_seconds: _Optional[float] = ..., load: _Optional[float] = ..., cores: _Optional[float] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "kind", "used_bytes", "total_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    used_bytes: int
    total_bytes: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., used_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class PsLoad(_message.Message):
    __slots__ = ("pushes", "pulls", "rows_pushed", "rows_pulled", "bytes_received", "bytes_sent", "busy_seconds", "staleness", "refused", "table_rows", "table_bytes")
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PUSHED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PULLED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    pushes: int
    pulls: int
    rows_pushed: int
    rows_pulled: int
    bytes_received: int
    bytes_sent: int
    busy_seconds: float
    staleness: _containers.RepeatedScalarFieldContainer[int]
    refused: int
    table_rows: int
    table_bytes: int
    def __init__(self, pushes: _Optional[int] = ..., pulls: _Optional[int] = ..., rows_pushed: _Optional[int] = ..., rows_pulled: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., staleness: _Optional[_Iterable[int]] = ..., refused: _Optional[int] = ..., table_rows: _Optional[int] = ..., table_bytes: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "generation", "revoked", "partition", "stop", "group_version", "num_pushing", "whole_epochs", "newest_lease", "wants_stacks", "checkpoint_request", "heartbeat_seconds", "report_seconds")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GROUP_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHING_FIELD_NUMBER: _ClassVar[int]
    WHOLE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_LEASE_FIELD_NUMBER: _ClassVar[int]
    WANTS_STACKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    generation: int
    revoked: _containers.RepeatedScalarFieldContainer[int]
    partition: Partition
    stop: bool
    group_version: int
    num_pushing: int
    whole_epochs: int
    newest_lease: int
    wants_stacks: bool
    checkpoint_request: int
    heartbeat_seconds: float
    report_seconds: float
    def __init__(self, known: bool = ..., generation: _Optional[int] = ..., revoked: _Optional[_Iterable[int]] = ..., partition: _Optional[_Union[Partition, _Mapping]] = ..., stop: bool = ..., group_version: _Optional[int] = ..., num_pushing: _Optional[int] = ..., whole_epochs: _Optional[int] = ..., newest_lease: _Optional[int] = ..., wants_stacks: bool = ..., checkpoint_request: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., report_seconds: _Optional[float] = ...) -> None: ...

class ProgressReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease", "committed", "loss", "has_loss", "skipped", "not_finite", "learning_rate")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOSS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    lease: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    loss: float
    has_loss: bool
    skipped: _containers.RepeatedScalarFieldContainer[int]
    not_finite: str
    learning_rate: float
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., loss: _Optional[float] = ..., has_loss: bool = ..., skipped: _Optional[_Iterable[int]] = ..., not_finite: _Optional[str] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class MetricsReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "step", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    step: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StopTrainingRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    reason: str
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("version", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "is_source")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    address: str
    is_source: bool
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., is_source: bool = ...) -> None: ...

class ReadyForGroupRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "left", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    address: str
    left: int
    reason: str
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., left: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WatchGroupRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "known_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    known_version: int
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., known_version: _Optional[int] = ...) -> None: ...

class WatchGroupReply(_message.Message):
    __slots__ = ("generation", "group", "wait", "end", "unknown", "formed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    group: Group
    wait: bool
    end: bool
    unknown: str
    formed: int
    def __init__(self, generation: _Optional[int] = ..., group: _Optional[_Union[Group, _Mapping]] = ..., wait: bool = ..., end: bool = ..., unknown: _Optional[str] = ..., formed: _Optional[int] = ...) -> None: ...

class GroupFormedRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "version", "applied", "steps", "restored_from", "engine")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    version: int
    applied: AppliedSet
    steps: int
    restored_from: str
    engine: str
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., applied: _Optional[_Union[AppliedSet, _Mapping]] = ..., steps: _Optional[int] = ..., restored_from: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "event")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    event: SessionEvent
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., event: _Optional[_Union[SessionEvent, str]] = ...) -> None: ...

class FinishedTask(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease", "num_minibatches", "surplus", "not_exported")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    NOT_EXPORTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    lease: int
    num_minibatches: int
    surplus: Surplus
    not_exported: str
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., num_minibatches: _Optional[int] = ..., surplus: _Optional[_Union[Surplus, _Mapping]] = ..., not_exported: _Optional[str] = ...) -> None: ...

class Surplus(_message.Message):
    __slots__ = ("count", "made_by")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MADE_BY_FIELD_NUMBER: _ClassVar[int]
    count: int
    made_by: str
    def __init__(self, count: _Optional[int] = ..., made_by: _Optional[str] = ...) -> None: ...

class FailedTask(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease", "minibatch", "error", "details", "bad_records")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    BAD_RECORDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    lease: int
    minibatch: int
    error: str
    details: str
    bad_records: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., minibatch: _Optional[int] = ..., error: _Optional[str] = ..., details: _Optional[str] = ..., bad_records: _Optional[_Iterable[int]] = ...) -> None: ...

class MetricState(_message.Message):
    __slots__ = ("name", "arrays", "additive", "num_states")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    ADDITIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    name: str
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    additive: bool
    num_states: int
    def __init__(self, name: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ..., additive: bool = ..., num_states: _Optional[int] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("shape", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class EvaluationReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease", "states", "results", "surplus")
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    lease: int
    states: _containers.RepeatedCompositeFieldContainer[MetricState]
    results: _containers.ScalarMap[str, float]
    surplus: Surplus
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., states: _Optional[_Iterable[_Union[MetricState, _Mapping]]] = ..., results: _Optional[_Mapping[str, float]] = ..., surplus: _Optional[_Union[Surplus, _Mapping]] = ...) -> None: ...

class LeaseQuestion(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    worker_id: int
    incarnation: int
    lease: int
    def __init__(self, worker_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., lease: _Optional[int] = ...) -> None: ...

class RegisterPsRequest(_message.Message):
    __slots__ = ("ps_id", "pod_name", "address", "nonce", "held_incarnation")
    PS_ID_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    HELD_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ps_id: int
    pod_name: str
    address: str
    nonce: int
    held_incarnation: int
    def __init__(self, ps_id: _Optional[int] = ..., pod_name: _Optional[str] = ..., address: _Optional[str] = ..., nonce: _Optional[int] = ..., held_incarnation: _Optional[int] = ...) -> None: ...

class RegisterPsReply(_message.Message):
    __slots__ = ("accepted", "reason", "generation", "incarnation", "job_spec", "restore_from", "parameters_only")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    JOB_SPEC_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FROM_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    generation: int
    incarnation: int
    job_spec: str
    restore_from: str
    parameters_only: bool
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[int] = ..., job_spec: _Optional[str] = ..., restore_from: _Optional[str] = ..., parameters_only: bool = ...) -> None: ...

class PsReadyRequest(_message.Message):
    __slots__ = ("ps_id", "incarnation", "initialized", "restored_from", "damaged", "error")
    PS_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ps_id: int
    incarnation: int
    initialized: bool
    restored_from: str
    damaged: _containers.RepeatedScalarFieldContainer[str]
    error: str
    def __init__(self, ps_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., initialized: bool = ..., restored_from: _Optional[str] = ..., damaged: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("number", "names")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    number: int
    names: _containers.RepeatedCompositeFieldContainer[MinibatchName]
    def __init__(self, number: _Optional[int] = ..., names: _Optional[_Iterable[_Union[MinibatchName, _Mapping]]] = ...) -> None: ...

class MinibatchName(_message.Message):
    __slots__ = ("epoch", "task", "n")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    task: int
    n: int
    def __init__(self, epoch: _Optional[int] = ..., task: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class Rounds(_message.Message):
    __slots__ = ("coordinator", "rounds")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    def __init__(self, coordinator: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ...) -> None: ...

class CloseRoundRequest(_message.Message):
    __slots__ = ("incarnation", "partition_version", "lease", "name", "pulled_version", "known_round")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ROUND_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    partition_version: int
    lease: int
    name: MinibatchName
    pulled_version: int
    known_round: int
    def __init__(self, incarnation: _Optional[int] = ..., partition_version: _Optional[int] = ..., lease: _Optional[int] = ..., name: _Optional[_Union[MinibatchName, _Mapping]] = ..., pulled_version: _Optional[int] = ..., known_round: _Optional[int] = ...) -> None: ...

class CloseRoundReply(_message.Message):
    __slots__ = ("status", "wait", "rounds", "partition")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    status: PsStatus
    wait: bool
    rounds: Rounds
    partition: Partition
    def __init__(self, status: _Optional[_Union[PsStatus, str]] = ..., wait: bool = ..., rounds: _Optional[_Union[Rounds, _Mapping]] = ..., partition: _Optional[_Union[Partition, _Mapping]] = ...) -> None: ...

class TaskStandingRequest(_message.Message):
    __slots__ = ("incarnation", "lease", "epoch", "task", "partition_version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    lease: int
    epoch: int
    task: int
    partition_version: int
    def __init__(self, incarnation: _Optional[int] = ..., lease: _Optional[int] = ..., epoch: _Optional[int] = ..., task: _Optional[int] = ..., partition_version: _Optional[int] = ...) -> None: ...

class TaskStandingReply(_message.Message):
    __slots__ = ("status", "applied", "partition")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    status: PsStatus
    applied: AppliedTask
    partition: Partition
    def __init__(self, status: _Optional[_Union[PsStatus, str]] = ..., applied: _Optional[_Union[AppliedTask, _Mapping]] = ..., partition: _Optional[_Union[Partition, _Mapping]] = ...) -> None: ...

class PsQuestion(_message.Message):
    __slots__ = ("generation", "incarnation")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incarnation: int
    def __init__(self, generation: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AppliedSetReply(_message.Message):
    __slots__ = ("status", "applied", "initialized", "version")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    status: PsStatus
    applied: AppliedSet
    initialized: bool
    version: int
    def __init__(self, status: _Optional[_Union[PsStatus, str]] = ..., applied: _Optional[_Union[AppliedSet, _Mapping]] = ..., initialized: bool = ..., version: _Optional[int] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("generation", "incarnation", "directory", "num_ps")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUM_PS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    incarnation: int
    directory: str
    num_ps: int
    def __init__(self, generation: _Optional[int] = ..., incarnation: _Optional[int] = ..., directory: _Optional[str] = ..., num_ps: _Optional[int] = ...) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("status", "error", "file", "size_bytes", "crc32")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    status: PsStatus
    error: str
    file: str
    size_bytes: int
    crc32: int
    def __init__(self, status: _Optional[_Union[PsStatus, str]] = ..., error: _Optional[str] = ..., file: _Optional[str] = ..., size_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class InitializeHeader(_message.Message):
    __slots__ = ("incarnation", "optimizer", "num_trainable", "num_non_trainable", "tables", "seed", "total_trainable", "total_non_trainable", "partition_version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_NON_TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NON_TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    optimizer: str
    num_trainable: int
    num_non_trainable: int
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    seed: int
    total_trainable: int
    total_non_trainable: int
    partition_version: int
    def __init__(self, incarnation: _Optional[int] = ..., optimizer: _Optional[str] = ..., num_trainable: _Optional[int] = ..., num_non_trainable: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., seed: _Optional[int] = ..., total_trainable: _Optional[int] = ..., total_non_trainable: _Optional[int] = ..., partition_version: _Optional[int] = ...) -> None: ...

class ExchangeHeader(_message.Message):
    __slots__ = ("incarnation", "push", "pull", "partition_version", "rounds", "wire_type")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_TYPE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    push: Push
    pull: Pull
    partition_version: int
    rounds: Rounds
    wire_type: WireType
    def __init__(self, incarnation: _Optional[int] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., partition_version: _Optional[int] = ..., rounds: _Optional[_Union[Rounds, _Mapping]] = ..., wire_type: _Optional[_Union[WireType, str]] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("lease", "epoch", "task", "minibatch", "dense", "tables", "pulled_version", "learning_rate", "num_records", "unreached")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PULLED_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    lease: int
    epoch: int
    task: int
    minibatch: int
    dense: bool
    tables: _containers.RepeatedScalarFieldContainer[str]
    pulled_version: int
    learning_rate: float
    num_records: int
    unreached: _containers.RepeatedCompositeFieldContainer[FloatRange]
    def __init__(self, lease: _Optional[int] = ..., epoch: _Optional[int] = ..., task: _Optional[int] = ..., minibatch: _Optional[int] = ..., dense: bool = ..., tables: _Optional[_Iterable[str]] = ..., pulled_version: _Optional[int] = ..., learning_rate: _Optional[float] = ..., num_records: _Optional[int] = ..., unreached: _Optional[_Iterable[_Union[FloatRange, _Mapping]]] = ...) -> None: ...

class FloatRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("dense", "tables", "read_only")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    dense: bool
    tables: _containers.RepeatedScalarFieldContainer[str]
    read_only: bool
    def __init__(self, dense: bool = ..., tables: _Optional[_Iterable[str]] = ..., read_only: bool = ...) -> None: ...

class KnownIdsHeader(_message.Message):
    __slots__ = ("incarnation", "table", "partition_version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    table: str
    partition_version: int
    def __init__(self, incarnation: _Optional[int] = ..., table: _Optional[str] = ..., partition_version: _Optional[int] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("status", "reason", "version", "repeated_push", "partition", "applied_round")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPEATED_PUSH_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_ROUND_FIELD_NUMBER: _ClassVar[int]
    status: PsStatus
    reason: str
    version: int
    repeated_push: bool
    partition: Partition
    applied_round: int
    def __init__(self, status: _Optional[_Union[PsStatus, str]] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ..., repeated_push: bool = ..., partition: _Optional[_Union[Partition, _Mapping]] = ..., applied_round: _Optional[int] = ...) -> None: ...
