"""Parts in a table of a database: the rows of a task, in one transaction, when their lease is confirmed.

The first of --prediction_columns is the table's primary key; elasticdl.data.sql_output writes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from elasticdl.data.sql_output import OutputTable
from elasticdl.worker.inference.row_writers import Columns
from elasticdl.worker.input.batches import LeaseLost
from elasticdl.worker.leases import HeldLease


class OutputRows:
    """The rows of a task, in memory; see `RowWriter`."""

    def __init__(self) -> None:
        self._parts: list[Columns] = []

    def write(self, columns: Columns) -> None:
        self._parts.append(columns)

    def close(self) -> None:
        """Does nothing: the transaction comes later."""

    def columns(self) -> Columns:
        """Return all rows."""
        names = self._parts[0] if self._parts else ()
        return {name: np.concatenate([part[name] for part in self._parts]) for name in names}


class TableParts:
    """The parts of one job in one table; see `Parts`."""

    def __init__(self, url: str, key: str, confirm: Callable[[int], bool]) -> None:
        """
        Args:
            url: of the table, which is made with the first part.
            key: the column that is its primary key.
            confirm: `MasterLink.confirm`: whether a lease still counts.

        Raises:
            DataError: what the URL needs is not installed, or it names no table.
        """
        self._table = OutputTable(url, key)
        self._confirm = confirm

    @contextmanager
    def writing(self, held: HeldLease) -> Iterator[OutputRows]:
        """The rows of a task, to be written in the block.

        Raises:
            LeaseLost: another worker has the task by now.
            DataError: the database refuses them.
        """
        rows = OutputRows()
        yield rows
        if not self._confirm(held.id):
            raise LeaseLost
        if columns := rows.columns():
            self._table.replace(columns)
