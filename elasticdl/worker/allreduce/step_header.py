"""The header that members of a group exchange before every step: one line of int64 numbers per member.

A header contains the minibatches that its member brings, the newest group that it knows, and its requests.  The headers
of all members determine the step (`StepPlan`), and which members leave (`Departures`).  `StepParts` is the port of a
member's contributions.
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
    EVALUATION = 1  # all members run evaluation tasks, instead of a step
    LEAVING = 2  # it leaves now: the others need a new group
    SHARING = 4  # rank 0: it has leases to share
    FAILED = 8  # user code raised here on a minibatch of rank 0's lease
    CHECKPOINT = 16  # rank 0: a checkpoint is due, send the optimizer's state here
    OVER = 32  # the master says that the job is over
    LAST = 128  # all data are trained: write the last checkpoint before the training ends
    ENDING = 64  # it got SIGTERM and will leave soon; at once if all have got it
    AGAIN = 512  # it reduces once more in the current step
    METRIC = 256  # a script gives a metric to its scheduler: exchange it, instead of a step
    CHECK = 1024  # a script asks whether any member has set the trigger: TRIGGER answers, instead of a step
    TRIGGER = 2048  # this member has set the trigger


_LEAVING_SOON = StepFlag.LEAVING | StepFlag.ENDING


@dataclass(frozen=True, slots=True)
class BatchRef:
    """A minibatch that a member brings to a step.

    Attributes:
        num_records: The weight of the minibatch in the step.
    """

    name: MinibatchName
    num_records: int


@dataclass(frozen=True, slots=True)
class StepProposal:
    """The header of one member.

    Attributes:
        version: Version of the newest group that the member knows.
    """

    version: int
    wishes: StepFlag = StepFlag.NOTHING
    parts: tuple[BatchRef, ...] = ()

    def numbers(self, most_parts: int) -> npt.NDArray[np.int64]:
        """Return the header as numbers; the length depends on `most_parts` only."""
        line = np.zeros(_NUM_FIXED + _NUM_OF_PART * most_parts, np.int64)
        line[:_NUM_FIXED] = self.version, self.wishes, len(self.parts)
        for k, part in enumerate(self.parts):
            start = _NUM_FIXED + _NUM_OF_PART * k
            line[start : start + _NUM_OF_PART] = part.name.epoch, part.name.task, part.name.n, part.num_records
        return line

    @classmethod
    def of(cls, line: npt.NDArray[np.int64]) -> StepProposal:
        """Parse the result of `numbers`."""
        version, wishes, count = line[:_NUM_FIXED].tolist()
        rest = line[_NUM_FIXED : _NUM_FIXED + _NUM_OF_PART * count].reshape(count, _NUM_OF_PART).tolist()
        return cls(version, StepFlag(wishes), tuple(BatchRef(MinibatchName(*row[:3]), row[3]) for row in rest))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step that all members have agreed on.

    Attributes:
        parts: The minibatches of each member, by rank; each name occurs once, and none is in the model.
        wishes_by_rank: The requests of each member.
    """

    parts: tuple[tuple[BatchRef, ...], ...]
    rank: int
    wishes_by_rank: tuple[StepFlag, ...]

    @classmethod
    def of(cls, headers: Sequence[StepProposal], rank: int) -> StepPlan:
        """Return the plan that follows from the headers; it is the same in every member.

        Two members may bring the same minibatch, one of them under a lease that it has lost without knowing it: the
        minibatch of the lower rank counts.

        Args:
            headers: The headers of all members, by rank.
            rank: Rank of this member.
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
        """The requests of all members together."""
        return reduce(or_, set(self.wishes_by_rank))  # mostly all are equal, and there is nothing to combine

    @property
    def wishes_of_each(self) -> StepFlag:
        """The requests that every member has made."""
        return reduce(and_, set(self.wishes_by_rank))

    @property
    def ends_all(self) -> bool:
        """Whether all members got SIGTERM before the end of the job."""
        return StepFlag.ENDING in self.wishes_of_each and StepFlag.OVER not in self.wishes

    def first_with(self, wish: StepFlag) -> int:
        """Return the lowest rank that has made a request."""
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
        """The number of records of the whole step."""
        return sum(part.num_records for part in self.all_parts)

    def scale(self, part: BatchRef) -> float:
        """Return the weight of a part's mean gradient in the mean gradient of the step."""
        return part.num_records / self.num_records if part.num_records else 0.0


class StepParts(Protocol):
    """A member's contributions to the steps of its group.  Called by the main thread, in the order of a step.

    Attributes:
        wish: Requests for the next header, in addition to those of the loop.
    """

    wish: StepFlag

    @property
    def is_over(self) -> bool:
        """Whether there are no more data."""
        ...

    def entered(self) -> None:
        """Note that a group was entered; the ledger may have changed."""
        ...

    def offer(self, patience_s: float) -> list[BatchRef]:
        """Return the parts that this member offers for the next step; wait up to `patience_s` if it has none."""
        ...

    def agree(self, plan: StepPlan) -> bool:
        """Return, after the headers, whether the plan is a step.  May exchange more with the other members."""
        ...

    def reported(self, plan: StepPlan) -> Sequence[BatchRef]:
        """Return the parts of a step that this member reports to the master."""
        ...


class Departures:
    """Tracks which members of a group leave or are gone, and whether this one ends last.

    The processes of a pod end together.

    Attributes:
        is_last: See `GroupSession.is_last`; False before the first group.
        is_alone: See `GroupSession.is_alone`; False before the first group.
    """

    def __init__(self) -> None:
        self._pods: Sequence[int] = ()
        self._rank = 0
        self._leaving: set[int] = set()  # pods, from the newest headers
        self.is_last = self.is_alone = False

    def entered(self, pods: Sequence[int], rank: int) -> None:
        """Begin with a new group.

        Args:
            pods: The pod of each member, by rank.
            rank: Rank of this member.
        """
        self._pods, self._rank, self._leaving = pods, rank, set()
        self._judge(set())

    def planned(self, plan: StepPlan) -> None:
        """Update from the headers: all members are alive, and their requests are known."""
        self._leaving = self.leaving(plan)
        self._judge(set())

    def lost(self, ranks: Collection[int | None]) -> None:
        """Note that members are gone; if one of them was to write the last checkpoint, choose another.

        Args:
            ranks: The members that are gone.  None, unknown ranks, and members in this process's pod are ignored.
        """
        pods = {pod for rank, pod in enumerate(self._pods) if rank in ranks} - {self._pods[self._rank]}
        if pods:
            self._judge(pods)

    def leaving(self, plan: StepPlan) -> set[int]:
        """Return the pods that leave now or soon: what ends the group may also cut short their last second."""
        pods = zip(self._pods, plan.wishes_by_rank, strict=True)
        return {pod for pod, wishes in pods if wishes and wishes & _LEAVING_SOON}

    def _judge(self, lost: set[int]) -> None:
        """Set `is_last` and `is_alone`.

        If all pods leave, rank 0 is the last one; if a single pod stays, the first process of it.

        Args:
            lost: The pods that are gone; never the pod of this process.
        """
        pods = self._pods
        staying = set(pods) - lost - self._leaving or {next(pod for pod in pods if pod not in lost)}
        self.is_last = len(staying) == 1 and pods.index(*staying) == self._rank
        # Another process of the same pod may hold one step more.
        self.is_alone = all(pod in lost for rank, pod in enumerate(pods) if rank != self._rank)
