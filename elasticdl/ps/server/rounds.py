"""Synchronous rounds: which minibatches make one update.  Pure: no locks, no clock, no gradients.

PS 0 closes rounds: a name is *confirmed* when a worker says that every PS holds its gradient, and enough confirmed
    names are a round.  Workers pass rounds on to the other PS.  From any round that it receives, a PS applies the names
    that it holds and has not applied, independent of the round's number.  So each name is applied once, even if rounds
    come twice, late or out of order.  Numbers only say which rounds need not be sent to a worker again.

So the log of closed rounds may be short.  A worker always receives the round of its own name; if that has left the log,
the name is confirmed again and closed in another round, which reaches the PS that hold the name and have not applied
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elasticdl.ps.applied import MinibatchName
from elasticdl.ps.server.model import Update, is_empty, unreached
from elasticdl.ps.wire import PushCall
from elasticdl.rpc import elasticdl_pb2 as pb

_KEPT = 1000  # rounds in the log: far more than workers have in flight


class RoundsOfPs0:
    """The log of closed rounds, and the names that wait for the next round.

    Attributes:
        newest: Number of the newest round; 0 before the first.
    """

    def __init__(self, grads_to_wait: int) -> None:
        self._grads_to_wait = grads_to_wait
        self._confirmed: dict[MinibatchName, None] = {}  # in order
        self._log: dict[int, tuple[MinibatchName, ...]] = {}
        self._round_of: dict[MinibatchName, int] = {}
        self.newest = 0

    @property
    def is_waiting(self) -> bool:
        """Whether some names are confirmed, but not enough for a round."""
        return bool(self._confirmed)

    def is_confirmed(self, name: MinibatchName) -> bool:
        return name in self._confirmed

    def is_closed(self, name: MinibatchName) -> bool:
        """Return whether a round in the log has a name."""
        return name in self._round_of

    def confirm(self, name: MinibatchName) -> None:
        self._confirmed[name] = None

    def withdraw(self, names: Iterable[MinibatchName] | None = None) -> None:
        """Withdraw confirmations; None: all."""
        for name in list(self._confirmed if names is None else names):
            self._confirmed.pop(name, None)

    def due(self, num_pushing: int | None) -> tuple[MinibatchName, ...]:
        """Return the names of the round that can be closed now; empty if none can.

        Args:
            num_pushing: Workers that may still confirm names; None: unknown.
        """
        enough = self._grads_to_wait if num_pushing is None else min(self._grads_to_wait, max(1, num_pushing))
        return tuple(self._confirmed) if len(self._confirmed) >= enough else ()

    def close(self, names: Sequence[MinibatchName]) -> None:
        """Log names as the next round."""
        self.withdraw(names)
        self.newest += 1
        self._log[self.newest] = tuple(names)
        self._round_of.update(dict.fromkeys(names, self.newest))
        for name in self._log.pop(self.newest - _KEPT, ()):
            if self._round_of[name] == self.newest - _KEPT:
                del self._round_of[name]

    def rounds_since(self, name: MinibatchName, known_round: int) -> list[pb.Round]:
        """Return the round of a closed name, and all rounds after `known_round` that are still in the log."""
        numbers = {self._round_of[name], *range(max(known_round, self.newest - _KEPT) + 1, self.newest + 1)}
        return [_message(number, self._log[number]) for number in sorted(numbers)]


def mean(pushes: Mapping[MinibatchName, PushCall]) -> Update | None:
    """Return one update by several minibatches, the mean of their gradients weighted by records; None if all are empty.

    A variable is updated if one minibatch reaches it; the gradients of the others count as zero.
    Rows of the same id are left to the update, which sums them.
    """
    given = [push for push in pushes.values() if not is_empty(push)]
    if len(given) < 2:
        return Update.of(given[0]) if given else None
    records = [max(1, push.header.num_records) for push in given]
    weights = [np.float32(count / sum(records)) for count in records]
    weighted = list(zip(given, weights, strict=True))
    dense = [(push.gradient, push.change, weight) for push, weight in weighted if push.header.dense]
    gradient = change = None
    for one_gradient, one_change, weight in dense:
        assert one_gradient is not None
        assert one_change is not None
        if gradient is None or change is None:
            gradient, change = one_gradient * weight, one_change * weight
        else:
            gradient += one_gradient * weight
            change += one_change * weight
    tables = dict.fromkeys(table for push in given for table, _, _ in push.rows)
    rows = []
    for table in tables:
        of_table = [(ids, sums * weight) for push, weight in weighted for name, ids, sums in push.rows if name == table]
        ids, sums = zip(*of_table, strict=True)
        rows.append((table, np.concatenate(ids), np.concatenate(sums)))
    rates = [push.header.learning_rate * float(weight) for push, weight in weighted]
    in_none = set.intersection(*(set(unreached(push)) for push in given if push.header.dense)) if dense else set()
    return Update(gradient, change, tuple(rows), sum(rates) if all(rates) else 0.0, tuple(sorted(in_none)))


def _message(number: int, names: Iterable[MinibatchName]) -> pb.Round:
    return pb.Round(number=number, names=[pb.MinibatchName(epoch=n.epoch, task=n.task, n=n.n) for n in names])
