"""Clipping of a worker's own gradient by its norm, as the user's optimizer asks for it.

The parameter servers see pieces of a gradient only, whose norms mean nothing; clipping by value is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from elasticdl_client.errors import ModelDefinitionError

_BY_NORM = ("clipnorm", "global_clipnorm")


@dataclass(frozen=True, slots=True)
class Clipping:
    """At most one of them is set; see `keras.optimizers.Optimizer`."""

    clipnorm: float | None = None
    global_clipnorm: float | None = None

    @classmethod
    def of(cls, optimizer: Any) -> Clipping:
        """What an optimizer asks for; None for an optimizer: nothing."""
        if optimizer is None:
            return cls()
        return cls(*(getattr(optimizer, name, None) or None for name in _BY_NORM))

    @property
    def by_norm(self) -> bool:
        return self.clipnorm is not None or self.global_clipnorm is not None

    def apply(
        self, dense: list[Any], rows: dict[str, Any], places: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Clipped gradients; a table counts as one variable, and gradients of the same id as their sum.

        Args:
            rows: table to gradients [n, dim].
            places: table to the number of each row's id among the unique ones [n].
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


def describe_optimizer(optimizer: Any, path: str, on_parameter_server: bool) -> str:
    """Keras config of an optimizer as JSON, without clipping by norm, which is done before gradients leave the worker.

    Raises:
        ModelDefinitionError: it is no Keras optimizer, or one of the user's own that a parameter server cannot run, or
            it decays some variables only.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelDefinitionError(f"{path}: optimizer() returned a {type(optimizer).__name__}, not a Keras optimizer.")
    if on_parameter_server and not type(optimizer).__module__.startswith("keras."):
        raise ModelDefinitionError(
            f"{path}: optimizer() returned {type(optimizer).__name__}, which a parameter server does not know.",
            "Use one of keras.optimizers, or --distribution_strategy=Local.",
        )
    if on_parameter_server and _excludes_from_decay(optimizer):
        raise ModelDefinitionError(
            f"{path}: optimizer() called exclude_from_weight_decay, which a parameter server does not know.",
            "Leave it out: weight_decay then holds for all variables; or use --distribution_strategy=Local.",
        )
    described = keras.optimizers.serialize(optimizer)
    described["config"].update(dict.fromkeys(_BY_NORM))
    kept = {name: described[name] for name in ("class_name", "config")}
    return json.dumps(kept, sort_keys=True, default=float)


def _excludes_from_decay(optimizer: Any) -> bool:
    # Keras keeps them by private names; an empty list changes nothing.
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return any(getattr(optimizer, name, None) for name in names)
