"""Pods: wanted against observed.

A lost worker's successor has a new id, a lost PS's the same.  This module keeps what the cluster said and what is to be
created when; why a pod's end matters, and how long its successor waits, is decided by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.master.core.commands import CreatePod
from elasticdl.master.core.events import PodChanged
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Phase, Role

ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.DELETED})
MAX_CREATE_DELAY = 60.0


@dataclass(slots=True)
class PodRecord:
    """A pod that was created and has not ended, as far as known.

    Attributes:
        uid: empty until the cluster has named it.
        gone_uids: of earlier pods of this name; what is said of them is over.
        is_leaving: it was told to end; nobody counts on it.
        running_since: None until it runs.
        create_delay: before the attempt to create it.
    """

    name: str
    role: Role
    index: int
    uid: str = ""
    gone_uids: list[str] = field(default_factory=list)
    is_leaving: bool = False
    running_since: float | None = None
    create_delay: float = 0.0


@dataclass(slots=True)
class Pending:
    """A pod to be created, not before `due_at`; index None: a worker with the next id."""

    due_at: float
    role: Role
    index: int | None
    delay: float = 0.0  # after the last attempt, which failed


class Pods:
    """The living pods of a job, and those to be created."""

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._records: dict[str, PodRecord] = {}
        self._pending: list[Pending] = []
        self._gone_uids: dict[str, list[str]] = {}
        self._next_worker_id = 0
        self.is_listed = False

    def living(self, role: Role) -> list[PodRecord]:
        """Those that count: created, not ended, not leaving."""
        return [record for record in self._records.values() if record.role is role and not record.is_leaving]

    def existing(self) -> list[PodRecord]:
        return list(self._records.values())

    def get(self, role: Role, index: int) -> PodRecord | None:
        return self._records.get(self._settings.pod_name(role, index))

    def fill(self, clock: float) -> None:
        """Plans what is wanted and neither lives nor is planned yet."""
        planned = {pending.index for pending in self._pending if pending.role is Role.PS}
        existing = {record.index for record in self._records.values() if record.role is Role.PS}
        for ps_id in range(self._settings.num_ps):
            if ps_id not in planned | existing:
                self._pending.append(Pending(clock, Role.PS, ps_id))
        num_workers = len(self.living(Role.WORKER)) + sum(p.role is Role.WORKER for p in self._pending)
        for _ in range(self._settings.num_workers - num_workers):
            self._pending.append(Pending(clock, Role.WORKER, None))

    def succeed(self, role: Role, index: int, due_at: float) -> None:
        """Plans the successor of a lost pod."""
        self._pending.append(Pending(due_at, role, index if role is Role.PS else None))

    def due(self, clock: float) -> list[CreatePod]:
        """What is to be created now; it counts as living from here on."""
        commands = []
        for pending in [p for p in self._pending if p.due_at <= clock]:
            if pending.index is not None and self.get(pending.role, pending.index) is not None:
                continue  # the old pod of that name has not ended yet
            self._pending.remove(pending)
            index = pending.index
            if index is None:
                index, self._next_worker_id = self._next_worker_id, self._next_worker_id + 1
            name = self._settings.pod_name(pending.role, index)
            self._records[name] = PodRecord(
                name, pending.role, index, "", self._gone_uids.pop(name, []), create_delay=pending.delay
            )
            commands.append(CreatePod(name, pending.role, index))
        return commands

    def not_created(self, name: str, clock: float) -> float | None:
        """A creation failed and is tried again: after how many seconds; None if the pod is unknown."""
        record = self._records.pop(name, None)
        if record is None:
            return None
        delay = min(MAX_CREATE_DELAY, max(1.0, 2 * record.create_delay))
        self._gone_uids[name] = record.gone_uids
        self._pending.append(Pending(clock + delay, record.role, record.index, delay))
        return delay

    def changed(self, event: PodChanged, clock: float) -> PodRecord | None:
        """What the cluster says of a pod.

        Returns:
            The record, if this is the news that the pod has ended.
        """
        record = self._records.get(event.name)
        if record is None or self._is_gone(event):
            return None
        record.uid = event.uid
        if event.phase is Phase.RUNNING and record.running_since is None:
            record.running_since = clock
        return self._end(record) if event.phase in ENDED else None

    def listed(self, events: tuple[PodChanged, ...], clock: float) -> tuple[list[PodChanged], list[str]]:
        """Everything that exists.

        Returns:
            What must be taken as changes: all of it, and the end of each pod that is not there any more; and the names
            of living pods that should not be.
        """
        self.is_listed = True
        names = {event.name for event in events if not self._is_gone(event)}
        missing = [
            PodChanged(r.name, r.role, r.index, r.uid, Phase.DELETED, "Deleted", message="it does not exist any more")
            for r in self._records.values()
            if r.name not in names
        ]
        strays = [
            event.name
            for event in events
            if event.role is not Role.MASTER and event.phase not in ENDED and self._is_stray(event)
        ]
        return [*events, *missing], strays

    def _is_stray(self, event: PodChanged) -> bool:
        record = self._records.get(event.name)
        return record is None or record.is_leaving or self._is_gone(event)

    def _is_gone(self, event: PodChanged) -> bool:
        """It speaks of an earlier pod of that name."""
        record = self._records.get(event.name)
        return record is not None and event.uid in record.gone_uids

    def _end(self, record: PodRecord) -> PodRecord:
        del self._records[record.name]
        if record.role is Role.PS:
            self._gone_uids[record.name] = [uid for uid in (*record.gone_uids[-7:], record.uid) if uid]
        return record

    def snapshot(self) -> dict[str, Any]:
        return {
            "next_worker_id": self._next_worker_id,
            "records": [[r.name, r.role, r.index, r.uid, r.gone_uids, r.is_leaving] for r in self._records.values()],
            "gone_uids": self._gone_uids,
        }

    def restore(self, saved: Mapping[str, Any], clock: float) -> None:
        self._next_worker_id = saved["next_worker_id"]
        self._gone_uids = {name: list(uids) for name, uids in saved["gone_uids"].items()}
        for name, role, index, uid, gone_uids, is_leaving in saved["records"]:
            self._records[name] = PodRecord(name, Role(role), index, uid, list(gone_uids), is_leaving)

    def validate(self) -> None:
        ids = [record.index for record in self._records.values() if record.role is Role.WORKER]
        assert len(ids) == len(set(ids))
        assert all(worker_id < self._next_worker_id for worker_id in ids)
        if self.is_listed:
            planned = sum(pending.role is Role.WORKER for pending in self._pending)
            assert len(self.living(Role.WORKER)) + planned <= self._settings.num_workers
