"""How a model travels to the process that exports it: messages and arrays through a pipe, each read once, in order.

A message is a little-endian u64 and as many bytes of JSON; an array is its bytes alone, its size being known by then.
A chunk of a table is the u64 count of its ids, the ids, and their rows; the count 0 ends the table.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, InitialRow, TableRows

_COUNT = struct.Struct("<Q")


class StreamEnded(Exception):
    """The other end is gone."""


class ExportWriter:
    """Raises `BrokenPipeError` after the reader has gone."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def message(self, **values: Any) -> None:
        encoded = json.dumps(values).encode()
        self._count(len(encoded))
        self._pipe.write(encoded)

    def array(self, values: npt.NDArray[Any]) -> None:
        self._pipe.write(_bytes(np.ascontiguousarray(values)))

    def table(self, table: TableRows) -> None:
        self.message(table=table.name, num_rows=table.num_rows, dim=table.dim, initial=asdict(table.initial))
        for ids, rows in table.chunks:
            if len(ids):
                self._count(len(ids))
                self.array(ids)
                self.array(rows)
        self._count(0)

    def end(self) -> None:
        """No more tables."""
        self.message(end=True)
        self._pipe.flush()

    def _count(self, count: int) -> None:
        self._pipe.write(_COUNT.pack(count))


class ExportReader:
    """Raises `StreamEnded` where the stream ends too early."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def message(self) -> dict[str, Any]:
        encoded = bytearray(self._count())
        self._fill(memoryview(encoded))
        decoded: dict[str, Any] = json.loads(encoded)
        return decoded

    def floats(self, *shape: int) -> Floats:
        values = np.empty(shape, np.float32)
        self._fill_array(values)
        return values

    def tables(self) -> Iterator[TableRows]:
        """Each must be read to its end before the next."""
        while "table" in (message := self.message()):
            name, num_rows, dim = message["table"], message["num_rows"], message["dim"]
            yield TableRows(name, dim, num_rows, self._chunks(dim), InitialRow(**message["initial"]))

    def _chunks(self, dim: int) -> Iterator[tuple[Ids, Floats]]:
        while (count := self._count()) > 0:
            ids = np.empty(count, np.int64)
            self._fill_array(ids)
            yield ids, self.floats(count, dim)

    def _count(self) -> int:
        encoded = bytearray(_COUNT.size)
        self._fill(memoryview(encoded))
        return int(_COUNT.unpack(encoded)[0])

    def _fill_array(self, values: npt.NDArray[Any]) -> None:
        self._fill(_bytes(values))

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            count = self._pipe.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise StreamEnded
            buffer = buffer[count:]


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
