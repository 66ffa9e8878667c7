"""Clipping of a worker's own gradient by its norm, as the user's optimizer asks for it.

The parameter servers see pieces of a gradient only, whose norms mean nothing; clipping by value is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

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
