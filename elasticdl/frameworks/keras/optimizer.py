"""The user's `optimizer()`: made as Keras's `compile` makes it, refused where it cannot be, described as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras

from elasticdl.frameworks.keras.step.clipping import BY_NORM
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_SCALED = "mixed_float16"  # the policy with which `compile` wraps the optimizer


def make_optimizer(definition: ModelDefinition, model: Any, on_parameter_server: bool) -> Any:
    """The optimizer of `optimizer()`, a name or a config; as in Keras, that of a mixed_float16 model scales the loss.

    Raises:
        ModelDefinitionError: it is no Keras optimizer, or one whose settings would not be kept.
    """
    path, made = definition.path, definition.optimizer
    if callable(made):
        made = user_call(made, f"{path}: optimizer()")
    if isinstance(made, str | Mapping):
        made = user_call(lambda: keras.optimizers.get(made), f"{path}: the optimizer {made!r}")
    if not isinstance(made, keras.optimizers.Optimizer):
        raise ModelDefinitionError(f"{path}: optimizer() returned a {type(made).__name__}, not a Keras optimizer.")
    if on_parameter_server:
        return made
    if getattr(made, "inner_optimizer", made).use_ema:
        raise ModelDefinitionError(
            f"{path}: the optimizer has use_ema=True, and its averages enter the model at the end of fit alone.",
            "Leave it out; a smaller learning rate at the end, by a schedule, has much the same effect.",
        )
    if model.dtype_policy.name == _SCALED and not isinstance(made, keras.optimizers.LossScaleOptimizer):
        made = keras.optimizers.LossScaleOptimizer(made)
    return made


def describe_optimizer(optimizer: Any) -> str:
    """Keras config of an optimizer as JSON, without clipping by norm: the worker does that to its own gradient."""
    described = keras.optimizers.serialize(optimizer)
    described["config"].update(dict.fromkeys(BY_NORM))
    kept = {name: described[name] for name in ("class_name", "config")}
    return json.dumps(kept, sort_keys=True, default=float)


def check_for_parameter_server(path: str, optimizer: Any, model: Any) -> None:
    """Refuse settings of the model and its optimizer that no parameter server implements; Keras checks its own options.

    Raises:
        ModelDefinitionError: there is something.
    """
    if not type(optimizer).__module__.startswith("keras."):
        raise ModelDefinitionError(
            f"{path}: optimizer() returned {type(optimizer).__name__}, which a parameter server does not know.",
            "Use one of keras.optimizers, or --distribution_strategy=Local.",
        )
    if _excludes_from_decay(optimizer):
        raise ModelDefinitionError(
            f"{path}: optimizer() called exclude_from_weight_decay, which a parameter server does not know.",
            "Leave it out: weight_decay then holds for all variables; or use --distribution_strategy=Local.",
        )
    if model.dtype_policy.name == _SCALED:
        raise ModelDefinitionError(
            f"{path}: the model's policy is {_SCALED}, whose loss must be scaled, which parameter servers do not do.",
            "Use mixed_bfloat16, or --distribution_strategy=AllReduceStrategy or Local.",
        )
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise ModelDefinitionError(
                f"{path}: {variable.path} has a constraint, {type(variable.constraint).__name__}, which no parameter "
                "server applies to a whole variable.",
                "Use --distribution_strategy=AllReduceStrategy or Local, or leave it out; some of those of large "
                "embeddings are applied to their rows: docs/embedding.md.",
            )


def _excludes_from_decay(optimizer: Any) -> bool:
    # Keras keeps them by private names; an empty list changes nothing.
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return any(getattr(optimizer, name, None) for name in names)
