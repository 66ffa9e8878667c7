"""The user's `optimizer()` with its clipping, learning-rate scheduler and `callbacks()`.

An optimizer is created as by Keras's `compile`, refused if it is not supported, and described as JSON.

Workers clip their gradients by norm, because a parameter server has only pieces of a gradient, and their norms are
meaningless; parameter servers clip by value.

For callbacks: the rules for the master, and the calls of their hooks.

Hooks run in workers: `on_train_begin` in each, the others in one.  Of Keras's own `LearningRateScheduler` only the
schedule is used (see `learning_rates`).  A hook that is impossible in a distributed job is refused by name.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.api import callbacks as ours
from elasticdl.api.tensorflow import LearningRateScheduler as ByVersion
from elasticdl.frameworks.callback_rules import RuleMaker, Rules
from elasticdl.frameworks.keras.compiled import scales_loss
from elasticdl.frameworks.user_code import made_callbacks, refuse_hooks, user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_ZERO = 1e-30  # sent instead of 0, which means the optimizer's own rate in messages
_ByEpoch = keras.callbacks.LearningRateScheduler


def make_optimizer(definition: ModelDefinition, model: Any, on_parameter_server: bool) -> Any:
    """Return the optimizer, given by a function, name or config; for mixed_float16 it scales the loss, as in Keras.

    Raises:
        ModelDefinitionError: It is not a Keras optimizer, or has unsupported settings.
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
    if scales_loss(model) and not isinstance(made, keras.optimizers.LossScaleOptimizer):
        made = keras.optimizers.LossScaleOptimizer(made)
    return made


def describe_optimizer(optimizer: Any) -> str:
    """Return the Keras config of an optimizer as JSON, without clipping by norm, which workers do themselves."""
    described = keras.optimizers.serialize(optimizer)
    described["config"].update(dict.fromkeys(BY_NORM))
    kept = {name: described[name] for name in ("class_name", "config")}
    return json.dumps(kept, sort_keys=True, default=float)


def check_for_parameter_server(path: str, optimizer: Any, model: Any, assigned: Sequence[Any]) -> None:
    """Refuse settings of the model and its optimizer that parameter servers do not implement.

    Args:
        path: Path of the user's module, for messages.
        optimizer: The optimizer.
        model: The model.
        assigned: Trainable variables that the model assigns in a training step.

    Raises:
        ModelDefinitionError: There is such a setting.
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
    if scales_loss(model):
        raise ModelDefinitionError(
            f"{path}: the model's policy is mixed_float16, whose loss is scaled, and parameter servers do not do that.",
            "Use mixed_bfloat16, or --distribution_strategy=AllReduceStrategy or Local.",
        )
    if assigned:
        raise ModelDefinitionError(
            f"{path}: the model assigns its trainable variable {assigned[0].path} in a training step, as "
            "SpectralNormalization does, and parameter servers take gradients of such variables alone.",
            "Use --distribution_strategy=AllReduceStrategy or Local, or a layer that computes with the new value and "
            "assigns nothing.",
        )
    _check_overwritten(path, model.trainable_variables, "which no parameter server does")
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise ModelDefinitionError(
                f"{path}: {variable.path} has a constraint, {type(variable.constraint).__name__}, which no parameter "
                "server applies to a whole variable.",
                "Use --distribution_strategy=AllReduceStrategy or Local, or leave it out; some of those of large "
                "embeddings are applied to their rows: docs/embedding.md.",
            )


def check_for_groups(path: str, model: Any) -> None:
    """Refuse layers and losses that are wrong with averaged gradients, or need more than the sum of gradients.

    Raises:
        ModelDefinitionError: The model has such a part.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ModelDefinitionError(
                f"{path}: the layer {layer.name} is a BatchNormalization(synchronized=True), and each worker knows the "
                "statistics of its own minibatch alone.",
                "Leave synchronized out: running statistics are averaged over the workers; or take a layer that "
                "normalizes each sample alone: LayerNormalization, GroupNormalization.",
            )
    why = "and a group would take the mean of what its members measure, not the largest"
    _check_overwritten(path, model.trainable_variables, why)


def _check_overwritten(path: str, trainable: Sequence[Any], why: str) -> None:
    for variable in trainable:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelDefinitionError(
                f"{path}: {variable.path} takes its gradient as its value, as quantize('float8') has it, {why}.",
                "Use --distribution_strategy=Local, or leave the model as it is.",
            )


def _excludes_from_decay(optimizer: Any) -> bool:
    # Keras stores them in private attributes; an empty list changes nothing.
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return any(getattr(optimizer, name, None) for name in names)


