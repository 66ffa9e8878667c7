"""The group of a single process without a master, and the ports of a group for a script.

There is one port per client of the group; `LoneGroup` and `GroupSession` implement all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from elasticdl.collective import Reduction
from elasticdl.ps.applied import MinibatchName
from elasticdl.worker.allreduce.group_session import GroupEnded, ReplicaState
from elasticdl.worker.allreduce.replica import EndingGroup, Membership
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan, StepProposal
from elasticdl.worker.ledger import Ledger


class SharesGroup(Membership, Protocol):
    """The part of `GroupSession` used to choose the minibatches of a script."""

    most_parts: int

    def is_proven(self, name: MinibatchName) -> bool: ...


class GradientGroup(Protocol):
    """The part of `GroupSession` that sums a script's gradients."""

    def begin_reduce(self, buffer: Any) -> Reduction: ...

    def continue_step(self) -> None: ...

    def finish_reduce(self, reductions: Sequence[Reduction]) -> None: ...

    def abandon(self, reason: str, is_model_whole: bool = True) -> GroupEnded: ...


class MetricGroup(Membership, Protocol):
    """The part of `GroupSession` that agrees on the metrics of a script's schedulers."""

    def gather(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...


class StepGroup(EndingGroup, SharesGroup, GradientGroup, MetricGroup, Protocol):
    """The part of `GroupSession` that a script's controller uses."""

    @property
    def is_outdated(self) -> bool: ...

    def start(self) -> None: ...

    def enter(self) -> bool: ...

    def plan_step(self, parts: Sequence[BatchRef] = (), wishes: StepFlag = StepFlag.NOTHING) -> StepPlan: ...

    def commit(self, plan: StepPlan, reported: Sequence[BatchRef] | None = None) -> None: ...

    def take_confirmed(self) -> list[MinibatchName]: ...


class LoneGroup:
    """A group of one member, which cannot be lost; see `GroupSession`."""

    def __init__(self, state: ReplicaState) -> None:
        self.ledger = Ledger()
        self.most_parts = 1
        self.rank = 0
        self.size = 1
        self.is_last = self.is_alone = self.holds_all = True
        self.has_left = self.is_outdated = False
        self._state = state
        self._has_begun = False
        self._confirmed: list[MinibatchName] = []

    def start(self) -> None:
        """Do nothing: there is no master that changes the group."""

    def enter(self) -> bool:
        if not self._has_begun:
            self._has_begun = True
            self.ledger = self._state.start_over().ledger
        return True

    def shut_out(self) -> bool:
        """Return False: it never waits for a group."""
        return False

    def leave(self, reason: str = "") -> None:
        """Do nothing: there is no other member."""

    def abandon(self, reason: str, is_model_whole: bool = True) -> GroupEnded:
        self.holds_all = self.holds_all and is_model_whole
        return GroupEnded(reason)

    def plan_step(self, parts: Sequence[BatchRef] = (), wishes: StepFlag = StepFlag.NOTHING) -> StepPlan:
        return StepPlan.of([StepProposal(0, wishes, tuple(parts))], 0)

    def collect(self) -> dict[str, npt.NDArray[Any]]:
        return {}

    def part(self) -> bool:
        """Return True: there is no other member."""
        return True

    def begin_reduce(self, buffer: Any) -> Reduction:
        return Reduction(cast(Any, None), (), buffer)

    def continue_step(self) -> None:
        """Do nothing: there is no other member."""

    def finish_reduce(self, reductions: Sequence[Reduction]) -> None:
        """Do nothing: there is no other member."""

    def commit(self, plan: StepPlan, reported: Sequence[BatchRef] | None = None) -> None:
        for part in plan.all_parts:
            self.ledger.applied.add(part.name)
            self.ledger.applied.num_applies += 1
        self.ledger.steps += 1
        self.ledger.num_records += plan.num_records
        self._confirmed += [part.name for part in plan.all_parts]

    def is_proven(self, name: MinibatchName) -> bool:
        return name in self.ledger.applied

    def take_confirmed(self) -> list[MinibatchName]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def gather(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return numbers[np.newaxis]

    def share(self, data: bytes | None, source: int = 0) -> bytes:
        assert data is not None
        return data
