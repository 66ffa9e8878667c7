"""Conversion of wire messages to the core's records and back; only this module knows both.

It decides nothing; ids, names and numbers are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from elasticdl.master.core import commands, events
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.plan.callbacks import Callbacks
from elasticdl.master.core.values import (
    Array,
    CpuUse,
    DataKind,
    Lease,
    MetricArrays,
    Occasion,
    Position,
    PsPartition,
    PsUsage,
    ReportedLease,
    ScriptPlan,
    SessionEvent,
    Stacks,
    TaskType,
    WorkerGroup,
)
from elasticdl.protocol import Device, Role, Shard
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.validation import InvalidMessage

_ROLES = {pb.MASTER: Role.MASTER, pb.PS: Role.PS, pb.WORKER: Role.WORKER}


def applied_set(message: pb.AppliedSet) -> CommittedSet:
    tasks = ((t.epoch, t.task, t.watermark, t.extras) for t in message.tasks)
    skipped = {(t.epoch, t.task): frozenset(t.skipped) for t in message.tasks if t.skipped}
    runs = ((run.epoch, run.first_task, run.num_tasks, run.watermark) for run in message.runs)
    return CommittedSet.of(tasks, message.num_applies, skipped, runs)


def shard(message: pb.ShardMessage) -> Shard:
    return Shard(message.name, message.start, message.end, message.identity)


def metric_state(message: pb.MetricState) -> MetricArrays:
    arrays = tuple(Array(tuple(array.shape), array.data) for array in message.arrays)
    return MetricArrays(message.name, arrays, message.additive, message.num_states or 1)


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
        committed=tuple(message.committed),
        occasion=occasion(message.occasion) if message.HasField("occasion") else None,
    )


def occasion(message: pb.Occasion) -> Occasion:
    return Occasion(message.save_to, message.epoch, tuple(sorted(message.logs.items())))


def worker_joined(call: int, message: pb.RegisterWorkerRequest) -> events.WorkerJoined:
    return events.WorkerJoined(
        call,
        message.worker_id,
        message.incarnation,
        message.pod_name,
        tuple(ReportedLease(lease(held.lease), tuple(held.committed)) for held in message.held),
        applied_set(message.applied) if message.HasField("applied") else None,
        message.restored_from,
        message.restored_records,
    )


def check_callbacks(message: pb.ModelReport) -> None:
    """Check the rules of the user's callbacks.

    Raises:
        InvalidMessage: The master cannot apply these rules.
    """
    try:
        Callbacks(json.loads(message.callbacks) if message.callbacks else {})
    except ValueError as error:
        raise InvalidMessage(f"ModelReport.callbacks: {error}") from error


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
        plan(message.plan) if message.HasField("plan") else None,
        json.loads(message.callbacks) if message.callbacks else {},
    )


def session_reported(call: int, message: pb.SessionReport) -> events.SessionReported:
    what = SessionEvent(pb.SessionEvent.Name(message.event).lower())
    return events.SessionReported(call, message.worker_id, message.incarnation, what)


def plan(message: pb.Plan) -> ScriptPlan:
    num_epochs = message.num_epochs if message.has_num_epochs else None
    return ScriptPlan(message.minibatch_size, message.num_minibatches_per_task, num_epochs, message.num_records)


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
        ps_load(message.load, message.cpu) if message.HasField("load") else None,
        message.group_version,
        message.waiting_seconds,
        message.memory_share,
        Stacks(message.stacks.where, message.stacks.text) if message.HasField("stacks") else None,
        _cpu_use(message.cpu) if message.HasField("cpu") else None,
        _device(message.device) if message.HasField("device") else None,
        message.ended,
        message.optimizer_share,
        message.ending,
        _written_checkpoint(message.checkpoint) if message.HasField("checkpoint") else None,
        message.checkpoint.attempt,
    )


def _written_checkpoint(message: pb.WrittenCheckpoint) -> events.CheckpointSaved | events.CheckpointFailed:
    if message.error:
        return events.CheckpointFailed(message.version, message.error)
    return events.CheckpointSaved(message.version, message.directory)


def _cpu_use(message: pb.CpuUse) -> CpuUse:
    return CpuUse(message.throttled_seconds, message.steal_seconds, message.load, message.cores)


def _device(message: pb.Device) -> Device:
    return Device(message.name, message.kind, message.used_bytes, message.total_bytes)


def lease_requested(call: int, message: pb.LeaseRequest) -> events.LeaseRequested:
    only = TaskType(pb.TaskType.Name(message.only)) if message.only else None
    return events.LeaseRequested(
        call,
        message.worker_id,
        message.incarnation,
        message.at_once,
        only,
        message.ahead,
        message.number,
        message.oldest,
        tuple(message.held),
    )


def ready_for_group(call: int, message: pb.ReadyForGroupRequest) -> events.ReadyForGroup:
    return events.ReadyForGroup(
        call, message.worker_id, message.incarnation, message.address, message.left, message.reason
    )


def group_formed(call: int, message: pb.GroupFormedRequest) -> events.GroupFormed:
    return events.GroupFormed(
        call,
        message.worker_id,
        message.incarnation,
        message.version,
        applied_set(message.applied),
        message.steps,
        message.restored_from,
        message.engine,
    )


def ps_load(message: pb.PsLoad, cpu: pb.CpuUse) -> PsUsage:
    return PsUsage(
        pushes=message.pushes,
        pulls=message.pulls,
        bytes_received=message.bytes_received,
        bytes_sent=message.bytes_sent,
        busy_seconds=message.busy_seconds,
        staleness=tuple(message.staleness),
        refused=message.refused,
        table_rows=message.table_rows,
        table_bytes=message.table_bytes,
        throttled_seconds=cpu.throttled_seconds,
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
        message.learning_rate or None,
    )


def task_finished(call: int, message: pb.FinishedTask) -> events.TaskFinished:
    return events.TaskFinished(
        call,
        message.worker_id,
        message.incarnation,
        message.lease,
        message.num_minibatches,
        message.surplus.count,
        message.surplus.made_by,
        message.not_exported,
    )


def message_received(call: int, message: pb.WorkerMessage) -> events.MessageReceived:
    """Return the event of a worker's message.

    Raises:
        InvalidMessage: The message is empty.
    """
    has_heartbeat, has_request = message.HasField("heartbeat"), message.HasField("lease_request")
    if not has_heartbeat and not message.reports and not has_request:
        raise InvalidMessage("WorkerMessage: it holds neither a heartbeat nor a report nor a request for a lease")
    beats = (heartbeat_received(call, message.heartbeat),) if has_heartbeat else ()
    request = replace(lease_requested(call, message.lease_request), at_once=True) if has_request else None
    return events.MessageReceived(call, (*beats, *(_task_report(call, report) for report in message.reports)), request)


def _task_report(call: int, report: pb.TaskReport) -> events.ProgressReported | events.TaskFinished:
    match report.WhichOneof("report"):
        case "progress":
            return progress_reported(call, report.progress)
        case "finished":
            return task_finished(call, report.finished)
    raise InvalidMessage("TaskReport: it holds no report")


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
        message.surplus.count,
        message.surplus.made_by,
    )


def metrics_reported(call: int, message: pb.MetricsReport) -> events.MetricsReported:
    return events.MetricsReported(
        call, message.worker_id, message.incarnation, message.step, dict(sorted(message.metrics.items()))
    )


def training_stop_requested(call: int, message: pb.StopTrainingRequest) -> events.TrainingStopRequested:
    return events.TrainingStopRequested(call, message.worker_id, message.incarnation, message.reason)


def ps_joined(call: int, message: pb.RegisterPsRequest) -> events.PsJoined:
    return events.PsJoined(
        call, message.ps_id, message.pod_name, message.address, message.nonce, message.held_incarnation
    )


def ps_ready(call: int, message: pb.PsReadyRequest) -> events.PsReady:
    return events.PsReady(
        call,
        message.ps_id,
        message.incarnation,
        message.initialized,
        message.restored_from,
        tuple(message.damaged),
        message.error,
    )


def model_layout(message: pb.ModelReport) -> dict[str, object]:
    """Return the model's part of a manifest: variables, tables, optimizer."""
    return {
        "variables": [{"name": v.name, "shape": list(v.shape), "trainable": v.trainable} for v in message.variables],
        "tables": [
            {"name": t.name, "dim": t.dim, "initializer": t.initializer, "input_dim": t.input_dim}
            for t in message.tables
        ],
        "optimizer": message.optimizer,
    }


