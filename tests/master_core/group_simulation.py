"""Simulated members of AllReduce groups around the real core: groups, steps, models; no process and no clock.

Members keep to the protocol of architecture §4: headers, steps that only count when all buffers came, reports one step
late, state from the source.  A collective may come to its end in some members and fail in others, whenever a member is
gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from core_simulation import SimJob
from simulated_members import Model, Name, SimGroup, SimMember, Where
from simulated_processes import SimLease, SimPod, SimWorker

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.plan.tasks import cut
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, PodState, TaskType, WorkerGroup
from elasticdl.protocol import Shard, task_order


class GroupJob(SimJob):
    """A job whose workers form groups."""

    def __init__(
        self, settings: JobSettings, shards: Sequence[Shard], feed: Callable[[int], int] | None = None
    ) -> None:
        self.groups: dict[int, SimGroup] = {}
        self.saved: Model | None = None  # the newest checkpoint
        self.num_lost_models = 0
        super().__init__(settings, shards, feed)

    # Processes ------------------------------------------------------------------------------------------------------

    def new_worker(self, pod: SimPod, worker_id: int, number: int) -> SimWorker:
        return SimMember(pod, worker_id, number)

    def members(self) -> list[SimMember]:
        return [one for one in self.living() if isinstance(one, SimMember)]

    def end_pod(self, pod: SimPod, reason: str, phase: PodState = PodState.FAILED) -> None:
        for member in self.members():
            if member.pod is pod and member.planned is not None:
                self.groups[member.planned.version].gone.add(member.id)
        super().end_pod(pod, reason, phase)

    def leave(self, worker: SimWorker) -> None:
        super().leave(worker)
        assert isinstance(worker, SimMember)
        if worker.planned is not None:
            self.groups[worker.planned.version].gone.add(worker.id)

    def restart_master(self) -> None:
        for member in self.members():
            member.has_watch = False
        super().restart_master()

    def register(self, worker: SimWorker) -> None:
        super().register(worker)
        assert isinstance(worker, SimMember)
        worker.num_registrations += worker.is_registered

    def heartbeat_fields(self, worker: SimWorker) -> dict[str, Any]:
        assert isinstance(worker, SimMember)
        is_inside = worker.where.value >= Where.STANDINGS.value and worker.planned is not None
        group = self.groups[worker.planned.version] if worker.planned is not None else None
        waits = group is not None and len(group.brought[worker.id]) > worker.position
        return {
            "group_version": worker.planned.version if is_inside and worker.planned is not None else 0,
            "waiting_seconds": self.now - worker.since if waits else 0.0,
        }

    # A member does the next thing -----------------------------------------------------------------------------------

    def act(self, member: SimMember, pick: int = 0) -> None:
        """One thing; a stopped process does nothing."""
        if member.is_stopped or member.is_gone or self.end is not None or not member.is_registered:
            return
        self._watch(member)
        if member.is_calling or member.is_gone:
            return
        if member.planned is not None and self._must_leave(member):
            self._out(member, "a newer group is planned")
            return
        match member.where:
            case Where.OUTSIDE:
                self._outside(member)
            case Where.FORMING:
                self._forming(member)
            case Where.TELLING:
                self._tell(member)
            case _:
                self._collective(member, pick)

    def _watch(self, member: SimMember) -> None:
        if member.has_watch:
            return

        def answered(answer: Any) -> None:
            member.has_watch = False
            if isinstance(answer, c.GroupPlanned):
                assert member.newest is None or answer.group.version > member.newest.version
                member.newest = answer.group
            elif isinstance(answer, c.UnknownWorker):
                member.is_registered = False
            elif isinstance(answer, c.JobOver):
                member.is_stopped = True

        known = member.newest.version if member.newest is not None else 0
        member.has_watch = True
        self.call(lambda call: e.GroupWatched(call, member.id, member.incarnation, known), answered)

    def _must_leave(self, member: SimMember) -> bool:
        """A newer group is without a member that this one waits for, or this one is still being formed."""
        planned, newest = member.planned, member.newest
        assert planned is not None
        if newest is None or newest.version <= planned.version:
            return False
        members = {(m.worker_id, m.incarnation) for m in newest.members}
        gone = any((m.worker_id, m.incarnation) not in members for m in planned.members)
        return gone or member.where is Where.FORMING

    def _out(self, member: SimMember, reason: str) -> None:
        assert member.planned is not None
        self.groups[member.planned.version].gone.add(member.id)
        member.left, member.reason = member.planned.version, reason
        member.planned, member.where, member.ready_at = None, Where.OUTSIDE, -1

    def _outside(self, member: SimMember) -> None:
        if member.ready_at != member.num_registrations:
            registration = member.num_registrations

            def answered(answer: Any) -> None:
                member.is_calling = False
                if isinstance(answer, c.Accepted):
                    member.ready_at = max(member.ready_at, registration)
                elif isinstance(answer, c.UnknownWorker):
                    member.is_registered = False

            left, reason = member.left, member.reason
            address = f"host-{member.id}:{member.incarnation}"
            member.is_calling = True
            self.mail.append(
                (
                    member,
                    lambda call: e.ReadyForGroup(call, member.id, member.incarnation, address, left, reason),
                    answered,
                )
            )
        elif member.newest is not None and member.newest.version > member.left:
            self._enter_if_in(member, member.newest)

    def _enter_if_in(self, member: SimMember, planned: WorkerGroup) -> None:
        if not planned.has(member.id, member.incarnation):
            return
        group = self.groups.setdefault(planned.version, SimGroup(planned))
        assert group.planned == planned
        group.brought[member.id] = []
        member.planned, member.where, member.since, member.position = planned, Where.FORMING, self.now, 0

    def _forming(self, member: SimMember) -> None:
        group = self._group(member)
        if len(group.brought) == len(group.planned.members) and not group.gone:
            member.where = Where.STANDINGS
        elif group.gone or self.now - member.since >= self.settings.collective_timeout:
            self._out(member, "forming took too long")

    def _group(self, member: SimMember) -> SimGroup:
        assert member.planned is not None
        return self.groups[member.planned.version]

    def _collective(self, member: SimMember, pick: int) -> None:
        """Brings its part, and later continues with the parts of all; or sees that a member is gone."""
        group = self._group(member)
        mine = group.brought[member.id]
        if len(mine) == member.position:
            mine.append(self._part(member))
            member.since = self.now
            if pick % 2:
                return
        everybody = [group.brought.get(m.worker_id, []) for m in group.planned.members]
        is_complete = all(len(parts) > member.position for parts in everybody)
        if group.gone - {member.id} and (not is_complete or pick % 3 == 0):
            self._out(member, f"worker {min(group.gone)} is gone")
        elif is_complete:
            parts = [parts[member.position] for parts in everybody]
            member.position += 1
            self._passed(member, group, parts)

    def _part(self, member: SimMember) -> Any:
        match member.where:
            case Where.STANDINGS:
                return (len(member.model.steps), member.holds)
            case Where.STATE:
                return copy.deepcopy(member.model)
            case Where.HEADER:
                newest = member.newest.version if member.newest is not None else 0
                return (newest, self._bring(member))
        return None

    def _bring(self, member: SimMember) -> tuple[Name, ...]:
        """The minibatches for the next step."""
        names = member.model.names
        most = max(1, self.settings.fixed_global_batch // self.settings.minibatch_size)
        found: list[Name] = []
        for held in list(member.held.values()):
            lease = held.lease
            if lease.type is TaskType.TRAINING and not held.is_told:
                found += [(lease.epoch, lease.task, n) for n in range(self.num_minibatches(lease))]
        found = [name for name in dict.fromkeys(found) if name not in names]  # a task may be held again, after a loss
        if not found:
            return ()
        if self.settings.fixed_global_batch:
            found = [name for name in found if name[0] == found[0][0]]
            is_whole = len(found) >= most or self._is_end_of_epoch(found)
            return tuple(found[:most]) if is_whole else ()
        return (found[0],)

    def _is_end_of_epoch(self, found: list[Name]) -> bool:
        num_tasks = len(cut(self.shards, self.settings.records_per_task))
        order = task_order(self.settings.seed, found[0][0], num_tasks)
        return found[-1][1] == order[-1]

    def _passed(self, member: SimMember, group: SimGroup, parts: list[Any]) -> None:
        match member.where:
            case Where.STANDINGS:
                self._choose_source(member, group, parts)
            case Where.STATE:
                if member.receives:
                    member.model = copy.deepcopy(parts[member.source])
                self._entered(member)
            case Where.HEADER:
                self._step(member, parts)
            case Where.REDUCE:
                member.model.apply(member.step)
                member.pending = list(member.own)
                member.where = Where.HEADER
                self._check_lockstep(member, group)

    def _choose_source(self, member: SimMember, group: SimGroup, parts: list[Any]) -> None:
        steps = [n if holds and m.is_source else -1 for (n, holds), m in zip(parts, group.planned.members, strict=True)]
        newest = max(steps)
        if newest < 0 and member.rank == 0:
            self.num_lost_models += self.job._groups.num_formed > 0
            member.model = copy.deepcopy(self.saved) if self.saved is not None else Model()
            member.restored_from = "checkpoint" if self.saved is not None else ""
        member.source = 0 if newest < 0 else steps.index(newest)
        member.receives = steps[member.rank] != newest if newest >= 0 else member.rank > 0
        member.holds = (member.holds and group.planned.members[member.rank].is_source) or not member.receives
        if any(count != newest or count < 0 for count in steps) and len(steps) > 1:
            member.where = Where.STATE
        else:
            self._entered(member)

    def _entered(self, member: SimMember) -> None:
        member.holds = True
        member.pending = []
        member.where = Where.TELLING if member.rank == 0 else Where.HEADER

    def _tell(self, member: SimMember) -> None:
        planned, applied, steps = member.planned, member.model.applied(), len(member.model.steps)
        restored_from, member.restored_from = member.restored_from, ""
        assert planned is not None

        def answered(answer: Any) -> None:
            if not member.is_calling or member.planned is not planned or member.where is not Where.TELLING:
                return
            member.is_calling = False
            if isinstance(answer, c.Accepted):
                member.where = Where.HEADER
            else:
                member.is_registered = member.is_registered and not isinstance(answer, c.UnknownWorker)
                self._out(member, "the master does not want it any more")

        member.is_calling = True
        self.mail.append(
            (
                member,
                lambda call: e.GroupFormed(
                    call, member.id, member.incarnation, planned.version, applied, steps, restored_from
                ),
                answered,
            )
        )

    def _step(self, member: SimMember, headers: list[Any]) -> None:
        """All headers came: so all members hold the step before."""
        assert member.planned is not None
        member.pending = []
        if max(newest for newest, _ in headers) > member.planned.version:
            self._out(member, "")
            return
        brought: list[tuple[Name, ...]] = []
        seen: set[Name] = set()
        for _, names in headers:
            brought.append(tuple(name for name in names if name not in seen))
            seen.update(names)
        member.step = tuple(name for names in brought for name in names)
        member.own = brought[member.rank]
        if member.step:
            member.where = Where.REDUCE

    def _check_lockstep(self, member: SimMember, group: SimGroup) -> None:
        steps = tuple(member.model.steps)
        assert group.history.setdefault(len(steps), steps) == steps, "members differ"

    # Reports to the master ------------------------------------------------------------------------------------------

    def request(self, worker: SimWorker) -> None:
        """Sometimes for evaluation alone; never a long poll inside of a planned."""
        assert isinstance(worker, SimMember)
        if worker.where in (Where.HEADER, Where.REDUCE):
            super().request(worker)

    def request_fields(self, worker: SimWorker) -> dict[str, Any]:
        assert isinstance(worker, SimMember)
        worker.num_requests += 1
        only = TaskType.EVALUATION if worker.num_requests % 3 == 0 else None
        return {"at_once": True, "only": only}

    def most_held(self, worker: SimWorker) -> int:
        return 100

    def step(self, worker: SimWorker, pick: int = 0) -> None:
        assert isinstance(worker, SimMember)
        if worker.where in (Where.HEADER, Where.REDUCE):
            super().step(worker, pick)

    def _train(self, worker: SimWorker, held: SimLease, pick: int) -> None:
        """Tells what has come to be in every member's model."""
        assert isinstance(worker, SimMember)
        lease, size = held.lease, self.num_minibatches(held.lease)
        confirmed = worker.model.names - set(worker.pending)
        found = [n for n in range(size) if (lease.epoch, lease.task, n) in confirmed and n not in held.committed]
        if found:
            held.committed.update(found)
            news = tuple(found)
            self.post(
                worker,
                held,
                lambda call: e.ProgressReported(call, worker.id, worker.incarnation, lease.id, news, 0.5),
            )
        elif len(held.committed) == size:
            self.finished(worker, held)

    def num_minibatches(self, lease: Lease) -> int:
        """With --fixed_global_batch every minibatch counts as planned, empty or not."""
        if self.settings.fixed_global_batch:
            return -(-len(lease.shard) // self.settings.minibatch_size)
        return super().num_minibatches(lease)

    def save(self) -> None:
        """Rank 0 writes a checkpoint."""
        for member in self.members():
            if member.where is Where.HEADER and member.rank == 0 and not member.is_stopped:
                self.saved = copy.deepcopy(member.model)

    # Invariants -----------------------------------------------------------------------------------------------------

    def check_ledger(self) -> None:
        """Check that committed work is in every member's model, as long as a group stands."""
        formed = self.job._groups.formed
        if not self.job._is_open or formed is None:
            return
        ledger = self.job._work.tasks.ledger().tasks()
        for member in self.members():
            if member.planned == formed and member.where in (Where.HEADER, Where.REDUCE):
                names = member.model.names
                for (epoch, task), applied in ledger.items():
                    missing = [n for n in applied if (epoch, task, n) not in names]
                    assert not missing, (member.id, epoch, task, missing)

    def everybody_works(self) -> None:
        for _ in range(12):
            for member in self.members():
                self.request(member)
                self.step(member)
                self.step(member, 1)
                self.act(member, 2)
            while self.mail:
                self.deliver()
