"""Synchronous mode: the rounds that a worker carries from PS 0, which closes them, to the other PS.

What PS 0 tells a worker goes to every other PS, whatever that one has applied already: it may have got the worker's own
minibatch only after it had heard of its round.
"""

from __future__ import annotations

import threading

from elasticdl.rpc import elasticdl_pb2 as pb


class CarriedRounds:
    """Those of one partition, so of one life of PS 0.  Thread-safe."""

    def __init__(self, num_ps: int) -> None:
        self._lock = threading.Lock()
        self._applied = [0] * num_ps
        self._undelivered: list[pb.Rounds | None] = [None] * num_ps

    @property
    def known(self) -> int:
        """The newest round that every PS has applied."""
        with self._lock:
            return min(self._applied)

    def learn(self, rounds: pb.Rounds) -> None:
        """From PS 0: the round of a minibatch of this worker, and those after `known`."""
        with self._lock:
            self._applied[0] = max([self._applied[0], *(one.number for one in rounds.rounds)])
            for ps_id in range(1, len(self._undelivered)):
                self._undelivered[ps_id] = rounds

    def for_ps(self, ps_id: int) -> pb.Rounds | None:
        """What a PS must be told; None: nothing."""
        with self._lock:
            return self._undelivered[ps_id]

    def delivered(self, ps_id: int, rounds: pb.Rounds | None, applied_round: int) -> None:
        """A PS has applied rounds, and says which is the newest that it has applied."""
        with self._lock:
            self._applied[ps_id] = max(self._applied[ps_id], applied_round)
            if self._undelivered[ps_id] is rounds:
                self._undelivered[ps_id] = None
