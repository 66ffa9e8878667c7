"""Fleet: the live processes, the causes of their ends, and their replacement.

It joins pods, workers and servers, each of which is a part of its own.  A lost process is never a failure of its task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elasticdl.master.core.commands import Accepted, DeletePod, HeartbeatAnswer, PsAdmitted, Refused, ResizePod
from elasticdl.master.core.events import (
    HeartbeatReceived,
    PodChanged,
    PodNotCreated,
    PodNotResized,
    PodResized,
    PodsListed,
    PsJoined,
    PsReady,
    ScaleRefused,
)
from elasticdl.master.core.fleet.hangs import Hangs, Liveness
from elasticdl.master.core.fleet.pods import NODE_LOST, PodRecord, Pods
from elasticdl.master.core.fleet.servers import Server, Servers
from elasticdl.master.core.fleet.stragglers import Stragglers
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.checkpoints import Checkpoints
from elasticdl.master.core.ledger.reconciliation import Reconciler
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, PodState, PsPartition, TaskType
from elasticdl.master.core.workers import Worker
from elasticdl.protocol import Role
from elasticdl_client.job_events import Detail, EventKind

MAX_REASONS = 20  # reported reasons for which a pod waits
_NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*")  # decimal and hexadecimal: counts, ids of sandboxes
_END_OF_CODE = re.compile(r": |; its last lines:\n")  # ends the code of "exit code 1: KeyError: 'a'"
_REASONS_TO_REPLACE = (EventKind.WORKER_HUNG, EventKind.WORKER_SLOW, EventKind.LEASE_LOST)
_NEAR_LIMIT = 0.9  # of a pod's memory limit
_GIVE_WAY_S = 10.0  # a queue with free quota admits a pod within a second or two


FleetEvent = (
    HeartbeatReceived | PsJoined | PsReady | PodChanged | PodNotCreated | PodResized | PodNotResized | ScaleRefused
)


class Fleet:
    """All processes of a job except the master's own."""

    def __init__(
        self, state: JobState, groups: WorkerGroups, work: Work, reconciler: Reconciler, checkpoints: Checkpoints
    ) -> None:
        self._settings = settings = state.settings
        self._workers, self._loads = state.workers, state.ps_metrics
        self._ending, self._out = state.ending, state.out
        self._groups = groups
        self._work = work
        self._retry_budget = work.retry_budget
        self._reconciler = reconciler
        self._checkpoints = checkpoints
        self.pods = Pods(settings)
        self.servers = Servers(settings.num_own_servers, state.generation)
        self.hangs = Hangs(state, groups, work)
        self._stragglers = Stragglers(state)
        self._liveness = Liveness(state, self.servers, work)
        self._refusals: dict[Role, str] = {}  # the last that an event is about, until a pod of the role is created
        self._resize_message = ""
        self._can_resize = True  # until the cluster refuses
        self.resumed = 0  # number of the event of the resumption, until the list of surviving pods has arrived

    @property
    def num_serving(self) -> int:
        """Number of serving parameter servers; of TensorFlow's own ones, which do not report, the running ones."""
        if self._settings.has_tensorflow_servers:
            return sum(record.running_since is not None for record in self.pods.living(Role.PS))
        return self.servers.num_ready

    def handle(self, event: FleetEvent, clock: float) -> None:
        match event:
            case HeartbeatReceived():
                self._heartbeat(event, clock)
            case PsJoined():
                self._ps_joined(event, clock)
            case PsReady():
                self._ps_ready(event, clock)
            case PodChanged():
                self._pod_changed(event, clock)
            case PodNotCreated():
                self._pod_not_created(event, clock)
            case PodResized():
                self._pod_resized(event)
            case PodNotResized():
                self._pod_not_resized(event)
            case ScaleRefused():
                self._refuse_scale(event)

    # How many workers -----------------------------------------------------------------------------------------------

    def scale(
        self, num_workers: int, subject: str, why: str, clock: float, details: Mapping[str, Detail] | None = None
    ) -> None:
        """Set the wanted number of training workers; running ones that are still wanted stay as they are.

        Args:
            num_workers: The new number.
            subject: Author of the change: user or master.
            why: The reason, for the log; may be empty.
            clock: The present time.
            details: Further details for the event.
        """
        before = self.pods.num_training
        if num_workers == before or self._ending.is_decided:
            return
        text = f"workers {before} → {num_workers}" + (f": {why}" if why else "")
        cause = self._out.events.add(
            EventKind.JOB_SCALED, subject, text, 0, before=before, after=num_workers, **(details or {})
        )
        released = self.pods.scale(num_workers, lambda record: self._use_of(record, clock))
        self.pods.fill(clock, cause)
        self._out.persist()
        self._out.log(f"The {subject} wants {num_workers} workers, not {before}{why and f': {why}'}")
        for record in released:
            self._out.events.add(EventKind.POD_DRAINING, record.subject, "is not wanted any more", cause)
            self._out.add(DeletePod(record.name))

    def _use_of(self, record: PodRecord, clock: float) -> int:
        """Return the rank of a worker's pod: healthy members of the last group, with the model, rank highest."""
        return min(self._use_of_process(worker_id, record, clock) for worker_id in self._settings.ids_in(record.index))

    def _use_of_process(self, worker_id: int, record: PodRecord, clock: float) -> int:
        worker = self._workers.get(worker_id)
        if worker is None:
            return int(record.has_node)
        if worker.stuck_since is not None or worker.is_leaving:
            return 0
        if clock - worker.heard_at > self._settings.collective_timeout:
            return 1
        return 3 if worker_id in {member.worker_id for member in self._groups.formed_members} else 2

    def _refuse_scale(self, event: ScaleRefused) -> None:
        """Report an impossible number of workers once over all generations of the master."""
        kinds = (EventKind.JOB_SCALED, EventKind.SCALE_REFUSED)
        events = (one for one in reversed(self._out.events.history.events) if one.subject == "user")
        last = next((one for one in events if one.kind in kinds), None)
        if self._ending.is_decided or (last is not None and last.message == event.reason):
            return
        self._out.events.add(EventKind.SCALE_REFUSED, "user", event.reason)
        self._out.log(event.reason, Level.WARNING)

    # Heartbeats --------------------------------------------------------------------------------------------------

    def _heartbeat(self, event: HeartbeatReceived, clock: float) -> None:
        if event.role is Role.PS:
            self._ps_heartbeat(event, clock)
            return
        worker = self._workers.known(event.id, event.incarnation, clock)
        stop = self._ending.has_failed
        if worker is None:
            self._out.reply(event.call, HeartbeatAnswer(False, stop=stop))
            return
        self._add_memory_if_low(event)
        worker.group_version, worker.collective_seconds = event.group_version, event.waiting_seconds
        worker.device, worker.optimizer_share = event.device, event.optimizer_share
        worker.is_ending = event.ending
        if event.checkpoint is not None and worker.tries_checkpoint(event.checkpoint_attempt):
            self._checkpoints.handle_of_worker(event.checkpoint)
        self._workers.times.report(worker.id, worker.incarnation, event.seconds)
        if event.leaving:
            self._worker_leaves(worker, clock)
        if event.ended:
            self._handle_script_end(worker, clock)
        revoked = self._work.leases.renew(worker.id, event.positions, clock)
        wants_stacks = self.hangs.on_heartbeat(worker, event, clock)
        self._stragglers.on_heartbeat(worker, event, clock)
        self._workers.on_heartbeat(worker, event.positions, event.activity, event.seconds, clock)
        known = worker.has_joined or worker.is_leaving
        version = self._groups.newest_version
        partition = self._newer_partition(event)
        whole, newest = self._work.quota.all_held_by(worker.id, self._work.tasks)
        asked, pace = self._checkpoints.num_requests, self._workers.pace(self._settings)
        answer = HeartbeatAnswer(known, revoked, partition, stop, 0, version, whole, newest, wants_stacks, asked, pace)
        self._out.reply(event.call, answer)

    def _ps_heartbeat(self, event: HeartbeatReceived, clock: float) -> None:
        server = self.servers.known(event.id, event.incarnation, clock)
        if server is None:
            self._out.reply(event.call, HeartbeatAnswer(False, stop=self._ending.is_over))
            return
        self._add_memory_if_low(event)
        if event.load is not None:
            self._loads.on_heartbeat(server.id, server.incarnation, event.load, clock)
            self.servers.times.report(server.id, server.incarnation, event.load.busy_seconds)
        if event.leaving:
            self._ps_leaves(server)
        stop = self._ending.is_over or self._may_leave(server)
        num_pushing = self._work.leases.num_busy(TaskType.TRAINING)
        partition = self._newer_partition(event)
        answer = HeartbeatAnswer(True, (), partition, stop, num_pushing, newest_lease=self._work.leases.newest)
        self._out.reply(event.call, answer)

    def _add_memory_if_low(self, event: HeartbeatReceived) -> None:
        """Give a pod more memory before the kernel kills it, if it is near its limit."""
        is_worker = event.role is Role.WORKER
        record = self.pods.of_worker(event.id) if is_worker else self.pods.get(event.role, event.id)
        if event.memory_share < _NEAR_LIMIT or not self._can_resize or record is None or self._ending.is_decided:
            return
        if (pod := self.pods.resize(record)) is not None:
            self._out.add(ResizePod(pod))

    def _pod_resized(self, event: PodResized) -> None:
        self.pods.resized(event.name, event.memory_factor)
        text = f"was near its memory limit, which is {event.memory_bytes >> 20} MiB now"
        self._out.events.add(EventKind.POD_RESIZED, self._subject(event.name), text, 0, memory_bytes=event.memory_bytes)
        self._out.persist()
        self._out.log(f"{event.name} {text}")

    def _pod_not_resized(self, event: PodNotResized) -> None:
        self._can_resize = self._can_resize and not event.is_final
        if event.message != self._resize_message:
            self._resize_message = event.message
            self._out.events.add(EventKind.POD_NOT_RESIZED, self._subject(event.name), event.message)
            text = f"{event.name} is near its memory limit, which cannot be raised in place: {event.message}"
            self._out.log(f"{text} If it is OOMKilled, its successor gets more.", Level.WARNING)

    def _newer_partition(self, event: HeartbeatReceived) -> PsPartition | None:
        """Return the partition if it is newer than the one that the caller has seen, else None."""
        partition = self.servers.partition
        return None if partition is None or partition.version <= event.partition_version else partition

    def _worker_leaves(self, worker: Worker, clock: float) -> None:
        if not worker.is_leaving:
            worker.is_leaving = True
            self.pods.touch(worker.id)
            record = self.pods.of_worker(worker.id)
            is_first = sum(one.is_leaving for one in self._in_pod(self._settings.pod_of(worker.id))) == 1
            if is_first and (record is None or not record.is_released):  # a release was logged before
                self._drains(self._settings.subject_of(worker.id))
            self._groups.leaves(worker.id, clock)
            self._work.lose_worker(worker.id)
            self._out.persist()
            self._out.log(f"Worker {self._settings.name_of(worker.id)} was asked to end; its leases are back")

    def _handle_script_end(self, worker: Worker, clock: float) -> None:
        """Note that a script ends: its process is silent from now on and has left its group by itself."""
        if not worker.is_leaving:
            worker.is_leaving = worker.has_ended = True
            self._workers.times.committed(worker.id)  # it has reported what it has trained
            self.pods.touch(worker.id)
            if not self._work.is_covered:  # otherwise the other scripts end, too
                self._groups.ends(worker.id, clock)
            self._work.lose_worker(worker.id)
            self._out.persist()
            self._out.log(f"Worker {self._settings.name_of(worker.id)} has ended its script")

    def _in_pod(self, index: int) -> list[Worker]:
        """Return the registered processes of a worker's pod."""
        return [one for worker_id in self._settings.ids_in(index) if (one := self._workers.get(worker_id)) is not None]

    def _drains(self, subject: str) -> None:
        if not self._ending.is_decided:  # otherwise all of them are terminating
            self._out.events.add(EventKind.POD_DRAINING, subject, "was asked to end")

    def _ps_leaves(self, server: Server) -> None:
        if server.leaving_version is None:
            server.leaving_version = self._work.tasks.model_version
            self._drains(f"ps-{server.id}")
            self._out.persist()
            last = "" if self._may_leave(server) else "; a checkpoint is written first"
            self._out.log(f"PS {server.id} was asked to end{last}")

    def _may_leave(self, server: Server) -> bool:
        """Return whether a terminating PS may leave: its state is saved as far as possible."""
        version = server.leaving_version
        if version is None or self._ending.is_decided:
            return version is not None
        return self._checkpoints.is_settled(min(version, self._work.tasks.model_version))

    @property
    def wants_checkpoint(self) -> bool:
        """Whether some PS is terminating and waits for a checkpoint."""
        return any(s.leaving_version is not None and not self._may_leave(s) for s in self.servers.all())

    def _ps_joined(self, event: PsJoined, clock: float) -> None:
        before = self.servers.get(event.ps_id)
        incarnation = before.incarnation if before is not None else 0
        written = self.servers.snapshot()
        answer = self.servers.join(event, *self._checkpoints.source(), clock)
        if isinstance(answer, PsAdmitted):
            if answer.incarnation != incarnation:
                self._reconciler.doubt()
            if self.servers.snapshot() != written:  # otherwise a PS comes back to a new generation of the master
                self._out.persist()
        self._out.reply(event.call, answer)

    def _ps_ready(self, event: PsReady, clock: float) -> None:
        server = self.servers.known(event.ps_id, event.incarnation, clock)
        if server is None:
            self._out.reply(event.call, Refused(f"PS {event.ps_id} must register first, or was replaced"))
            return
        if event.error:
            self._ps_cannot_restore(server, event)
        elif not server.is_ready:
            self._tell_restored(server, event)
            self._out.events.add(
                EventKind.PS_READY,
                f"ps-{server.id}",
                f"restored from {event.restored_from}" if event.restored_from else "",
                self._out.events.newest(f"ps-{server.id}"),
                incarnation=server.incarnation,
                restored_from=event.restored_from,
            )
            self.servers.ready(server, self._work.tasks.model_version)
            self._work.model_was_lost()
            self._reconciler.doubt()
            self._out.persist()
            self._out.log(f"PS {server.id} is ready (incarnation {server.incarnation}, {server.address})")
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _ps_cannot_restore(self, server: Server, event: PsReady) -> None:
        passed = "".join(f"\n{text}" for text in event.damaged)
        advice = (
            "repair or remove what is damaged and start the job again, from a checkpoint that is whole "
            "(--checkpoint_dir_for_init) or without one"
        )
        text = f"{event.error}{passed}"
        cause = self._out.events.add(EventKind.CHECKPOINT_UNREADABLE, f"ps-{server.id}", text)
        text = f"PS {server.id} cannot restore its part of the model: {text}\n  → {advice}"
        self._ending.fail(text, cause=cause)

    def _tell_restored(self, server: Server, event: PsReady) -> None:
        if event.damaged:
            passed = "; ".join(event.damaged)
            taken = event.restored_from or "no checkpoint: it begins with initial values"
            self._out.events.add(
                EventKind.CHECKPOINT_UNREADABLE, f"ps-{server.id}", passed, 0, restored_from=event.restored_from
            )
            self._out.log(f"PS {server.id} restored its part from {taken}: {passed}", Level.WARNING)
        elif event.restored_from:
            self._out.log(f"PS {server.id} restored its part from {event.restored_from}")

    # The cluster ----------------------------------------------------------------------------------------------------

    def pods_listed(self, event: PodsListed, clock: float) -> None:
        changes, strays = self.pods.listed(event.pods, clock)
        for change in changes:
            self._pod_changed(change, clock)
        self.resumed = 0
        if not self._ending.is_decided:
            strays += self.pods.superfluous(event.pods)
            self.pods.fill(clock)
        for stray in strays:
            self._delete(stray)

    def _pod_changed(self, event: PodChanged, clock: float) -> None:
        had_run = self.pods.has_run(event.role)
        known = self.pods.get(event.role, event.index)
        record = self.pods.changed(event, clock)
        if (known := known or self.pods.get(event.role, event.index)) is not None:
            self._log_change(known, event)
        if self.pods.has_run(event.role) and not had_run:
            self._out.persist()
        if record is None:
            self._see_whether_blocked(event)
            return
        if event.reason == NODE_LOST:
            self._delete(event)
        if record.role is Role.WORKER:
            self._worker_ended(record, event, clock)
        else:
            self._ps_ended(record, event, clock)

    def _delete(self, event: PodChanged) -> None:
        """Delete the object of a pod on a lost node at once: no kubelet is left to end the process."""
        self._out.add(DeletePod(event.name, 0.0 if event.reason == NODE_LOST else None))

    def _see_whether_blocked(self, event: PodChanged) -> None:
        record = self.pods.get(event.role, event.index)
        if not event.blocked or record is None or record.uid != event.uid or event.blocked in record.complaints:
            return
        record.complaints.add(event.blocked)
        created = self._out.events.newest(record.subject)
        cause = self._out.events.add(EventKind.POD_BLOCKED, record.subject, event.blocked, created)
        text = f"{record.name} cannot start: {event.blocked}"
        if self.pods.has_run(record.role):
            self._out.log(text, Level.WARNING)
        else:
            self._ending.fail(text, cause=cause)

    def _log_change(self, record: PodRecord, event: PodChanged) -> None:
        """Log the first appearance of a pod's new states, except for its end."""
        if not event.uid or record.uid != event.uid:
            return
        if not record.is_known:
            record.is_known = True
            self._refusals.pop(record.role, None)
            self._out.events.add(EventKind.POD_CREATED, record.subject, "", record.cause, slot=record.slot)
        if event.phase is PodState.RUNNING and not record.has_run:
            record.has_run = True
            created = self._out.events.newest(record.subject)
            self._out.events.add(EventKind.POD_RUNNING, record.subject, "", created, **_where(event))
        why = ", ".join(filter(None, (event.reason, event.message)))
        pattern = _NUMBERS.sub("#", why)  # how many nodes lack a resource changes every second
        is_new = pattern not in (record.pending_why, *record.complaints) and len(record.complaints) < MAX_REASONS
        if event.phase is PodState.PENDING and why and not event.blocked and is_new:
            record.complaints.add(pattern)
            record.pending_why = pattern
            created = self._out.events.newest(record.subject)
            self._out.events.add(EventKind.POD_PENDING, record.subject, event.message, created, reason=event.reason)

    def _subject(self, name: str) -> str:
        """Return the subject of events about a pod, by its name."""
        record = self.pods.named(name)
        return name if record is None else record.subject

    def _lost(self, record: PodRecord, event: PodChanged) -> int:
        """Log the end of a pod; return the number of the event that causes its successor."""
        if self._ending.is_decided:  # all pods are ending
            return 0
        if not record.is_known:  # the previous master was lost before it created the pod
            return record.cause
        cause = self._out.events.newest_about(record.subject, EventKind.POD_DRAINING, EventKind.POD_GIVEN_UP)
        is_done = event.phase is PodState.SUCCEEDED and self._settings.runs_command and not record.is_leaving
        if is_done or record.is_released:
            return self._out.events.add(EventKind.POD_COMPLETED, record.subject, "", cause)
        if record.is_leaving:  # it was given up earlier
            return cause
        if self.resumed:
            return self._out.events.add(EventKind.POD_STOPPED, record.subject, event.message, self.resumed)
        details: dict[str, Detail] = {} if event.exit_code is None else {"exit_code": event.exit_code}
        return self._out.events.add(
            EventKind.POD_LOST,
            record.subject,
            event.message,
            cause,
            reason=event.reason or event.phase.value,
            **details,
            **_where(event),
        )

    def _pod_not_created(self, event: PodNotCreated, clock: float) -> None:
        record = self.pods.named(event.name)
        delay = self.pods.not_created(event.name, event.message, clock, event.lacks_quota)
        if record is not None and delay is not None and self._refusals.get(record.role) != event.message:
            self._refusals[record.role] = event.message
            self._out.events.add(EventKind.POD_NOT_CREATED, self._subject(event.name), event.message)
            self._out.log(f"{event.name} cannot be created: {event.message}. It is tried again.", Level.WARNING)

    def _worker_ended(self, record: PodRecord, event: PodChanged, clock: float) -> None:
        lost = self._lost(record, event)
        processes = self._in_pod(record.index)
        # Processes beside one that fails by its own fault do not leave: they are killed.
        is_whole = len(processes) == self._settings.processes_per_worker
        is_signalled = not all(one.has_ended for one in processes)
        was_leaving = is_whole and is_signalled and all(one.is_leaving for one in processes)
        reached = max((one.reached for one in processes), default=0)
        is_done = self._settings.runs_command and event.phase is PodState.SUCCEEDED and not record.is_leaving
        if is_done:
            for worker_id in self._settings.ids_in(record.index):
                self._workers.times.committed(worker_id)
        why = "is not wanted any more" if record.is_released else f"was lost ({_why(event)})"
        has_committed = self.lose_worker(record, why, clock)
        if is_done:
            self.pods.complete(record)
            self._out.persist()
            self._out.log(f"Worker {record.index} is done: its command has ended with 0")
            return
        if not record.is_leaving:  # otherwise its successor may have restored the model already
            self._reconciler.doubt_session(Role.WORKER, record.slot)
        if not record.is_leaving and not self._ending.is_decided:
            self._out.persist()
            if not was_leaving and self._fail_if_relapsed(record, event, lost, reached):
                return
            self._out.log(f"Relaunch the worker: {record.name} ({_why(event)})", Level.WARNING)
            self._plan_successor(record, event, lost, was_leaving, has_committed, clock)

    def _ps_ended(self, record: PodRecord, event: PodChanged, clock: float) -> None:
        lost = self._lost(record, event)
        server = self.servers.get(record.index)
        self._reconciler.doubt_session(Role.PS, record.slot)
        was_leaving = server is not None and server.leaving_version is not None
        version = self._work.tasks.model_version
        has_served = server is not None and server.is_ready and version > server.ready_version
        is_first = self.servers.is_complete and self._retry_budget.has_trained
        reached = self._work.tasks.records_done if has_served and is_first else 0
        self._lose_server(record)
        if not record.is_leaving and not self._ending.is_decided:
            self._out.persist()
            if not was_leaving and self._fail_if_relapsed(record, event, lost, reached):
                return
            self._out.log(f"PS {record.index} is lost ({_why(event)}); it is started again", Level.WARNING)
            self._plan_successor(record, event, lost, was_leaving, has_served, clock)

    def _lose_server(self, record: PodRecord) -> None:
        self.servers.lose(record.index)
        self._loads.lost(record.index)

    def _plan_successor(
        self, record: PodRecord, event: PodChanged, lost: int, was_leaving: bool, has_committed: bool, clock: float
    ) -> None:
        """Plan the successor of a wanted pod, or fail the job after too many ends.

        Args:
            lost: Number of the event that reports the pod's end.
        """
        delay = 0.0
        if not was_leaving and not self.resumed and not self._gets_more_memory(record, event):
            seconds = 0.0 if record.running_since is None else clock - record.running_since
            delay = self._retry_budget.pod_ended(event.reason, record.place, has_committed, seconds)
            if self._fail_if_certain(record, event, lost, has_committed) or self._fail_if_enough(record, event, lost):
                return
        self.pods.plan_successor(record, clock + delay, lost)

    def _gets_more_memory(self, record: PodRecord, event: PodChanged) -> bool:
        if event.reason != "OOMKilled" or (factor := self.pods.grow_memory(record)) is None:
            return False
        times = f"its successor gets {factor:.3g} times the memory that the job asks for"
        self._out.log(f"{record.role}-{record.index} ran out of memory (OOMKilled); {times}", Level.WARNING)
        return True

    def _fail_if_certain(self, record: PodRecord, event: PodChanged, lost: int, has_committed: bool) -> bool:
        """Fail the job if a command has failed twice with the same error of its own code: it would fail again."""
        if not self._settings.runs_command or has_committed:
            return False
        if self._retry_budget.is_known_error(event.message):
            code, error = _END_OF_CODE.split(event.message, maxsplit=1)
            twice = f"The command has ended so twice, last in {record.name} ({code}), which had committed nothing"
            self._ending.fail(f"{error}\n{twice}. It is not tried again.", cause=lost)
        return self._ending.is_decided

    def _fail_if_enough(self, record: PodRecord, event: PodChanged, lost: int) -> bool:
        faults = self._retry_budget.num_faults
        if self._retry_budget.is_enough(faults):
            text = f"{faults} pods in a row ended by their own fault before they committed anything"
            log_of = "" if "\n" in event.message else record.name  # otherwise the message has the last lines of its log
            self._ending.fail(f"{text}; the last one was {record.name} ({_why(event)})", log_of, lost)
        return self._ending.is_decided

    def _fail_if_relapsed(self, record: PodRecord, event: PodChanged, lost: int, reached: int) -> bool:
        """Fail the job if pods keep failing at the same point and lose the model each time: that would never end.

        Pods that fail together count as one failure: the other workers count again after their next commit of training,
        servers once all serve and a worker has committed.  Workers that only evaluate lose nothing.
        """
        is_own = event.reason == "Error" or (event.reason == "OOMKilled" and self.pods.has_most_memory(record))
        if not is_own or not reached or self.resumed:
            return False
        for worker in self._workers.all():
            worker.reached = 0
        count = self._retry_budget.relapsed(reached)
        if count > 1 and self._retry_budget.is_enough(count):
            code, *error = _END_OF_CODE.split(event.message or _why(event), maxsplit=1)
            kind = "workers" if record.role is Role.WORKER else "parameter servers"
            text = f"{count} {kind} in a row failed, the last one {record.name} ({code})"
            furthest = self._retry_budget.furthest
            text = f"{text}, and training got no further than {furthest:,} records. It is not tried again."
            self._ending.fail("\n".join([*error, text]), "" if error else record.name, lost)
        return self._ending.is_decided

    def lose_worker(self, record: PodRecord, why: str, clock: float) -> bool:
        """Give back the leases of all processes of a pod; return whether it had ever committed something."""
        self.pods.touch_slot(record)
        has_committed = False
        for worker_id in self._settings.ids_in(record.index):
            self._groups.lost(worker_id, why, clock)
            self._work.lose_worker(worker_id)
            worker = self._workers.remove(worker_id)
            has_committed |= worker is not None and worker.has_committed
        return has_committed

    # Time -----------------------------------------------------------------------------------------------------------

    def find_hangs(self, clock: float) -> None:
        """Look for workers that have stopped moving."""
        if not self._ending.is_decided:
            self.hangs.find(clock, self.servers.is_complete)

    def time_out(self, clock: float) -> None:
        """Revoke leases that were not renewed; replace silent and stuck workers."""
        for lease in self._work.leases.expired(clock - self._settings.lease_timeout):
            holder = self._work.leases.holder_of(lease)
            if (record := self.pods.of_worker(holder)) is not None and record.state:
                self.hangs.is_silent(holder, record.state, clock)
            subject, text = self._settings.subject_of(holder), f"lease {lease.id} was not renewed in time"
            cause = self._out.events.newest_about(subject, EventKind.WORKER_HUNG)
            self._out.events.add(EventKind.LEASE_LOST, subject, text, cause, epoch=lease.epoch + 1, task=lease.task)
            name = self._settings.name_of(holder)
            self._out.log(f"Worker {name} has lost lease {lease.id}: it was not renewed in time", Level.WARNING)
            self._workers.times.lost(holder)
            self._work.give_back(lease)
            self._groups.lost_lease(holder, clock)
        if self._ending.is_decided:
            return
        for record in self.pods.existing():
            if not record.is_leaving and (why := self._liveness.why_given_up(record, clock)):
                for worker in self._in_pod(record.index) if record.role is Role.WORKER else ():
                    if self._liveness.is_silent(worker.heard_at, clock) and not worker.has_ended:
                        self.hangs.is_silent(worker.id, record.state, clock)
                self._replace(record, why, clock)
        self._give_way(clock)
        slow = self._stragglers.find(clock)
        slow_pod = None if slow is None else self.pods.of_worker(slow.worker_id)
        if slow is not None and slow_pod is not None and not slow_pod.is_leaving:
            self._replace(slow_pod, slow.why, clock)

    def _give_way(self, clock: float) -> None:
        """Delete workers whose quota a server lacks, in a queue or its namespace: without the server they have no work.

        Workers that wait in a queue are deleted as well, since they may be older than the server; their successors
        are created when the server has a place.
        """
        waiting = [] if self._settings.queues_differ else self.pods.take_without_quota(clock, _GIVE_WAY_S)
        if not waiting:
            return
        workers = self.pods.living(Role.WORKER)
        placed = sorted((w for w in workers if w.has_node), key=lambda w: (self._use_of(w, clock), -w.index))
        num_leaving = sum(r.is_leaving and r.has_node for r in self.pods.existing())
        given = [w for w in workers if not w.has_node] + placed[: max(0, len(waiting) - num_leaving)]
        server = f"{Role.PS}-{waiting[0]}"
        for record in given:
            self._release(record, server, clock)
        if given:
            self._out.persist()
            names = f"{', '.join(one.subject for one in given)}: asked to end"
            self._out.log(f"{names}, for {server} lacks quota", Level.WARNING)

    def _release(self, record: PodRecord, server: str, clock: float) -> None:
        record.is_leaving = record.is_released = True
        self.pods.touch_slot(record)
        text = f"gives its quota to {server}"
        cause = self._out.events.add(EventKind.POD_DRAINING, record.subject, text, self._out.events.newest(server))
        self._reconciler.doubt_session(record.role, record.slot)
        self._out.add(DeletePod(record.name))
        self.pods.plan_successor(record, clock, cause)

    def _replace(self, record: PodRecord, why: str, clock: float) -> None:
        record.is_leaving = True
        self.pods.touch_slot(record)
        cause = self._out.events.newest_about(record.subject, *_REASONS_TO_REPLACE)
        given_up = self._out.events.add(EventKind.POD_GIVEN_UP, record.subject, why, cause)
        self._reconciler.doubt_session(record.role, record.slot)
        self._out.persist()
        self._out.add(DeletePod(record.name))
        if record.role is Role.WORKER:
            self.lose_worker(record, f"was given up ({why})", clock)
            self._out.log(f"Relaunch the worker: {record.name} ({why})", Level.WARNING)
        else:
            self._lose_server(record)
            self._out.log(f"PS {record.index} is given up ({why}); it is started again", Level.WARNING)
        self.pods.plan_successor(record, clock, given_up)

    def who_must_be_ended(self, heard_after: float) -> list[str]:
        """Return the names of pods that do not end by themselves with the job; a live PS leaves at `stop`."""
        return [
            record.name
            for record in self.pods.existing()
            if record.role is Role.WORKER or not self.servers.is_heard(record.index, heard_after)
        ]

    def place(self, clock: float) -> None:
        """Create the pods that are due."""
        if not self.pods.is_listed or self._ending.is_decided:
            return
        commands = self.pods.due(clock)
        if commands:
            self._out.persist()
        for command in commands:
            self._out.add(command)


def _where(event: PodChanged) -> dict[str, Detail]:
    return {"node": event.node} if event.node else {}


def _why(event: PodChanged) -> str:
    parts = [event.reason or event.phase]
    if event.exit_code is not None and not event.message.startswith("exit code"):
        parts.append(f"exit code {event.exit_code}")
    if event.message:
        parts.append(event.message)
    return ", ".join(parts)