class LearningRates:
    """The rates of the learning-rate scheduler among the callbacks, if there is one: by epoch, or by model version.

    Rates are functions of the module alone, so that every worker finds the same, in whatever order it works on
    epochs.
    """

    def __init__(self, path: str, callbacks: Sequence[Any], optimizer: Callable[[], Any]) -> None:
        """
        Args:
            path: Path of the user's module, for messages.
            callbacks: The user's callbacks.
            optimizer: Returns the user's optimizer; called only if there is a scheduler.

        Raises:
            ModelDefinitionError: There are two schedulers, or the optimizer has its own schedule.
        """
        found = [callback for callback in callbacks if isinstance(callback, ByVersion | _ByEpoch)]
        if len(found) > 1:
            raise ModelDefinitionError(
                f"{path}: callbacks() returned {len(found)} learning-rate schedulers.", "Return one."
            )
        self._path = path
        self._scheduler = found[0] if found else None
        self._by_epoch: list[float] = []
        if found:
            self._own = _own_rate(path, optimizer())
            self._takes_rate = isinstance(found[0], _ByEpoch) and _takes_two(found[0].schedule)

    def at(self, epoch: int, version: int) -> float | None:
        """See `Framework.learning_rate`.

        Raises:
            ModelDefinitionError: The schedule raises, or its value is not a learning rate.
        """
        if self._scheduler is None:
            return None
        if isinstance(self._scheduler, ByVersion):
            return self._call(version)
        while len(self._by_epoch) <= epoch:
            before = self._by_epoch[-1] if self._by_epoch else self._own
            number = len(self._by_epoch)
            self._by_epoch.append(self._call(number, before) if self._takes_rate else self._call(number))
        return self._by_epoch[epoch]

    def _call(self, *arguments: Any) -> float:
        assert self._scheduler is not None
        shown = ", ".join(map(str, arguments))
        what = f"{self._path}: the schedule of {type(self._scheduler).__name__}, called with ({shown}),"
        schedule = self._scheduler.schedule
        value = user_call(lambda: float(schedule(*arguments)), what)
        if not (math.isfinite(value) and value >= 0):
            raise ModelDefinitionError(f"{what} returned {value}.", "A learning rate is a finite number, not below 0.")
        return value or _ZERO


def own_rate_at(optimizer: Any, version: int) -> float | None:
    """Return an optimizer's own rate: a constant, or its schedule's at a model version."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None)
    if rate is None:
        return None
    has_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return scheduled_at(rate, version) if has_schedule else float(rate)


def scheduled_at(schedule: Any, step: int) -> float:
    """Return a schedule's rate at a step, given as `fit` gives it: TensorFlow would keep a Python number for ever."""
    return float(schedule(tf.constant(np.int64(step))))


def _own_rate(path: str, optimizer: Any) -> float:
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise ModelDefinitionError(
            f"{path}: callbacks() has a learning-rate scheduler, and the optimizer a {type(rate).__name__}.",
            "Use one of them: each sets the learning rate.",
        )
    return 0.0 if optimizer is None else float(optimizer.learning_rate)


