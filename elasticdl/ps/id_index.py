"""From embedding ids to row numbers: an open-addressing hash table whose probes are whole-array operations.

It owns keys only; rows are numbered in order of creation and never removed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Ids
from elasticdl.ps.hashing import mix64

_SMALLEST = 1024  # places; always a power of two, at most half of them taken
_EMPTY = -1


class IdIndex:
    """Maps any int64 to its row number, vectorised (linear probing)."""

    def __init__(self) -> None:
        self._allocate(_SMALLEST)
        self._ids: Ids = np.empty(_SMALLEST // 2, np.int64)
        self.num_rows = 0

    @property
    def ids(self) -> Ids:
        """The ids [num_rows] by row number; a view."""
        return self._ids[: self.num_rows]

    def find(self, ids: Ids) -> Ids:
        """Row numbers [len(ids)]; -1 where there is no row."""
        places = self._places(ids)
        rows = self._rows[places]
        unsure = np.flatnonzero((self._keys[places] != ids) & (rows != _EMPTY))
        while unsure.size:
            there = (places[unsure] + 1) & self._mask
            places[unsure] = there
            found = self._rows[there]
            rows[unsure] = found
            unsure = unsure[(self._keys[there] != ids[unsure]) & (found != _EMPTY)]
        return rows

    def add(self, ids: Ids) -> Ids:
        """Numbers new rows, in the order of `ids`, which must be unique and without rows."""
        first, last = self.num_rows, self.num_rows + len(ids)
        if last > len(self._ids):
            grown = np.empty(max(last, 2 * len(self._ids)), np.int64)
            grown[:first] = self.ids
            self._ids = grown
        rows = np.arange(first, last, dtype=np.int64)
        self._ids[first:last] = ids
        self.num_rows = last
        if 2 * last > len(self._rows):
            self._allocate(1 << (4 * last - 1).bit_length())
            self._insert(self.ids, np.arange(last, dtype=np.int64))
        else:
            self._insert(ids, rows)
        return rows

    def _allocate(self, num_places: int) -> None:
        self._mask = np.int64(num_places - 1)
        self._keys: Ids = np.zeros(num_places, np.int64)
        self._rows: Ids = np.full(num_places, _EMPTY, np.int64)

    def _places(self, ids: Ids) -> Ids:
        return mix64(ids).view(np.int64) & self._mask

    def _insert(self, ids: Ids, rows: npt.NDArray[np.int64]) -> None:
        """Each round all pending ids try one place; of those that try the same free one, one gets it."""
        places = self._places(ids)
        while ids.size:
            free = np.flatnonzero(self._rows[places] == _EMPTY)
            wanted = places[free]
            self._rows[wanted] = rows[free]
            won = free[self._rows[wanted] == rows[free]]
            self._keys[places[won]] = ids[won]
            lost = np.ones(len(ids), np.bool_)
            lost[won] = False
            ids, rows = ids[lost], rows[lost]
            places = (places[lost] + 1) & self._mask
