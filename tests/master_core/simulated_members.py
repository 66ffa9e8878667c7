"""State of the simulated members of AllReduce groups: models, groups, and where each member is.

The members' models are the truth that the tests compare the core with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from simulated_processes import SimWorker

from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import WorkerGroup

Name = tuple[int, int, int]  # epoch, task, minibatch


@dataclass
class Model:
    """The model of a member: the steps that made it."""

    steps: list[tuple[Name, ...]] = field(default_factory=list)

    @property
    def names(self) -> set[Name]:
        return {name for step in self.steps for name in step}

    def apply(self, step: tuple[Name, ...]) -> None:
        assert not self.names & set(step), f"applied twice: {self.names & set(step)}"
        assert len(set(step)) == len(step)
        self.steps.append(step)

    def applied(self) -> CommittedSet:
        tasks: dict[tuple[int, int], list[int]] = {}
        for epoch, task, n in self.names:
            tasks.setdefault((epoch, task), []).append(n)
        found = [(epoch, task, 0, tuple(ns)) for (epoch, task), ns in tasks.items()]
        return CommittedSet.of(found, len(self.names))


class Where(Enum):
    """The activity of a member."""

    OUTSIDE = auto()  # until it has said that it is ready, and is called
    FORMING = auto()
    STANDINGS = auto()  # gathers the members' steps
    STATE = auto()  # gives or receives the model
    TELLING = auto()  # rank 0: the master must hear of the group
    HEADER = auto()
    REDUCE = auto()


@dataclass
class SimGroup:
    """The processes of one group, and what each has brought to each collective."""

    planned: WorkerGroup
    brought: dict[int, list[Any]] = field(default_factory=dict)  # by worker
    gone: set[int] = field(default_factory=set)  # died, left or gave up
    history: dict[int, tuple[tuple[Name, ...], ...]] = field(default_factory=dict)  # models by number of steps


@dataclass
class SimMember(SimWorker):
    model: Model = field(default_factory=Model)
    holds: bool = False
    where: Where = Where.OUTSIDE
    planned: WorkerGroup | None = None
    newest: WorkerGroup | None = None  # heard by its watch
    has_watch: bool = False
    left: int = 0
    reason: str = ""
    num_registrations: int = 0
    ready_at: int = -1  # the registration under which it has said that it is ready
    is_calling: bool = False  # waits for an answer to ReadyForGroup or GroupFormed
    since: float = 0.0
    position: int = 0  # collectives of the group that it has passed
    pending: list[Name] = field(default_factory=list)
    step: tuple[Name, ...] = ()
    own: tuple[Name, ...] = ()
    restored_from: str = ""
    source: int = 0
    receives: bool = False
    num_requests: int = 0

    @property
    def rank(self) -> int:
        assert self.planned is not None
        return next(k for k, m in enumerate(self.planned.members) if m.worker_id == self.id)
