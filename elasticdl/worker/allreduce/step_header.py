"""The header that members of a group exchange before every step: one line of int64 numbers per member.

A header names the minibatches that its member brings, the newest group that it knows, and its requests.  From those of
all members follow the step (`StepPlan`), and which members leave (`Departures`).  `StepParts`: the port of what a
member brings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import reduce
from operator import and_, or_
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elasticdl.ps.applied import MinibatchName

_NUM_FIXED = 3  # version, wishes, number of parts
_NUM_OF_PART = 4


class StepFlag(IntFlag):
    """Requests of a member to all others."""

    NOTHING = 0
    EVALUATION = 1  # all work evaluation tasks off, instead of a step
    LEAVING = 2  # it goes away now: the others need a new group
    SHARING = 4  # rank 0: it has leases to share
    FAILED = 8  # user code raised at this member on a minibatch of rank 0's lease
    CHECKPOINT = 16  # rank 0: bring the optimizer's state here, a checkpoint is due
    OVER = 32  # the master says that the job is over
    LAST = 128  # all is trained: the last checkpoint is to be whole before training ends
    ENDING = 64  # it was asked to end, and leaves soon: at once if all are
    AGAIN = 512  # it reduces once more in the present step
    METRIC = 256  # a script's scheduler is given a metric: exchange it, instead of a step
    CHECK = 1024  # a script asks whether one of them has set the trigger: this header says so, instead of a step
    TRIGGER = 2048  # it has


_LEAVING_SOON = StepFlag.LEAVING | StepFlag.ENDING


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A minibatch that a member brings to a step.

    Attributes:
        num_records: its weight.
    """

    name: MinibatchName
    num_records: int


@dataclass(frozen=True, slots=True)
class StepProposal:
    """One member's line.

    Attributes:
        version: of the newest group it knows.
    """

    version: int
    wishes: StepFlag = StepFlag.NOTHING
    parts: tuple[BatchRef, ...] = ()

    def numbers(self, most_parts: int) -> npt.NDArray[np.int64]:
        """The line, of the same length for every header with the same `most_parts`."""
        line = np.zeros(_NUM_FIXED + _NUM_OF_PART * most_parts, np.int64)
        line[:_NUM_FIXED] = self.version, self.wishes, len(self.parts)
        for k, part in enumerate(self.parts):
            start = _NUM_FIXED + _NUM_OF_PART * k
            line[start : start + _NUM_OF_PART] = part.name.epoch, part.name.task, part.name.n, part.num_records
        return line

    @classmethod
    def of(cls, line: npt.NDArray[np.int64]) -> StepProposal:
        """The inverse of `numbers`."""
        version, wishes, count = line[:_NUM_FIXED].tolist()
        rest = line[_NUM_FIXED : _NUM_FIXED + _NUM_OF_PART * count].reshape(count, _NUM_OF_PART).tolist()
        return cls(version, StepFlag(wishes), tuple(BatchRef(MinibatchName(*row[:3]), row[3]) for row in rest))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that all members have agreed on.

    Attributes:
        parts: by rank; every name once, and none that the model holds.
        wishes_by_rank: of each member.
    """

    parts: tuple[tuple[BatchRef, ...], ...]
    rank: int
    wishes_by_rank: tuple[StepFlag, ...]

    @classmethod
    def of(cls, headers: Sequence[StepProposal], rank: int) -> StepPlan:
        """Return the plan that follows from the headers, by rank; the same in every member.

        Two members may bring the same minibatch, one of them under a lease that it has lost without knowing it yet:
        the lower rank's counts.
        """
        seen: set[MinibatchName] = set()
        parts = []
        for header in headers:
            own = []
            for part in header.parts:
                if part.name not in seen:
                    seen.add(part.name)
                    own.append(part)
            parts.append(tuple(own))
        return cls(tuple(parts), rank, tuple(header.wishes for header in headers))

    @property
    def wishes(self) -> StepFlag:
        """Of all members together."""
        return reduce(or_, set(self.wishes_by_rank))  # as a rule there is one, and nothing to combine

    @property
    def wishes_of_each(self) -> StepFlag:
        """The wishes that every member has."""
        return reduce(and_, set(self.wishes_by_rank))

    @property
    def ends_all(self) -> bool:
        """Whether all members were asked to end before the end of the job."""
        return StepFlag.ENDING in self.wishes_of_each and StepFlag.OVER not in self.wishes

    def first_with(self, wish: StepFlag) -> int:
        """The lowest rank that wants something."""
        return next(rank for rank, wishes in enumerate(self.wishes_by_rank) if wishes & wish)

    @property
    def own(self) -> tuple[BatchRef, ...]:
        """This member's parts."""
        return self.parts[self.rank]

    @property
    def all_parts(self) -> list[BatchRef]:
        return [part for parts in self.parts for part in parts]

    @property
    def num_records(self) -> int:
        """Of the whole step."""
        return sum(part.num_records for part in self.all_parts)

    def scale(self, part: BatchRef) -> float:
        """The weight of a part's mean gradient in that of the step."""
        return part.num_records / self.num_records if part.num_records else 0.0


