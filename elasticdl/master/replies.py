"""The core's answers and records to wire messages; the other way is in messages.py.

Nothing here decides anything; ids, names and numbers pass unchanged.
"""

from __future__ import annotations

from elasticdl.master.core import commands
from elasticdl.master.core.values import Lease, MetricArrays, Occasion, PsPartition, ScriptPlan, WorkerGroup
from elasticdl.protocol.values import Shard
from elasticdl.rpc import elasticdl_pb2 as pb


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
    return pb.ShardMessage(name=value.name, start=value.start, end=value.end)


def world_message(value: WorkerGroup) -> pb.World:
    members = [
        pb.WorldMember(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            address=member.address,
            is_source=member.is_source,
        )
        for member in value.members
    ]
    return pb.World(version=value.version, members=members)


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
                world_version=answer.world_version,
                whole_epochs=answer.whole_epochs,
                newest_lease=answer.newest_lease,
                wants_stacks=answer.wants_stacks,
                checkpoint_request=answer.checkpoint_request,
                heartbeat_seconds=answer.pace.heartbeat,
                report_seconds=answer.pace.report,
            )
    raise AssertionError(f"{answer} does not answer Heartbeat")


def sample_reply(answer: commands.Answer) -> pb.SampleReply:
    match answer:
        case commands.SampleGiven(found):
            return pb.SampleReply(shard=shard_message(found))
        case commands.NoLeaseNow() | commands.JobOver() | commands.UnknownWorker():
            return pb.SampleReply(wait=True)
    raise AssertionError(f"{answer} does not answer Sample")


def watch_reply(answer: commands.Answer, generation: int) -> pb.WatchWorldReply:
    match answer:
        case commands.WorldPlanned(world):
            return pb.WatchWorldReply(generation=generation, world=world_message(world))
        case commands.NoLeaseNow():
            return pb.WatchWorldReply(generation=generation, wait=True)
        case commands.JobOver():
            return pb.WatchWorldReply(generation=generation, end=True)
        case commands.UnknownWorker(reason):
            return pb.WatchWorldReply(generation=generation, unknown=reason)
    raise AssertionError(f"{answer} does not answer WatchWorld")


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
