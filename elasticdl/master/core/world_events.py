"""Reports of workers on the worlds of an AllReduce job; part of events.py, which defines events."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.master.core.applied import CommittedSet


@dataclass(frozen=True, slots=True)
class SampleRequested:
    """Sample, a long poll.  Answers: `SampleGiven`, `NoLeaseNow`, `JobOver`, `UnknownWorker`."""

    call: int
    worker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ReadyForWorld:
    """ReadyForWorld: a worker stands outside of every world.  Answers: `Accepted`, `UnknownWorker`.

    Attributes:
        address: of the store that it opens when it is rank 0.
        left: version of the world that it has left, or could not form; 0: it comes new.
        reason: why it left.
    """

    call: int
    worker_id: int
    incarnation: int
    address: str
    left: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorldWatched:
    """WatchWorld, a long poll.  Answers: `WorldPlanned`, `NoLeaseNow`, `JobOver`, `UnknownWorker`."""

    call: int
    worker_id: int
    incarnation: int
    known_version: int = 0


@dataclass(frozen=True, slots=True)
class WorldFormed:
    """WorldFormed, from rank 0: every member holds this.  Answers: `Accepted`, `Refused` (leave it), `UnknownWorker`.

    Attributes:
        applied: what the model holds with which the members continue.
        steps: updates in it.
        restored_from: directory of the checkpoint taken; empty: none.
        engine: what sums in it, for people; empty: nothing, it has one member.
    """

    call: int
    worker_id: int
    incarnation: int
    version: int
    applied: CommittedSet
    steps: int = 0
    restored_from: str = ""
    engine: str = ""
