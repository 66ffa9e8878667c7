"""Accounting: attributes the time of worker slots and servers to states of pods, workers, servers and groups.

It owns the job's own time: microseconds of wall clock time since the job's beginning, over all generations of the
master.  It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from elasticdl.master.core.fleet.fleet import Fleet
from elasticdl.master.core.fleet.pods import PodRecord
from elasticdl.master.core.fleet.servers import Server
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.checkpoints import Checkpoints
from elasticdl.master.core.slot_time import SECOND, SlotUse
from elasticdl.master.core.state import JobState
from elasticdl_client.goodput import PodTimes, PsState, summary


class Accounting:
    """Account for the time of all wanted workers and servers.

    Args:
        began_at: Beginning of the job, by the clock that `begin` is called with.
    """

    def __init__(
        self, state: JobState, fleet: Fleet, groups: WorkerGroups, checkpoints: Checkpoints, began_at: float
    ) -> None:
        self._settings, self._workers, self._ending = state.settings, state.workers, state.ending
        self._fleet = fleet
        self._groups = groups
        self._checkpoints = checkpoints
        self._began_at = began_at
        self._is_decided = False  # whether the slots' times include that the job is decided
        self._num_server_changes = -1  # `Servers.num_changes` when the servers' times were last updated
        self._offset = 0  # microseconds added so that time never goes back from one generation to the next

    def begin(self, unix_now: float) -> None:
        """Set the time before an event is handled.

        Args:
            unix_now: Seconds since the Unix epoch; never goes back within a generation of the master.
        """
        now = self._micros(unix_now)
        self._workers.times.now = self._fleet.servers.times.now = now
        if not self._fleet.servers.is_complete:
            self._workers.times.miss_servers()

    def _micros(self, unix_now: float) -> int:
        return max(self._workers.times.now, self._by_clock(unix_now))

    def _by_clock(self, unix_now: float) -> int:
        """Return microseconds since the job's beginning; negative if the clock is behind it."""
        return round((unix_now - self._began_at) * SECOND) + self._offset

    def end(self) -> None:
        """Update the states of slots and servers after an event was handled."""
        if self._ending.is_decided and not self._ending.has_failed:
            self._workers.times.complete()
        if self._groups.is_broken:
            self._workers.times.miss_group()
        self._fleet.servers.times.save(self._checkpoints.is_running)
        servers = self._fleet.servers
        if servers.num_changes != self._num_server_changes:
            self._num_server_changes = servers.num_changes
            for server in servers.all():
                servers.times.is_at(server.id, _state_of(server))
        if self._fleet.pods.num_wanted * self._settings.processes_per_worker != self._workers.times.num_slots:
            self._workers.times.want(self._process_slots())
        if self._ending.is_decided and not self._is_decided:
            self._is_decided = True
            self._fleet.pods.touch_all()
        if touched := self._fleet.pods.take_touched():
            self._update_slots(touched)

    def _update_slots(self, slots: Set[int]) -> None:
        records = self._fleet.pods.in_slots(slots)
        for slot in slots:
            for number, worker_id in self._processes(slot, records.get(slot)):
                self._workers.times.is_at(number, *self._content(slot, number, records.get(slot), worker_id))

    def _process_slots(self) -> set[int]:
        """Return the slots of the processes of all wanted workers."""
        return {number for slot in self._fleet.pods.worker_slots for number, _ in self._processes(slot, None)}

    def _processes(self, slot: int, record: PodRecord | None) -> Iterable[tuple[int, int]]:
        """Yield slot and id of each process of a worker's slot; the id is -1 if there is no pod."""
        numbers = self._settings.ids_in(slot)
        return zip(numbers, self._settings.ids_in(record.index) if record else [-1] * len(numbers), strict=True)

    def _content(self, slot: int, number: int, record: PodRecord | None, worker_id: int) -> tuple[SlotUse, int]:
        """Return the use of a process's slot, and the id of the process if it is live, else -1."""
        use = self._use(slot, number, record, worker_id)
        return use, worker_id if use is SlotUse.LIVE else -1

    def _use(self, slot: int, number: int, record: PodRecord | None, worker_id: int) -> SlotUse:
        if self._fleet.pods.is_done(slot):
            return SlotUse.DONE
        if record is None:
            if self._ending.is_decided:
                return SlotUse.STOPPED
            has_lost = self._workers.times.has_lost(number) and not self._fleet.pods.is_without_room(slot)
            return SlotUse.RECOVERING if has_lost else SlotUse.UNSCHEDULED
        worker = self._workers.get(worker_id)
        if worker is not None:
            return SlotUse.STOPPED if worker.is_leaving else SlotUse.LIVE
        return SlotUse.LIVE if record.has_node else SlotUse.UNSCHEDULED

    # For the status and the log -------------------------------------------------------------------------------------

    def worker_seconds(self, unix_now: float) -> dict[str, float]:
        """Return the seconds of all worker slots by `goodput.SlotState`, up to `unix_now`."""
        return self._workers.times.seconds(self._micros(unix_now))

    def ps_seconds(self, unix_now: float) -> dict[str, float]:
        """Return the seconds of all servers by `goodput.PsState`, up to `unix_now`."""
        return self._fleet.servers.times.seconds(self._micros(unix_now))

    def elapsed_seconds(self, unix_now: float) -> float:
        """Return the seconds since the job's submission: the accounted time of each slot that was always wanted."""
        return self._micros(unix_now) / SECOND

    def moment(self, unix_now: float) -> float:
        """Return the present in seconds since the Unix epoch, later than in all generations before."""
        return unix_now + self._offset / SECOND

    def lines(self, unix_now: float) -> list[str]:
        """Return the log lines for the end of the job."""
        found = {"time": self.worker_seconds(unix_now), "time of servers": self.ps_seconds(unix_now)}
        return [f"{head}: {text}" for head, seconds in found.items() if (text := summary(seconds))]

    # The journal ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        times = {"workers": self._workers.times.snapshot(), "servers": self._fleet.servers.times.snapshot()}
        pods = self._workers.times.pods.to_journal()
        return {"began_at": self._began_at, "offset": self._offset, **times, "pods": pods}

    @staticmethod
    def stopped_seconds(saved: Mapping[str, Any], resumed_at: float) -> float:
        """Return the seconds from a job's last journal to its resumption; 0 if the job was not stopped.

        Args:
            saved: A result of `snapshot`.
            resumed_at: Seconds since the Unix epoch: when the newest run was requested, maybe before that journal.
        """
        written_at: float = saved["began_at"] + (saved["workers"]["now"] - saved["offset"]) / SECOND
        return max(0.0, resumed_at - written_at)

    def restore(self, saved: Mapping[str, Any], unix_now: float, stopped_seconds: float = 0.0) -> None:
        """Restore an earlier generation's state; the time since then has passed without a master.

        Args:
            saved: A result of `snapshot`.
            unix_now: Seconds since the Unix epoch.
            stopped_seconds: How long the job was stopped before this generation.
        """
        self._began_at, self._offset = saved["began_at"], saved["offset"]
        written_at: int = saved["workers"]["now"]
        self._offset += max(0, written_at - self._by_clock(unix_now))  # the wall clock was set back
        self.begin(unix_now)
        resumed = min(self._workers.times.now, written_at + round(stopped_seconds * SECOND))
        pause = (written_at, resumed) if resumed > written_at else None
        if "pods" in saved:
            self._workers.times.pods = PodTimes.from_journal(saved["pods"])
        self._workers.times.restore(saved["workers"], pause)
        self._workers.times.want(self._process_slots())
        self._fleet.servers.times.restore(saved["servers"], pause)

    def validate(self) -> None:
        """Check that all time is accounted for.

        Raises:
            AssertionError: Some time is not.
        """
        self._workers.times.validate()
        slots = self._fleet.pods.worker_slots if not self._fleet.pods.is_touched else frozenset()
        records = self._fleet.pods.in_slots(slots)
        for slot in slots:
            for number, worker_id in self._processes(slot, records.get(slot)):
                content = self._workers.times.content(number)
                expected = self._content(slot, number, records.get(slot), worker_id)
                assert content == expected, (slot, number, content, records.get(slot))
        self._fleet.servers.times.validate()


def _state_of(server: Server) -> PsState:
    """Return a server's state; `IDLE` stands for serving."""
    if server.is_lost or not server.incarnation:
        return PsState.ABSENT
    return PsState.IDLE if server.is_ready else PsState.RESTORING
