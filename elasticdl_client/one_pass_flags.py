"""The flags of jobs that go over data once: with a trained model, or to compute statistics of columns."""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` is `dataclasses.field`)
from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl_client.checks import at_least, between, check_outputs, check_writable_directory
from elasticdl_client.choices import DistributionStrategy, JobType, PredictionFormat
from elasticdl_client.flags import Group, flag

_EVALUATE = frozenset({JobType.EVALUATE})
_PREDICT = frozenset({JobType.PREDICT})
_ANALYZE = frozenset({JobType.ANALYZE})


@dataclass(frozen=True)
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
