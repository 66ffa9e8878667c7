"""Whether XLA compiles a step: it is tried once, and left alone where it cannot or where it would be slower."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import tensorflow as tf

from elasticdl.frameworks.keras.operations import slow_with_xla, warn_of_chance
from elasticdl.frameworks.keras.step.lookups import IdOutOfRange

_log = logging.getLogger("elasticdl.keras")


class _Graph(Protocol):
    @property
    def operations(self) -> set[str]: ...


G = TypeVar("G", bound=_Graph)
R = TypeVar("R")


def first_run(make: Callable[[], G], run: Callable[[G], R]) -> tuple[G, R] | None:
    """Makes a graph that is compiled when it first runs, and runs it; None: not with XLA, the log says why.

    Raises:
        IdOutOfRange: an embedding layer has no row for an id.
    """
    try:
        graph = make()
        slow = slow_with_xla(graph.operations)
        if slow:
            tell_uncompiled(f"{slow} is slower with XLA")
            return None
        result = run(graph)
    except IdOutOfRange:
        raise
    except (tf.errors.OpError, NotImplementedError, ValueError) as error:
        tell_uncompiled(str(error).strip().partition("\n")[0])
        return None
    warn_of_chance(graph.operations)
    return graph, result


def tell_uncompiled(reason: str) -> None:
    """Says in the log why steps are not compiled."""
    _log.info("Steps are not compiled with XLA: %s", reason)
