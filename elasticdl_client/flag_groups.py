"""The flags of `JobSpec` by subject: the model, its computation, jobs that go over data once, and the strategies."""

from __future__ import annotations

from collections.abc import Mapping

# ruff: noqa: RUF009 (`flag` is `dataclasses.field`)
from dataclasses import dataclass
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
from elasticdl_client.flags import TRAIN_ONLY, WITH_MODEL, Group, flag, parses
from elasticdl_client.params import parse_params, parse_size

COMPUTATION_DEFAULTS: dict[str, object] = {
    "precision": Precision.FP32,
    "compile": False,
    "channels_last": False,
    "clip_gradient_norm": 0.0,
    "accumulate_steps": 1,
    "shard_optimizer": False,
    "input_workers": 0,
}


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class ComputationFlags:
    """The part of `JobSpec` on making minibatches and computing steps; the attributes have the flags' names."""

    precision: Precision = flag(
        Precision.FP32,
        "Compute in fp32, or in bf16 or fp16, the latter with dynamic loss scaling: PyTorch models by autocast, Keras "
        "models by a mixed policy, with AllReduceStrategy or Local.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
    )
    compile: bool = flag(
        False, "PyTorch models: compile the model with torch.compile.", Group.TRAINING, jobs=TRAIN_ONLY
    )
    channels_last: bool = flag(
        False,
        "PyTorch models: keep images and the kernels of convolutions in memory with the channels last.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
    )
    clip_gradient_norm: float = flag(
        0.0,
        "PyTorch models: scale the gradient of a step down to this norm where it is larger; 0: leave it as it is.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    accumulate_steps: int = flag(
        1,
        "PyTorch models: compute each minibatch in N parts, one after the other, and add their gradients up; a divisor "
        "of --minibatch_size.",
        Group.TRAINING,
        jobs=TRAIN_ONLY,
        check=between(1, 2**31 - 1),
    )
    shard_optimizer: bool = flag(
        False,
        "PyTorch models: each worker keeps the optimizer's state of a part of the parameters, two N-ths of it with N "
        "workers (ZeRO-1), and updates that part.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
    )
    input_workers: int = flag(
        0,
        "PyTorch models: run `feed` in N processes of each worker; 0: in a thread of the worker.",
        Group.TRAINING,
        jobs=WITH_MODEL,
        check=between(0, 256),
    )


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class ModelFlags:
    """The part of `JobSpec` that names what a job runs; the attributes have the flags' names."""

    model_zoo: str = flag(
        "",
        "Directory of model definitions; empty: the current directory, or /model_zoo in an image.",
        Group.MODEL,
        check=check_path,
        jobs=WITH_MODEL,
    )
    model_def: str = flag(
        "",
        "package.module.symbol of the model function or class, relative to --model_zoo.",
        Group.MODEL,
        check=check_model_def,
        jobs=WITH_MODEL,
    )
    model_params: str = flag(
        "",
        'Arguments of that function: "k=v;k2=v2", Python literals or else strings.',
        Group.MODEL,
        check=parses(partial(parse_params, "model_params")),
        jobs=WITH_MODEL,
    )
    framework: FrameworkName = flag(
        FrameworkName.AUTO,
        "tensorflow, torch, or custom: the module's own adapter; auto: the one that the model definition imports.",
        Group.MODEL,
        jobs=WITH_MODEL,
    )
    feed: str = flag(
        "feed",
        "feed(dataset, mode, metadata); --dataset_fn is its older name.",
        Group.MODEL,
        check=check_symbol,
        jobs=WITH_MODEL,
    )
    loss: str = flag("loss", "loss(labels, predictions).", Group.MODEL, check=check_symbol, jobs=WITH_MODEL)
    optimizer: str = flag(
        "optimizer",
        "optimizer(): the Keras optimizer; optimizer(model): that of PyTorch.",
        Group.MODEL,
        check=check_symbol,
        jobs=WITH_MODEL,
    )
    eval_metrics_fn: str = flag(
        "eval_metrics_fn",
        "eval_metrics_fn(): metrics by name.",
        Group.MODEL,
        check=check_symbol,
        jobs=WITH_MODEL,
    )
    callbacks: str = flag(
        "callbacks", "callbacks(): list of callbacks; optional.", Group.MODEL, check=check_symbol, jobs=WITH_MODEL
    )
    custom_data_reader: str = flag(
        "custom_data_reader",
        "custom_data_reader(...): the module's own Reader; optional.",
        Group.MODEL,
        check=check_symbol,
        jobs=WITH_MODEL,
    )
    prediction_outputs_processor: str = flag(
        "PredictionOutputsProcessor",
        "Class whose process() takes predictions.",
        Group.MODEL,
        jobs=frozenset({JobType.PREDICT}),
        check=check_symbol,
    )


