"""The user's `callbacks()`: which of their hooks a distributed job calls, and calling them.

`on_train_end` is called once, by the worker that ends the job, with the trained variables in the model.  Of Keras's own
`LearningRateScheduler` only the schedule is used (see `learning_rates`).  A callback that relies on any other hook is
refused by name: nobody would call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from elasticdl.frameworks.keras.model import user_call
from elasticdl_client.errors import ModelDefinitionError

_CALLED = frozenset({"on_train_end"})


def make_callbacks(path: str, callbacks: Callable[[], Any] | None) -> list[Any]:
    """Calls the user's function.

    Args:
        path: of the user's module, for messages.

    Raises:
        ModelDefinitionError: it raises, returns something else, or a callback has a hook that is not called.
    """
    if callbacks is None:
        return []
    made = user_call(callbacks, f"{path}: callbacks()")
    if not isinstance(made, list | tuple) or not all(isinstance(one, keras.callbacks.Callback) for one in made):
        raise ModelDefinitionError(
            f"{path}: callbacks() returned {made!r}.", "It must return a list of keras.callbacks.Callback."
        )
    for callback in made:
        unknown = sorted(_hooks(type(callback)) - _CALLED)
        if unknown:
            raise ModelDefinitionError(
                f"{path}: the callback {type(callback).__name__} has {', '.join(unknown)}, which no worker calls.",
                f"Of the hooks of a callback these are called: {', '.join(sorted(_CALLED))}.",
            )
    return list(made)


def has_end(callbacks: list[Any]) -> bool:
    """Whether there is something to do in `end_training`."""
    return any("on_train_end" in _hooks(type(callback)) for callback in callbacks)


def end_training(callbacks: list[Any], model: Any, minibatch_size: int, output: str) -> None:
    """Calls `on_train_end`.

    Args:
        output: of the job; the callbacks find it as ``params["saved_model_path"]``.
    """
    for callback in callbacks:
        callback.set_params({"batch_size": minibatch_size, "saved_model_path": output})
        callback.set_model(model)
        callback.on_train_end()


def _hooks(kind: type) -> set[str]:
    """The hooks that a class defines itself."""
    names = [name for name in dir(kind) if name.startswith("on_")]
    plain = keras.callbacks.LearningRateScheduler
    known = plain if issubclass(kind, plain) else keras.callbacks.Callback
    return {name for name in names if getattr(kind, name) is not getattr(known, name, None)}
