"""Compiled models: `compile` provides the symbols that the module does not define; settings in both must be equal.

Unsupported overrides of methods of `keras.Model` are refused by name.

docs/keras_models.md has the rules as a table.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.metrics import Evaluated, metric_name, metrics_by_name
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_NO_WORKER_DOES = ("weighted_metrics", "run_eagerly")  # arguments of `compile`
_COMPILED = "Say it once: leave it out of the module, or leave it out of compile()."
_log = logging.getLogger("elasticdl.keras")


def completed(definition: ModelDefinition, model: Any) -> ModelDefinition:
    """Return the definition with what it leaves to `compile`; that of a model which is not compiled as it is.

    The loss of `compile` has its `loss_weights`; a model with a `compute_loss` of its own needs none.
    """
    given = _arguments(model)
    taken: dict[str, Any] = {}
    if leaves_loss_to_compile(definition, model):
        taken = {"loss": given["loss"], "loss_weights": given.get("loss_weights")}
    elif definition.loss is None and given and is_overridden(model, "compute_loss"):
        taken["loss"] = no_loss
    if definition.optimizer is None and given.get("optimizer") is not None:
        taken["optimizer"] = lambda: given["optimizer"]
    if definition.eval_metrics_fn is None and _flat(given.get("metrics")):
        taken["eval_metrics_fn"] = partial(_metrics_of, definition.path, model, given["metrics"])
    return replace(definition, **taken)


def taken_from_compile(definition: ModelDefinition, complete: ModelDefinition) -> list[str]:
    """Return the symbols that `completed` has added."""
    names = ("loss", "optimizer", "eval_metrics_fn")
    return [name for name in names if getattr(definition, name) is None and getattr(complete, name) is not None]


def check_complete(definition: ModelDefinition, needed: Collection[str]) -> None:
    """Check a completed definition.

    Args:
        definition: The completed definition.
        needed: Symbols that the job requires.

    Raises:
        ModelDefinitionError: A symbol is given neither by the module nor by `compile`.
    """
    arguments = {"eval_metrics_fn": "metrics"}
    for name in needed:
        if getattr(definition, name) is None:
            raise ModelDefinitionError(
                f"{definition.path} has no {name}, and {definition.symbol} returned no model that is compiled with "
                f"{arguments.get(name, name)}.",
                f"Define {name}, or let {definition.symbol} return a model on which compile("
                f"{arguments.get(name, name)}=…) was called.",
            )


def by_output(model: Any, evaluated: Evaluated) -> Evaluated:
    """Give the outputs of a model that returns a list the names by which `compile` takes their metrics."""
    names = _output_names(model)
    parts = evaluated.predictions
    if len(names) < 2 or not isinstance(parts, list | tuple) or len(parts) != len(names):
        return evaluated
    labels = evaluated.labels
    if isinstance(labels, list | tuple) and len(labels) == len(names):
        labels = dict(zip(names, labels, strict=True))
    return evaluated._replace(labels=labels, predictions=dict(zip(names, parts, strict=True)))


def check_compiled(definition: ModelDefinition, model: Any, optimizer: Any, metrics: Collection[str]) -> None:
    """Check the arguments of `compile` against the module.

    Args:
        definition: The module's own definition.
        model: The model.
        optimizer: The job's optimizer.
        metrics: Names of the job's metrics.

    Raises:
        ModelDefinitionError: An argument contradicts the module, or is not supported by workers.
    """
    given = _arguments(model)
    refused = {name: given[name] for name in _NO_WORKER_DOES if given.get(name)}
    if definition.loss is not None:
        if given.get("loss_weights"):
            refused["loss_weights"] = given["loss_weights"]
        if given.get("loss") is not None and not _same_loss(given["loss"], definition.loss):
            refused["loss"] = given["loss"]
    is_given = definition.optimizer is not None and given.get("optimizer") is not None
    if is_given and not _same(given["optimizer"], optimizer):
        refused["optimizer"] = given["optimizer"]
    if definition.eval_metrics_fn is not None:
        unknown = [one for one in _flat(given.get("metrics")) if metric_name(one) not in metrics]
        if unknown:
            refused["metrics"] = [metric_name(one) for one in unknown]
    if refused:
        listed = ", ".join(f"{name}={_shown(value)}" for name, value in refused.items())
        why, hint = "which the module does not say", _COMPILED
        if set(refused) <= set(_NO_WORKER_DOES):
            why, hint = "which no worker does", "Leave it out of compile()."
        raise ModelDefinitionError(f"{definition.path}: the model is compiled with {listed}, {why}.", hint)
    if given.get("steps_per_execution", 1) != 1:
        _log.warning("compile(steps_per_execution=…) changes nothing here: each minibatch is a step of its own")


def _arguments(model: Any) -> Mapping[str, Any]:
    """Return the arguments of `compile` by name; empty: it was not called."""
    given: Mapping[str, Any] = getattr(getattr(model, "_compile_config", None), "config", {})
    return given


def leaves_loss_to_compile(definition: ModelDefinition, model: Any) -> bool:
    """Return whether the loss is that of `compile`: the module has none, and the model was compiled with one."""
    return definition.loss is None and _arguments(model).get("loss") is not None


def may_do_without_loss(definition: ModelDefinition, model: Any) -> bool:
    """Return whether the model was compiled and nothing says its loss: then what its layers add is all of it."""
    return definition.loss is None and bool(_arguments(model))


def no_loss(labels: Any, predictions: Any) -> Any:
    """Return 0: the loss function for a model that adds its whole loss itself."""
    return tf.zeros(())


def _output_names(model: Any) -> list[str]:
    return [str(name) for name in getattr(model, "output_names", None) or ()]


def _metrics_of(path: str, model: Any, metrics: Any) -> Any:
    """Return the `metrics` of `compile` as `eval_metrics_fn()` gives them; of several outputs with Keras's names."""
    names = _output_names(model)
    if isinstance(metrics, Mapping) and "class_name" not in metrics:
        named = dict(metrics)
    elif len(names) > 1:
        listed = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        if len(listed) != len(names):
            raise ModelDefinitionError(
                f"{path}: compile was given {len(listed)} metrics for a model with the outputs {', '.join(names)}.",
                'Name the output that metrics are of: {"output": ["accuracy"]}.',
            )
        named = dict(zip(names, listed, strict=True))
    else:
        return _flat(metrics)
    if len(named) == 1 and len(names) < 2 and list(named) == names:
        return _flat(metrics)
    unknown = [name for name in named if names and name not in names]
    if unknown:
        raise ModelDefinitionError(
            f"{path}: compile was given metrics of the output {unknown[0]!r}; the model's outputs: {', '.join(names)}.",
            "Name one of these.",
        )
    return {
        output: {f"{output}_{name}": metric for name, metric in metrics_by_name(path, _flat(given)).items()}
        for output, given in named.items()
        if given is not None
    }


