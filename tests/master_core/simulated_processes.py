"""The processes of a simulated job: pods, parameter servers, workers and what they hold; no process and no clock.

Parameter servers are the truth that the tests compare the core with.  They keep to the protocol of architecture §4:
fencing by lease, incarnations, idempotent names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import Lease, PodState, PsPartition
from elasticdl.protocol import Role

Names = dict[tuple[int, int], set[int]]


@dataclass
class SimPod:
    name: str
    role: Role
    index: int
    uid: str
    slot: int = 0
    phase: PodState = PodState.PENDING
    reason: str = ""
    is_stuck: bool = False  # its node is lost: the object stays until it is deleted without grace


@dataclass(frozen=True)
class Leaving:
    """The state in which a PS was asked to end."""

    committed: CommittedSet
    mischief: tuple[int, int, int]


@dataclass
class SimPs:
    """A parameter server process; dies with its state."""

    pod: SimPod
    nonce: int
    incarnation: int = 0
    names: Names = field(default_factory=dict)
    num_applies: int = 0
    newest: dict[tuple[int, int], int] = field(default_factory=dict)
    is_ready: bool = False
    leaving: Leaving | None = None

    def standing(self, lease: Lease) -> bool:
        key = (lease.epoch, lease.task)
        if lease.id < self.newest.get(key, 0):
            return False
        self.newest[key] = lease.id
        return True

    def push(self, lease: Lease, n: int) -> bool:
        key = (lease.epoch, lease.task)
        if lease.id < self.newest.get(key, 0):
            return False
        names = self.names.setdefault(key, set())
        if n not in names:
            names.add(n)
            self.num_applies += 1
        return True

    def applied(self) -> CommittedSet:
        tasks = [(epoch, task, 0, tuple(names)) for (epoch, task), names in self.names.items()]
        return CommittedSet.of(tasks, self.num_applies)


@dataclass
class SimLease:
    lease: Lease
    has_asked: bool = False
    committed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)  # told and acknowledged
    is_told: bool = False  # its end has been reported


@dataclass
class SimWorker:
    pod: SimPod
    id: int
    incarnation: int
    is_registered: bool = False
    is_stopped: bool = False
    is_leaving: bool = False
    is_gone: bool = False
    has_request: bool = False
    held: dict[int, SimLease] = field(default_factory=dict)
    partition: PsPartition | None = None
    began: float = 0.0

    def seconds(self, now: float) -> dict[str, float]:
        """Of its life, by activity: as an earnest worker would say it."""
        lived = max(0.0, now - self.began)
        start = min(lived, 1.5)
        shares = {"compute": 0.5, "ps": 0.2, "idle": 0.1, "join": 0.1, "input": 0.1}
        return {"start": start, **{activity: share * (lived - start) for activity, share in shares.items()}}
