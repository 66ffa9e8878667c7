"""Pods: the wanted and the observed pods.

Each pod fills a slot of its role: a PS the slot of its id, a worker any, with all its processes.  A lost worker's
successor has a new id and the same slot; a lost PS's successor has the same id and slot.  Slots of workers come and go
with the number that the user wants.  This module keeps what the cluster reported, and what to create when; the caller
decides what a pod's end means and how long its successor waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from elasticdl.master.core.commands import CreatePod
from elasticdl.master.core.events import PodChanged
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Place, PodState
from elasticdl.protocol import Role

NODE_LOST = "NodeLost"
ENDED = frozenset({PodState.SUCCEEDED, PodState.FAILED, PodState.DELETED})
MAX_CREATE_DELAY = {Role.PS: 5.0, Role.WORKER: 60.0}  # a PS's name may be taken until its last pod is removed
RETRY = 1.0  # seconds
MEMORY_GROWTH = 1.5
MAX_MEMORY_FACTOR = 4.0
KEPT_ENDED = 50  # ended worker pods kept for their logs; at least as many as there are workers


@dataclass(slots=True)
class PodRecord:
    """A pod that was created and, as far as known, has not ended.

    Attributes:
        uid: Empty until the cluster has assigned it.
        gone_uids: Uids of earlier pods of this name, whose changes are ignored.
        is_leaving: It was ended from outside and no longer counts.
        is_released: It was ended because its slot is no longer wanted, or a server needs its quota: a worker
            finishes its minibatch first.
        is_scheduled: It has a node or a slot, but may not run yet.
        running_since: None until it runs.
        state: State of its process while it runs, if the cluster reports one, such as "stopped by SIGSTOP".
        create_delay: Delay before the attempt to create it.
        complaints: Reported reasons why it cannot start or waits.
        resized_to: Memory factor of the last requested resize in place; each factor is requested once.
        is_known: Its creation was logged; this and the next three are kept over the master's generations.
        has_run: Its start was logged.
        pending_why: The logged reason why it is pending, without numbers.
        cause: Number of the event that caused it.
    """

    name: str
    role: Role
    index: int
    slot: int
    uid: str = ""
    gone_uids: list[str] = field(default_factory=list)
    is_leaving: bool = False
    is_released: bool = False
    is_scheduled: bool = False
    running_since: float | None = None
    state: str = ""
    create_delay: float = 0.0
    complaints: set[str] = field(default_factory=set)
    resized_to: float = 1.0
    is_known: bool = False
    has_run: bool = False
    pending_why: str = ""
    cause: int = 0

    @property
    def subject(self) -> str:
        """Subject of the events about it."""
        return f"{self.role}-{self.index}"

    @property
    def has_node(self) -> bool:
        """Whether there is room for it: it runs, or is about to."""
        return self.is_scheduled or self.running_since is not None

    @property
    def place(self) -> Place:
        return (self.role, self.slot)


@dataclass(slots=True)
class Pending:
    """A pod to be created, not before `due_at`; `index` is None for a worker, which gets the next id."""

    due_at: float
    role: Role
    slot: int
    index: int | None
    delay: float = 0.0  # after the last failed attempt
    cause: int = 0  # see `PodRecord`

    @property
    def place(self) -> Place:
        return (self.role, self.slot)


class Pods:
    """The live pods of a job, and those to be created."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._records: dict[str, PodRecord] = {}
        self._in_slot: dict[int, PodRecord] = {}  # the newest worker of each slot
        self._pending: dict[Place, Pending] = {}
        self._by_index: dict[tuple[Role, int], Pending] = {}  # pending ones with an index
        self._delayed: dict[Place, Pending] = {}  # pending ones whose creation has failed before
        self._soonest = 0.0  # no pending pod is due earlier
        self._touched: set[int] = set()  # worker slots whose content may have changed
        self._refusals: dict[str, tuple[Role, str]] = {}  # why pods could not be created, the newest last
        self._without_quota: dict[int, float] = {}  # servers that a queue or a quota holds back, and since when
        self._gone_uids: dict[str, list[str]] = {}
        self._memory_factors: dict[Place, float] = {}  # only factors above 1
        self._has_run: set[Role] = set()
        self._slots = set(range(settings.num_workers))  # of the wanted training workers
        self._is_scaled = False  # False: the flags of the present generation determine the number
        self._done: set[int] = set()  # slots of workers whose command has succeeded
        self._ended: list[str] = []  # ended worker pods in order of their ends, until the list lacks them
        self._next_worker_id = 0
        self.is_listed = False

    def living(self, role: Role) -> list[PodRecord]:
        """Return the pods of a role that count: created, not ended, not leaving."""
        return [record for record in self._records.values() if record.role is role and not record.is_leaving]

    def servers(self) -> list[PodRecord]:
        """Return the parameter servers that count, in a time that does not depend on the number of workers."""
        found = (self.get(Role.PS, index) for index in range(self._settings.num_ps))
        return [record for record in found if record is not None and not record.is_leaving]

    def in_slots(self, slots: Set[int]) -> dict[int, PodRecord]:
        """Return the workers that count, by slot."""
        found = {slot: record for slot in slots if (record := self._in_slot.get(slot)) is not None}
        return {slot: record for slot, record in found.items() if not record.is_leaving}

    def named(self, name: str) -> PodRecord | None:
        return self._records.get(name)

    def existing(self) -> list[PodRecord]:
        return list(self._records.values())

    def get(self, role: Role, index: int) -> PodRecord | None:
        return self._records.get(self._settings.pod_name(role, index))

    def of_worker(self, worker_id: int) -> PodRecord | None:
        """Return the pod of a worker's process; None if unknown."""
        return self.get(Role.WORKER, self._settings.pod_of(worker_id))

    def has_run(self, role: Role) -> bool:
        """Return whether any pod of a role has started in this job, so its image can be pulled."""
        return role in self._has_run

    def fill(self, clock: float, cause: int = 0) -> None:
        """Plan all wanted pods that are neither live nor planned; `cause`: see `PodRecord`."""
        for role, wanted in self._wanted():
            filled = set(self._filled(role)) | (self._done if role is Role.WORKER else set())
            for slot in sorted(wanted - filled):
                self._plan(_pending(clock, role, slot, cause))

    def _plan(self, pending: Pending) -> None:
        """Add a pod to those to be created."""
        self._pending[pending.place] = pending
        if pending.index is not None:
            self._by_index[pending.role, pending.index] = pending
        if pending.delay:
            self._delayed[pending.place] = pending
        self._soonest = min(self._soonest, pending.due_at)
        self._touch(pending.role, pending.slot)

    def _unplan(self, pending: Pending) -> None:
        del self._pending[pending.place]
        self._delayed.pop(pending.place, None)
        if pending.index is not None:
            del self._by_index[pending.role, pending.index]
        self._touch(pending.role, pending.slot)

    # Slots whose content may have changed ---------------------------------------------------------------------------

    def touch(self, worker_id: int) -> None:
        """Note that a worker or its pod has changed."""
        if (record := self.of_worker(worker_id)) is not None:
            self.touch_slot(record)

    def touch_slot(self, record: PodRecord) -> None:
        self._touch(record.role, record.slot)

    def touch_all(self) -> None:
        """Note that any slot may have changed."""
        self._touched |= self.worker_slots

    def _touch(self, role: Role, slot: int) -> None:
        if role is Role.WORKER:
            self._touched.add(slot)

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def take_touched(self) -> set[int]:
        """Return the wanted worker slots touched since the last call."""
        touched, self._touched = self._touched, set()
        return touched & self.worker_slots

    def _wanted(self) -> list[tuple[Role, Set[int]]]:
        return [(Role.PS, set(range(self._settings.num_ps))), (Role.WORKER, self.worker_slots)]

    @property
    def num_training(self) -> int:
        """Number of wanted training workers."""
        return len(self._slots)

    @property
    def num_unfinished(self) -> int:
        """Number of wanted training workers whose command has not succeeded yet; only these get successors."""
        return len(self._slots - self._done)

    @property
    def num_wanted(self) -> int:
        """Number of wanted workers, the evaluator included."""
        return len(self._slots) + self._settings.has_evaluator

    @property
    def worker_slots(self) -> Set[int]:
        """Slots of the wanted workers, the evaluator's included."""
        return self._slots | {self._settings.num_workers} if self._settings.has_evaluator else self._slots

    def scale(self, num_workers: int, use_of: Callable[[PodRecord], int]) -> list[PodRecord]:
        """Set the number of training workers, in a job without an evaluator; return the pods to release.

        Slots whose command is done are removed first, then empty ones, then those of the lowest rank, youngest first.

        Args:
            use_of: Returns the rank of a pod.

        Returns:
            The pods whose slots are no longer wanted.
        """
        self._is_scaled = True
        free = (slot for slot in count() if slot not in self._slots)
        self._slots |= set(islice(free, max(0, num_workers - len(self._slots))))
        living = {record.slot: record for record in self.living(Role.WORKER)}

        def worth(slot: int) -> tuple[bool, bool, int, int, int]:
            record = living.get(slot)
            use, age = (0, 0) if record is None else (use_of(record), -record.index)
            return slot not in self._done, record is not None, use, age, -slot

        dropped = sorted(self._slots, key=worth)[: len(self._slots) - num_workers]
        self._slots -= set(dropped)
        self._done &= self._slots
        for pending in list(self._pending.values()):
            if pending.role is Role.WORKER and pending.slot not in self._slots:
                self._unplan(pending)
                if pending.index is not None:
                    self._refusals.pop(self._settings.pod_name(pending.role, pending.index), None)
        self.touch_all()
        released = [living[slot] for slot in dropped if slot in living]
        for record in released:
            record.is_leaving = record.is_released = True
        return released

    def _filled(self, role: Role) -> list[int]:
        """Return the slots of live and planned pods."""
        planned = [pending.slot for pending in self._pending.values() if pending.role is role]
        return [record.slot for record in self.living(role)] + planned

    def plan_successor(self, record: PodRecord, due_at: float, cause: int) -> None:
        """Plan the successor of a pod that was lost by the event `cause`."""
        self._plan(_pending(due_at, record.role, record.slot, cause))

    def complete(self, record: PodRecord) -> None:
        """Note that the command of a worker has succeeded: its slot is not filled again."""
        self._done.add(record.slot)
        self._touch(record.role, record.slot)

    def is_done(self, slot: int) -> bool:
        """Return whether the command of the worker in a slot has succeeded."""
        return slot in self._done

    @property
    def training_is_done(self) -> bool:
        """Whether the commands of all training workers have succeeded."""
        return bool(self._slots) and self._done >= self._slots

    @property
    def some_are_done(self) -> bool:
        """Whether the command of any worker has succeeded."""
        return bool(self._done)

    @property
    def all_are_done(self) -> bool:
        """Whether the commands of all workers have succeeded."""
        return bool(self.worker_slots) and self._done >= self.worker_slots

    def grow_memory(self, record: PodRecord) -> float | None:
        """Raise the memory of the next pod in a slot; return its factor over the flags, None at the maximum."""
        factor = self._grown(record)
        if factor is not None:
            self._memory_factors[record.place] = factor
        return factor

    def has_most_memory(self, record: PodRecord) -> bool:
        """Return whether the memory of the next pod in a slot is at the maximum."""
        return self._grown(record) is None

    def _grown(self, record: PodRecord) -> float | None:
        factor = self._memory_factors.get(record.place, 1.0)
        return None if factor >= MAX_MEMORY_FACTOR else min(MAX_MEMORY_FACTOR, MEMORY_GROWTH * factor)

    def resize(self, record: PodRecord) -> CreatePod | None:
        """Return the pod with its successor's memory; None at the maximum, or if that was requested before."""
        factor = self._grown(record)
        if factor is None or factor <= record.resized_to or record.is_leaving:
            return None
        record.resized_to = factor
        return CreatePod(record.name, record.role, record.index, record.slot, factor)

    def resized(self, name: str, factor: float) -> None:
        """Keep a memory factor that is in force for the pod's slot."""
        record = self._records.get(name)
        if record is not None:
            self._memory_factors[record.place] = max(factor, self._memory_factors.get(record.place, 1.0))

    def due(self, clock: float) -> list[CreatePod]:
        """Return the pods to create now; they count as live from here on."""
        if clock < self._soonest:
            return []
        commands = []
        due = [p for p in self._pending.values() if p.due_at <= clock]
        servers_first = bool(due) and self._servers_come_first
        for pending in due:
            if servers_first and pending.role is Role.WORKER:
                continue
            if pending.index is not None and self.get(pending.role, pending.index) is not None:
                continue  # the previous pod of that name has not ended yet
            self._unplan(pending)
            record = self._record(pending)
            factor = self._memory_factors.get(record.place, 1.0)
            commands.append(CreatePod(record.name, record.role, record.index, record.slot, factor))
        self._soonest = min((pending.due_at for pending in self._pending.values()), default=float("inf"))
        return commands

    @property
    def _servers_come_first(self) -> bool:
        """Whether a worker created now could take the quota that a server needs.

        A queue need not admit pods in the order of their creation: Kueue's ages are whole seconds.
        """
        if self._settings.has_queue:
            return sum(server.has_node for server in self.servers()) < self._settings.num_ps
        return bool(self._without_quota)

    def take_without_quota(self, clock: float, for_s: float) -> list[int]:
        """Return the indices of servers that a queue or a quota has held back for more than `for_s` seconds.

        Their time is counted anew from `clock`.
        """
        found = [index for index, since in self._without_quota.items() if clock - since > for_s]
        self._without_quota |= dict.fromkeys(found, clock)
        return found

    def _lacks_quota(self, record: PodRecord, lacks: bool, clock: float) -> None:
        if record.role is Role.PS and lacks and not record.is_leaving:
            self._without_quota.setdefault(record.index, clock)
        elif record.role is Role.PS:
            self._without_quota.pop(record.index, None)

    def _record(self, pending: Pending) -> PodRecord:
        role, slot, index = pending.role, pending.slot, pending.index
        if index is None:
            index, self._next_worker_id = self._next_worker_id, self._next_worker_id + 1
        name = self._settings.pod_name(role, index)
        gone_uids = self._gone_uids.pop(name, [])
        record = PodRecord(name, role, index, slot, "", gone_uids, create_delay=pending.delay, cause=pending.cause)
        self._add(record)
        return record

    def _add(self, record: PodRecord) -> None:
        self._records[record.name] = record
        if record.role is Role.WORKER and not record.is_leaving:
            self._in_slot[record.slot] = record
        self._touch(record.role, record.slot)

    def _forget(self, record: PodRecord) -> None:
        del self._records[record.name]
        if record.role is Role.WORKER and self._in_slot.get(record.slot) is record:
            del self._in_slot[record.slot]
        self._touch(record.role, record.slot)

    def not_created(self, name: str, why: str, clock: float, lacks_quota: bool = False) -> float | None:
        """Plan another attempt after a failed creation; return its delay, None if the pod is unknown or exists.

        A worker that is no longer wanted is not created.
        """
        record = self._records.get(name)
        if record is None or record.uid:
            return None
        self._forget(record)
        self._refusals.pop(name, None)
        if record.is_released:
            return None
        self._refusals[name] = (record.role, why)
        self._lacks_quota(record, lacks_quota, clock)
        delay = min(MAX_CREATE_DELAY[record.role], max(RETRY, 2 * record.create_delay))
        self._gone_uids[name] = record.gone_uids
        self._plan(Pending(clock + delay, record.role, record.slot, record.index, delay, record.cause))
        return delay

    def refusals(self) -> dict[str, tuple[Role, str]]:
        """Return why wanted pods could not be created, by name, the newest last."""
        return dict(self._refusals)

    def is_without_room(self, slot: int) -> bool:
        """Return whether the creation of a slot's worker has failed and is to be repeated."""
        return (Role.WORKER, slot) in self._delayed

    def hurry(self, clock: float) -> None:
        """Retry failed creations soon: there may be room again."""
        for pending in self._delayed.values():
            pending.due_at, pending.delay = min(pending.due_at, clock + RETRY), 0.0
            self._soonest = min(self._soonest, pending.due_at)
            self._touch(pending.role, pending.slot)
        self._delayed = {}

    def changed(self, event: PodChanged, clock: float) -> PodRecord | None:
        """Apply a change of a pod that the cluster reports.

        Returns:
            The record, if this change is the pod's end.
        """
        record = self._records.get(event.name) or self._adopt(event)
        if record is None or self._is_gone(event):
            return None
        self._touch(record.role, record.slot)
        self._refusals.pop(record.name, None)
        record.uid = event.uid
        record.is_scheduled = bool(event.node) or event.has_slot
        self._lacks_quota(record, bool(event.queue), clock)
        if event.phase is PodState.RUNNING or event.exit_code is not None:
            self._has_run.add(record.role)
        if event.phase is PodState.RUNNING and record.running_since is None:
            record.running_since = clock
        record.state = event.message if event.phase is PodState.RUNNING else ""
        return self._end(record, clock) if event.phase in ENDED else None

    def _adopt(self, event: PodChanged) -> PodRecord | None:
        """Return the record of a pod that exists although its creation seemed to fail."""
        is_gone = event.phase in ENDED or event.uid in self._gone_uids.get(event.name, [])
        pending = self._by_index.get((event.role, event.index))
        if pending is None or is_gone:
            return None
        self._unplan(pending)
        return self._record(pending)

    def listed(self, events: tuple[PodChanged, ...], clock: float) -> tuple[list[PodChanged], list[PodChanged]]:
        """Apply a list of all existing pods.

        Returns:
            The list as changes, with the end of each pod that is missing in it; and the pods that should not exist:
            live ones, and those that a lost node never releases.
        """
        self.is_listed = True
        names = {event.name for event in events if not self._is_gone(event)}
        missing = [
            PodChanged(
                r.name, r.role, r.index, r.uid, PodState.DELETED, "Deleted", message="it does not exist any more"
            )
            for r in self._records.values()
            if r.name not in names
        ]
        strays = [
            event
            for event in events
            if (event.phase not in ENDED or event.reason == NODE_LOST)
            and event.role is not Role.MASTER
            and self._is_stray(event)
        ]
        return [*events, *missing], strays

    def superfluous(self, events: tuple[PodChanged, ...]) -> list[PodChanged]:
        """Return ended worker pods, out of all existing ones, that are older than the newest kept ones."""
        ended = {event.name: event for event in events if event.role is Role.WORKER and event.phase in ENDED}
        known = [name for name in self._ended if name in ended]
        earlier = sorted(ended.keys() - set(known), key=lambda name: ended[name].index)  # ended before this generation
        self._ended = earlier + known
        return [ended[name] for name in self._ended[: -max(KEPT_ENDED, self.num_wanted)]]

    def _is_stray(self, event: PodChanged) -> bool:
        record = self._records.get(event.name) or self._adopt(event)
        return record is None or record.is_leaving or self._is_gone(event)

    def _is_gone(self, event: PodChanged) -> bool:
        """Return whether a change is about an earlier pod of the same name."""
        record = self._records.get(event.name)
        return record is not None and event.uid in record.gone_uids

    def _end(self, record: PodRecord, clock: float) -> PodRecord:
        self._forget(record)
        self.hurry(clock)
        if record.role is Role.PS:
            self._gone_uids[record.name] = [uid for uid in (*record.gone_uids[-7:], record.uid) if uid]
        else:
            self._ended.append(record.name)
        return record

    def snapshot(self) -> dict[str, Any]:
        records = [
            [
                *(r.name, r.role, r.index, r.uid, r.gone_uids, r.is_leaving, r.slot),
                *(r.is_known, r.has_run, r.pending_why, r.cause, r.is_released),
            ]
            for r in self._records.values()
        ]
        return {
            "next_worker_id": self._next_worker_id,
            "records": records,
            "gone_uids": self._gone_uids,
            "memory_factors": [[*place, factor] for place, factor in self._memory_factors.items()],
            "has_run": sorted(self._has_run),
            "done": sorted(self._done),
            "slots": sorted(self._slots) if self._is_scaled else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore an earlier generation's state."""
        self._next_worker_id = saved["next_worker_id"]
        self._gone_uids = {name: list(uids) for name, uids in saved["gone_uids"].items()}
        for name, role, index, uid, gone_uids, is_leaving, slot, *said in saved["records"]:
            record = PodRecord(name, Role(role), index, slot, uid, list(gone_uids), is_leaving)
            if said:  # journals older than the log of events lack it
                record.is_known, record.has_run, record.pending_why, record.cause = said[:4]
                record.is_released = said[4:] == [True]
            self._add(record)
        self._memory_factors = {(Role(role), slot): factor for role, slot, factor in saved["memory_factors"]}
        self._has_run = {Role(role) for role in saved["has_run"]}
        self._done = set(saved.get("done", ()))
        if (slots := saved.get("slots")) is not None:
            self._slots, self._is_scaled = set(slots), True
        self.touch_all()

    def validate(self) -> None:
        ids = [record.index for record in self._records.values() if record.role is Role.WORKER]
        assert len(ids) == len(set(ids))
        assert all(worker_id < self._next_worker_id for worker_id in ids)
        for role, wanted in self._wanted():
            slots = self._filled(role)
            assert len(slots) == len(set(slots)), (role, slots)
            assert wanted >= set(slots), (role, slots)
        living = {record.slot: record for record in self.living(Role.WORKER)}
        assert living == self.in_slots(living.keys() | self._in_slot.keys())
        assert self._delayed == {place: one for place, one in self._pending.items() if one.delay}
        planned = {self._settings.pod_name(*index) for index in self._by_index}
        attempted = {record.name for record in self._records.values() if not record.uid}
        assert self._refusals.keys() <= planned | attempted, self._refusals
        assert self._without_quota.keys() <= set(range(self._settings.num_ps)), self._without_quota
        assert set(self._by_index) == {(p.role, p.index) for p in self._pending.values() if p.index is not None}
        assert all(one.due_at >= self._soonest for one in self._pending.values())
        assert all(1.0 < factor <= MAX_MEMORY_FACTOR for factor in self._memory_factors.values())


def _pending(due_at: float, role: Role, slot: int, cause: int = 0) -> Pending:
    return Pending(due_at, role, slot, slot if role is Role.PS else None, cause=cause)
