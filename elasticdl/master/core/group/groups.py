"""The groups of an AllReduce job: their members in order, and when to plan a new one.

The members have the authoritative state of the model.  A group *forms* when its rank 0 reports it; it *stands* until
something happens to a member or a worker is to join.  While none stands the ledger is in doubt: no lease is granted,
and the next formed group reports the commits.  A group takes its model from a member of the last formed one, if any
is alive; so no group is planned without one of them as long as one is alive, however slow it is.

Only the last formed group is persisted, before rank 0 continues: a version contains the master's generation, so the
next generation need not know of groups that never formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from elasticdl.master.core.commands import GroupPlanned, JobOver, NoLeaseNow, UnknownWorker, Wake
from elasticdl.master.core.events import GroupFormed, GroupWatched, ReadyForGroup
from elasticdl.master.core.group.candidates import Candidate, Suspects, Watch, together
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, Member, WorkerGroup
from elasticdl.master.core.workers import Worker
from elasticdl_client.job_events import Detail, EventKind

SETTLE = 0.2  # seconds that a new group waits for workers that may become ready a moment later
MAX_SETTLE = 1.0  # seconds after which the first ready worker waits no longer
LATE = 30.0  # seconds that a process waits for others of its pod before the status names them
HOLDER_LEASES = 3  # lease timeouts of silence after which even the last member with the model is given up
_MAX_COMPLAINT = 160  # characters of a member's error; its own log has the whole


class WorkerGroups:
    """Plans groups and follows their states; without effect for jobs that have no groups."""

    def __init__(self, state: JobState) -> None:
        self._settings, self._workers, self._out = state.settings, state.workers, state.out
        self._num_wanted = state.settings.num_workers * state.settings.processes_per_worker
        self._version = state.generation << 32
        self.formed: WorkerGroup | None = None  # the last formed group
        self.planned: WorkerGroup | None = None  # the newest group
        self.num_formed = 0
        self._engine = ""  # of the last formed group
        self._candidates: dict[int, Candidate] = {}
        self._suspects = Suspects()
        self._watches: dict[int, Watch] = {}  # by worker, the longest wait first
        self._unanswered: set[int] = set()  # workers whose watch is newer than the last announcement
        self._announced = (0, False)  # the last announced version, and whether it was broken
        self._ready: set[int] = set()  # ids of the candidates that are ready
        self._broken = ""  # why the newest group cannot stand; empty if it can
        self._broken_by = 0  # number of the newest event of a broken group since the last one formed
        self._broken_at = 0.0
        self._lost: set[int] = set()  # workers of the newest group that are gone
        self._transitions = TransitionLog(state.settings)
        self._complaint = ""
        self._has_ended = False  # the job is decided: members that leave are not logged
        self._judged = 0  # the newest version that could not form because of a member

    # Queries --------------------------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """Whether a group has formed and can make its next step, as far as known."""
        return self.planned is not None and self.planned is self.formed and not self._broken

    @property
    def is_broken(self) -> bool:
        """Whether a group had formed and was broken by something that happened to a member."""
        return self.formed is not None and bool(self._broken)

    @property
    def newest_version(self) -> int:
        return 0 if self.planned is None else self.planned.version

    @property
    def members(self) -> tuple[int, ...]:
        """Workers of the group that stands, in order of rank; empty without one."""
        return self._formed_ids() if self.stands else ()

    @property
    def engine(self) -> str:
        """Name of the all-reduce engine of the current group, for logs; empty if it has none, or without a group."""
        return self._engine if self.stands else ""

    def is_member(self, worker_id: int) -> bool:
        """Return whether a worker is in the group that stands."""
        return self.stands and self.formed is not None and worker_id in self.formed.ids

    @property
    def is_model_held(self) -> bool:
        """Whether a member of the last formed group stays; otherwise the next one begins with a checkpoint or anew."""
        known = map(self._known, self.formed_members)
        return any(worker is not None and not worker.is_leaving for worker in known)

    @property
    def formed_members(self) -> tuple[Member, ...]:
        """Members of the last formed group, even if they are gone."""
        return () if self.formed is None else self.formed.members

    # Reports of workers ---------------------------------------------------------------------------------------------

    def ready(self, event: ReadyForGroup, clock: float) -> None:
        """Handle the report of a known worker that it is in no group."""
        known = self._candidates.get(event.worker_id)
        if known is None or known.incarnation != event.incarnation:
            self._lose(event.worker_id, "its process is a new one", clock)
            known = self._candidates[event.worker_id] = Candidate(event.worker_id, event.incarnation, event.address)
        known.address = event.address
        known.ready_at = clock
        known.sent_version = (
            0 if event.left >= known.sent_version else known.sent_version
        )  # otherwise it is on its way into that group
        self._note(known)
        planned = self.planned
        if planned is not None and event.left == planned.version and planned.has(event.worker_id, event.incarnation):
            complaint = f"worker {self._settings.name_of(event.worker_id)}: {event.reason or 'it has left'}"
            self._transitions.complaint(complaint)
            self._break(complaint, clock)

    def watched(self, event: GroupWatched, clock: float) -> None:
        """Keep the call of a known worker that waits for a newer group than the one it knows."""
        self._answer_watch(event.worker_id, NoLeaseNow())
        candidate = self._candidates.get(event.worker_id)
        if candidate is not None and candidate.sent_version > event.known_version:
            candidate.sent_version = 0  # the last answer has not reached it
        if candidate is not None:
            self._note(candidate)
        self._watches[event.worker_id] = Watch(event.call, clock, event.known_version)
        self._unanswered.add(event.worker_id)

    def abandoned(self, call: int) -> None:
        self._watches = {worker: watch for worker, watch in self._watches.items() if watch.call != call}

    def has_formed(self, event: GroupFormed, clock: float) -> bool | None:
        """Handle the report of rank 0 that all members hold the same model.

        Returns:
            Whether that model may lack minibatches reported so far, as it is not that of a member of the last group.
            None if the event is rejected or repeated.
        """
        group = self.planned
        if group is None or group.version != event.version or group is self.formed:
            return None
        first = group.members[0]
        if (first.worker_id, first.incarnation) != (event.worker_id, event.incarnation):
            return None
        before = len(self.formed_members)
        has_source = any(member.is_source for member in group.members)
        is_new = not has_source or bool(event.restored_from)
        self.formed = group
        self.num_formed += 1
        for member in group.members:
            self._has_heard(member.worker_id, group)
        self._suspects.has_formed(member.worker_id for member in group.members)
        self._log_formed(group, before, clock)
        self._broken_by = 0
        restored = f"that of {event.restored_from}" if event.restored_from else "the initial one"
        origin = "" if has_source and not event.restored_from else restored
        line = self._transitions.end(group, self.num_formed, clock, origin)
        if event.engine not in ("", self._engine):
            line += f"; it sums by {event.engine}"
        self._engine = event.engine
        self._out.log(line, Level.WARNING if origin and self.num_formed > 1 else Level.INFO)
        if self._broken:
            self._transitions.fact(self._broken)
            self._transitions.begin(clock)
        self._out.persist()
        return is_new

    def _log_formed(self, group: WorkerGroup, before: int, clock: float) -> None:
        """Log the event of a formed group."""
        joined = [self._settings.subject_of(member.worker_id) for member in group.members if not member.is_source]
        cause = self._broken_by or max((self._out.events.newest(subject) for subject in joined), default=0)
        seconds = 0.0 if self._transitions.since is None else clock - self._transitions.since
        self._out.events.add(
            EventKind.GROUP_FORMED,
            f"group-{self.num_formed}",
            "",
            cause,
            before=before,
            after=len(group.members),
            seconds=round(seconds, 3),
            workers=" ".join(map(str, pods_of(group, self._settings))),
            **({"processes": len(group.members)} if self._settings.processes_per_worker > 1 else {}),
        )

    def is_formed(self, version: int) -> bool:
        """Return whether a version is that of the last formed group."""
        return self.formed is not None and self.formed.version == version

    # Changes of workers ---------------------------------------------------------------------------------------------

    def lost(self, worker_id: int, why: str, clock: float) -> None:
        """Handle the final loss of a process, with all others of its pod."""
        name = str(self._settings.pod_of(worker_id))
        self._lose(worker_id, why, clock, name)
        if self.formed is not self.planned and worker_id in self._formed_ids():
            self._transitions.fact(f"worker {name} {why}")
        self._candidates.pop(worker_id, None)
        self._ready.discard(worker_id)
        self._answer_watch(worker_id, UnknownWorker("the worker was replaced"))

    def lost_lease(self, worker_id: int, clock: float) -> None:
        """Handle the loss of a member's lease: the member has nothing to work on."""
        if worker_id in self.members:
            cause = self._out.events.newest(self._settings.subject_of(worker_id))
            self._break_knowingly(f"worker {self._settings.name_of(worker_id)} has lost its lease", clock, cause)

    def leaves(self, worker_id: int, clock: float) -> None:
        """Handle a worker that is to end from outside."""
        self._lose(worker_id, "was asked to end", clock, str(self._settings.pod_of(worker_id)))

    def ends(self, worker_id: int, clock: float) -> None:
        """Handle the end of a worker's script, before the end of the data."""
        self._lose(worker_id, "has ended its script", clock)

    def _lose(self, worker_id: int, why: str, clock: float, name: str = "") -> None:
        """Break the group of a worker that no longer counts; `name`: for logs, if it is not the name of the process."""
        if worker_id in self._lost or self.planned is None:
            return
        if any(member.worker_id == worker_id for member in self.planned.members):
            self._lost.add(worker_id)
            cause = self._out.events.newest(self._settings.subject_of(worker_id))
            self._break_knowingly(f"worker {name or self._settings.name_of(worker_id)} {why}", clock, cause)

    def _break(self, why: str, clock: float, cause: int = 0, **details: Detail) -> None:
        if not self._broken:
            self._broken, self._broken_at = why, clock
            if not self._has_ended:
                number = self.num_formed + (self.planned is not self.formed)
                self._broken_by = self._out.events.add(EventKind.GROUP_BROKEN, f"group-{number}", why, cause, **details)
            self._transitions.begin(clock)

    def _break_knowingly(self, fact: str, clock: float, cause: int = 0, **details: Detail) -> None:
        self._transitions.fact(fact)
        self._break(fact, clock, cause, **details)

    def _formed_ids(self) -> tuple[int, ...]:
        return () if self.formed is None else tuple(self.formed.ids)

    def time_out(self, clock: float) -> None:
        """Look for members that are silent, stuck, or all waiting for each other."""
        if self.planned is None or self._broken:
            return
        members = self.planned.members
        for member in members:
            worker = self._known(member)
            if worker is None or worker.has_ended:
                continue
            if self._is_over(worker.heard_at + self._settings.collective_timeout, clock):
                self._lose(member.worker_id, f"was silent for {clock - worker.heard_at:.0f} s", clock)
            elif worker.stuck_since is not None:
                self._lose(member.worker_id, f"is stuck ({worker.activity})", clock)
        inside = [self._collective_seconds(member) for member in members]
        if len(members) > 1 and min(inside) >= self._settings.collective_timeout:
            text = f"all members waited for {min(inside):.0f} s in one collective"
            self._break_knowingly(text, clock, waited=round(min(inside), 1))

    def _collective_seconds(self, member: Member) -> float:
        """Return the seconds that a member has waited inside a collective of the newest group."""
        worker = self._known(member)
        if worker is None or worker.group_version != self.newest_version:
            return 0.0
        return worker.collective_seconds

    def collective_seconds(self) -> dict[int, float]:
        """Return the seconds that each member of the group that stands has waited inside its collective; 0: in none."""
        if not self.stands:
            return {}
        return {member.worker_id: self._collective_seconds(member) for member in self.formed_members}

    # Planning -------------------------------------------------------------------------------------------------------

    def advance(self, clock: float, num_wanted: int) -> None:
        """Plan the next group if it is due, and announce it to its workers.

        Args:
            clock: The present time.
            num_wanted: Number of workers that are present or may come; below --min_workers once scripts have ended.
        """
        self._num_wanted = num_wanted * self._settings.processes_per_worker
        if chosen := self._choose(clock):
            self._plan_if_enough(chosen, clock, num_wanted)
        self._announce()
        long = takewhile(lambda one: clock - one[1].since >= self._settings.long_poll, self._watches.items())
        for worker_id, _ in list(long):
            self._answer_watch(worker_id, NoLeaseNow())

    def _plan_if_enough(self, chosen: list[Candidate], clock: float, num_wanted: int) -> None:
        """Plan a group of these workers, or log that fewer than --min_workers are present."""
        num_processes = self._settings.processes_per_worker
        at_least = min(self._settings.min_workers, num_wanted)
        num_pods = len({self._settings.pod_of(one.id) for one in chosen})
        # Only the first group waits for all processes: later a pod may have one that has ended.
        awaited = self.awaited(clock) if self.formed is None else []
        is_short = num_pods < at_least or (awaited and len(chosen) < at_least * num_processes)
        if is_short and (ending := self._ending(chosen)):
            chosen, is_short = ending, False
        if is_short:
            number = f"{num_pods}"
            if num_processes > 1:
                number += f" with {len(chosen)} of {num_pods * num_processes} processes"
            flag = f"--min_workers={self._settings.min_workers}"
            self._complain(f"Training waits for workers: {number} can form a group, {at_least} must ({flag})")
        else:
            self._plan(chosen, clock)

    def _ending(self, chosen: list[Candidate]) -> list[Candidate]:
        """Return the holders of the model if all of them are ending and must agree on the last checkpoint."""
        if self.stands:
            return []  # they agree in the present group
        holders = [one for one in chosen if one.id in self._formed_ids()]
        known = [self._workers.get(one.id) for one in holders]
        return holders if all(worker is not None and worker.is_ending for worker in known) else []

    def awaited(self, clock: float, after: float = 0.0) -> list[int]:
        """Return the processes that the first group waits for, because others of their pods are ready.

        Processes that have ended, or that are not ready after the time limit of a worker's start, are not awaited.  A
        process that was ready before may be in a group that did not form, and leaves it when the next is planned.

        Args:
            clock: The present time.
            after: Least seconds for which another process of the pod must have been ready.
        """
        if self.formed is not None:
            return []
        ready = [one for one in self._candidates.values() if one.is_ready and self._is_alive(one, clock)]
        since: dict[int, float] = {}
        for one in ready:
            pod, ready_at = self._settings.pod_of(one.id), clock if one.ready_at is None else one.ready_at
            since[pod] = min(since.get(pod, ready_at), ready_at)
        pods = [pod for pod, ready_at in since.items() if after <= clock - ready_at <= self._settings.start_timeout]
        beside = {worker_id for pod in pods for worker_id in self._settings.ids_in(pod)} - {one.id for one in ready}
        known = {worker_id: self._workers.get(worker_id) for worker_id in sorted(beside)}
        return [worker_id for worker_id, worker in known.items() if worker is None or not self._has_come(worker)]

    def _has_come(self, worker: Worker) -> bool:
        """Return whether a process was ready, reports a group of an earlier generation of the master, or has ended."""
        return worker.has_ended or worker.id in self._candidates or worker.group_version > 0

    def _announce(self) -> None:
        """Answer the watches of workers that do not know the newest group."""
        news = (self.newest_version, bool(self._broken))
        workers = list(self._watches) if news != self._announced else list(self._unanswered)
        self._announced, self._unanswered = news, set()
        for worker_id in sorted(workers):
            watch = self._watches.get(worker_id)
            is_new = watch is not None and self.planned is not None and self.planned.version > watch.known_version
            if is_new and self.planned is not None and not self._broken:
                self._answer_watch(worker_id, GroupPlanned(self.planned))
                self._has_heard(worker_id, self.planned)

    def _has_heard(self, worker_id: int, group: WorkerGroup) -> None:
        candidate = self._candidates.get(worker_id)
        if candidate is not None and group.has(worker_id, candidate.incarnation):
            candidate.sent_version = group.version
            self._note(candidate)

    def _note(self, candidate: Candidate) -> None:
        """Update whether a candidate is ready."""
        if candidate.is_ready:
            self._ready.add(candidate.id)
        else:
            self._ready.discard(candidate.id)

    def over(self) -> JobOver:
        """Return the answer to a watch once no more groups are planned."""
        return JobOver(0 if self.formed is None else self.formed.version)

    def end(self) -> None:
        """Stop planning after the job was decided."""
        self._has_ended = True
        for worker_id in list(self._watches):
            self._answer_watch(worker_id, self.over())

    def _choose(self, clock: float) -> list[Candidate]:
        """Return the members of a group that is due now; empty if none is."""
        if self.planned is not None and self.planned is not self.formed and not self._broken:
            return []  # it is being formed; workers that come later join the next one
        if self.stands and not self._ready:
            return []
        sources = self._alive(self.formed, clock)
        names = {one.id for one in sources}
        joiners = [
            one
            for one in map(self._candidates.__getitem__, sorted(self._ready))
            if one.id not in names and self._is_alive(one, clock) and not self._suspects.is_barred(one.id, clock)
        ]
        if self.stands:
            return [*sources, *joiners] if joiners and self._are_all_there(joiners, clock) else []
        if not sources:
            if self._awaits_holder(clock):
                return []
            return self._without_suspects(joiners, clock) if self._are_all_there(joiners, clock) else []
        called = sources + [one for one in self._alive(self.planned, clock) if one.id not in names]
        ready = [one for one in called if one.is_ready]
        ready_sources = [one for one in sources if one.is_ready]
        if len(ready) == len(called):
            return self._without_suspects(together(ready, joiners), clock)
        if ready_sources and self._settings.shard_optimizer:  # a slow member may hold a part of the model alone
            newest = max(one.ready_at or 0.0 for one in ready)
            holders = [one for one in called if one.is_ready or one.id in names]
            return together(holders, joiners) if self._is_over(newest + SETTLE, clock) else []
        if ready_sources:  # the others are slow and join later
            newest = max(one.ready_at or 0.0 for one in ready)
            return together(ready, joiners) if self._is_over(newest + SETTLE, clock) else []
        return together(called, joiners) if self._is_over(self._broken_at + SETTLE, clock) else []

    def _awaits_holder(self, clock: float) -> bool:
        """Return whether the only processes with the model are silent members of the last group that may return."""
        limit = HOLDER_LEASES * self._settings.lease_timeout
        for member in self.formed_members:
            worker = self._known(member)
            if worker is None or worker.is_leaving or worker.stuck_since is not None:
                continue
            if not self._is_over(worker.heard_at + limit, clock):
                name = self._settings.name_of(worker.id)
                self._complain(f"Training waits for worker {name}, which is silent: no other worker has the model")
                return True
        return False

    def _without_suspects(self, ready: list[Candidate], clock: float) -> list[Candidate]:
        """Exclude a suspect if the newest group could not form although all its members are alive."""
        group = self.planned
        if group is None or group is self.formed or self._lost or self._judged == group.version:
            return ready
        if {one.id for one in ready} < {member.worker_id for member in group.members}:
            return ready
        self._judged = group.version
        if self._may_hold_alone(group, ready) and self._suspects.spares():
            return ready
        named = [(member.worker_id, member.is_source) for member in group.members]
        suspects = self._suspects.of_failed_group(named, clock)
        if suspects and len(ready) > len(suspects):
            names = ", ".join(map(self._settings.name_of, sorted(suspects)))
            self._out.log(f"A group could not form ({self._broken}); it is tried without worker {names}", Level.WARNING)
            return [one for one in ready if one.id not in suspects]
        return ready

    def _may_hold_alone(self, group: WorkerGroup, ready: list[Candidate]) -> bool:
        """Return whether a member of a group that could not form may hold a part of the model alone."""
        living = {(one.id, one.incarnation) for one in ready}
        is_one_gone = any((member.worker_id, member.incarnation) not in living for member in self.formed_members)
        return self._settings.shard_optimizer and is_one_gone and all(member.is_source for member in group.members)

    def _are_all_there(self, joiners: list[Candidate], clock: float) -> bool:
        """Return whether no other worker is about to become ready."""
        if not joiners:
            return False
        inside = set(self.members) | {one.id for one in joiners}
        if len(inside) >= self._num_wanted:
            return True
        times = [one.ready_at for one in joiners if one.ready_at is not None]
        return self._is_over(min(max(times) + SETTLE, min(times) + MAX_SETTLE), clock)

    def _is_over(self, moment: float, clock: float) -> bool:
        if clock < moment:
            self._out.add(Wake(moment - clock))
        return clock >= moment

    def _plan(self, chosen: list[Candidate], clock: float) -> None:
        """Plan a group: members of the last one first, in the same order, which is that of their age."""
        before = self.formed_members
        order = {(member.worker_id, member.incarnation): rank for rank, member in enumerate(before)}
        chosen = sorted(chosen, key=lambda one: (order.get((one.id, one.incarnation), len(order)), one.id))
        joiners = [one.id for one in chosen if (one.id, one.incarnation) not in order]
        if joiners and before:
            names = dict.fromkeys(str(self._settings.pod_of(worker_id)) for worker_id in joiners)
            self._transitions.fact(f"worker {', '.join(names)} joined")
        self._version += 1
        self.planned = WorkerGroup(
            self._version,
            tuple(Member(o.id, o.incarnation, o.address, (o.id, o.incarnation) in order) for o in chosen),
        )
        self._lost.clear()
        self._broken = self._complaint = ""
        self._transitions.begin(clock)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self._out.log(text, Level.WARNING)

    # Presence of workers --------------------------------------------------------------------------------------------

    def _known(self, member: Member | Candidate) -> Worker | None:
        worker = self._workers.get(member.worker_id if isinstance(member, Member) else member.id)
        return worker if worker is not None and worker.incarnation == member.incarnation else None

    def _is_alive(self, member: Member | Candidate, clock: float) -> bool:
        """Return whether a process can be counted on now."""
        worker = self._known(member)
        if worker is None or not worker.has_joined or worker.is_leaving or worker.stuck_since is not None:
            return False
        return clock - worker.heard_at < self._settings.collective_timeout

    def _alive(self, group: WorkerGroup | None, clock: float) -> list[Candidate]:
        """Return the live members of a group, in its order."""
        members = () if group is None else group.members
        found = [(self._candidates.get(member.worker_id), member) for member in members]
        return [one for one, m in found if one and one.incarnation == m.incarnation and self._is_alive(one, clock)]

    def _answer_watch(self, worker_id: int, answer: GroupPlanned | NoLeaseNow | JobOver | UnknownWorker) -> None:
        watch = self._watches.pop(worker_id, None)
        if watch is not None:
            self._out.reply(watch.call, answer)

    # Generations of the master ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        group = self.formed
        members = [] if group is None else [[m.worker_id, m.incarnation, m.address] for m in group.members]
        return {"version": 0 if group is None else group.version, "members": members, "num_formed": self.num_formed}

    def restore(self, saved: Mapping[str, Any], clock: float) -> None:
        """Restore the last formed group; its members continue, and get another one after they have registered."""
        self.num_formed = saved["num_formed"]
        if saved["members"]:
            self.formed = self.planned = WorkerGroup(saved["version"], tuple(Member(*one) for one in saved["members"]))
            self._candidates = {one[0]: Candidate(*one) for one in saved["members"]}
            began = self._out.events.newest_of(EventKind.MASTER_RESTARTED, EventKind.JOB_RESUMED)
            self._break_knowingly("the master has restarted", clock, began)

    def validate(self) -> None:
        """Check that the newest group is not older than the last formed one, and that no worker is in it twice.

        Raises:
            AssertionError: One of these does not hold.
        """
        assert self._ready == {one.id for one in self._candidates.values() if one.is_ready}
        for group in filter(None, (self.formed, self.planned)):
            ids = [member.worker_id for member in group.members]
            assert ids, group
            assert len(set(ids)) == len(ids), group
        if self.formed is not None:
            assert self.planned is not None
            assert self.planned.version >= self.formed.version
            sources = {(m.worker_id, m.incarnation) for m in self.formed.members}
            if self.planned is not self.formed:
                assert {(m.worker_id, m.incarnation) for m in self.planned.members if m.is_source} <= sources