def manifest_layout(
    layout: Mapping[str, object],
) -> tuple[tuple[dict[str, object], ...], tuple[dict[str, object], ...]]:
    """Return variables and tables of `model_layout` in the format of a manifest."""
    variables, tables = layout.get("variables", []), layout.get("tables", [])
    assert isinstance(variables, list)
    assert isinstance(tables, list)
    return tuple(variables), tuple(tables)


def plan_message(value: ScriptPlan | None) -> pb.Plan | None:
    if value is None:
        return None
    return pb.Plan(
        minibatch_size=value.minibatch_size,
        num_minibatches_per_task=value.num_minibatches_per_task,
        has_num_epochs=value.num_epochs is not None,
        num_epochs=value.num_epochs or 0,
        num_records=value.num_records,
        num_minibatches=value.num_minibatches,
    )


def lease_message(value: Lease) -> pb.Lease:
    return pb.Lease(
        id=value.id,
        type=str(value.type),
        epoch=value.epoch,
        task=value.task,
        shard=shard_message(value.shard),
        excluded=value.excluded,
        model_version=value.model_version,
        merged=[metric_state_message(state) for state in value.merged],
        committed=value.committed,
        occasion=None if value.occasion is None else occasion_message(value.occasion),
    )


def occasion_message(value: Occasion) -> pb.Occasion:
    return pb.Occasion(save_to=value.save_to, epoch=value.epoch, logs=dict(value.logs))