def _same_loss(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, str | dict) and isinstance(other, str | dict) and one == other:
        return True
    try:
        return _same(keras.losses.get(one), keras.losses.get(other))
    except (ValueError, TypeError):  # losses by output
        return bool(keras.tree.flatten(one) == keras.tree.flatten(other))


def _same(one: Any, other: Any) -> bool:
    """Return whether two Keras objects have the same class and settings."""
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


_STEP = (
    "Put what is special into call, add_loss or compute_loss, which are honoured; or train in a script with a loop of "
    "your own (docs/estimator.md)."
)
_LOOP = "The workers have the loop; a loop of your own belongs into a script (docs/estimator.md)."
_TEST = "Put metrics into eval_metrics_fn(), and special losses into compute_loss."
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
NOTED = ("metrics", "metrics_names", "reset_metrics")  # overrides without an effect on the model; only logged


def call_model(model: Any, features: Any, training: bool) -> Any:
    """Call a model as `fit` and `evaluate` do: without `training` where its `call` does not take it.

    Keras then calls its layers, too, with their own defaults: Dropout and BatchNormalization as in inference.
    """
    with _normalizing_by_weights(model):
        if "training" in inspect.signature(model.call).parameters:
            return model(features, training=training)
        return model(features)


@contextmanager
def _normalizing_by_weights(model: Any) -> Iterator[None]:
    """Return a context for tracing a graph, see `normalize_by_weights`; at its end layers drop the graph's tensors."""
    before = [(layer, layer.mean, layer.variance) for layer in _adapted_layers(model)]
    normalize_by_weights(model)
    try:
        yield
    finally:
        for layer, mean, variance in before:
            layer.mean, layer.variance = mean, variance


def normalize_by_weights(model: Any) -> None:
    """Let `Normalization` layers use their weights, such as those of a checkpoint: `adapt` has made constants of them.

    In a graph they are read when it runs.
    """
    for layer in _adapted_layers(model):
        layer.finalize_state()


def _adapted_layers(model: Any) -> list[Any]:
    kind = keras.layers.Normalization
    return [one for one in model._flatten_layers() if isinstance(one, kind) and one.built and one.input_mean is None]


def scales_loss(model: Any) -> bool:
    """Return whether the optimizer scales the loss: by the policy, unless `compile(auto_scale_loss=False)`."""
    if model.dtype_policy.name != "mixed_float16":
        return False
    return not _arguments(model) or isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def is_overridden(model: Any, name: str) -> bool:
    """Return whether the user has overridden a method of a model, in a class or in the object."""
    definer = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
    return name in vars(model) or (definer is not None and definer.__module__.partition(".")[0] != "keras")


def check_overrides(path: str, model: Any, mode: Mode) -> None:
    """Check that workers support the user's overrides of methods of a model.

    Args:
        path: Path of the user's module, for messages.
        model: The model.
        mode: Mode of the job's tasks; a training job also evaluates and exports.

    Raises:
        ModelDefinitionError: The model overrides methods that workers do not call.
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
