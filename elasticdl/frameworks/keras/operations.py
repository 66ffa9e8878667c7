"""Which operations a traced function consists of: random ones and Python ones want care."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_STATEFUL_RANDOM = re.compile(
    r"Random(?!Dataset)|Rng|Multinomial|TruncatedNormal|SampleDistortedBoundingBox|Stateful(Uniform|Standard|Truncated)"
)
_PYTHON = re.compile(r"PyFunc")


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


def stateful_random(operations: Iterable[str]) -> list[str]:
    """Those whose values depend on what was run before."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.match(op))


def not_vectorisable(operations: Iterable[str]) -> list[str]:
    """Those that mean something else, or nothing, for many records at once: anything random, anything in Python."""
    return sorted(op for op in operations if _STATEFUL_RANDOM.search(op) or _PYTHON.search(op))
