"""Conversion of a JobSpec to the core's settings, and to the lines that show it in the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import DataKind
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec, changed_flags
from elasticdl_client.kubernetes.pods import has_evaluator, queue_of
from elasticdl_client.secret_values import hide_in_flag

_VERBS = {
    JobType.TRAIN: "committed",
    JobType.EVALUATE: "evaluated",
    JobType.PREDICT: "predicted",
    JobType.ANALYZE: "analyzed",
}


def settings_of(spec: JobSpec) -> JobSettings:
    """Return the core's settings.

    Raises:
        JobError: This master cannot run such a job.
    """
    strategy = spec.distribution_strategy
    runs_command = bool(spec.job_command)
    is_local = strategy is DistributionStrategy.LOCAL
    queue = queue_of(spec, "worker")
    return JobSettings(
        job_name=spec.job_name,
        strategy=strategy,
        num_workers=1 if is_local else spec.num_workers,
        processes_per_worker=spec.num_processes_per_worker,
        max_workers=spec.max_workers,
        min_gain=spec.min_gain,
        scaling_window=spec.scaling_window,
        num_ps=0 if is_local else spec.num_ps_pods,
        has_queue=bool(queue) and queue == queue_of(spec, "ps"),
        queues_differ=queue != queue_of(spec, "ps"),
        has_training_data=bool(spec.training_data) or runs_command,
        has_validation_data=bool(spec.validation_data) and not runs_command,
        has_prediction_data=bool(spec.prediction_data),
        minibatch_size=spec.minibatch_size,
        num_minibatches_per_task=spec.num_minibatches_per_task,
        num_epochs=spec.num_epochs,
        max_step=spec.max_step,
        seed=spec.seed,
        evaluation_steps=spec.evaluation_steps,
        evaluation_start_delay=spec.evaluation_start_delay_secs,
        evaluation_throttle=spec.evaluation_throttle_secs,
        output="" if runs_command else spec.output,
        checkpoint_dir="" if runs_command else spec.checkpoint_dir,
        checkpoint_steps=spec.checkpoint_steps,
        checkpoint_dir_for_init="" if runs_command else spec.checkpoint_dir_for_init,
        collective_timeout=spec.collective_timeout,
        min_workers=spec.min_workers,
        fixed_global_batch=spec.fixed_global_batch,
        shard_optimizer=spec.shard_optimizer,
        input_workers=spec.input_workers,
        lease_timeout=spec.lease_timeout,
        step_timeout=spec.step_timeout,
        hang_timeout=spec.hang_timeout,
        hang_action=spec.hang_action,
        straggler_action=spec.straggler_action,
        max_task_failures=spec.max_task_failures,
        max_bad_records=spec.max_bad_records,
        bad_records_dir=spec.bad_records_dir,
        nan_policy=spec.nan_policy,
        runs_command=runs_command,
        expects_data=bool(spec.training_data) or strategy is DistributionStrategy.ALL_REDUCE,
        has_tensorflow_servers=runs_command and spec.need_tf_config and spec.num_ps_pods > 0,
        has_evaluator=has_evaluator(spec),
        verb=_VERBS[spec.job_type],
        has_last_task=bool(spec.prediction_outputs),
    )


def data_kinds(spec: JobSpec) -> list[DataKind]:
    """Return the kinds of data of a job."""
    return [kind for kind in DataKind if getattr(spec, f"{kind}_data")]


def fixed_flags(spec: JobSpec) -> dict[str, object]:
    """Return the flags that all generations of a job's master share: they define the minibatches and the strategy.

    Secrets are left out: the journal contains the result, and a password may change between two generations.
    """
    spec = spec.public()
    sources = (
        {} if spec.job_type is JobType.TRAIN else {f"{kind}_data": getattr(spec, f"{kind}_data") for kind in DataKind}
    )
    return sources | {
        "job_name": spec.job_name,
        "minibatch_size": spec.minibatch_size,
        "num_minibatches_per_task": spec.num_minibatches_per_task,
        "seed": spec.seed,
        "fixed_global_batch": spec.fixed_global_batch,
        "training_data": spec.training_data,
        "data_reader_params": spec.data_reader_params,
        "records_per_shard": spec.records_per_shard,
        "shuffle": spec.shuffle,
        "distribution_strategy": str(spec.distribution_strategy),
        "num_ps_pods": spec.num_ps_pods,
        "processes_per_worker": spec.num_processes_per_worker,
    }


def check_fixed_flags(before: Mapping[str, object], spec: JobSpec) -> None:
    """Raise if the journal was written for other flags.

    Args:
        before: The fixed flags of the generation that wrote it.
        spec: Specification of this generation.

    Raises:
        JobError: The flags differ; the message names them.
    """
    known = {name: hide_in_flag(name, value) for name, value in before.items()}  # older versions hid nothing
    known.setdefault("processes_per_worker", 1)  # older versions had only one
    changed = [
        f"--{name}={known.get(name)}, not {now}" for name, now in fixed_flags(spec).items() if known.get(name) != now
    ]
    if changed:
        more = ""
        if "processes_per_worker" not in before and spec.num_processes_per_worker > 1:  # each GPU had none of its own
            flag = "--processes_per_worker=1" if spec.job_command else "gpu=1 in --worker_resource_request"
            more = f"{flag} continues this job with one process in each worker; else "
        raise JobError(
            f"the journal was written for a job with {', and '.join(changed)}",
            f"{more}a job continues with the flags that it began with; start a new one under another --job_name: with "
            "--checkpoint_dir_for_init it begins with this one's model, on any number of parameter servers",
        )


def describe(spec: JobSpec) -> Iterator[str]:
    """Yield the flags that differ from their defaults, one line each, in the order of ``--help``."""
    yield f"Flags of this job ({spec.job_type}); all others have their defaults:"
    for name in changed_flags(spec):
        yield f"  --{name}={hide_in_flag(name, getattr(spec, name))}"