class StepParts(Protocol):
    """The part of a member in the steps of its group.  Called by the main thread, in the order of a step.

    Attributes:
        wish: for the next header, beside those of the loop.
    """

    wish: StepFlag

    @property
    def is_over(self) -> bool:
        """There are no more data."""
        ...

    def entered(self) -> None:
        """A group has been entered: the ledger may be another one."""
        ...

    def offer(self, patience_s: float) -> list[BatchRef]:
        """Return the parts that this member offers for the next step; wait at most `patience_s` if it has none."""
        ...

    def agree(self, plan: StepPlan) -> bool:
        """After the headers: whether the plan is one of a step.  May exchange more with the other members."""
        ...

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        """Return the parts of a step that this member reports to the master."""
        ...


class Departures:
    """Which members of a group leave or are gone, and whether this one ends last.  The processes of a pod end together.

    Attributes:
        is_last: see `GroupSession.is_last`; False before the first group.
        is_alone: see `GroupSession.is_alone`; likewise.
    """

    def __init__(self) -> None:
        self._pods: Sequence[int] = ()
        self._rank = 0
        self._leaving: set[int] = set()  # pods, as of the newest header
        self.is_last = self.is_alone = False

    def entered(self, pods: Sequence[int], rank: int) -> None:
        """A group has begun.

        Args:
            pods: of its members, by rank.
        """
        self._pods, self._rank, self._leaving = pods, rank, set()
        self._judge(set())

    def planned(self, plan: StepPlan) -> None:
        """All members are there, and their wishes are known."""
        self._leaving = self.leaving(plan)
        self._judge(set())

    def lost(self, ranks: Collection[int | None]) -> None:
        """Members are gone: if one of them was to write the last checkpoint, another one is.

        Args:
            ranks: those of no member do not count, nor does the own pod.
        """
        pods = {pod for rank, pod in enumerate(self._pods) if rank in ranks} - {self._pods[self._rank]}
        if pods:
            self._judge(pods)

    def leaving(self, plan: StepPlan) -> set[int]:
        """Return the pods that leave, now or soon: the cause of the group's end may end their last second, too."""
        pods = zip(self._pods, plan.wishes_by_rank, strict=True)
        return {pod for pod, wishes in pods if wishes and wishes & _LEAVING_SOON}

    def _judge(self, lost: set[int]) -> None:
        """Rank 0 is the last one if all pods leave, else the first process of the only one that stays.

        Args:
            lost: pods that are gone, another one than that of this process.
        """
        pods = self._pods
        staying = set(pods) - lost - self._leaving or {next(pod for pod in pods if pod not in lost)}
        self.is_last = len(staying) == 1 and pods.index(*staying) == self._rank
        # A process beside this one in its pod may hold a step more than it does.
        self.is_alone = all(pod in lost for rank, pod in enumerate(pods) if rank != self._rank)
