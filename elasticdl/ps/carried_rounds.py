"""Synchronous mode: the rounds that a worker carries from PS 0, which closes them, to the PS that still lack them."""

from __future__ import annotations

import threading

from elasticdl.rpc import elasticdl_pb2 as pb


class CarriedRounds:
    """Those of one partition, so of one life of PS 0.  Thread-safe."""

    def __init__(self, num_ps: int) -> None:
        self._lock = threading.Lock()
        self._applied = [0] * num_ps
        self._rounds = pb.Rounds()

    @property
    def known(self) -> int:
        """The newest round that every PS has applied."""
        with self._lock:
            return min(self._applied)

    def learn(self, rounds: pb.Rounds) -> None:
        """Rounds closed after `known`, in order."""
        with self._lock:
            self._rounds = rounds

    def for_ps(self, ps_id: int) -> pb.Rounds | None:
        """What a PS must be told; None: nothing."""
        with self._lock:
            lacking = [one for one in self._rounds.rounds if one.number > self._applied[ps_id]]
            return pb.Rounds(coordinator=self._rounds.coordinator, rounds=lacking) if lacking else None

    def applied(self, ps_id: int, number: int) -> None:
        """A PS says which round is the newest that it has applied."""
        with self._lock:
            self._applied[ps_id] = max(self._applied[ps_id], number)
