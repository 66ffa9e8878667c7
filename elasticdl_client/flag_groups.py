"""The flags of `JobSpec` by subject: the model, its computation, jobs that go over data once, and the strategies."""

from __future__ import annotations

from collections.abc import Mapping

# ruff: noqa: RUF009 (`flag` gives a `dataclasses.field`)
from dataclasses import dataclass, fields
from functools import partial

from elasticdl_client.checks import (
    above,
    at_least,
    between,
    check_model_def,
    check_outputs,
    check_path,
    check_symbol,
    check_writable_directory,
)
from elasticdl_client.choices import (
    DistributionStrategy,
    FrameworkName,
    JobType,
    Precision,
    PredictionFormat,
    WireDtype,
)
from elasticdl_client.flags import WITH_MODEL, Group, parses
from elasticdl_client.params import parse_params, parse_size


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class ComputationFlags:
    """The part of `JobSpec` on making minibatches and computing steps; the attributes have the flags' names."""

    precision: Precision = Group.TRAINING.flag(
        Precision.FP32,
        "Compute in fp32, or in bf16 or fp16, the latter with dynamic loss scaling: PyTorch models by autocast, Keras "
        "models by a mixed policy, with AllReduceStrategy or Local.",
    )
    compile: bool = Group.TRAINING.flag(False, "PyTorch models: compile the model with torch.compile.")
    channels_last: bool = Group.TRAINING.flag(
        False, "PyTorch models: keep images and the kernels of convolutions in memory with the channels last."
    )
    clip_gradient_norm: float = Group.TRAINING.flag(
        0.0,
        "PyTorch models: scale the gradient of a step down to this norm where it is larger; 0: leave it as it is.",
        check=at_least(0),
    )
    accumulate_steps: int = Group.TRAINING.flag(
        1,
        "PyTorch models: compute each minibatch in N parts, one after the other, and add their gradients up; a divisor "
        "of --minibatch_size.",
        check=between(1, 2**31 - 1),
    )
    shard_optimizer: bool = Group.ALL_REDUCE.flag(
        False,
        "PyTorch models: each worker keeps the optimizer's state of a part of the parameters, two N-ths of it with N "
        "workers (ZeRO-1), and updates that part.",
    )
    input_workers: int = Group.TRAINING.flag(
        0,
        "PyTorch models: run `feed` in N processes of each worker; 0: in a thread of the worker.",
        jobs=WITH_MODEL,
        check=between(0, 256),
    )


COMPUTATION = tuple(field.name for field in fields(ComputationFlags))


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class ModelFlags:
    """The part of `JobSpec` that names what a job runs; the attributes have the flags' names."""

    model_zoo: str = Group.MODEL.flag(
        "", "Directory of model definitions; empty: the current directory, or /model_zoo in an image.", check=check_path
    )
    model_def: str = Group.MODEL.flag(
        "", "package.module.symbol of the model function or class, relative to --model_zoo.", check=check_model_def
    )
    model_params: str = Group.MODEL.flag(
        "",
        'Arguments of that function: "k=v;k2=v2", Python literals or else strings.',
        check=parses(partial(parse_params, "model_params")),
    )
    framework: FrameworkName = Group.MODEL.flag(
        FrameworkName.AUTO,
        "tensorflow, torch, or custom: the module's own adapter; auto: the one that the model definition imports.",
    )
    feed: str = Group.MODEL.flag(
        "feed", "feed(dataset, mode, metadata); --dataset_fn is its older name.", check=check_symbol
    )
    loss: str = Group.MODEL.flag("loss", "loss(labels, predictions).", check=check_symbol)
    optimizer: str = Group.MODEL.flag(
        "optimizer", "optimizer(): the Keras optimizer; optimizer(model): that of PyTorch.", check=check_symbol
    )
    eval_metrics_fn: str = Group.MODEL.flag(
        "eval_metrics_fn", "eval_metrics_fn(): metrics by name.", check=check_symbol
    )
    callbacks: str = Group.MODEL.flag("callbacks", "callbacks(): list of callbacks; optional.", check=check_symbol)
    custom_data_reader: str = Group.MODEL.flag(
        "custom_data_reader", "custom_data_reader(...): the module's own Reader; optional.", check=check_symbol
    )
    prediction_outputs_processor: str = Group.MODEL.flag(
        "PredictionOutputsProcessor",
        "Class whose process() takes predictions.",
        jobs=frozenset({JobType.PREDICT}),
        check=check_symbol,
    )


