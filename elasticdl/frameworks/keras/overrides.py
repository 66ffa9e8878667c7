"""The user's overrides of `keras.Model` and arguments of `compile`: unsupported ones are refused by name.

docs/keras_models.md has the same as tables.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import keras

from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.metrics import metric_name
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_STEP = (
    "Put what is special into call, add_loss or compute_loss, which are honoured; or train in a script with a loop of "
    "your own (docs/estimator.md)."
)
_LOOP = "The workers have the loop; a loop of your own belongs into a script (docs/estimator.md)."
_TEST = "Put metrics into eval_metrics_fn(), and what is special of the loss into compute_loss."
_PREDICT = "Let call return what is to be predicted, or define a prediction_outputs_processor."
REFUSED = {
    Mode.TRAINING: {
        "train_step": _STEP,
        "train_on_batch": _LOOP,
        "make_train_function": _LOOP,
        "fit": _LOOP,
    },
    Mode.EVALUATION: dict.fromkeys(
        ("test_step", "test_on_batch", "make_test_function", "evaluate", "compute_metrics", "get_metrics_result"), _TEST
    ),
    Mode.PREDICTION: dict.fromkeys(("predict_step", "predict_on_batch", "make_predict_function", "predict"), _PREDICT),
}
NOTED = ("metrics", "metrics_names", "reset_metrics")  # change nothing of the model: the log says so
_COMPILED = "Leave compile() out (load_model(…, compile=False)): the module's loss, optimizer, eval_metrics_fn count."
_log = logging.getLogger("elasticdl.keras")


def is_overridden(model: Any, name: str) -> bool:
    """Whether a method of a model is the user's, by its class or put into the object."""
    definer = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
    return name in vars(model) or (definer is not None and definer.__module__.partition(".")[0] != "keras")


def check_overrides(path: str, model: Any, mode: Mode) -> None:
    """
    Args:
        path: of the user's module, for messages.
        mode: of the job's tasks; a job that trains evaluates and exports, too.

    Raises:
        ModelDefinitionError: the model has methods of its own that no worker calls.
    """
    groups = [group for one, group in REFUSED.items() if mode in (one, Mode.TRAINING)]
    hints = {name: hint for group in groups for name, hint in group.items()}
    found = [name for name in hints if is_overridden(model, name)]
    if found:
        raise ModelDefinitionError(
            f"{path}: {type(model).__name__} overrides {', '.join(found)}, which no worker calls.",
            " ".join(dict.fromkeys(hints[name] for name in found)),
        )
    noted = [name for name in NOTED if is_overridden(model, name)]
    if noted:
        _log.warning(
            "%s of %s: workers do not ask for it; metrics that shall be shown belong into eval_metrics_fn()",
            ", ".join(noted),
            type(model).__name__,
        )


def check_compiled(definition: ModelDefinition, model: Any, optimizer: Any, metrics: Collection[str]) -> None:
    """Settings of `compile` count where the module says the same.

    Args:
        optimizer: the module's; None: this job has none.
        metrics: names of the module's.

    Raises:
        ModelDefinitionError: the model was compiled with something else than the module says.
    """
    given: Mapping[str, Any] = getattr(getattr(model, "_compile_config", None), "config", {})
    refused = {name: given[name] for name in ("loss_weights", "weighted_metrics", "run_eagerly") if given.get(name)}
    if definition.loss is not None and given.get("loss") is not None and not _same_loss(given["loss"], definition.loss):
        refused["loss"] = given["loss"]
    if optimizer is not None and given.get("optimizer") is not None and not _same(given["optimizer"], optimizer):
        refused["optimizer"] = given["optimizer"]
    unknown = [one for one in _flat(given.get("metrics")) if metric_name(one) not in metrics]
    if unknown:
        refused["metrics"] = [metric_name(one) for one in unknown]
    if refused:
        listed = ", ".join(f"{name}={_shown(value)}" for name, value in refused.items())
        raise ModelDefinitionError(
            f"{definition.path}: {definition.symbol} returned a model compiled with {listed}, which the module does "
            "not say.",
            _COMPILED,
        )
    if given.get("steps_per_execution", 1) != 1:
        _log.warning("compile(steps_per_execution=…) changes nothing here: each minibatch is a step of its own")


def _same_loss(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, str | dict) and isinstance(other, str | dict) and one == other:
        return True
    try:
        return _same(keras.losses.get(one), keras.losses.get(other))
    except (ValueError, TypeError):  # by output
        return bool(keras.tree.flatten(one) == keras.tree.flatten(other))


def _same(one: Any, other: Any) -> bool:
    """Whether two of Keras's objects are of the same class and settings."""
    one, other = (getattr(part, "inner_optimizer", part) for part in (one, other))
    if one is other or not (hasattr(one, "get_config") and hasattr(other, "get_config")):
        return one is other
    return type(one) is type(other) and {**one.get_config(), "name": ""} == {**other.get_config(), "name": ""}


def _flat(metrics: Any) -> list[Any]:
    if isinstance(metrics, Mapping) and "class_name" not in metrics:
        return [one for part in metrics.values() for one in _flat(part)]
    if isinstance(metrics, list | tuple):
        return [one for part in metrics for one in _flat(part)]
    return [] if metrics is None else [metrics]


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | bool | list | dict | tuple) else type(value).__name__
