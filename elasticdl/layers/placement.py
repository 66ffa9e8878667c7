"""Decide where the rows of a model's embedding layers come from.

Owns the context (`embedding_placement`) in which a model is made, and a layer's requests for rows while a function is
traced.  It never talks to a parameter server: rows enter and leave a compiled function as ordinary tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from elasticdl.layers.functions import inlined
from elasticdl_client.errors import ModelDefinitionError

Tensor = Any  # TensorFlow is untyped here

_PLACEMENT: ContextVar[Placement | None] = ContextVar("elasticdl_embedding_placement", default=None)


class LayerError(ModelDefinitionError):
    """An error that a layer raises while it is called."""

    _keras_call_info_injected = True  # else Keras adds a page of text to the message


class RowsNotFetched(LayerError):
    """A layer was called outside of the code for which the rows of its table were fetched."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The table that a layer needs.

    Attributes:
        name: Name of the layer and of its table; unique in a model.
        dim: Length of a row.
        initializer: Keras initializer of the rows.
        input_dim: Ids are in [0, input_dim); 0: any int64 is an id.
        regularizer: Keras regularizer of the rows of a minibatch, if any.
        constraint: Keras constraint of the updated rows, if any.
    """

    name: str
    dim: int
    initializer: Any
    input_dim: int
    regularizer: Any = None
    constraint: Any = None


class Rows(Protocol):
    """A source of rows for layers."""

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        """Return the rows, float32 [n, dim], of `ids`, int64 [n]."""
        ...


class Placement:
    """Places the tables of layers on the parameter servers, if they are made inside `embedding_placement`.

    Outside of `using` a layer returns zeros; this is enough to build a model.
    """

    def __init__(self) -> None:
        self.tables: dict[str, TableSpec] = {}
        self._active = threading.local()

    def add(self, table: TableSpec) -> None:
        """Add the table of a layer; called when the layer is built.

        Raises:
            ModelDefinitionError: Another layer has the same name.
        """
        if table.name in self.tables:
            raise ModelDefinitionError(
                f"Two embedding layers of the model are named {table.name!r}.",
                "Give each a name of its own: its table on the parameter servers is called by it.",
            )
        self.tables[table.name] = table

    def remove(self, table: str) -> None:
        """Remove the table of a layer that uses its own variable instead."""
        del self.tables[table]

    @contextmanager
    def using(self, source: Rows) -> Iterator[None]:
        """Return a context in which layers called in this thread take their rows from `source`."""
        previous = self._source()
        self._active.source = source
        try:
            with inlined():
                yield
        finally:
            self._active.source = previous

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        """See `Rows`."""
        source = self._source()
        return tf.zeros([tf.size(ids), dim]) if source is None else source.rows(table, ids, dim)

    def _source(self) -> Rows | None:
        return getattr(self._active, "source", None)


@contextmanager
def embedding_placement(placement: Placement | None) -> Iterator[None]:
    """Return a context in which new embedding layers belong to `placement`; None: each has its own variable."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def current_placement() -> Placement | None:
    """Return the placement of the innermost `embedding_placement`, if any."""
    return _PLACEMENT.get()


class Recorded:
    """A source that records the ids of every call of every layer, and returns zeros."""

    def __init__(self) -> None:
        self.ids: dict[str, list[Tensor]] = {}
        self.answers: list[Tensor] = []
        self._graph = tf.compat.v1.get_default_graph()

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        if ids.graph is not self._graph:
            raise LayerError(
                f"The embedding layer {table!r} is called inside a loop or a condition of the graph.",
                "Call it on the whole batch, outside of tf.while_loop, tf.cond, tf.map_fn, TimeDistributed and so on; "
                "or keep it in the workers, with a larger --embedding_threshold.",
            )
        self.ids.setdefault(table, []).append(ids)
        answer = tf.zeros([tf.size(ids), dim])
        self.answers.append(answer)
        return answer


class Given:
    """A source of rows fetched before: each call of a layer takes the next rows of its table."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        """
        Args:
            rows: Maps each table to [n, dim]: one row for each id of each call, in order.
        """
        self._rows = rows
        self._start: dict[str, Tensor] = {}

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        rows, count = self._rows[table], ids.shape[0]
        start = self._start.get(table, 0)
        end = start + (tf.size(ids) if count is None else count)
        self._start[table] = end
        return rows if isinstance(end, int) and (start, end) == (0, rows.shape[0]) else rows[start:end]


class Served:
    """A source for an exported model: each table is a function from ids to rows."""

    def __init__(self, tables: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._tables = tables

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        return self._tables[table](ids)
