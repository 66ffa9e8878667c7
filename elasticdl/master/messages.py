"""Wire messages to the core's records and back: the one place where both are known.

Nothing here decides anything; ids, names and numbers pass unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticdl.master.core import commands, events
from elasticdl.master.core.applied import AppliedSet
from elasticdl.master.core.values import (
    Array,
    DataKind,
    HeldLease,
    Lease,
    MetricState,
    Partition,
    Position,
    PsLoad,
    Role,
    Shard,
    TaskType,
)
from elasticdl.rpc import elasticdl_pb2 as pb

_ROLES = {pb.MASTER: Role.MASTER, pb.PS: Role.PS, pb.WORKER: Role.WORKER}


# From the wire ---------------------------------------------------------------------------------------------------


def applied_set(message: pb.AppliedSet) -> AppliedSet:
    return AppliedSet.of(((t.epoch, t.task, t.watermark, t.extras) for t in message.tasks), message.num_applies)


def shard(message: pb.ShardMessage) -> Shard:
    return Shard(message.name, message.start, message.end)


def metric_state(message: pb.MetricState) -> MetricState:
    arrays = tuple(Array(tuple(array.shape), array.data) for array in message.arrays)
    return MetricState(message.name, arrays, message.additive, message.num_states or 1)


def lease(message: pb.Lease) -> Lease:
    return Lease(
        id=message.id,
        type=TaskType(pb.TaskType.Name(message.type)),
        epoch=message.epoch,
        task=message.task,
        shard=shard(message.shard),
        excluded=tuple(message.excluded),
        model_version=message.model_version,
        merged=tuple(metric_state(state) for state in message.merged),
    )


def worker_joined(call: int, message: pb.RegisterWorkerRequest) -> events.WorkerJoined:
    return events.WorkerJoined(
        call,
        message.worker_id,
        message.incarnation,
        message.pod_name,
        tuple(HeldLease(lease(held.lease), tuple(held.committed)) for held in message.held),
        applied_set(message.applied),
    )


def model_reported(call: int, message: pb.ModelReport) -> events.ModelReported:
    shards: dict[DataKind, tuple[Shard, ...]] = {}
    if message.has_training_shards:
        shards[DataKind.TRAINING] = tuple(map(shard, message.training_shards))
    if message.has_validation_shards:
        shards[DataKind.VALIDATION] = tuple(map(shard, message.validation_shards))
    if message.has_prediction_shards:
        shards[DataKind.PREDICTION] = tuple(map(shard, message.prediction_shards))
    return events.ModelReported(
        call,
        message.worker_id,
        message.incarnation,
        message.error,
        message.error_details,
        bool(message.metrics),
        message.has_callbacks,
        shards,
    )


def heartbeat_received(call: int, message: pb.HeartbeatRequest) -> events.HeartbeatReceived:
    return events.HeartbeatReceived(
        call,
        _ROLES[message.role],
        message.id,
        message.incarnation,
        tuple(Position(position.lease, position.minibatch) for position in message.positions),
        message.activity,
        dict(message.seconds),
        message.partition_version,
        message.leaving,
        ps_load(message.load) if message.HasField("load") else None,
    )


def ps_load(message: pb.PsLoad) -> PsLoad:
    return PsLoad(
        pushes=message.pushes,
        pulls=message.pulls,
        bytes_received=message.bytes_received,
        bytes_sent=message.bytes_sent,
        busy_seconds=message.busy_seconds,
        staleness=tuple(message.staleness),
        refused=message.refused,
        table_rows=message.table_rows,
        table_bytes=message.table_bytes,
    )


def progress_reported(call: int, message: pb.ProgressReport) -> events.ProgressReported:
    loss = message.loss if message.has_loss else None
    return events.ProgressReported(
        call,
        message.worker_id,
        message.incarnation,
        message.lease,
        tuple(message.committed),
        loss,
        tuple(message.skipped),
        message.not_finite,
    )


def task_finished(call: int, message: pb.FinishedTask) -> events.TaskFinished:
    return events.TaskFinished(call, message.worker_id, message.incarnation, message.lease, message.num_minibatches)


def task_failed(call: int, message: pb.FailedTask) -> events.TaskFailed:
    return events.TaskFailed(
        call,
        message.worker_id,
        message.incarnation,
        message.lease,
        message.minibatch,
        message.error,
        message.details,
        tuple(message.bad_records),
    )


def evaluation_reported(call: int, message: pb.EvaluationReport) -> events.EvaluationReported:
    return events.EvaluationReported(
        call,
        message.worker_id,
        message.incarnation,
        message.lease,
        tuple(metric_state(state) for state in message.states),
        dict(message.results),
    )


def ps_joined(call: int, message: pb.RegisterPsRequest) -> events.PsJoined:
    return events.PsJoined(
        call, message.ps_id, message.pod_name, message.address, message.nonce, message.held_incarnation
    )


def ps_ready(call: int, message: pb.PsReadyRequest) -> events.PsReady:
    return events.PsReady(
        call,
        message.ps_id,
        message.incarnation,
        applied_set(message.applied),
        message.initialized,
        message.restored_from,
        tuple(message.damaged),
        message.error,
    )


def model_layout(message: pb.ModelReport) -> dict[str, object]:
    """What a manifest says of the model: variables, tables, optimizer."""
    return {
        "variables": [{"name": v.name, "shape": list(v.shape), "trainable": v.trainable} for v in message.variables],
        "tables": [
            {"name": t.name, "dim": t.dim, "initializer": t.initializer, "input_dim": t.input_dim}
            for t in message.tables
        ],
        "optimizer": message.optimizer,
    }


# To the wire -----------------------------------------------------------------------------------------------------


def lease_message(value: Lease) -> pb.Lease:
    return pb.Lease(
        id=value.id,
        type=str(value.type),
        epoch=value.epoch,
        task=value.task,
        shard=pb.ShardMessage(name=value.shard.name, start=value.shard.start, end=value.shard.end),
        excluded=value.excluded,
        model_version=value.model_version,
        merged=[metric_state_message(state) for state in value.merged],
    )


def metric_state_message(value: MetricState) -> pb.MetricState:
    arrays = [pb.Array(shape=array.shape, data=array.data) for array in value.arrays]
    return pb.MetricState(name=value.name, arrays=arrays, additive=value.additive, num_states=value.num_states)


def partition_message(value: Partition | None) -> pb.Partition | None:
    if value is None:
        return None
    addresses = [
        pb.PsAddress(
            ps_id=ps.ps_id,
            address=ps.address,
            incarnation=ps.incarnation,
            buckets=[pb.BucketRange(start=owned.start, end=owned.end) for owned in ps.buckets],
        )
        for ps in value.ps
    ]
    return pb.Partition(version=value.version, ps=addresses)


def registration_reply(answer: commands.Answer, generation: int, job_spec: str) -> pb.RegisterWorkerReply:
    match answer:
        case commands.Registered(partition):
            return pb.RegisterWorkerReply(
                accepted=True, generation=generation, job_spec=job_spec, partition=partition_message(partition)
            )
        case commands.Refused(reason):
            return pb.RegisterWorkerReply(accepted=False, reason=reason, generation=generation)
    raise AssertionError(f"{answer} does not answer RegisterWorker")


def lease_reply(answer: commands.Answer, generation: int) -> pb.LeaseReply:
    match answer:
        case commands.LeaseGranted(granted):
            return pb.LeaseReply(generation=generation, lease=lease_message(granted))
        case commands.NoLeaseNow():
            return pb.LeaseReply(generation=generation, wait=True)
        case commands.JobOver():
            return pb.LeaseReply(generation=generation, end=True)
        case commands.UnknownWorker(reason):
            return pb.LeaseReply(generation=generation, unknown=reason)
    raise AssertionError(f"{answer} does not answer RequestLease")


def heartbeat_reply(answer: commands.Answer, generation: int) -> pb.HeartbeatReply:
    match answer:
        case commands.HeartbeatAnswer(known, revoked, partition, stop, num_pushing):
            return pb.HeartbeatReply(
                known=known,
                generation=generation,
                revoked=revoked,
                partition=partition_message(partition),
                stop=stop,
                num_pushing=num_pushing,
            )
    raise AssertionError(f"{answer} does not answer Heartbeat")


def ps_registration_reply(answer: commands.Answer, generation: int, job_spec: str) -> pb.RegisterPsReply:
    match answer:
        case commands.PsAdmitted(incarnation, restore_from, parameters_only):
            return pb.RegisterPsReply(
                accepted=True,
                generation=generation,
                incarnation=incarnation,
                job_spec=job_spec,
                restore_from=restore_from,
                parameters_only=parameters_only,
            )
        case commands.Refused(reason):
            return pb.RegisterPsReply(accepted=False, reason=reason, generation=generation)
    raise AssertionError(f"{answer} does not answer RegisterPs")


def ack(answer: commands.Answer, generation: int) -> pb.Ack:
    match answer:
        case commands.Accepted(model_version):
            return pb.Ack(accepted=True, generation=generation, model_version=model_version)
        case commands.Refused(reason) | commands.UnknownWorker(reason):
            return pb.Ack(accepted=False, reason=reason, generation=generation)
    raise AssertionError(f"{answer} is no acknowledgement")


def manifest_layout(
    layout: Mapping[str, object],
) -> tuple[tuple[dict[str, object], ...], tuple[dict[str, object], ...]]:
    """Variables and tables of `model_layout`, as a manifest takes them."""
    variables, tables = layout.get("variables", []), layout.get("tables", [])
    assert isinstance(variables, list)
    assert isinstance(tables, list)
    return tuple(variables), tuple(tables)
