"""A script of the groups of an AllReduce job, reading as prose."""

from __future__ import annotations

from typing import Any

from core_script import Script, Sets, applied

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState, TaskType, WorkerGroup
from elasticdl.protocol import Role
from elasticdl_client.choices import DistributionStrategy


class GroupScript(Script):
    """A job of 2 tasks of 2 minibatches of 10 records each whose workers form groups, unless told otherwise."""

    def __init__(self, records: int = 40, **settings: Any) -> None:
        values: dict[str, Any] = {"num_ps": 0, "strategy": DistributionStrategy.ALL_REDUCE}
        super().__init__(records, **(values | settings))

    def moment(self, seconds: float = 0.25) -> None:
        """A short time passes, in which all send heartbeats."""
        self.now += seconds
        for worker in self.job._workers.all():
            self.beat(worker.id)
        self.tell(e.Tick())

    def beat(self, worker_id: int, waiting: float = 0.0, group: int | None = None, **fields: Any) -> Any:
        leases = tuple(lease.id for lease in self.job._work.leases.of_worker(worker_id))
        version = (self.version if group is None else group) if worker_id in self.members else 0
        return self.heartbeat(worker_id, leases, group_version=version, waiting_seconds=waiting, **fields)

    def silence(self, seconds: int, *silent: int) -> None:
        """Time passes while all but some are heard."""
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.job._workers.all():
                if worker.id not in silent:
                    self.beat(worker.id)
            self.tell(e.Tick())

    def ready(self, worker_id: int, left: int = 0, reason: str = "", incarnation: int = 7) -> Any:
        return self.ask(e.ReadyForGroup, worker_id, incarnation, f"host-{worker_id}", left, reason)

    def all_leave(self, *worker_ids: int, reason: str = "worker 9 is gone") -> None:
        version = self.version
        for worker_id in worker_ids:
            self.ready(worker_id, version, reason)

    def watch(self, worker_id: int, known: int = 0) -> int:
        """The number of the call."""
        self.ask(e.GroupWatched, worker_id, 7, known)
        return self._num_calls

    def forms(self, sets: Sets | None = None, steps: int = 1, **fields: Any) -> Any:
        """Rank 0 of the newest group says that it has formed."""
        group = self.planned
        return self.ask(
            e.GroupFormed,
            group.members[0].worker_id,
            group.members[0].incarnation,
            group.version,
            applied(sets or {}),
            steps,
            **fields,
        )

    @property
    def planned(self) -> WorkerGroup:
        group = self.job._groups.planned
        assert group is not None
        return group

    @property
    def version(self) -> int:
        return self.job._groups.newest_version

    @property
    def members(self) -> tuple[int, ...]:
        """Of the newest group, in order of rank."""
        group = self.job._groups.planned
        return () if group is None else tuple(member.worker_id for member in group.members)

    @property
    def stands(self) -> bool:
        return self.job._groups.stands

    def ask_at_once(self, worker_id: int = 0, only: TaskType | None = None) -> Any:
        return self.ask(e.LeaseRequested, worker_id, 7, True, only)

    def successor_starts(self, worker_id: int) -> None:
        self.worker_starts(worker_id)
        self.ready(worker_id)

    def restarts(self, *worker_ids: int) -> None:
        """The master is a new one, and finds these pods."""
        self.restart_master()
        pods = []
        for worker_id in worker_ids:
            name = f"elasticdl-j-worker-{worker_id}"
            pods.append(e.PodChanged(name, Role.WORKER, worker_id, f"{name}/1", PodState.RUNNING))
        self.tell(e.PodsListed(tuple(pods)))


def standing(num_workers: int = 3, wanted: int = 0, **settings: Any) -> GroupScript:
    """A job whose group has formed with its initial values; more workers may be wanted than have come."""
    script = GroupScript(num_workers=max(wanted, num_workers), **settings)
    for worker_id in range(num_workers):
        script.worker_starts(worker_id)
    script.data_is_known()
    for worker_id in range(num_workers):
        script.ready(worker_id)
    if wanted > num_workers:
        script.moment()
    assert script.members == tuple(range(num_workers))
    assert script.forms(steps=0) == c.Accepted(0)
    assert script.stands
    return script
