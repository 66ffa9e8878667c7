"""ServerTimes: into what the time of every wanted parameter server is split, without rest.

As in slot_time.py times are whole microseconds and sums are exact.  A server that serves says in its heartbeats for how
long its threads were in calls; the rest of the time it writes a checkpoint, while one is being written, or is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl_client.goodput import PsState

SECOND = 1_000_000  # microseconds
_MOST_SECONDS = 1e10  # that a process may claim


@dataclass(slots=True)
class _Server:
    """All moments and times are microseconds.

    Attributes:
        settled: up to here its time is in the sums.
        state: `IDLE` for one that serves, else `ABSENT` or `RESTORING`.
        incarnation: of the process that was heard last.
        busy: what that has reported.
        saving: since `settled`, while a checkpoint was being written that is not any more.
        busy_share: of the time before its last report: busy, and all.
    """

    settled: int = 0
    state: PsState = PsState.ABSENT
    incarnation: int = 0
    busy: int = 0
    saving: int = 0
    busy_share: tuple[int, int] = (0, 1)


class ServerTimes:
    """The time of all parameter servers of a job.

    Attributes:
        now: as in `SlotTimes`.
    """

    def __init__(self, num_servers: int) -> None:
        self.now = 0
        self._servers = [_Server() for _ in range(num_servers)]
        self._sums = dict.fromkeys(PsState, 0)
        self._saving_since: int | None = None  # a checkpoint is being written
        self._pause = (0, 0)  # the newest time in which the job was stopped, from and until

    def is_at(self, ps_id: int, state: PsState) -> None:
        """A server is absent, restores, or serves (`IDLE`) from now on; without effect if that is known."""
        server = self._servers[ps_id]
        if server.state is not state:
            self._add(server, self._guess(server, self.now))
            server.state = state

    def save(self, is_running: bool) -> None:
        """A checkpoint is being written from now on, or is not; without effect if that is known."""
        if is_running == (self._saving_since is not None):
            return
        for server in self._servers:
            server.saving += self._saving(server, self.now)
        self._saving_since = self.now if is_running else None

    def report(self, ps_id: int, incarnation: int, busy_seconds: float) -> None:
        """A server says for how long its threads were in calls since its start."""
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
        """Return the seconds by state, up to a moment; empty for a job without servers."""
        if not self._servers:
            return {}
        now = self.now if now is None else max(now, self.now)
        sums = dict(self._sums)
        for server in self._servers:
            for state, us in self._guess(server, now).items():
                sums[state] += us
        return {state.value: us / SECOND for state, us in sums.items()}

    def _guess(self, server: _Server, until: int) -> dict[PsState, int]:
        """How the time that is not settled is probably split: it is as busy as it was before its last report."""
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
        """Since it is settled, of the checkpoint that is being written now."""
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
        """Takes over what an earlier life knew.  A server that lives covers the time between with its next report."""
        self._sums = {state: saved["sums"].get(state.value, 0) for state in PsState}
        begin, end = saved.get("pause", (0, 0))
        self._pause = (begin, end) if pause is None else pause
        for server, values in zip(self._servers, saved["servers"], strict=True):
            server.settled, state, server.incarnation, server.busy, busy, whole = values
            server.state, server.busy_share = PsState(state), (busy, whole)

    def validate(self) -> None:
        """Every microsecond of every server is in exactly one state.

        Raises:
            AssertionError: it is not so.
        """
        assert min(self._sums.values()) >= 0, self._sums
        assert sum(self._sums.values()) == sum(server.settled for server in self._servers)
        assert all(0 <= server.settled <= self.now for server in self._servers)
