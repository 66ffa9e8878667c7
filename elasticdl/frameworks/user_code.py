"""Calls of functions that the user has written."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from elasticdl.model_def import signature_of
from elasticdl_client.errors import ElasticDLError, ModelDefinitionError


def user_call(function: Callable[[], Any], what: str) -> Any:
    """Call user code; raise its exceptions, `sys.exit` too, as a `ModelDefinitionError` with their traceback."""
    process = os.getpid()
    try:
        return function()
    except ElasticDLError:
        raise
    except (Exception, SystemExit) as error:
        if os.getpid() != process:  # a child forked by the user's code: let it exit
            raise
        message = f"{what} raised {type(error).__name__}: {error}"
        raise ModelDefinitionError(message, details=traceback.format_exc()) from error


def num_taken(feed: Callable[..., Any]) -> int:
    """Return how many of mode and metadata a `feed` accepts: feed(dataset) and feed(dataset, mode) are also valid."""
    signature = signature_of(feed)
    while signature is not None and inspect.Parameter.VAR_POSITIONAL in _kinds(signature):
        wrapped: Callable[..., Any] | None = getattr(feed, "__wrapped__", None)
        if wrapped is None:
            return 2
        feed, signature = wrapped, signature_of(wrapped)  # a decorator passes its arguments on
    if signature is None:
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(0, sum(kind in positional for kind in _kinds(signature)) - 1)


def _kinds(signature: inspect.Signature) -> list[inspect._ParameterKind]:
    return [parameter.kind for parameter in signature.parameters.values()]


def made_callbacks(path: str, callbacks: Callable[[], Any] | None) -> list[Any]:
    """Return the result of the user's `callbacks()`; an empty list if there is no such function.

    Args:
        path: Path of the user's module, for messages.

    Raises:
        ModelDefinitionError: The function raises, or does not return a list.
    """
    if callbacks is None:
        return []
    made = user_call(callbacks, f"{path}: callbacks()")
    if not isinstance(made, list | tuple):
        raise ModelDefinitionError(f"{path}: callbacks() returned a {type(made).__name__}.", "Return a list.")
    return list(made)


def refuse_hooks(path: str, callback: Any, unknown: Sequence[str], called: str) -> None:
    """Refuse a callback with hooks that are never called.

    Raises:
        ModelDefinitionError: The callback has such hooks.
    """
    if unknown:
        raise ModelDefinitionError(
            f"{path}: the callback {type(callback).__name__} has {', '.join(unknown)}, which no worker calls.",
            f"Of the hooks of a callback {called} is called.",
        )
