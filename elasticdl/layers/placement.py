"""Where the rows of a model's embedding layers come from.

Owns the ambient placement under which a model is made, and a layer's requests for rows while a function is traced.
It never talks to a parameter server: rows enter and leave a compiled function as ordinary tensors.
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

    _keras_call_info_injected = True  # or Keras would put a page of its own around the message


class RowsNotFetched(LayerError):
    """A layer is called where the rows of its table were not fetched for."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A layer's requirements on its table.

    Attributes:
        input_dim: ids are in [0, input_dim); 0: any int64 is an id.
        regularizer: Keras regularizer of the rows of a minibatch; None: none.
        constraint: Keras constraint of the rows that an update touches; None: none.
    """

    name: str
    dim: int
    initializer: Any
    input_dim: int
    regularizer: Any = None
    constraint: Any = None


class Rows(Protocol):
    """Gives a layer the rows of its ids."""

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        """[n, dim] float32 for `ids` [n] int64."""
        ...


class Placement:
    """Places the tables of the layers made under it on the parameter servers.

    Outside of `using` a layer answers with zeros, which is all that building a model takes.
    """

    def __init__(self) -> None:
        self.tables: dict[str, TableSpec] = {}
        self._active = threading.local()

    def add(self, table: TableSpec) -> None:
        """Called by a layer when it is built.

        Raises:
            ModelDefinitionError: another layer has the name.
        """
        if table.name in self.tables:
            raise ModelDefinitionError(
                f"Two embedding layers of the model are named {table.name!r}.",
                "Give each a name of its own: its table on the parameter servers is called by it.",
            )
        self.tables[table.name] = table

    def remove(self, table: str) -> None:
        """The layer has a variable of its own after all."""
        del self.tables[table]

    @contextmanager
    def using(self, source: Rows) -> Iterator[None]:
        """While it lasts, layers called in this thread take their rows from `source`."""
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
    """Embedding layers made inside belong to `placement`; None: each has an ordinary variable of its own."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


def current_placement() -> Placement | None:
    """The placement of the innermost `embedding_placement`."""
    return _PLACEMENT.get()


class Recorded:
    """Writes down the ids of every call of every layer and answers with zeros."""

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
    """Rows handed in from outside: those of the k-th call of a layer are the k-th stretch of its table's."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        """
        Args:
            rows: table to [n, dim], for each id of each call, in order.
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
    """Whole tables, each a function of ids: for an exported model."""

    def __init__(self, tables: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._tables = tables

    def rows(self, table: str, ids: Tensor, dim: int) -> Tensor:
        return self._tables[table](ids)
