"""Minibatches of a script's group with a fixed global batch: each is reported, under whatever lease it comes."""

from __future__ import annotations

from typing import Any

from elasticdl.api.data import Minibatch
from elasticdl.api.pytorch.alone import LoneGroup
from elasticdl.api.pytorch.shares import GlobalShares
from elasticdl.worker.ledger import Ledger, RestoredModel


class Data:
    """The reports so far."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def done(self, minibatch: Minibatch, loss: float | None = None) -> bool:
        self.told.append((minibatch.lease, minibatch.n))
        return False

    def undone(self, minibatch: Minibatch) -> bool:
        return True

    def holds(self, minibatch: Minibatch) -> bool:
        return True

    def has_rest_of(self, epoch: int, newest_lease: int) -> bool:
        return False

    def get_minibatch_count_per_epoch(self) -> int:
        return 4


class Drawer:
    """Has what a test puts there."""

    is_over = False

    def __init__(self) -> None:
        self.drawn: list[Minibatch] = []

    def take(self, timeout_s: float, num_waiting: int) -> list[Minibatch]:
        taken, self.drawn = self.drawn, []
        return taken


class Pipeline:
    """Makes nothing."""

    def ask(self, minibatch: Minibatch) -> None:
        pass

    def forget(self, name: Any) -> None:
        pass


class Start:
    """A model of initial values."""

    def start_over(self) -> RestoredModel:
        return RestoredModel(Ledger())


def drawn(lease: int, n: int) -> Minibatch:
    return Minibatch(lease, 0, 0, n, "", [n], ends_lease=n == 3)


def test_what_the_model_holds_of_a_lease_that_comes_later_is_reported_and_not_made_again() -> None:
    """The lease before was lost, and the last report on it was refused."""
    state: Any = Start()
    data: Any = Data()
    drawer: Any = Drawer()
    pipeline: Any = Pipeline()
    group = LoneGroup(state)
    shares = GlobalShares(data, drawer, pipeline, group, 2)
    assert group.enter()
    shares.entered()

    def made() -> list[int]:
        """Numbers of the minibatches of the next step."""
        plan = group.plan_step(shares.offer(0.0), shares.wish)
        while not shares.agree(plan):
            plan = group.plan_step(shares.offer(0.0), shares.wish)
        group.commit(plan, shares.reported(plan))
        shares.applied(plan)
        shares.confirmed(group.take_confirmed(), None)
        return [part.name.n for part in plan.all_parts]

    drawer.drawn = [drawn(1, n) for n in range(4)]
    assert made() == [0, 1]
    drawer.drawn = [drawn(2, n) for n in range(4)]
    assert made() == [2, 3]
    assert {n for lease, n in data.told if lease == 2} == {0, 1, 2, 3}
