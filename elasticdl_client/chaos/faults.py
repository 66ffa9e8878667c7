"""Faults for a running job: their kinds, their seeded order, and the port by which they are injected.

Adapters of the port: `LocalFaults` (chaos/local_faults.py) and `ClusterFaults` (chaos/cluster_faults.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elasticdl_client.jobs.options import Options, seconds_of


class FaultKind(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    STOP = "stop"
    FILL_DISK = "fill disk"


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, of the pods of a role.

    Attributes:
        role: worker, ps or master; empty: the fault is not one of pods.
    """

    kind: FaultKind
    role: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.role}".rstrip()

    @property
    def is_undone(self) -> bool:
        """Whether the fault lasts for a time, and then ends."""
        return self.kind is not FaultKind.KILL


@dataclass(frozen=True, slots=True)
class Victim:
    """A running pod.

    Attributes:
        subject: as events name it: worker-3, ps-0, master.
        name: Name of the pod.
        uid: differs between two pods of one name.
        pid: its process on this machine; 0: it runs in a cluster.
    """

    subject: str
    name: str
    role: str
    index: int
    uid: str
    pid: int = 0


class FaultInjector(Protocol):
    """Five verbs.  All raise `ElasticDLError` when the runtime cannot be reached or refuses."""

    def check(self, faults: Sequence[Fault]) -> None:
        """Check that the faults can be injected into this job, before the first one is.

        Raises:
            FlagError: a fault is impossible here, or would harm more than the job.
            JobError: the user lacks a right.
        """
        ...

    def running(self, role: str) -> list[Victim]:
        """Return the running pods of a role, by their number."""
        ...

    def inject(self, fault: Fault, victim: Victim | None) -> None:
        """Inject a fault; a victim that has ended meanwhile is no error.  Returns when it is in effect.

        Args:
            victim: A pod of the fault's role; None for a fault that affects no pod.
        """
        ...

    def undo(self, fault: Fault, victim: Victim | None) -> None:
        """End a fault that lasts, or one that was interrupted; its victim may have ended."""
        ...

    def newest_checkpoint(self) -> int:
        """Return the number of minibatches in the newest complete checkpoint that is visible here; 0: none is."""
        ...


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one run of the command.  Each round has every fault once, in a random order.

    Attributes:
        every_s: between two faults.
        for_s: from the first fault to the end of the plan.
        stop_for_s: how long a fault that is undone lasts.
    """

    faults: tuple[Fault, ...]
    every_s: float
    for_s: float
    stop_for_s: float
    seed: int

    @classmethod
    def of(cls, options: Options) -> FaultPlan:
        """Return the plan of a command line that `options.parse` has checked."""
        faults = [Fault(FaultKind.KILL, role) for role in options.kill.split(",") if role]
        faults += [Fault(FaultKind.STOP, role) for role in options.stop.split(",") if role]
        faults += [Fault(FaultKind.FILL_DISK)] if options.fill_disk else []
        every_s, for_s, stop_for_s = (
            seconds_of(text) or 0.0 for text in (options.every, options.for_, options.stop_for)
        )
        return cls(tuple(dict.fromkeys(faults)), every_s, for_s, stop_for_s, options.seed)

    @property
    def num_faults(self) -> int:
        return math.ceil(self.for_s / self.every_s)

    def draw(self) -> Iterator[tuple[Fault, float]]:
        """Yield the faults, each with the place of its victim among the running pods, from 0 to below 1."""
        source = random.Random(self.seed)
        for number in range(self.num_faults):
            if number % len(self.faults) == 0:
                order = source.sample(self.faults, len(self.faults))
            yield order[number % len(self.faults)], source.random()


def choose(victims: Sequence[Victim], share: float) -> Victim:
    """Return the one of running pods that `FaultPlan.draw` means."""
    return victims[int(share * len(victims))]