def shard_message(value: Shard) -> pb.ShardMessage:
    return pb.ShardMessage(name=value.name, start=value.start, end=value.end, identity=value.identity)


def group_message(value: WorkerGroup) -> pb.Group:
    members = [
        pb.GroupMember(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            address=member.address,
            is_source=member.is_source,
        )
        for member in value.members
    ]
    return pb.Group(version=value.version, members=members)


def metric_state_message(value: MetricArrays) -> pb.MetricState:
    arrays = [pb.Array(shape=array.shape, data=array.data) for array in value.arrays]
    return pb.MetricState(name=value.name, arrays=arrays, additive=value.additive, num_states=value.num_states)


def partition_message(value: PsPartition | None) -> pb.Partition | None:
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
        case commands.Registered(partition, in_force):
            return pb.RegisterWorkerReply(
                accepted=True,
                generation=generation,
                job_spec=job_spec,
                partition=partition_message(partition),
                plan=plan_message(in_force),
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
        case commands.HeartbeatAnswer():
            return pb.HeartbeatReply(
                known=answer.known,
                generation=generation,
                revoked=answer.revoked,
                partition=partition_message(answer.partition),
                stop=answer.stop,
                num_pushing=answer.num_pushing,
                group_version=answer.group_version,
                whole_epochs=answer.whole_epochs,
                newest_lease=answer.newest_lease,
                wants_stacks=answer.wants_stacks,
                checkpoint_request=answer.checkpoint_request,
                heartbeat_seconds=answer.pace.heartbeat,
                report_seconds=answer.pace.report,
            )
    raise AssertionError(f"{answer} does not answer Heartbeat")


def message_reply(answer: commands.Answer, generation: int) -> pb.MasterMessage:
    match answer:
        case commands.MessageAnswer((commands.HeartbeatAnswer() as beat, *acks), lease):
            reply = pb.MasterMessage(heartbeat=heartbeat_reply(beat, generation))
        case commands.MessageAnswer(acks, lease):
            reply = pb.MasterMessage()
        case _:
            raise AssertionError(f"{answer} does not answer Exchange")
    reply.acks.extend(ack(one, generation) for one in acks)
    if lease is not None:
        reply.lease.CopyFrom(lease_reply(lease, generation))
    return reply


def sample_requested(call: int, message: pb.SampleRequest) -> events.SampleRequested:
    return events.SampleRequested(call, message.worker_id, message.incarnation, message.of_validation)


def sample_reply(answer: commands.Answer) -> pb.SampleReply:
    match answer:
        case commands.SampleGiven(found, epoch):
            return pb.SampleReply(shard=shard_message(found), epoch=epoch)
        case commands.NoLeaseNow() | commands.JobOver() | commands.UnknownWorker():
            return pb.SampleReply(wait=True)
    raise AssertionError(f"{answer} does not answer Sample")


def watch_reply(answer: commands.Answer, generation: int) -> pb.WatchGroupReply:
    match answer:
        case commands.GroupPlanned(group):
            return pb.WatchGroupReply(generation=generation, group=group_message(group))
        case commands.NoLeaseNow():
            return pb.WatchGroupReply(generation=generation, wait=True)
        case commands.JobOver(formed):
            return pb.WatchGroupReply(generation=generation, end=True, formed=formed)
        case commands.UnknownWorker(reason):
            return pb.WatchGroupReply(generation=generation, unknown=reason)
    raise AssertionError(f"{answer} does not answer WatchGroup")


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
