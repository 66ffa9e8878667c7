"""The user's `callbacks()`: the master's decisions for them, the hooks that are called, and the calls.

Hooks run in workers: `on_train_begin` in each, the others in one.  Of Keras's own `LearningRateScheduler` only the
schedule is used (see `learning_rates`).  A hook that is impossible in a distributed job is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from elasticdl.api import callbacks as ours
from elasticdl.frameworks.callback_rules import RuleMaker, Rules
from elasticdl.frameworks.user_code import made_callbacks, refuse_hooks
from elasticdl_client.errors import ModelDefinitionError

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
    """Calls the user's function.

    Args:
        path: of the user's module, for messages.

    Raises:
        ModelDefinitionError: it raises, returns something else, or a callback has a hook that is not called.
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
        refuse_hooks(path, callback, sorted(_hooks(callback) - set(_CALLED)), ", ".join(_CALLED))
    return made


def rules_of(path: str, callbacks: list[Any], metrics: Mapping[str, bool | None]) -> Rules:
    """Return the rules that the master applies for the callbacks.

    Args:
        metrics: of the evaluation, by name: whether more is better; None: not known.

    Raises:
        ModelDefinitionError: a setting of a callback cannot be kept.
    """
    maker = RuleMaker(path, metrics, ".keras")
    for callback in callbacks:
        match callback:
            case _OWN.EarlyStopping():
                maker.add_early_stopping(callback)
            case _OWN.ModelCheckpoint():
                maker.add_model_checkpoint(callback, callback.best)
            case _OWN.TerminateOnNaN():
                maker.rules.stops_at_nan = True
            case _:
                maker.add(callback)
    maker.rules.calls_epoch_end = any(EPOCH in _hooks(callback) for callback in callbacks)
    return maker.rules


def watches_loss(callbacks: list[Any]) -> bool:
    """Whether some callback monitors the loss on validation data."""
    return any(getattr(callback, "monitor", "") == "val_loss" for callback in callbacks if _watches(callback))


def _watches(callback: Any) -> bool:
    is_checkpoint = isinstance(callback, _OWN.ModelCheckpoint | ours.ModelCheckpoint)
    return bool(callback.save_best_only) if is_checkpoint else True


def has(callbacks: list[Any], *hooks: str) -> bool:
    """Whether one of these hooks does something."""
    return any(_hooks(callback).intersection(hooks) for callback in callbacks)


def call(callbacks: list[Any], hook: str, arguments: tuple[Any, ...], model: Any, params: Mapping[str, Any]) -> None:
    """Calls a hook of all callbacks that have it.

    Args:
        params: the `params` of a callback.
    """
    for callback in callbacks:
        if hook in _hooks(callback):
            callback.set_params(dict(params))
            callback.set_model(model)
            getattr(callback, hook)(*arguments)


def _hooks(callback: Any) -> set[str]:
    """The hooks that a callback defines itself."""
    if isinstance(callback, ours.Decided):
        return set()
    kind = type(callback)
    names = [name for name in dir(kind) if name.startswith("on_")]
    known = next((one for one in (*_SCHEDULED, *_DECIDED) if isinstance(callback, one)), keras.callbacks.Callback)
    own = {name for name in names if getattr(kind, name) is not getattr(known, name, None)}
    return own | {name for name in vars(callback) if name.startswith("on_")}


def _refuse_kind(path: str, callback: Any) -> None:
    """Refuses those of Keras's own that work with `fit` alone."""
    kind = type(callback)
    if not kind.__module__.startswith("keras.") or isinstance(callback, (*_DECIDED, *_SCHEDULED)):
        return
    if kind is not _OWN.LambdaCallback and kind is not _OWN.Callback:
        raise ModelDefinitionError(
            f"{path}: the callback {kind.__name__} has no place in a distributed job.",
            _HINTS.get(kind.__name__, "Leave it out; docs/callbacks.md says which callbacks work."),
        )
