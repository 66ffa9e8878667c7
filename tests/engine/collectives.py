"""The collectives of simulated members, as `elasticdl.collective.ElasticGroup` has them: late, cut, or torn apart.

A collective that all members have begun may come to its end in some of them and fail in the others, whenever a member
dies or gives up; a member that is cut off waits in silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.collective import GroupLost, Peer
from tests.engine.scheduler import Process, Scheduler, SimulatedThread

_MOST_LATE_S = 0.02
_SHARE_LATE = 0.3  # of the messages; the others arrive at once
_HEADER_NUMBERS = 3


@dataclass(eq=False)
class Links:
    """The network between members.

    Attributes:
        cut: processes that no message reaches or leaves.
        has_room: the source of a copy continues before others have it: the network holds all of a small model.
    """

    scheduler: Scheduler
    groups: dict[int, Formation] = field(default_factory=dict)
    cut: set[Process] = field(default_factory=set)
    has_room: bool = False
    held_back: list[tuple[Process, Process, Callable[[], None]]] = field(default_factory=list)

    def send(self, source: Process, target: Process, arrive: Callable[[], None]) -> None:
        """Let something arrive at a process, at once or some time later."""
        seed = self.scheduler.random
        if source is not target and (source in self.cut or target in self.cut):
            self.held_back.append((source, target, arrive))
        elif source is target or seed.random() >= _SHARE_LATE:
            arrive()
        else:
            self.scheduler.at(seed.random() * _MOST_LATE_S, lambda: self._arrive(source, arrive))

    def close(self, source: Process, target: Process, seen: Callable[[], None]) -> None:
        """Let a process see, at once or some time later, that a connection was closed."""
        if source in self.cut or target in self.cut:
            self.held_back.append((source, target, seen))
        else:
            self.scheduler.at(self.scheduler.random.random() * _MOST_LATE_S, seen)

    def _arrive(self, source: Process, arrive: Callable[[], None]) -> None:
        """Lose, perhaps, the last messages of a lost process."""
        if not source.is_over or self.scheduler.random.random() < 0.5:
            arrive()

    def heal(self, process: Process) -> None:
        """A process can be reached again, and what was sent meanwhile arrives."""
        self.cut.discard(process)
        held_back, self.held_back = self.held_back, []
        for source, target, arrive in held_back:
            self.send(source, target, arrive)

    def die(self, process: Process) -> None:
        """The connections of a process close."""
        self.cut.discard(process)
        for formation in self.groups.values():
            for rank, seat in formation.seats.items():
                if seat.process is process:
                    formation.depart(rank, "a connection was closed")


@dataclass(eq=False)
class Seat:
    """A member's place in one group.

    Attributes:
        arrived: the parts of each collective that are here, by its number and by rank.
        num_begun: collectives that this member has begun.
        lost: why the group is over for it.
        lacks: collectives that each departed member has not begun, from this number on.
    """

    process: Process
    arrived: dict[int, dict[int, Any]] = field(default_factory=dict)
    num_begun: int = 0
    lost: GroupLost | None = None
    lacks: dict[int, int] = field(default_factory=dict)
    waiter: SimulatedThread | None = None


class Formation:
    """All seats of one group.

    Attributes:
        num_proven: steps in the model of every member, as a header that all have sent shows.
    """

    def __init__(self, links: Links, version: int, peers: Sequence[Peer]) -> None:
        self._links = links
        self.version = version
        self.peers = list(peers)
        self.seats: dict[int, Seat] = {}
        self.num_proven = 0

    def wake(self, seat: Seat) -> None:
        if seat.waiter is not None:
            self._links.scheduler.wake(seat.waiter)

    def sit(self, rank: int, process: Process) -> Seat:
        seat = self.seats[rank] = Seat(process)
        for other in self.seats.values():
            self.wake(other)
        return seat

    def begin(self, rank: int, value: Any) -> int:
        """A member's part of its next collective; the number of that."""
        mine = self.seats[rank]
        number, mine.num_begun = mine.num_begun, mine.num_begun + 1
        for other in self.seats.values():
            self._links.send(mine.process, other.process, partial(self._arrive, other, number, rank, value))
        return number

    def depart(self, rank: int, why: str) -> None:
        """A member dies, leaves or gives up: its collectives not yet started never come."""
        begun = self.seats[rank].num_begun
        for seat in self.seats.values():
            if seat is not self.seats[rank]:
                self._links.close(self.seats[rank].process, seat.process, partial(self._lack, seat, rank, begun))

    def lose(self, rank: int, lost: GroupLost) -> None:
        seat = self.seats.get(rank)
        if seat is not None and seat.lost is None:
            seat.lost = lost
            self.wake(seat)

    def _arrive(self, seat: Seat, number: int, rank: int, value: Any) -> None:
        seat.arrived.setdefault(number, {})[rank] = value
        self.wake(seat)

    def _lack(self, seat: Seat, rank: int, begun: int) -> None:
        seat.lacks.setdefault(rank, begun)
        self.wake(seat)


