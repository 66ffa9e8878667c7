"""PackedColumns: numbers of each task of an epoch as the journal keeps them: small, and packed only where they change.

They are packed in the order in which tasks are granted.  So those that are done come first and those that are not
begun last, and both are long runs of one number: a million tasks take some kilobytes in every state of the epoch, where
in the order of the data they took up to one megabyte, as much as a ConfigMap holds.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

_CHUNK = 1 << 14  # tasks: what is packed again when one of them changes, a few milliseconds


class PackedColumns:
    """Arrays with one number a task, which their owner changes.

    Args:
        order: of the tasks: the same in every life of the master.
        columns: by name.
    """

    def __init__(self, order: Sequence[int], columns: Mapping[str, array[int]]) -> None:
        self._order = array("i", order)
        self._places = array("i", bytes(self._order.itemsize * len(order)))
        for place, task in enumerate(order):
            self._places[task] = place
        num_chunks = -(-len(order) // _CHUNK)
        self._columns = columns
        self._packed = {name: [""] * num_chunks for name in columns}
        self._changed = set(range(num_chunks))

    def changed(self, task: int) -> None:
        """A number of this task has changed."""
        self._changed.add(self._places[task] // _CHUNK)

    def pack(self) -> dict[str, list[str]]:
        """Return all columns, of JSON's types only."""
        for chunk in self._changed:
            tasks = self._order[chunk * _CHUNK : (chunk + 1) * _CHUNK]
            for name, column in self._columns.items():
                numbers = array(column.typecode, map(column.__getitem__, tasks))
                self._packed[name][chunk] = base64.b64encode(zlib.compress(numbers.tobytes())).decode()
        self._changed.clear()
        return {name: list(chunks) for name, chunks in self._packed.items()}

    def unpack(self, saved: Mapping[str, Any]) -> dict[str, array[int]]:
        """Return the columns of a journal by name; one that an older version did not have is as it is now.

        Older versions packed each column whole, in the order of the tasks' numbers.
        """
        found = {}
        for name, column in self._columns.items():
            packed = saved.get(name)
            if packed is None:
                found[name] = column
            elif isinstance(packed, str):
                found[name] = _unpack(packed, column.typecode)
            else:
                found[name] = array(column.typecode, column)
                numbers = (number for chunk in packed for number in _unpack(chunk, column.typecode))
                for task, number in zip(self._order, numbers, strict=True):
                    found[name][task] = number
        return found


def _unpack(text: str, kind: str) -> array[int]:
    values = array(kind)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    return values
