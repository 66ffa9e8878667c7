"""Create and connect the parts behind an elastic controller, in a job or alone."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch.utils.data

from elasticdl.api.data import DataShardService
from elasticdl.api.pytorch.alone import LoneGroup, StepGroup
from elasticdl.api.pytorch.gradients import ScriptGradients
from elasticdl.api.pytorch.pipeline import LoaderPipeline
from elasticdl.api.pytorch.plateau import PlateauMetrics
from elasticdl.api.pytorch.registration import OptimizerCheck
from elasticdl.api.pytorch.shares import GlobalShares, LeasedShares, MinibatchPrefetcher, ScriptBatchSource
from elasticdl.api.pytorch.steps import Loop, ScriptSteps
from elasticdl.api.pytorch.trainers import check_minibatch_size
from elasticdl.api.session import ScriptSession, at_exit
from elasticdl.collective import ElasticGroup
from elasticdl.frameworks.framework import Framework
from elasticdl.frameworks.torch.computation import limit_threads
from elasticdl.rpc.addresses import own_host
from elasticdl.rpc.job_secret import read_token
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.replica import CheckpointWriter, LastCheckpoint, Replica
from elasticdl.worker.checkpoint import CheckpointKind, HangLimits, StateCheckpoints, names_depend_on
from elasticdl.worker.termination import Termination
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, DataError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec

_STATE_FILE = "model.npz"
_ALONE = "script"  # job name in the checkpoints of a script without a job


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The script's own training options; None and 0: the job's flags apply."""

    batch_size: int
    num_epochs: int | None
    dataset_size: int
    shuffle: bool | None
    num_minibatches_per_shard: int
    fixed_global_batch: int
    training_data: str
    checkpoint_dir: str | None
    checkpoint_steps: int


def make_loop(
    wishes: TrainingOptions, session: ScriptSession, controller: ScriptSteps, dataset: Any, options: Any
) -> Loop:
    """Create all parts behind a controller, once its data set is known.

    Raises:
        ElasticDLError: The script and the job's flags contradict each other, or there is nothing to train.
    """
    spec, state = session.spec, controller.state
    wishes = _with_loader(wishes, options, spec)
    limit_threads()
    gradients = ScriptGradients(state.modules, session.clock)
    data = _data_of(wishes, session, dataset)
    num_per_step = _num_per_step(wishes.fixed_global_batch, data, session)
    collate = cast("Callable[..., Any] | None", options.pop("collate"))
    pipeline = LoaderPipeline(dataset, collate, spec.seed, **options)
    checkpoints = _checkpoints(wishes, data, session)
    model = Replica(cast(Framework, state), checkpoints, "", session.clock)
    writer = CheckpointWriter(model, checkpoints, wishes.checkpoint_steps or spec.checkpoint_steps)
    termination = _termination_of(session, controller)
    if session.link is not None:
        session.link.carry_ledger(controller.final_ledger)
        session.link.carry_device(gradients.meter)
        session.link.carry_checkpoints(lambda: checkpoints.newest_try)
        session.link.tasks_ahead = math.ceil(pipeline.num_ahead / data.plan.num_minibatches_per_task)
        pipeline.start()  # before there are connections, which its processes would keep open
    group, stop = _group_of(session, model, str(gradients.device))
    if session.link is not None:
        session.link.on_checkpoint_request(lambda: _take_request(checkpoints, writer, group))
    drawer = MinibatchPrefetcher(data, max(2 * num_per_step, 2 * pipeline.num_ahead))

    @cache
    def start_once() -> None:
        group.start()
        drawer.start()

    at_exit(controller.close)
    return Loop(
        data=data,
        group=group,
        shares=_shares_of(data, drawer, pipeline, group, num_per_step),
        pipeline=pipeline,
        gradients=gradients,
        optimizers=OptimizerCheck(state),
        metrics=PlateauMetrics(state, controller.progress.metrics, controller.take_metric),
        model=model,
        writer=writer,
        termination=termination,
        last=LastCheckpoint(group, writer, termination, session.clock),
        start=start_once,
        stop=stop,
    )


def _take_request(checkpoints: StateCheckpoints, writer: CheckpointWriter, group: StepGroup) -> None:
    """Request a checkpoint after the current step, or report to the waiting master that there will be none."""
    if checkpoints.is_wanted:
        writer.request()
    else:
        why = CheckpointError("the script keeps none: its checkpoint_dir is empty")
        checkpoints.note_failure(group.ledger.applied.num_names, why)