_EVALUATE = frozenset({JobType.EVALUATE})
_PREDICT = frozenset({JobType.PREDICT})
_ANALYZE = frozenset({JobType.ANALYZE})


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class OnePassFlags:
    """The part of `JobSpec` that evaluate, predict and analyze alone have; the attributes have the flags' names."""

    metrics_output: str = Group.CHECKPOINTS.flag(
        "",
        "File to write the metrics to, as JSON, also of storage (s3://…); empty: none.",
        jobs=_EVALUATE,
        check=check_writable_directory,
    )
    prediction_outputs: str = Group.CHECKPOINTS.flag(
        "",
        "Directory of the predictions, also of storage (s3://…), one file a task, in the order of the records, or a "
        "database's table (postgresql://…?table=…), a transaction a task; empty: the module's "
        "PredictionOutputsProcessor takes them.",
        jobs=_PREDICT,
        check=check_outputs,
    )
    prediction_format: PredictionFormat = Group.CHECKPOINTS.flag(
        PredictionFormat.AUTO,
        "Of those files: parquet, csv or recordio; auto: parquet if the image has pyarrow, else csv.",
        jobs=_PREDICT,
    )
    prediction_columns: str = Group.CHECKPOINTS.flag(
        "",
        "Columns of the data that are written there before the predictions, such as an id; with commas between.",
        jobs=_PREDICT,
    )
    data: str = Group.DATA.flag(
        "",
        "What to analyze: a table: files, a directory, a pattern, or a database's (sqlite:///…?table=…).",
        jobs=_ANALYZE,
    )
    records_per_task: int = Group.DATA.flag(
        10_000, "Records per task, the unit handed to a worker.", jobs=_ANALYZE, check=between(1, 2**31 - 1)
    )
    missing_values: str = Group.DATA.flag(
        "", "Texts that mean a missing value, besides the empty one, separated by commas.", jobs=_ANALYZE
    )
    num_buckets: int = Group.DATA.flag(
        10, "Number of buckets for the boundaries of a numeric column.", jobs=_ANALYZE, check=at_least(2)
    )
    vocabulary_size: int = Group.DATA.flag(
        100_000, "Maximum number of values to list per column.", jobs=_ANALYZE, check=at_least(1)
    )


def fields_of_analysis(values: Mapping[str, object]) -> dict[str, object]:
    """Convert the flags of `analyze` to those of other jobs: a prediction without a model, a part for each task.

    Args:
        values: Values of the flags that are given.
    """
    output = values.get("output", "")
    return {
        "distribution_strategy": DistributionStrategy.ALL_REDUCE,
        "num_ps_pods": 0,
        "prediction_data": values.get("data", ""),
        "prediction_outputs": f"{output}.parts" if output else "",
        "minibatch_size": values.get("records_per_task", OnePassFlags.records_per_task),
        "num_minibatches_per_task": 1,
    }


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class StrategyFlags:
    """The part of `JobSpec` that says how workers agree on a model; the attributes have the flags' names."""

    # Parameter servers
    use_async: bool = Group.PARAMETER_SERVER.flag(
        True, "Asynchronous: apply each gradient when it arrives; false: synchronous, in rounds."
    )
    grads_to_wait: int = Group.PARAMETER_SERVER.flag(
        1, "Synchronous: number of gradients in a round; fewer if fewer workers train.", check=at_least(1)
    )
    sync_version_tolerance: int = Group.PARAMETER_SERVER.flag(
        0, "Synchronous: take gradients up to N rounds late; later ones are computed again.", check=at_least(0)
    )
    get_model_steps: int = Group.PARAMETER_SERVER.flag(
        1,
        "Asynchronous: fetch dense parameters every N steps, and update the worker's copy itself between.",
        check=at_least(1),
    )
    max_staleness: int = Group.PARAMETER_SERVER.flag(
        0,
        "Asynchronous: maximum staleness; a gradient that misses more than N updates is computed again; 0: no limit.",
        check=at_least(0),
    )
    lr_staleness_modulation: bool = Group.PARAMETER_SERVER.flag(
        False, "Asynchronous: divide the learning rate by the gradient's staleness."
    )
    wire_dtype: WireDtype = Group.PARAMETER_SERVER.flag(
        WireDtype.FLOAT32,
        "Data type of gradients, parameters and rows on the network: float32, float16 or bfloat16.",
        jobs=WITH_MODEL,
    )
    embedding_threshold: str = Group.PARAMETER_SERVER.flag(
        "2MB",
        "Tables of keras.layers.Embedding above this size are on the parameter servers: bytes, KB, MB, GB; 0: all.",
        jobs=WITH_MODEL,
        check=parses(partial(parse_size, "embedding_threshold")),
    )

    # AllReduce
    min_workers: int = Group.ALL_REDUCE.flag(
        1, "Minimum number of workers; below it training waits.", check=between(1, 100_000)
    )
    fixed_global_batch: int = Group.ALL_REDUCE.flag(
        0,
        "Global batch size: records per step of all workers together, however many they are; a multiple of "
        "--minibatch_size; 0: one minibatch per worker.",
        check=at_least(0),
    )
    collective_timeout: float = Group.ALL_REDUCE.flag(
        5.0,
        "Seconds without a heartbeat after which a worker leaves the group; slow ones that send them are waited for.",
        check=above(0),
    )
