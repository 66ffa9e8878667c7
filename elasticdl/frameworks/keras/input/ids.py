"""The ids of a minibatch, found by a first trace of the model in which embedding layers only write their ids down.

The trace, once pruned to the ids, runs inside tf.data: no Python, no variable is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Ids, Mode
from elasticdl.frameworks.keras.operations import stateful_random
from elasticdl.layers.placement import Placement, Recorded, TableSpec
from elasticdl_client.errors import ModelDefinitionError

_SHOWN = 5
_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})  # look at no values


def ids_function(
    model: Any, placement: Placement, features: Any, mode: Mode, changing: Iterable[Any]
) -> Callable[[Any], dict[str, Any]]:
    """A graph function from batched features to table -> all ids [n] of all calls, in order of call.

    Args:
        features: spec of the batched features.
        changing: variables of the model that change from step to step.

    Raises:
        ModelDefinitionError: ids depend on what changes, or a layer is called in a loop; the layer is named.
    """
    leaves = tf.nest.flatten(features, expand_composites=True)
    recorded = Recorded()
    names: list[str] = []

    def record(*parts: Any) -> list[Any]:
        nonlocal recorded
        recorded = Recorded()
        with placement.using(recorded):
            model(tf.nest.pack_sequence_as(features, parts, expand_composites=True), training=mode is Mode.TRAINING)
        names.extend(recorded.ids)
        return [tf.concat(calls, 0) for calls in recorded.ids.values()]

    with tf.init_scope():
        whole = tf.compat.v1.wrap_function(record, [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves])
        _check_origin(whole.graph, recorded, changing)
        pruned = whole.prune(whole.inputs[: len(leaves)], whole.structured_outputs) if names else None

    def run(batch: Any) -> dict[str, Any]:
        if pruned is None:
            return {}
        outputs = pruned(*tf.nest.flatten(batch, expand_composites=True))
        return dict(zip(names, outputs, strict=True))

    return run


def complete(ids: Mapping[str, Any], tables: Iterable[str]) -> dict[str, Any]:
    """Table to its ids [n]; tables that were not called have none."""
    return {name: ids[name] if name in ids else tf.zeros([0], tf.int64) for name in tables}


def out_of_range(table: TableSpec, ids: Ids) -> str:
    """Describe ids that are negative or not below `input_dim`; empty if there are none."""
    # As unsigned numbers the negative ones are the largest.
    if not table.input_dim or not len(ids) or ids.view(np.uint64).max() < table.input_dim:
        return ""
    wrong = np.unique(ids[(ids < 0) | (ids >= table.input_dim)])
    shown = ", ".join(map(str, wrong[:_SHOWN])) + (", …" if len(wrong) > _SHOWN else "")
    return f"the embedding layer {table.name!r}: ids are not in [0, {table.input_dim}), its input_dim: {shown}"


def _check_origin(graph: Any, recorded: Recorded, changing: Iterable[Any]) -> None:
    """Refuse ids that depend on rows, changing variables or chance: they could not be known before the pull."""
    handles = {id(variable.value.handle): variable.path for variable in changing}
    variables = {id(inner.op): handles[id(outer)] for outer, inner in graph.captures if id(outer) in handles}
    rows = {id(answer.op) for answer in recorded.answers}
    for table, calls in recorded.ids.items():
        for op in _origins(calls):
            if id(op) in rows:
                cause = "the rows of an embedding"
            elif id(op) in variables:
                cause = f"the variable {variables[id(op)]}, which changes from step to step"
            elif stateful_random([op.type]):
                cause = f"the random operation {op.type}"
            else:
                continue
            raise ModelDefinitionError(
                f"The ids of the embedding layer {table!r} depend on {cause}.",
                "Let ids follow from the features alone, or keep the table in the workers: a larger "
                "--embedding_threshold.",
            )


def _origins(tensors: Iterable[Any]) -> Iterator[Any]:
    """All operations whose values the tensors are made from."""
    seen: set[int] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if id(op) not in seen:
            seen.add(id(op))
            yield op
            if op.type not in _SHAPES:
                waiting.extend(tensor.op for tensor in op.inputs)
