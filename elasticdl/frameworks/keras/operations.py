"""Which operations a traced function consists of: random ones and Python ones want care."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

_log = logging.getLogger("elasticdl.keras")

_STATEFUL_RANDOM = re.compile(
    r"Random(?!Dataset)|Rng|Multinomial|TruncatedNormal|SampleDistortedBoundingBox|Stateful(Uniform|Standard|Truncated)"
)
_PYTHON = re.compile(r"PyFunc")
_CONTROL_FLOW = re.compile(r"(Stateless)?(If|Case|While)$|For$|(Ref)?(Switch|Merge|Enter|Exit|NextIteration)$")
_DATASET = re.compile(r"_?(?:Parallel|Legacy)?(\w+?)(?:Dataset)?(?:V\d)?$")
_ONE_FOR_ONE = frozenset(  # or undone by `unbatch`
    {"assert_cardinality", "assert_next", "batch", "cache", "global_shuffle", "map", "options", "padded_batch"}
    | {"prefetch", "rebatch", "restructured", "scan", "shuffle", "snapshot", "variant"}
)
_SHUFFLING = frozenset({"shuffle", "global_shuffle", "shuffle_and_repeat", "directed_interleave"})
_SLOW_WITH_XLA = re.compile(r"Conv\dD|DepthwiseConv|While$|StatelessWhile$")


def operations_of_graph(graph: Any) -> set[str]:
    """Names of the operations of a graph, functions inside it included."""
    definition = graph.as_graph_def()
    found = {node.op for node in definition.node}
    for function in definition.library.function:
        found.update(node.op for node in function.node_def)
    return found


def operations_of_dataset(dataset: Any) -> set[str]:
    """Names of the operations of the functions of a dataset."""
    return {op for function in dataset._functions() for op in operations_of_graph(function.function.graph)}


def changing_the_count(dataset: Any) -> list[str]:
    """The methods of tf.data by which a dataset may have more or fewer elements than its source, from there on.

    Whether they do depends on their arguments and on the data: ``take(10**9)`` changes nothing.
    """
    methods = list(dict.fromkeys(_methods(dataset)))
    # Where nothing else does it, a map over batches may have changed their length.
    return [name for name in methods if name not in (*_ONE_FOR_ONE, "unbatch")] or [
        name for name in methods if name == "unbatch"
    ]


def _methods(dataset: Any) -> Iterator[str]:
    inputs = dataset._inputs()
    for part in inputs:
        yield from _methods(part)
    named = _DATASET.match(type(dataset).__name__)
    if inputs and named is not None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", named[1]).lower()
        drops = tf.get_static_value(getattr(dataset, "_drop_remainder", None)) if name.endswith("batch") else False
        yield f"{name}(drop_remainder=True)" if drops else name


def unrepeatable(dataset: Any) -> list[str]:
    """Return the methods and operations of a dataset by which two passes over it differ."""
    found = [name for name in _methods(dataset) if name in _SHUFFLING]
    operations = {op for part in _chain(dataset) for op in operations_of_dataset(part)}
    return list(dict.fromkeys([*found, *stateful_random(operations)]))


def _chain(dataset: Any) -> Iterator[Any]:
    yield dataset
    for part in dataset._inputs():
        yield from _chain(part)


def stateful_random(operations: Iterable[str]) -> list[str]:
    """Those whose values depend on what was run before."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.match(op))


def not_vectorisable(operations: Iterable[str]) -> list[str]:
    """Those that mean something else, or nothing, for many records at once: anything random, anything in Python."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.search(op) or _PYTHON.search(op))


def has_control_flow(operations: Iterable[str]) -> bool:
    """Whether there are conditions or loops, which TensorFlow does not run in one thread."""
    return any(_CONTROL_FLOW.match(op) for op in operations)


def slow_with_xla(operations: Iterable[str]) -> str:
    """One of those that XLA runs slower on a CPU than TensorFlow does; empty: there is none."""
    return min((op for op in operations if _SLOW_WITH_XLA.match(op)), default="")


def warn_of_chance(operations: Iterable[str]) -> None:
    """Logs the random operations of a step that do not depend on its seed."""
    found = stateful_random(operations)
    if found:
        _log.warning(
            "The model or loss uses random operations (%s) whose values depend on what a worker did before; use "
            "keras.random with a SeedGenerator to get the same steps everywhere",
            ", ".join(found),
        )
