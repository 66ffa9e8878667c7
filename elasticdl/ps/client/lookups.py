"""The ids of a minibatch as the parameter servers see them: unique, and grouped by the PS that owns them.

A `Lookup` is made once for each array of ids: the pull and the push of a minibatch share it, and so do tables that are
looked up by the same ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, Table
from elasticdl.kernels import _native
from elasticdl.ps.partition import Partition

Positions = npt.NDArray[np.int32]

_REMEMBERED = 64  # arrays of ids
_ENDS = 8  # ids at both ends of an array by which equal arrays are found


class IdsOutOfRange(ValueError):
    """Ids that a table does not have; the message names its layer."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ids [n] made unique.

    Attributes:
        unique: [U], those of PS 0 first.
        positions: of each of the n ids in `unique`; None: they are the unique ones, in order.
        bounds: PS k owns ``unique[bounds[k]:bounds[k + 1]]``.
    """

    unique: Ids
    positions: Positions | None
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, ids: Ids, partition: Partition) -> Lookup:
        unique, positions = _native.unique(np.ascontiguousarray(ids))
        if partition.num_ps == 1:
            return cls(unique, None if len(unique) == len(ids) else positions, (0, len(unique)))
        parts = partition.split(unique)
        order = np.concatenate(parts)
        places = np.empty(len(unique), np.int32)
        places[order] = np.arange(len(unique), dtype=np.int32)
        bounds = np.cumsum([0, *(len(part) for part in parts)])
        return cls(unique[order], places[positions], tuple(bounds.tolist()))

    def part(self, ps_id: int) -> slice:
        """Return the slice of `unique` that a PS owns."""
        return slice(self.bounds[ps_id], self.bounds[ps_id + 1])

    def expand(self, rows: Floats) -> Floats:
        """[U, dim] → [n, dim]."""
        return rows if self.positions is None else _native.gather(rows, self.positions)

    def sum(self, gradients: Floats) -> Floats:
        """[n, dim] → [U, dim]: gradients of the same id are added in their order."""
        if self.positions is None:
            return gradients
        return _native.sum_rows(np.ascontiguousarray(gradients), self.positions, len(self.unique))

    def check_range(self, table: str, input_dim: int) -> None:
        """
        Raises:
            IdsOutOfRange: some id is not in [0, input_dim).
        """
        if _native.all_within(self.unique, input_dim):
            return
        wrong = self.unique[(self.unique < 0) | (self.unique >= input_dim)]
        shown = ", ".join(str(one) for one in np.sort(wrong)[:5].tolist())
        raise IdsOutOfRange(
            f"embedding layer {table!r} was given ids that are not in [0, {input_dim}), its input_dim: {shown}"
            f"{' …' if len(wrong) > 5 else ''}"
        )


class RowLookups:
    """Makes lookups for one partition and remembers the newest.  Thread-safe."""

    def __init__(self, partition: Partition, tables: tuple[Table, ...]) -> None:
        self._partition = partition
        self._input_dims = {table.name: table.input_dim for table in tables if table.input_dim}
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[Ids, Lookup]] = OrderedDict()  # by id() of an array that is kept here

    def of(self, ids: Mapping[str, Ids], remember: bool = True) -> dict[str, Lookup]:
        """By table.

        Args:
            remember: the same arrays will come again.

        Raises:
            IdsOutOfRange: ids that a table does not have.
        """
        found: dict[str, Lookup] = {}
        alike: dict[bytes, list[tuple[Ids, Lookup]]] = {}
        for name, of_table in ids.items():
            found[name] = self._remembered(of_table) or self._made(of_table, alike)
            if remember:
                with self._lock:
                    self._known[id(of_table)] = of_table, found[name]
                    if len(self._known) > _REMEMBERED:
                        self._known.popitem(last=False)
            if name in self._input_dims:
                found[name].check_range(name, self._input_dims[name])
        return found

    def _remembered(self, ids: Ids) -> Lookup | None:
        with self._lock:
            known = self._known.get(id(ids))
        return None if known is None else known[1]

    def _made(self, ids: Ids, alike: dict[bytes, list[tuple[Ids, Lookup]]]) -> Lookup:
        key = len(ids).to_bytes(8, "little") + ids[:_ENDS].tobytes() + ids[-_ENDS:].tobytes()
        others = alike.setdefault(key, [])
        lookup = next((lookup for other, lookup in others if np.array_equal(other, ids)), None)
        if lookup is None:
            lookup = Lookup.of(ids, self._partition)
        others.append((ids, lookup))
        return lookup
