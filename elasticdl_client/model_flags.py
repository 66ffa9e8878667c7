"""The flags that say what the user's module defines; part of `JobSpec`."""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` is `dataclasses.field`)
from dataclasses import dataclass
from functools import partial

from elasticdl_client.checks import check_model_def, check_path, check_symbol
from elasticdl_client.choices import FrameworkName, JobType
from elasticdl_client.flags import WITH_MODEL, Group, flag, parses
from elasticdl_client.params import parse_params


@dataclass(frozen=True)
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
        "tensorflow, torch, or custom: the module's own adapter; auto: what the model definition imports.",
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