_EVALUATE = frozenset({JobType.EVALUATE})
_PREDICT = frozenset({JobType.PREDICT})
_ANALYZE = frozenset({JobType.ANALYZE})


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class OnePassFlags:
    """The part of `JobSpec` that evaluate, predict and analyze alone have; the attributes have the flags' names."""

    metrics_output: str = flag(
        "",
        "File to write the metrics to, as JSON, also of storage (s3://…); empty: none.",
        Group.CHECKPOINTS,
        jobs=_EVALUATE,
        check=check_writable_directory,
    )
    prediction_outputs: str = flag(
        "",
        "Directory of the predictions, also of storage (s3://…), one file a task, in the order of the records, or a "
        "database's table (postgresql://…?table=…), a transaction a task; empty: the module's "
        "PredictionOutputsProcessor takes them.",
        Group.CHECKPOINTS,
        jobs=_PREDICT,
        check=check_outputs,
    )
    prediction_format: PredictionFormat = flag(
        PredictionFormat.AUTO,
        "Of those files: parquet, csv or recordio; auto: parquet if the image has pyarrow, else csv.",
        Group.CHECKPOINTS,
        jobs=_PREDICT,
    )
    prediction_columns: str = flag(
        "",
        "Columns of the data that are written there before the predictions, such as an id; with commas between.",
        Group.CHECKPOINTS,
        jobs=_PREDICT,
    )
    data: str = flag(
        "",
        "What to analyze: a table: files, a directory, a pattern, or a database's (sqlite:///…?table=…).",
        Group.DATA,
        jobs=_ANALYZE,
    )
    records_per_task: int = flag(
        10_000, "Records per task, the unit handed to a worker.", Group.DATA, jobs=_ANALYZE, check=between(1, 2**31 - 1)
    )
    missing_values: str = flag(
        "",
        "Texts that mean a missing value, besides the empty one, separated by commas.",
        Group.DATA,
        jobs=_ANALYZE,
    )
    num_buckets: int = flag(
        10, "Number of buckets for the boundaries of a numeric column.", Group.DATA, jobs=_ANALYZE, check=at_least(2)
    )
    vocabulary_size: int = flag(
        100_000, "Maximum number of values to list per column.", Group.DATA, jobs=_ANALYZE, check=at_least(1)
    )


def fields_of_analysis(values: Mapping[str, object]) -> dict[str, object]:
    """Convert the flags of `analyze` to those of other jobs: a prediction without a model, a part for each task.

    Args:
        values: of the flags that are given.
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
    use_async: bool = flag(
        True,
        "Asynchronous: apply each gradient when it arrives; false: synchronous, in rounds.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
    )
    grads_to_wait: int = flag(
        1,
        "Synchronous: number of gradients in a round; fewer if fewer workers train.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(1),
    )
    sync_version_tolerance: int = flag(
        0,
        "Synchronous: take gradients up to N rounds late; later ones are computed again.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    get_model_steps: int = flag(
        1,
        "Asynchronous: fetch dense parameters every N steps, and update the worker's copy itself between.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(1),
    )
    max_staleness: int = flag(
        0,
        "Asynchronous: maximum staleness; a gradient that misses more than N updates is computed again; 0: no limit.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    lr_staleness_modulation: bool = flag(
        False,
        "Asynchronous: divide the learning rate by the gradient's staleness.",
        Group.PARAMETER_SERVER,
        jobs=TRAIN_ONLY,
    )
    wire_dtype: WireDtype = flag(
        WireDtype.FLOAT32,
        "Data type of gradients, parameters and rows on the network: float32, float16 or bfloat16.",
        Group.PARAMETER_SERVER,
        jobs=WITH_MODEL,
    )
    embedding_threshold: str = flag(
        "2MB",
        "Tables of keras.layers.Embedding above this size are on the parameter servers: bytes, KB, MB, GB; 0: all.",
        Group.PARAMETER_SERVER,
        check=parses(partial(parse_size, "embedding_threshold")),
        jobs=WITH_MODEL,
    )

    # AllReduce
    min_workers: int = flag(
        1,
        "Minimum number of workers; below it training waits.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=between(1, 100_000),
    )
    fixed_global_batch: int = flag(
        0,
        "Global batch size: records per step of all workers together, however many they are; a multiple of "
        "--minibatch_size; 0: one minibatch per worker.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=at_least(0),
    )
    collective_timeout: float = flag(
        5.0,
        "Seconds without a heartbeat after which a worker leaves the group; slow ones that send them are waited for.",
        Group.ALL_REDUCE,
        jobs=TRAIN_ONLY,
        check=above(0),
    )
