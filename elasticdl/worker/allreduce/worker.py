"""Puts the parts of an AllReduce worker together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from elasticdl.collective import ElasticGroup
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import Batch, FeedError, Framework, Mode, ShardsOptimizer, Share, TaskRecords
from elasticdl.protocol import Activity, Shard, derive_seed
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.addresses import own_host
from elasticdl.rpc.job_secret import read_token
from elasticdl.worker.allreduce.batch_source import BatchSource, LeasedBatches
from elasticdl.worker.allreduce.global_batch_source import GlobalBatches
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.loop import AllReduceLoop
from elasticdl.worker.allreduce.prefetchers import BatchPrefetcher, InterruptibleLeases, LeasePrefetcher, LocalLeases
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica, ShardedReplica
from elasticdl.worker.allreduce.sharded_session import ShardedSession
from elasticdl.worker.checkpoint import StateCheckpoints
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.task_reporting import TaskReporter
from elasticdl.worker.tasks import LeaseSource, TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")
_STATE_FILE = "model.npz"


def make_all_reduce_loop(
    link: MasterLink,
    framework: Framework,
    reader: Callable[[pb.TaskType], Reader],
    spec: JobSpec,
    termination: Termination,
    master_address: str,
) -> AllReduceLoop:
    """The loop of a worker whose model is compiled; the master knows what it defines.

    Args:
        reader: see `Readers.of`.
    """
    clock = link.clock
    checkpoints = StateCheckpoints.of_module(spec, _STATE_FILE)
    link.on_checkpoint_request(checkpoints.request)
    make_model = ShardedReplica if spec.shard_optimizer else Replica
    model = make_model(framework, checkpoints, spec.checkpoint_dir_for_init, clock)
    with clock.during(Activity.COMPILE):
        _compile_on(framework, model, _samples(link, framework, reader, spec), spec.seed)
    group = ElasticGroup(own_host(master_address), read_token(), framework.device, spec.encrypt)
    session = _session(link, group, model, framework, spec)
    outcomes = TaskReporter.of(spec, link, framework, model)
    writer = CheckpointWriter(model, checkpoints, spec.checkpoint_steps)

    def stream(requests: LeaseSource) -> TaskStream:
        return TaskStream.of(spec, requests, reader, clock)

    supply = _supply(session, stream, outcomes, spec)
    termination.at_once(link.announce_end)
    return AllReduceLoop(spec, session, supply, stream(link), writer, outcomes, termination)


def _session(
    link: MasterLink, group: ElasticGroup, model: Replica, framework: Framework, spec: JobSpec
) -> GroupSession:
    timeout_s = spec.collective_timeout
    if not isinstance(model, ShardedReplica):
        return GroupSession(link, group, model, timeout_s, processes_per_worker=spec.num_processes_per_worker)
    assert isinstance(framework, ShardsOptimizer)
    return ShardedSession(link, group, model, framework, timeout_s, spec.num_processes_per_worker)


def _supply(
    session: GroupSession, stream: Callable[[LeaseSource], TaskStream], outcomes: TaskReporter, spec: JobSpec
) -> BatchSource:
    """Of the group together, with --fixed_global_batch, or each member's own."""
    link, framework = outcomes.link, outcomes.framework
    if spec.fixed_global_batch:
        local = LocalLeases()
        drawer = LeasePrefetcher(InterruptibleLeases(link))
        feeder = BatchPrefetcher(stream(local), local, framework)
        return GlobalBatches(spec, session, drawer, local, feeder, outcomes, link.register().plan.num_minibatches)
    requests = InterruptibleLeases(link)
    tasks = stream(requests)
    feeder = BatchPrefetcher(tasks, requests, framework)
    return LeasedBatches(session, feeder, tasks, outcomes, spec.skips_not_finite)


def _samples(
    link: MasterLink, framework: Framework, reader: Callable[[pb.TaskType], Reader], spec: JobSpec
) -> list[Batch]:
    """Make a full minibatch and a short one; none if that fails: the error is reported again with its task."""
    shard = link.sample().shard
    found: list[Batch] = []
    try:
        records = reader(pb.TRAINING).read(Shard(shard.name, shard.start, shard.end))
        for count in (len(records), len(records) // 2):
            task = TaskRecords(0, derive_seed(spec.seed, 0, 0), records[:count])
            found += [batch for batch in framework.batches(Mode.TRAINING, iter([task])) if batch.size][:1]
    except (DataError, FeedError) as error:
        _log.info("The step is not compiled on a sample: %s", error)
    return found


def _compile_on(framework: Framework, model: Replica, samples: Sequence[Batch], seed: int) -> None:
    """Compile the step on samples, and reset the model afterwards.

    Errors of user code are only logged here: the same error is reported when the task runs.
    """
    try:
        for batch in samples:
            gradient = framework.local_gradient([Share(batch, seed, 1.0)], lambda buffer: None)
            framework.apply_gradient(gradient, framework.learning_rate(0, 0))
    except Exception as error:  # noqa: BLE001  see above
        _log.info("The step could not be compiled on a sample: %s: %s", type(error).__name__, error)
    model.reset()
