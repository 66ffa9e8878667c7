"""The ids of a minibatch, found by a first trace of the model in which embedding layers only write their ids down.

What is left of that trace, once pruned to the ids, runs inside tf.data: no Python, no variable is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from elasticdl.frameworks.framework import Mode
from elasticdl.layers.placement import Placement, Recorded, TableSpec


def ids_function(model: Any, placement: Placement, features: Any, mode: Mode) -> Callable[[Any], dict[str, Any]]:
    """A graph function from batched features to table -> all ids [n] of all calls, in order of call.

    Args:
        features: spec of the batched features.
    """
    leaves = tf.nest.flatten(features, expand_composites=True)
    names: list[str] = []

    def record(*parts: Any) -> list[Any]:
        recorded = Recorded()
        with placement.using(recorded):
            model(tf.nest.pack_sequence_as(features, parts, expand_composites=True), training=mode is Mode.TRAINING)
        names.extend(recorded.ids)
        return [tf.concat(calls, 0) for calls in recorded.ids.values()]

    with tf.init_scope():
        whole = tf.compat.v1.wrap_function(record, [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves])
        pruned = whole.prune(whole.inputs[: len(leaves)], whole.structured_outputs) if names else None

    def run(batch: Any) -> dict[str, Any]:
        if pruned is None:
            return {}
        outputs = pruned(*tf.nest.flatten(batch, expand_composites=True))
        return dict(zip(names, outputs, strict=True))

    return run


def unique_ids(ids: dict[str, Any], tables: dict[str, TableSpec]) -> dict[str, tuple[Any, Any]]:
    """Table to (unique ids [U], position [n] of each id among them); tables that were not called have none."""
    found = {}
    for name, table in tables.items():
        unique, positions = tf.unique(ids.get(name, tf.zeros([0], tf.int64)))
        if table.input_dim:
            _check_range(name, table.input_dim, unique)
        found[name] = (unique, positions)
    return found


def _check_range(name: str, input_dim: int, unique: Any) -> None:
    wrong = tf.boolean_mask(unique, tf.logical_or(unique < 0, unique >= input_dim))
    tf.debugging.Assert(
        tf.equal(tf.size(wrong), 0),
        [f"elasticdl.layers.Embedding '{name}': ids are not in [0, {input_dim}), its input_dim:", wrong],
    )
