"""Clipping of a worker's own gradient, as the user's optimizer asks for it.

The parameter servers never clip: they see pieces of a gradient only, whose norms mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from elasticdl_client.errors import ModelDefinitionError

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


@dataclass(frozen=True, slots=True)
class Clipping:
    """At most one of them is set; see `keras.optimizers.Optimizer`."""

    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None

    @classmethod
    def of(cls, optimizer: Any) -> Clipping:
        """What an optimizer asks for; None for an optimizer: nothing."""
        if optimizer is None:
            return cls()
        return cls(*(getattr(optimizer, name, None) or None for name in _CLIPPING))

    def apply(self, dense: list[Any], rows: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Clipped gradients; the rows of a table count as one variable."""
        names = list(rows)
        gradients = [*dense, *(rows[name] for name in names)]
        if self.clipnorm is not None:
            gradients = [tf.clip_by_norm(gradient, self.clipnorm) for gradient in gradients]
        elif self.global_clipnorm is not None and gradients:
            gradients, _ = tf.clip_by_global_norm(gradients, self.global_clipnorm)
        elif self.clipvalue is not None:
            gradients = [tf.clip_by_value(gradient, -self.clipvalue, self.clipvalue) for gradient in gradients]
        return gradients[: len(dense)], dict(zip(names, gradients[len(dense) :], strict=True))


def describe_optimizer(optimizer: Any, path: str, on_parameter_server: bool) -> str:
    """Keras config of an optimizer as JSON, without clipping, which is done before gradients leave the worker.

    Raises:
        ModelDefinitionError: it is no Keras optimizer, or one of the user's own that a parameter server cannot run.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelDefinitionError(f"{path}: optimizer() returned a {type(optimizer).__name__}, not a Keras optimizer.")
    if on_parameter_server and not type(optimizer).__module__.startswith("keras."):
        raise ModelDefinitionError(
            f"{path}: optimizer() returned {type(optimizer).__name__}, which a parameter server does not know.",
            "Use one of keras.optimizers, or --distribution_strategy=Local.",
        )
    described = keras.optimizers.serialize(optimizer)
    described["config"].update(dict.fromkeys(_CLIPPING))
    kept = {name: described[name] for name in ("class_name", "config")}
    return json.dumps(kept, sort_keys=True, default=float)