class Sum:
    """As `elasticdl.collective.Reduction`."""

    def __init__(self, wait: Callable[[], Mapping[int, Any]], buffer: npt.NDArray[np.float32]) -> None:
        self._wait = wait
        self._buffer = buffer

    def wait(self) -> None:
        self._buffer[:] = sum(self._wait().values())


class Copy:
    """As `Sum`, of one member's buffer."""

    def __init__(self, wait: Callable[[], Any], buffer: npt.NDArray[Any]) -> None:
        self._wait = wait
        self._buffer = buffer

    def wait(self) -> None:
        self._buffer[:] = self._wait()


class SimulatedGroup:
    """Stands for `ElasticGroup` in a simulated process."""

    def __init__(self, links: Links, process: Process, witness: Callable[[], tuple[object, int]]) -> None:
        """
        Args:
            witness: the model as it is now, and its steps: at every header those of all members are compared.
        """
        self.engine = ""
        self.device = "cpu"
        self.address = f"{process.name}:1"
        self._links = links
        self._process = process
        self._witness = witness
        self._formation: Formation | None = None
        self._rank = 0
        self._oldest = 0
        self._since: float | None = None

    @property
    def _seed(self) -> random.Random:
        return self._links.scheduler.random

    @property
    def waiting_seconds(self) -> float:
        return 0.0 if self._since is None else self._links.scheduler.now - self._since

    def form(self, version: int, peers: Sequence[Peer], rank: int, timeout_s: float) -> None:
        assert peers[rank].address == self.address
        self.leave()
        if version < self._oldest:
            raise GroupLost(f"group {version} has been given up before it was formed")
        self._oldest = version + 1
        formation = self._links.groups.setdefault(version, Formation(self._links, version, peers))
        assert formation.peers == list(peers), "two groups with one number"
        assert rank not in formation.seats, "a process enters a group twice"
        self._formation, self._rank = formation, rank
        seat = formation.sit(rank, self._process)
        end = self._links.scheduler.now + timeout_s
        try:
            self._wait(seat, lambda: len(formation.seats) == len(peers) and not self._is_cut(formation), end)
        except TimeoutError:
            missing = next((k for k in range(len(peers)) if k not in formation.seats), None)
            what = f"group {version} cannot be formed: not all members came within {timeout_s:g} s"
            raise GroupLost(what, missing) from None

    def gather(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mine = np.array(values, np.int64, ndmin=1)
        is_header = len(mine) > _HEADER_NUMBERS and len(mine) % 4 == _HEADER_NUMBERS
        parts = self._exchange((mine, self._witness() if is_header else None))
        if is_header:
            assert all(witness == parts[0][1] for _, witness in parts), f"members differ: {parts}"
            self._current().num_proven = parts[0][1][1]
        return np.array([part for part, _ in parts])

    def broadcast(self, arrays: Mapping[str, npt.NDArray[Any]] | None, source: int) -> dict[str, npt.NDArray[Any]]:
        given = {k: v.copy() for k, v in arrays.items()} if self._rank == source and arrays is not None else None
        found: dict[str, npt.NDArray[Any]] = self._copied(given, source)
        return {name: array.copy() for name, array in found.items()}

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        found: bytes = self._copied(data if self._rank == source else None, source)
        assert found is not None, "the source has nothing to give"
        return found

    def begin_reduce(self, buffer: npt.NDArray[np.float32]) -> Sum:
        formation = self._current()
        number = formation.begin(self._rank, buffer.copy())
        return Sum(lambda: self._finish(formation, number), buffer)

    def begin_copy(self, buffer: npt.NDArray[Any], source: int) -> Copy:
        formation = self._current()
        number = formation.begin(self._rank, buffer.copy() if self._rank == source else None)
        return Copy(lambda: self._finish(formation, number, source)[source], buffer)

    def leave(self) -> None:
        formation, self._formation = self._formation, None
        if formation is not None:
            formation.depart(self._rank, "it has left")

    def abandon(self, reason: str, older_than: int | None = None) -> None:
        formation = self._formation
        if older_than is not None:
            self._oldest = max(self._oldest, older_than)
            if formation is not None and formation.version >= older_than:
                return
        if formation is not None:
            formation.lose(self._rank, GroupLost(reason))
            if self._rank in formation.seats:
                formation.depart(self._rank, reason)

    def _is_cut(self, formation: Formation) -> bool:
        return len(formation.peers) > 1 and any(seat.process in self._links.cut for seat in formation.seats.values())

    def _current(self) -> Formation:
        if self._formation is None:
            raise GroupLost("this process is in no group")
        lost = self._formation.seats[self._rank].lost
        if lost is not None:
            raise GroupLost(lost.what, lost.rank)
        return self._formation

    def _exchange(self, value: Any) -> list[Any]:
        formation = self._current()
        arrived = self._finish(formation, formation.begin(self._rank, value))
        return [arrived[rank] for rank in range(len(arrived))]

    def _copied(self, value: Any, source: int) -> Any:
        """The source's value."""
        formation = self._current()
        return self._finish(formation, formation.begin(self._rank, value), source)[source]

    def _finish(self, formation: Formation, number: int, source: int | None = None) -> Mapping[int, Any]:
        """The parts of all members, by rank.

        Args:
            source: of a copy; None: it is no copy.
        """
        seat, size = formation.seats[self._rank], len(formation.peers)
        awaited = range(size) if source is None or not self._links.has_room else range(source, source + 1)
        arrived = seat.arrived.setdefault(number, {})
        self._wait(seat, lambda: all(map(arrived.__contains__, awaited)), None, number, arrived, awaited)
        del seat.arrived[number]
        return arrived

    def _wait(
        self,
        seat: Seat,
        is_there: Callable[[], bool],
        end: float | None,
        number: int = 0,
        arrived: Mapping[int, Any] | None = None,
        awaited: range = range(0),
    ) -> None:
        """Wait for a collective, or for all members; nothing arrives by a connection that is seen closed."""
        scheduler = self._links.scheduler
        self._since = scheduler.now
        try:
            scheduler.maybe_give_way()
            while True:
                departed = seat.lacks and [
                    rank
                    for rank, begun in seat.lacks.items()
                    if number >= begun or (arrived is not None and rank in awaited and rank not in arrived)
                ]
                if seat.lost is not None or (seat.lacks and (departed or self._seed.random() < 0.2)):
                    rank = min(departed or seat.lacks, default=None)
                    raise seat.lost or GroupLost(f"group {self._oldest - 1} is broken: a connection was closed", rank)
                if is_there():
                    return
                left = None if end is None else end - scheduler.now
                if left is not None and left <= 0:
                    raise TimeoutError
                seat.waiter = scheduler.running
                scheduler.wait(left)
        finally:
            seat.waiter, self._since = None, None
