"""The user's `callbacks()`: the master's decisions for them, the hooks that are called, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticdl.api import callbacks as ours
from elasticdl.frameworks.callback_rules import RuleMaker, Rules
from elasticdl.frameworks.user_code import made_callbacks, refuse_hooks
from elasticdl_client.errors import ModelDefinitionError

BEGIN, EPOCH, EVALUATION, END = "on_train_begin", "on_epoch_end", "on_evaluation_end", "on_train_end"
_CALLED = {
    BEGIN: f"{BEGIN}(model)",
    EPOCH: f"{EPOCH}(model, epoch, logs)",
    EVALUATION: f"{EVALUATION}(model, step, metrics)",
    END: f"{END}(model, output)",
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
        unknown = sorted(name for name in dir(callback) if name.startswith("on_") and name not in _CALLED)
        refuse_hooks(path, callback, unknown, ", ".join(_CALLED.values()))
        if not any(callable(getattr(callback, name, None)) for name in _CALLED):
            raise ModelDefinitionError(
                f"{path}: callbacks() gives a {type(callback).__name__} without {END}, or another hook.",
                f"A callback is one of elasticdl.api.callbacks, or an object with {', '.join(_CALLED.values())}.",
            )
    return made


def rules_of(path: str, callbacks: list[Any], metrics: Mapping[str, bool | None]) -> Rules:
    """Return the rules that the master applies for the callbacks.

    Args:
        metrics: of the evaluation, by name: whether more is better; None: not known.

    Raises:
        ModelDefinitionError: a setting of a callback cannot be kept.
    """
    maker = RuleMaker(path, metrics, ".pt")
    for callback in callbacks:
        maker.add(callback)
    maker.rules.calls_epoch_end = has(callbacks, EPOCH)
    return maker.rules


def watches_loss(callbacks: list[Any]) -> bool:
    """Whether some callback monitors the loss on validation data."""
    return any(
        callback.monitor == "val_loss" and getattr(callback, "save_best_only", True)
        for callback in callbacks
        if isinstance(callback, ours.EarlyStopping | ours.ModelCheckpoint)
    )


def has(callbacks: list[Any], hook: str) -> bool:
    """Whether a hook does something."""
    return any(_does(callback, hook) for callback in callbacks)


def call(callbacks: list[Any], hook: str, *arguments: Any) -> None:
    """Calls a hook of all callbacks that have it."""
    for callback in callbacks:
        if _does(callback, hook):
            getattr(callback, hook)(*arguments)


def _does(callback: Any, hook: str) -> bool:
    own = getattr(type(callback), hook, None)
    return callable(getattr(callback, hook, None)) and own is not getattr(ours.Callback, hook)
