"""Steps of plain Keras over records of `zoo/swapped.py`, eager: tracing a graph to compare with takes longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Parameters
from elasticdl.frameworks.keras.model import assign_flat, flat_values
from elasticdl.model_def import load
from tests.keras.conftest import ZOO

NUM_IDS = 40


@dataclass(frozen=True)
class ReferenceStep:
    """The step that a worker's must be equal to."""

    loss: float
    gradient: Any  # of the variables that are no tables, flat
    change: Any  # of the non-trainable ones
    of_tables: list[Any]  # gradients of whole tables


class Reference:
    """A model of `zoo/swapped.py` without anything of ours."""

    def __init__(self, symbol: str, params: Mapping[str, object] | None = None, **symbols: str) -> None:
        feed = symbols.get("feed", "feed")
        self._kind = feed.removesuffix("feed").rstrip("_")
        self._definition = load(ZOO, f"swapped.{symbol}", params, symbols, required=("feed",))
        keras.utils.set_random_seed(3)  # as the frameworks of the tests do: some models keep what they began with
        self._model = self._definition.model()
        self._model(self._parsed([b"0 1 2 3 4 5 6"])[0])
        self._frozen = [v for v in self._model.non_trainable_variables if v.dtype == "float32"]

    def step(
        self, records: Sequence[bytes], values: Parameters, tables: Sequence[tuple[str, Any]], decay: float = 0.0
    ) -> ReferenceStep:
        """A step on a minibatch.

        Args:
            values: of the variables that are no tables.
            tables: the end of a variable's path, with its values.
            decay: what the tables' regularizer takes of squares; of a table that has moved it counts the rows of the
                minibatch alone.
        """
        features, labels, *weights = self._parsed(records)
        variables, moved = self._assigned(values, tables)
        with tf.GradientTape() as tape:
            predictions = self._model(features, training=True)
            if isinstance(predictions, tf.Tensor) and predictions.shape.rank == 2:
                labels = labels[:, None]
            loss = tf.reduce_mean(self._definition.loss(labels, predictions, *weights))
            loss = tf.add_n([loss, *self._model.losses])
        sources = [variable.value for variable in (*variables, *moved)]
        found = tape.gradient(loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [part.numpy() for part in self._clipped([tf.convert_to_tensor(part) for part in found])]
        of_tables = gradients[len(variables) :]
        if decay:
            others = np.setdiff1d(np.arange(NUM_IDS), features)
            for (_, table), gradient in zip(tables, of_tables, strict=True):
                loss -= decay * np.square(table[others]).sum()
                gradient[others] -= 2 * decay * table[others]
        dense = np.concatenate([np.zeros(0, "f4"), *(part.ravel() for part in gradients[: len(variables)])])
        return ReferenceStep(float(loss), dense, flat_values(self._frozen) - values.non_trainable, of_tables)

    def predict(self, records: Sequence[bytes], values: Parameters, tables: Sequence[tuple[str, Any]]) -> Any:
        """Predictions for a minibatch."""
        self._assigned(values, tables)
        return self._model(self._parsed(records)[0], training=False).numpy()

    def _assigned(self, values: Parameters, tables: Sequence[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
        """The trainable variables that are no tables, and those that are."""
        variables, moved = list(self._model.trainable_variables), []
        for name, table in tables:
            at = next(k for k, variable in enumerate(variables) if variable.path.endswith(name))
            moved.append(variables.pop(at))
            moved[-1].assign(table)
        assign_flat(variables, values.trainable)
        assign_flat(self._frozen, values.non_trainable)
        return variables, moved

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        optimizer = self._definition.optimizer()
        if optimizer.global_clipnorm:
            gradients, _ = tf.clip_by_global_norm(gradients, optimizer.global_clipnorm)
        if optimizer.clipnorm:
            gradients = [tf.clip_by_norm(gradient, optimizer.clipnorm) for gradient in gradients]
        return gradients

    def _parsed(self, records: Sequence[bytes]) -> list[Any]:
        """Features, labels and, of the weighted feed, weights."""
        rows = [record.split() for record in records]
        labels = np.array([int(row[0]) for row in rows], "f4")
        if self._kind == "string":
            return [tf.constant([row[1:] for row in rows]), labels]
        numbers = [[int(part) for part in row[1:]] for row in rows]
        if self._kind == "ragged":
            return [tf.ragged.constant(numbers, dtype=tf.int64), labels]
        ids = np.array(numbers, "i8")
        return [ids, labels, *([ids[:, 0] % 3] if self._kind == "weighted" else [])]