def _with_loader(wishes: TrainingOptions, options: dict[str, Any], spec: JobSpec) -> TrainingOptions:
    """Move `batch_size` and `shuffle` from the loader's options to the training options, and return these.

    Raises:
        ElasticDLError: The controller or the job has other values.
    """
    batch_size, shuffle = options.pop("batch_size", None), options.pop("shuffle", None)
    if batch_size == 1 and (wishes.batch_size or spec.minibatch_size != JobSpec().minibatch_size):
        batch_size = None  # the default of DataLoader
    pairs = (("batch_size", wishes.batch_size or None, batch_size), ("shuffle", wishes.shuffle, shuffle))
    for name, ours, theirs in pairs:
        if None not in (ours, theirs) and ours != theirs:
            raise DataError(
                f"{name} is {ours} in create_elastic_controller, and {theirs} in the loader.", "Leave one of them out."
            )
    if batch_size and not wishes.batch_size:
        check_minibatch_size(spec, batch_size, "batch_size of the loader")
        wishes = dataclasses.replace(wishes, batch_size=batch_size)
    return wishes if shuffle is None else dataclasses.replace(wishes, shuffle=shuffle)


def _data_of(wishes: TrainingOptions, session: ScriptSession, dataset: Any) -> DataShardService:
    return DataShardService(
        batch_size=wishes.batch_size,
        num_epochs=wishes.num_epochs,
        dataset_size=wishes.dataset_size or _size_of(dataset),
        shuffle=wishes.shuffle,
        num_minibatches_per_shard=wishes.num_minibatches_per_shard,
        training_data=wishes.training_data,
        session=session,
    )


def _termination_of(session: ScriptSession, controller: ScriptSteps) -> Termination:
    """Install the handler of SIGTERM in a job, unless the script has its own or trains in another thread."""
    termination = Termination(session.clock)
    if session.link is not None:
        termination.at_once(session.link.announce_end)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            termination.before_end(controller.bid_farewell)
            termination.install()
    return termination


def _group_of(session: ScriptSession, model: Replica, device: str) -> tuple[StepGroup, Callable[[], None]]:
    """Return the group, and a function that frees it."""
    if session.link is None:
        return LoneGroup(model), lambda: None
    spec = session.spec
    if spec.distribution_strategy is not DistributionStrategy.ALL_REDUCE:
        raise JobError(
            f"the script trains with all workers together, and the job's strategy is {spec.distribution_strategy}",
            "start it with --distribution_strategy=AllReduceStrategy",
        )
    connections = ElasticGroup(own_host(os.environ["MASTER_ADDR"]), read_token(), device, spec.encrypt)
    num_processes = spec.num_processes_per_worker
    group = GroupSession(session.link, connections, model, spec.collective_timeout, processes_per_worker=num_processes)
    return group, connections.close


def _shares_of(
    data: DataShardService, drawer: MinibatchPrefetcher, pipeline: LoaderPipeline, group: StepGroup, num_per_step: int
) -> ScriptBatchSource:
    if num_per_step:
        return GlobalShares(data, drawer, pipeline, group, num_per_step)
    return LeasedShares(data, drawer, pipeline, group)


def _num_per_step(wanted: int, data: DataShardService, session: ScriptSession) -> int:
    """Return the number of minibatches per step of the whole group; 0: one per member.

    Raises:
        FlagError: The script contradicts the job's flag, or the number is not a multiple of the minibatch size.
    """
    flag = session.spec.fixed_global_batch
    if session.link is not None and wanted not in (0, flag):
        raise FlagError(
            f"The script says fixed_global_batch={wanted}, and the job's flag is {flag}.",
            f"Start the job with --fixed_global_batch={wanted}: the master hands out the data accordingly.",
        )
    records, size = wanted or flag, data.plan.minibatch_size
    if records % size:
        raise FlagError(
            f"fixed_global_batch={records} is not a multiple of the {size} records of a minibatch.",
            f"Give {max(1, records // size) * size}, or another batch_size.",
        )
    return records // size


def _checkpoints(wishes: TrainingOptions, data: DataShardService, session: ScriptSession) -> StateCheckpoints:
    spec = session.spec
    plan = data.plan
    valid_for = names_depend_on(
        plan.minibatch_size, plan.num_minibatches_per_task, spec.seed, data.shuffles, plan.num_records
    )
    name = _ALONE if session.is_alone else spec.job_name
    kind = CheckpointKind(name, DistributionStrategy.ALL_REDUCE.value, _STATE_FILE, valid_for)
    directory = spec.checkpoint_dir if wishes.checkpoint_dir is None else wishes.checkpoint_dir
    return StateCheckpoints(directory, kind, spec.keep_checkpoint_max, HangLimits(spec.hang_timeout, spec.step_timeout))


def _size_of(dataset: Any) -> int:
    """Return the number of samples in a data set; 0: ElasticDL reads the data from files.

    Raises:
        DataError: The data set has no length, or is empty.
    """
    if hasattr(dataset, "__len__"):
        if not len(dataset):
            raise DataError(f"{type(dataset).__name__} has no samples.", "Look at its path and its filters.")
        return len(dataset)
    if isinstance(dataset, torch.utils.data.Dataset):
        raise DataError(
            f"{type(dataset).__name__} has no length, so an epoch of it has no end.",
            "Give it a __len__, or say the number of its samples: create_elastic_controller(…, dataset_size=…).",
        )
    return 0
