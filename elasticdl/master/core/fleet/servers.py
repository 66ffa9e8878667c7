"""Servers: the parameter servers' incarnations and readiness, and the partition of the buckets among them.

Workers get the partition only while every PS is ready.  Pods are in pods.py; applied sets are read and compared in
ledger/reconciliation.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.commands import PsAdmitted, Refused
from elasticdl.master.core.events import PsJoined
from elasticdl.master.core.values import NUM_BUCKETS, BucketRange, PsAddress, PsPartition
from elasticdl_client.goodput import PsState

SECOND = 1_000_000  # microseconds
_MOST_SECONDS = 1e10  # upper bound for a process's report


@dataclass(slots=True)
class Server:
    """One PS id, over all of its incarnations.

    Attributes:
        incarnation: The newest incarnation; 0 if it has never joined.
        is_present: That incarnation has joined in this generation of the master and is not lost.
        is_lost: That incarnation is over for good; its later messages are rejected.
        ready_version: Model version when that incarnation became ready.
        leaving_version: Model version when that incarnation was ended from outside; None if it was not.
    """

    id: int
    incarnation: int = 0
    nonce: int = 0
    address: str = ""
    is_ready: bool = False
    is_present: bool = False
    is_lost: bool = False
    heard_at: float = 0.0
    ready_version: int = 0
    leaving_version: int | None = None


def owned(ps_id: int, num_ps: int) -> tuple[BucketRange, ...]:
    """Return the buckets of a PS in an even division: k of M owns k·1024 // M … (k+1)·1024 // M - 1."""
    return (BucketRange(ps_id * NUM_BUCKETS // num_ps, (ps_id + 1) * NUM_BUCKETS // num_ps),)


class Servers:
    """All parameter servers of the job; none for strategies without PS.

    Attributes:
        times: Accounts for their time.
        is_complete: Whether every one of them is ready.
        num_changes: Number of changes of their states so far.
    """

    def __init__(self, num_ps: int, generation: int) -> None:
        self.times = ServerTimes(num_ps)
        self._servers = [Server(ps_id) for ps_id in range(num_ps)]
        self._version = generation << 32  # grows over all generations of the master without being persisted
        self._partition: PsPartition | None = None
        self.is_complete = not self._servers
        self.num_changes = 0

    def get(self, ps_id: int) -> Server | None:
        return self._servers[ps_id] if 0 <= ps_id < len(self._servers) else None

    def all(self) -> list[Server]:
        return list(self._servers)

    @property
    def num_ready(self) -> int:
        return sum(server.is_ready and server.is_present for server in self._servers)

    @property
    def are_expected_back(self) -> bool:
        """Whether every missing PS served an earlier generation of the master and may register again in this one."""
        return 0 < self.num_unregistered == len(self._servers) - self.num_ready

    @property
    def num_unregistered(self) -> int:
        """Number of PS that served an earlier generation of the master and have not registered in this one."""
        return sum(server.is_ready and not server.is_present and not server.is_lost for server in self._servers)

    @property
    def num_lost(self) -> int:
        return sum(server.is_lost for server in self._servers)

    @property
    def partition(self) -> PsPartition | None:
        """The partition; None while a PS is not ready, and in jobs without PS."""
        return self._partition

    def join(self, event: PsJoined, restore_from: str, parameters_only: bool, clock: float) -> PsAdmitted | Refused:
        """Register a PS process: a known one keeps its incarnation, a new one gets the next."""
        server = self.get(event.ps_id)
        if server is None:
            return Refused(f"this job has no PS {event.ps_id}")
        same = event.nonce == server.nonce and server.incarnation > 0
        if (same and server.is_lost) or (event.held_incarnation and event.held_incarnation != server.incarnation):
            return Refused(f"PS {server.id} was replaced")
        if event.held_incarnation and server.is_lost:
            return Refused(f"PS {server.id} was given up")
        if not same and not event.held_incarnation:
            server.incarnation += 1
            server.is_ready = False
            server.leaving_version = None
        server.nonce, server.address, server.heard_at = event.nonce, event.address, clock
        server.is_present, server.is_lost = True, False
        self._renew()
        return PsAdmitted(server.incarnation, restore_from, parameters_only)

    def known(self, ps_id: int, incarnation: int, clock: float) -> Server | None:
        """Return the PS and note its heartbeat; None if this incarnation of it is not in force."""
        server = self.get(ps_id)
        if server is None or server.incarnation != incarnation or not server.is_present:
            return None
        server.heard_at = clock
        return server

    def is_heard(self, ps_id: int, after: float) -> bool:
        """Return whether the PS is present and has sent a heartbeat after this time."""
        server = self.get(ps_id)
        return server is not None and server.is_present and server.heard_at >= after

    def ready(self, server: Server, version: int) -> None:
        """Note that a PS has restored its state, at this model version."""
        server.is_ready, server.ready_version = True, version
        self._renew()

    def lose(self, ps_id: int) -> Server | None:
        """Note that a PS process is gone or was given up; return the PS, None if that was known."""
        server = self.get(ps_id)
        if server is None or server.is_lost:
            return None
        server.is_present, server.is_ready, server.is_lost = False, False, True
        server.leaving_version = None
        self._renew()
        return server

    def _renew(self) -> None:
        addresses = tuple(
            PsAddress(server.id, server.address, server.incarnation, owned(server.id, len(self._servers)))
            for server in self._servers
        )
        self.is_complete = self.num_ready == len(self._servers)
        self.num_changes += 1
        if not self.is_complete or not addresses:
            self._partition = None
        elif self._partition is None or self._partition.ps != addresses:
            self._version += 1
            self._partition = PsPartition(self._version, addresses)

    def snapshot(self) -> list[list[Any]]:
        return [
            [s.incarnation, s.nonce, s.address, s.is_ready, s.is_lost, s.ready_version, s.leaving_version]
            for s in self._servers
        ]

    def restore(self, saved: list[Any], clock: float) -> None:
        for server, values in zip(self._servers, saved, strict=True):
            server.incarnation, server.nonce, server.address, server.is_ready, server.is_lost = values[:5]
            server.ready_version, server.leaving_version = values[5:]
            server.heard_at = clock

    def validate(self) -> None:
        assert self.is_complete == (self.num_ready == len(self._servers))
        assert (self._partition is not None) == (self.is_complete and bool(self._servers))
        if self._partition is not None:
            ranges = sorted((b.start, b.end) for ps in self._partition.ps for b in ps.buckets)
            ends = [end for _, end in ranges]
            assert [start for start, _ in ranges] == [0, *ends[:-1]], ranges
            assert ends[-1] == NUM_BUCKETS
        for server in self._servers:
            assert not (server.is_lost and (server.is_present or server.is_ready)), server


@dataclass(slots=True)
class _Server:
    """Time of one server; all times are in microseconds.

    Attributes:
        settled: The sums contain its time up to here.
        state: `IDLE` while it serves, else `ABSENT` or `RESTORING`.
        incarnation: Incarnation of the process with the last heartbeat.
        busy: Its last report.
        saving: Part of the time since `settled` in which checkpoints, finished by now, were written.
        busy_share: Proportion of the time before its last report: (busy, all).
    """

    settled: int = 0
    state: PsState = PsState.ABSENT
    incarnation: int = 0
    busy: int = 0
    saving: int = 0
    busy_share: tuple[int, int] = (0, 1)


class ServerTimes:
    """Splits all the time of every wanted parameter server into states.

    As in slot_time.py, times are whole microseconds and sums are exact.  A serving PS reports in its heartbeats how
    long its threads were in calls; its other time counts as writing a checkpoint while one is written, else as idle.

    Attributes:
        now: As in `SlotTimes`.
    """

    def __init__(self, num_servers: int) -> None:
        self.now = 0
        self._servers = [_Server() for _ in range(num_servers)]
        self._sums = dict.fromkeys(PsState, 0)
        self._saving_since: int | None = None  # start of the checkpoint that is being written
        self._pause = (0, 0)  # start and end of the newest pause of the job

    def is_at(self, ps_id: int, state: PsState) -> None:
        """Set the state of a server from now on: absent, restoring, or serving (`IDLE`); no effect if unchanged."""
        server = self._servers[ps_id]
        if server.state is not state:
            self._add(server, self._guess(server, self.now))
            server.state = state

    def save(self, is_running: bool) -> None:
        """Note whether a checkpoint is being written from now on; no effect if unchanged."""
        if is_running == (self._saving_since is not None):
            return
        for server in self._servers:
            server.saving += self._saving(server, self.now)
        self._saving_since = self.now if is_running else None

    def report(self, ps_id: int, incarnation: int, busy_seconds: float) -> None:
        """Settle time by a server's report: seconds of its threads in calls since its start."""
        server = self._servers[ps_id]
        busy = int(min(busy_seconds, _MOST_SECONDS) * SECOND) if busy_seconds > 0 else 0
        grown = busy - (server.busy if incarnation == server.incarnation else 0)
        server.incarnation, server.busy = incarnation, busy
        if server.state is PsState.IDLE:
            length = self.now - server.settled
            used = min(max(0, grown), length)
            self._add(server, self._split(server, self.now, used))
            server.busy_share = (used, length) if length else server.busy_share

    def seconds(self, now: int | None = None) -> dict[str, float]:
        """Return the seconds by state up to a moment; empty for a job without servers."""
        if not self._servers:
            return {}
        now = self.now if now is None else max(now, self.now)
        sums = dict(self._sums)
        for server in self._servers:
            for state, us in self._guess(server, now).items():
                sums[state] += us
        return {state.value: us / SECOND for state, us in sums.items()}

    def _guess(self, server: _Server, until: int) -> dict[PsState, int]:
        """Return the probable split of the unsettled time: as busy as before the last report."""
        length = until - server.settled
        stopped = max(0, min(until, self._pause[1]) - max(server.settled, self._pause[0]))
        if server.state is PsState.ABSENT:
            return {PsState.ABSENT: length}
        if server.state is not PsState.IDLE:
            return {PsState.ABSENT: stopped, server.state: length - stopped}
        busy, whole = server.busy_share
        return self._split(server, until, (length - stopped) * busy // whole, stopped)

    def _split(self, server: _Server, until: int, busy: int, absent: int = 0) -> dict[PsState, int]:
        rest = until - server.settled - busy - absent
        saving = min(rest, server.saving + self._saving(server, until))
        return {PsState.ABSENT: absent, PsState.BUSY: busy, PsState.SAVING: saving, PsState.IDLE: rest - saving}

    def _saving(self, server: _Server, until: int) -> int:
        """Return the part of the unsettled time in which checkpoints were written, the present one included."""
        return 0 if self._saving_since is None else until - max(self._saving_since, server.settled)

    def _add(self, server: _Server, parts: Mapping[PsState, int]) -> None:
        for state, us in parts.items():
            self._sums[state] += us
        server.settled, server.saving = self.now, 0

    def snapshot(self) -> dict[str, Any]:
        return {
            "sums": {state.value: us for state, us in self._sums.items() if us},
            "pause": list(self._pause),
            "servers": [[s.settled, s.state.value, s.incarnation, s.busy, *s.busy_share] for s in self._servers],
        }

    def restore(self, saved: Mapping[str, Any], pause: tuple[int, int] | None = None) -> None:
        """Restore the state of an earlier generation.  A running server covers the gap with its next report."""
        self._sums = {state: saved["sums"].get(state.value, 0) for state in PsState}
        begin, end = saved.get("pause", (0, 0))
        self._pause = (begin, end) if pause is None else pause
        for server, values in zip(self._servers, saved["servers"], strict=True):
            server.settled, state, server.incarnation, server.busy, busy, whole = values
            server.state, server.busy_share = PsState(state), (busy, whole)

    def validate(self) -> None:
        """Check that every microsecond of every server is in exactly one state.

        Raises:
            AssertionError: A microsecond is in none or in two.
        """
        assert min(self._sums.values()) >= 0, self._sums
        assert sum(self._sums.values()) == sum(server.settled for server in self._servers)
        assert all(0 <= server.settled <= self.now for server in self._servers)
