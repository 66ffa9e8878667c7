"""Counts of a PS since its start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elasticdl.rpc import elasticdl_pb2 as pb


def staleness_bin(staleness: int) -> int:
    """0, 1, 2, then 3-4, 5-8, 9-16 and so on."""
    return 0 if staleness <= 0 else (staleness - 1).bit_length() + 1


class PsCounters:
    """Counters; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted = pb.PsLoad()
        self._staleness: list[int] = []

    @contextmanager
    def call(self, bytes_received: int) -> Iterator[None]:
        """Around the work for a call."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            with self._lock:
                self._counted.bytes_received += bytes_received
                self._counted.busy_seconds += seconds

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self._counted.bytes_sent += num_bytes

    def pushed(self, num_rows: int, staleness: int) -> None:
        """A push that was applied."""
        place = staleness_bin(staleness)
        with self._lock:
            self._counted.pushes += 1
            self._counted.rows_pushed += num_rows
            self._staleness += [0] * (place + 1 - len(self._staleness))
            self._staleness[place] += 1

    def pulled(self, num_rows: int) -> None:
        with self._lock:
            self._counted.pulls += 1
            self._counted.rows_pulled += num_rows

    def refused(self) -> None:
        """A push that was too stale or too late."""
        with self._lock:
            self._counted.refused += 1

    def message(self, table_rows: int, table_bytes: int) -> pb.PsLoad:
        """All of it, with the size of the tables as it is now."""
        with self._lock:
            message = pb.PsLoad()
            message.CopyFrom(self._counted)
            message.staleness.extend(self._staleness)
        message.table_rows, message.table_bytes = table_rows, table_bytes
        return message