def _takes_two(schedule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True


BY_NORM = ("clipnorm", "global_clipnorm")


@dataclass(frozen=True, slots=True)
class Clipping:
    """At most one of them is set; see `keras.optimizers.Optimizer`."""

    clipnorm: float | None = None
    global_clipnorm: float | None = None

    @classmethod
    def of(cls, optimizer: Any) -> Clipping:
        """Return the clipping that an optimizer asks for; none for an optimizer that is None."""
        if optimizer is None:
            return cls()
        return cls(*(getattr(optimizer, name, None) or None for name in BY_NORM))

    @property
    def by_norm(self) -> bool:
        return self.clipnorm is not None or self.global_clipnorm is not None

    def apply(
        self, dense: list[Any], rows: dict[str, Any], places: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return clipped gradients; a table counts as one variable, and gradients of the same id count as their sum.

        Args:
            dense: Gradients of the dense variables.
            rows: Maps each table to gradients [n, dim].
            places: Maps each table to the index of each row's id among the unique ids [n].
        """
        if not self.by_norm:
            return dense, rows
        summed = [tf.math.unsorted_segment_sum(part, places[name], tf.shape(part)[0]) for name, part in rows.items()]
        squares = [tf.reduce_sum(tf.square(part)) for part in [*dense, *summed]]
        if self.clipnorm is not None:
            factors = [_factor(tf.sqrt(square), self.clipnorm) for square in squares]
        else:
            total = tf.add_n(squares) if squares else tf.zeros(())
            factors = [_factor(tf.sqrt(total), self.global_clipnorm)] * len(squares)
        clipped = [part * factor for part, factor in zip([*dense, *rows.values()], factors, strict=True)]
        return clipped[: len(dense)], dict(zip(rows, clipped[len(dense) :], strict=True))


def _factor(norm: Any, largest: Any) -> Any:
    return largest / tf.maximum(norm, largest)


BEGIN, EPOCH, EVALUATION, TEST, END = (
    "on_train_begin",
    "on_epoch_end",
    "on_evaluation_end",
    "on_test_end",
    "on_train_end",
)
_CALLED = (BEGIN, EPOCH, EVALUATION, TEST, END)
_OWN = keras.callbacks
_DECIDED = (_OWN.EarlyStopping, _OWN.ModelCheckpoint, _OWN.TerminateOnNaN)
_SCHEDULED = (_OWN.LearningRateScheduler,)
_HINTS = {
    "ReduceLROnPlateau": "Use a LearningRateScheduler, or a schedule in the optimizer.",
    "TensorBoard": "Leave it out; --tensorboard_log_dir writes what TensorBoard shows.",
    "BackupAndRestore": "Leave it out; --checkpoint_dir keeps checkpoints, from which the job continues by itself.",
    "CSVLogger": "Leave it out; --tensorboard_log_dir keeps losses and metrics.",
    "History": "Leave it out; --tensorboard_log_dir keeps losses and metrics.",
}


def make_callbacks(path: str, callbacks: Callable[[], Any] | None) -> list[Any]:
    """Call the user's `callbacks()`.

    Args:
        path: Path of the user's module, for messages.
        callbacks: The function; None: there is none.

    Raises:
        ModelDefinitionError: It raises, does not return a list, or a callback has a hook that is never called.
    """
    made = made_callbacks(path, callbacks)
    for callback in made:
        if isinstance(callback, ours.Decided):
            continue
        if not isinstance(callback, keras.callbacks.Callback):
            raise ModelDefinitionError(
                f"{path}: callbacks() gives a {type(callback).__name__}.",
                "Each must be a keras.callbacks.Callback, or one of elasticdl.api.callbacks.",
            )
        _refuse_kind(path, callback)
        _refuse_setting(path, callback)
        refuse_hooks(path, callback, sorted(_hooks(callback) - set(_CALLED)), ", ".join(_CALLED))
    return made


def rules_of(path: str, callbacks: list[Any], metrics: Mapping[str, bool | None]) -> Rules:
    """Return the rules that the master applies for the callbacks.

    Args:
        path: Path of the user's module, for messages.
        callbacks: The callbacks.
        metrics: Maps the name of each evaluation metric to whether higher is better; None: unknown.

    Raises:
        ModelDefinitionError: A callback has a setting that the master cannot follow.
    """
    maker = RuleMaker(path, metrics)
    for callback in callbacks:
        match callback:
            case _OWN.EarlyStopping():
                maker.add_early_stopping(callback)
                decided = maker.rules.stopping[-1]  # Keras resolves "auto" with the metrics built by `fit`
                callback.monitor = f"val_{decided['metric']}"
                callback.mode = "max" if decided["maximize"] else "min"
            case _OWN.ModelCheckpoint():
                maker.add_model_checkpoint(callback, callback.best)
            case _OWN.TerminateOnNaN():
                maker.rules.stops_at_nan = True
            case _:
                maker.add(callback)
    maker.rules.calls_epoch_end = any(EPOCH in _hooks(callback) for callback in callbacks)
    return maker.rules


def watches_loss(callbacks: list[Any]) -> bool:
    """Return whether a callback monitors the loss on validation data."""
    return any(getattr(callback, "monitor", "") == "val_loss" for callback in callbacks if _watches(callback))


def _watches(callback: Any) -> bool:
    is_checkpoint = isinstance(callback, _OWN.ModelCheckpoint | ours.ModelCheckpoint)
    return bool(callback.save_best_only) if is_checkpoint else True


def has(callbacks: list[Any], *hooks: str) -> bool:
    """Return whether any callback overrides one of these hooks."""
    return any(_hooks(callback).intersection(hooks) for callback in callbacks)


class KeptModel:
    """The weights and the learning rate that a hook finds, and leaves as they are: other workers see no changes."""

    def __init__(self, path: str, model: Any, optimizer: Any) -> None:
        """
        Args:
            path: Path of the user's module, for messages.
            model: The model.
            optimizer: The optimizer.
        """
        self._path = path
        rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        rates = {"the learning rate": rate} if isinstance(rate, keras.Variable) else {}  # a schedule has no variable
        self._variables = [*rates.items(), *((f"the variable {v.path}", v) for v in model.weights)]
        self._values = [variable.numpy().copy() for _, variable in self._variables]

    def check(self, who: str) -> None:
        """Check for changes by a hook, and revert them, because the hook will be called again.

        Raises:
            ModelDefinitionError: The hook has changed a value.
        """
        changed = []
        for (what, variable), value in zip(self._variables, self._values, strict=True):
            if variable.numpy().tobytes() != value.tobytes():
                variable.assign(value)
                changed.append(what)
        if changed:
            others = f" and {len(changed) - 1} others" if changed[1:] else ""
            raise ModelDefinitionError(
                f"{self._path}: {who} has changed {changed[0]}{others}, in one of several workers alone.",
                "Of learning rates use a LearningRateScheduler, or a schedule in the optimizer; let the function that "
                "makes the model set weights. Or use --distribution_strategy=Local.",
            )


@contextmanager
def optimizer_within(model: Any, optimizer: Any) -> Iterator[None]:
    """Return a context in which a compiled model has the job's optimizer: `compile` creates its own from a name."""
    if not (getattr(model, "compiled", False) and optimizer is not None):
        yield
        return
    own, model.optimizer = model.optimizer, optimizer
    try:
        yield
    finally:
        model.optimizer = own


def call(
    callbacks: list[Any],
    hook: str,
    arguments: tuple[Any, ...],
    model: Any,
    params: Mapping[str, Any],
    kept: KeptModel | None = None,
) -> str:
    """Call a hook of all callbacks that override it.

    Args:
        callbacks: The callbacks.
        hook: Name of the hook.
        arguments: Arguments of the hook.
        model: The model for the callbacks.
        params: The `params` of the callbacks.
        kept: Values that hooks must not change; None: they may change everything.

    Returns:
        The reason to end training early, if a hook has set `model.stop_training`, as in `fit`; else empty.

    Raises:
        ModelDefinitionError: A hook has changed a value in `kept`.
    """
    reasons = []
    for callback in callbacks:
        if hook in _hooks(callback):
            who = f"{hook} of {type(callback).__name__}"
            callback.set_params(dict(params))
            callback.set_model(model)
            model.stop_training = False
            getattr(callback, hook)(*arguments)
            if model.stop_training:
                reasons.append(f"{who} has set model.stop_training")
            if kept is not None:
                kept.check(who)
    return "; ".join(reasons)


def _hooks(callback: Any) -> set[str]:
    """Return the hooks that a callback overrides."""
    if isinstance(callback, ours.Decided):
        return set()
    kind = type(callback)
    names = [name for name in dir(kind) if name.startswith("on_")]
    known = next((one for one in (*_SCHEDULED, *_DECIDED) if isinstance(callback, one)), keras.callbacks.Callback)
    own = {name for name in names if getattr(kind, name) is not getattr(known, name, None)}
    return own | {name for name in vars(callback) if name.startswith("on_")}


def _refuse_kind(path: str, callback: Any) -> None:
    """Refuse Keras's own callbacks that work only with `fit`, and subclasses of them."""
    kinds = type(callback).__mro__
    of_keras = next(kind for kind in kinds if kind.__module__.startswith("keras."))
    if of_keras in (_OWN.LambdaCallback, _OWN.Callback, *_DECIDED, *_SCHEDULED):
        return
    name = of_keras.__name__
    which = name if kinds[0] is of_keras else f"{kinds[0].__name__}, a {name},"
    raise ModelDefinitionError(
        f"{path}: the callback {which} has no place in a distributed job.",
        _HINTS.get(name, "Leave it out; docs/callbacks.md says which callbacks work."),
    )


def _refuse_setting(path: str, callback: Any) -> None:
    """Refuse settings that the master cannot follow; if the callbacks are already known, before the job starts."""
    if isinstance(callback, _OWN.EarlyStopping) and callback.restore_best_weights:
        raise ModelDefinitionError(
            f"{path}: EarlyStopping(restore_best_weights=True): no process holds the best weights.",
            "Leave it out: ModelCheckpoint(path, save_best_only=True) keeps the best model; elasticdl.fit restores it.",
        )
    if isinstance(callback, _OWN.ModelCheckpoint) and callback.save_weights_only:
        raise ModelDefinitionError(
            f"{path}: ModelCheckpoint(save_weights_only=True): whole models are saved.",
            "Leave it out, and give a path that ends in .keras, or a directory.",
        )