def pods_of(group: WorkerGroup, settings: JobSettings) -> list[int]:
    """Return the pods of a group's members, in order of rank."""
    return list(dict.fromkeys(settings.pod_of(member.worker_id) for member in group.members))


class TransitionLog:
    """The steps from one group to the next, for the log: when the present change began, and why.

    The master's own knowledge counts; a member's report of its collective is used only if nothing else is known.
    """

    def __init__(self, settings: JobSettings) -> None:
        self._settings = settings
        self._facts: list[str] = []
        self._complaints: list[str] = []
        self._since: float | None = None

    @property
    def since(self) -> float | None:
        """When the present change began; None if there is none."""
        return self._since

    def begin(self, clock: float) -> None:
        """Note that a group is broken or a new one is planned; only the first call per change counts."""
        self._since = clock if self._since is None else self._since

    def fact(self, text: str) -> None:
        if text not in self._facts:
            self._facts.append(text)

    def complaint(self, text: str) -> None:
        """Keep the reason with which a member has left its group."""
        first = text.split(". ")[0].strip()
        self._complaints.append(first if len(first) <= _MAX_COMPLAINT else first[: _MAX_COMPLAINT - 1] + "…")

    def end(self, group: WorkerGroup, number: int, clock: float, origin: str) -> str:
        """End the change; return the log line of the formed group.

        Args:
            group: The formed group.
            number: Number of groups formed so far, this one included.
            clock: The present time.
            origin: Origin of the model if it is not that of a member of the last group; else empty.
        """
        duration = 0.0 if self._since is None else clock - self._since
        pods = pods_of(group, self._settings)
        names = ", ".join(map(str, pods))
        count = f"{len(pods)} worker{'s' if len(pods) > 1 else ''}"
        if self._settings.processes_per_worker > 1:
            count += f" ({len(group.members)} processes)"
        line = f"Group {number} of {count} has formed in {duration:.2f} s: worker {names}"
        causes = self._facts or self._complaints[:1]
        if origin and number > 1:
            causes = [*causes, "no worker has the model any more"]
        line += f" ({'; '.join(causes)})" if causes else ""
        self._facts, self._complaints, self._since = [], [], None
        return line + (f"; its model is {origin}" if origin else "")
