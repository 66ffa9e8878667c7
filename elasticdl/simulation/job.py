"""A simulated job: the master's real core, and pods, parameter servers, workers and groups in virtual time.

The core decides everything that a master decides; this module simulates its environment.  The model is the state of the
parameter servers or of the members of a group: of each task the minibatches 0, 1, … up to a watermark, since workers
process them in order.  A started but unfinished minibatch is computed again, and so is everything that a model loses.

Not simulated: evaluation, export and restarts of the master.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, PodState, Position, PsPartition, TaskType
from elasticdl.protocol import Role, Shard
from elasticdl.simulation.cluster import Change, SimulatedCluster, SimulatedPod, Timeline
from elasticdl.simulation.scenario import Amounts, Scenario

TICK_S = 1.0
HOLD = 2  # leases of a worker: the task that it computes, and the next one
TaskName = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Workload:
    """A job to simulate.

    Attributes:
        settings: Settings of the core; evaluation and export are not simulated.
        shards: Shards of the training data.
        step_s: Seconds of a worker for a minibatch on a node of speed 1.
        requests: Resources of a pod, by role.
        priorities: Returns the priority of a pod, given role and slot.
        heartbeat_s: Seconds between two heartbeats of a process.
        speed: Returns the speed of a worker, as a share of its speed alone, given the time and the number of workers.
        waits_for: The activity of the rest of their time: ps, input, world (a collective), or compute.
    """

    settings: JobSettings
    shards: tuple[Shard, ...]
    step_s: float
    requests: Mapping[Role, Amounts]
    priorities: Callable[[Role, int], int] = lambda role, slot: 0
    heartbeat_s: float = 2.0
    speed: Callable[[float, int], float] = lambda at, num_workers: 1.0
    waits_for: str = "ps"


@dataclass(eq=False, slots=True)
class Process:
    """The process in a pod."""

    pod: SimulatedPod
    role: Role
    index: int
    uid: str
    is_connected: bool = False  # whether its process has begun and its messages arrive
    incarnation: int = 0
    began: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedWorker(Process):
    """A worker process.

    Attributes:
        held: Its leases; it computes the first.
        since: Since when it computes the first lease; None if it does not.
        base: Minibatches of that task that were in the model at that time.
        reported: Minibatches of that task that it has reported.
        computed: Seconds of computing.
        waited: Seconds of waiting for `Workload.waits_for`.
        speed: Its speed in the present task, as a share of its speed alone.
        own_step_s: Seconds of a minibatch at its speed alone.
        step_s: Seconds of a minibatch at the present speed.
    """

    own_step_s: float = 1.0
    step_s: float = 1.0
    speed: float = 1.0
    held: deque[Lease] = field(default_factory=deque)
    since: float | None = None
    base: int = 0
    reported: int = 0
    computed: float = 0.0
    waited: float = 0.0
    asks: bool = False
    is_leaving: bool = False
    partition: PsPartition | None = None
    wake: int = 0  # number of the newest planned end of a task


@dataclass(slots=True)
class EventTimes:
    """Processor seconds of the core, by kind of event."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.counts[kind] = self.counts.get(kind, 0) + 1


class SimulatedJob:
    """A job with parameter servers.

    Args:
        times: If given, accumulates the core's times.
    """

    def __init__(
        self,
        workload: Workload,
        scenario: Scenario,
        cluster: SimulatedCluster,
        timeline: Timeline,
        times: EventTimes | None = None,
    ) -> None:
        self.workload = workload
        self.settings = workload.settings
        self.scenario = scenario
        self.cluster = cluster
        self.timeline = timeline
        self.times = times
        self.core = Job(self.settings)
        self.end: c.EndJob | None = None
        self.log: list[str] = []
        self.model: dict[TaskName, int] = {}  # minibatches of each task, from 0 on
        self.num_lost = 0
        self.num_again = 0  # minibatches that were computed more than once, or wasted
        self._checkpoints: dict[str, dict[TaskName, int]] = {}
        self._calls: dict[int, Callable[[Any], None]] = {}
        self._num_calls = 0
        self._num_processes = 0
        self._inbox: deque[e.Event] = deque()
        self._is_handling = False
        self._processes: dict[str, Process] = {}  # by pod name
        self._running: list[SimulatedWorker] = []  # workers with a process
        self._computing: dict[TaskName, SimulatedWorker] = {}
        self._slots: dict[str, int] = {}
        self._running_since = 0.0
        self.worker_seconds = 0.0  # of running processes

    # The core -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Submit the job."""
        self.tell(e.PodsListed(()))
        self._tick()

    def tell(self, event: e.Event) -> None:
        """Give an event to the core after its queued ones, and carry out the commands."""
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._inbox and self.end is None:
            one = self._inbox.popleft()
            before = thread_time() if self.times is not None else 0.0
            todo = self.core.handle(one, self.timeline.now)
            if self.times is not None:
                self.times.add(type(one).__name__, thread_time() - before)
            for command in todo:
                self._execute(command)
        self._is_handling = False

    def call(self, make: Callable[[int], e.Event], answered: Callable[[Any], None]) -> None:
        """Make a call of the master; the answer comes at once, or later for a long poll."""
        self._num_calls += 1
        self._calls[self._num_calls] = answered
        self.tell(make(self._num_calls))

    def _tick(self) -> None:
        if self.end is None:
            self.tell(e.Tick())
            self.timeline.after(TICK_S, self._tick)

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.Reply(call, answer):
                self._calls.pop(call)(answer)
            case c.CreatePod():
                self._over_api(lambda: self._create(command))
            case c.DeletePod(name, _):
                self._over_api(lambda: self._delete(name))
            case c.ListShards(kind):
                self.tell(e.ShardsListed(kind, self.workload.shards))
            case c.ReadAppliedSets(question, ps):
                applied = self.applied()
                self.tell(e.AppliedSetsRead(question, {one.ps_id: applied for one in ps}))
            case c.SaveCheckpoint(version, _, _):
                directory = f"version-{version}"
                self._settle_all()
                self._checkpoints = {directory: dict(self.model)}
                self.tell(e.CheckpointSaved(version, directory))
            case c.Log(_, text):
                self.log.append(text)
            case c.Wake(after_s):
                self.timeline.after(after_s, lambda: self.tell(e.Tick()))
            case c.EndJob():
                self.end = command

    def applied(self) -> CommittedSet:
        """Return the minibatches in the model."""
        self._settle_all()
        held = CommittedSet(num_applies=sum(self.model.values()))
        held.watermarks.update(self.model)
        return held

    # The API of Kubernetes ------------------------------------------------------------------------------------------

    def _over_api(self, action: Callable[[], None]) -> None:
        """Run a request to the API, or report a change; delayed while the API does not answer."""
        moment = self.timeline.now + self.scenario.api_latency
        for outage in self.scenario.api_outages:
            if outage.at <= moment < outage.at + outage.lasts:
                moment = outage.at + outage.lasts
        self.timeline.at(moment, action)

    def _create(self, command: c.CreatePod) -> None:
        if self.end is not None:
            return
        self._num_processes += 1
        priority = self.workload.priorities(command.role, command.slot)
        requests = self.workload.requests[command.role]
        is_worker = command.role is Role.WORKER
        pod = SimulatedPod(command.name, requests, priority, self._pod_changes, may_fail=is_worker)
        uid = f"uid-{self._num_processes}"
        kind = SimulatedWorker if is_worker else Process
        self._processes[command.name] = kind(pod, command.role, command.index, uid)
        self._report(self._processes[command.name], PodState.PENDING)
        self.cluster.create(pod)

    def _delete(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            self.cluster.end(process.pod, "Deleted")

    def _report(self, process: Process, phase: PodState, reason: str = "") -> None:
        node = "" if process.pod.node is None else process.pod.node.name
        event = e.PodChanged(process.pod.name, process.role, process.index, process.uid, phase, reason, node=node)
        self._over_api(lambda: self.tell(event))

    def _pod_changes(self, pod: SimulatedPod, change: Change, reason: str) -> None:
        process = self._processes[pod.name]
        match change:
            case Change.SCHEDULED:
                self._report(process, PodState.PENDING)
            case Change.STARTED:
                self._report(process, PodState.RUNNING)
                process.began = self.timeline.now
                self.timeline.after(self.scenario.start, lambda: self._process_begins(process))
            case Change.WARNED:
                self._handle_warning(process)
            case Change.CUT_OFF:
                self._handle_stop(process)
            case Change.ENDED:
                self._handle_stop(process)
                del self._processes[pod.name]
                if self.end is None and reason not in ("Completed", "Deleted") and process.role is Role.WORKER:
                    self.num_lost += 1
                phase = {"Completed": PodState.SUCCEEDED, "Deleted": PodState.DELETED}.get(reason, PodState.FAILED)
                self._report(process, phase, reason)

    def _process_begins(self, process: Process) -> None:
        if process.pod.is_gone or not process.pod.is_running or self.end is not None:
            return
        process.is_connected = True
        self._num_processes += 1
        if isinstance(process, SimulatedWorker):
            assert process.pod.node is not None
            process.incarnation = self._num_processes
            process.own_step_s = self.workload.step_s / process.pod.node.pool.speed
            self._count_running(process, True)
            self.join(process)
        else:
            self._join_ps(process, self._num_processes)
        self._heartbeat(process)

    def count_seconds(self) -> None:
        """Update `worker_seconds` to the present time."""
        self.worker_seconds += len(self._running) * (self.timeline.now - self._running_since)
        self._running_since = self.timeline.now

    def _count_running(self, worker: SimulatedWorker, begins: bool) -> None:
        self.count_seconds()
        if begins:
            self._running.append(worker)
        else:
            self._running.remove(worker)
        for one in list(self._computing.values()):
            if one is not worker and self.workload.speed(self.timeline.now, len(self._running)) != one.speed:
                self._pause(one)
                self._compute(one)

    def _handle_stop(self, process: Process) -> None:
        """Stop a process: it is gone, or its node is."""
        if not process.is_connected:
            return
        process.is_connected = False
        if isinstance(process, SimulatedWorker):
            self._count_running(process, False)
            self.lose(process)
        else:
            self._lose_ps(process)

    def lose(self, worker: SimulatedWorker) -> None:
        """Stop a worker's computing; the minibatch that it has begun is lost."""
        self._pause(worker, is_lost=True)
        worker.held.clear()

    def _handle_warning(self, process: Process) -> None:
        """Handle the warning of a process: a worker gives back unfinished tasks, a server waits for a checkpoint."""
        if not process.is_connected:
            return
        if not isinstance(process, SimulatedWorker):
            self._ps_heartbeat(process, is_leaving=True)
            return
        if process.is_leaving:
            return
        process.is_leaving = True
        self.lose(process)
        worker = process
        seconds = self._seconds(worker)
        self.call(
            lambda call: e.HeartbeatReceived(
                call, Role.WORKER, worker.index, worker.incarnation, seconds=seconds, leaving=True
            ),
            lambda _: None,
        )

    # Parameter servers ----------------------------------------------------------------------------------------------

    def _join_ps(self, server: Process, nonce: int) -> None:
        def joined(answer: Any) -> None:
            if not isinstance(answer, c.PsAdmitted):
                return
            server.incarnation = answer.incarnation
            self.call(lambda call: e.PsReady(call, server.index, server.incarnation), lambda _: None)

        self.call(lambda call: e.PsJoined(call, server.index, server.pod.name, "address", nonce), joined)

    def _lose_ps(self, server: Process) -> None:
        """Set a lost server's part of the model back to the newest checkpoint, and the commits with it."""
        for worker in self._running:
            self._pause(worker)
            worker.partition = None
        before = sum(self.model.values())
        self.model = dict(next(iter(self._checkpoints.values()), {}))
        self.num_again += before - sum(self.model.values())

    # Workers --------------------------------------------------------------------------------------------------------

    def join(self, worker: SimulatedWorker) -> None:
        """Register a worker, and report a model without metrics."""

        def joined(answer: Any) -> None:
            if isinstance(answer, c.Registered):
                worker.partition = answer.partition
                self.call(lambda call: e.ModelReported(call, worker.index, worker.incarnation), lambda _: None)
                self.ask(worker)

        self.call(lambda call: e.WorkerJoined(call, worker.index, worker.incarnation, worker.pod.name), joined)

    def ask(self, worker: SimulatedWorker) -> None:
        """Request a lease if the worker may hold another one."""
        if (
            worker.asks
            or not worker.is_connected
            or worker.is_leaving
            or len(worker.held) >= HOLD
            or self.end is not None
        ):
            return

        def answered(answer: Any) -> None:
            worker.asks = False
            self._lease_answered(worker, answer)

        worker.asks = True
        self.call(lambda call: e.LeaseRequested(call, worker.index, worker.incarnation), answered)

    def _lease_answered(self, worker: SimulatedWorker, answer: Any) -> None:
        if not worker.is_connected or worker.is_leaving:
            return
        if isinstance(answer, c.LeaseGranted):
            worker.held.append(answer.lease)
            self._compute(worker)
            self.ask(worker)
        elif isinstance(answer, c.JobOver):
            self.timeline.after(0.0, lambda: self.cluster.end(worker.pod, "Completed"))
        elif isinstance(answer, c.NoLeaseNow):
            self.ask(worker)

    def size(self, lease: Lease) -> int:
        """Return the number of minibatches of a task."""
        return -(-len(lease.shard) // self.settings.minibatch_size)

    def _compute(self, worker: SimulatedWorker) -> None:
        """Begin a worker's first task, unless it computes, or servers are missing."""
        if worker.since is not None or not worker.held or worker.partition is None or not worker.is_connected:
            return
        lease = worker.held[0]
        name = (lease.epoch, lease.task)
        if lease.type is not TaskType.TRAINING:
            self._finish(worker)
            return
        other = self._computing.get(name)
        if other is not None:  # it has lost its lease and does not know yet: the servers reject it from now on
            self._pause(other, is_lost=True)
        worker.base = worker.reported = self.model.get(name, 0)
        worker.since = self.timeline.now
        worker.speed = self.workload.speed(worker.since, len(self._running))
        worker.step_s = worker.own_step_s / worker.speed
        self._computing[name] = worker
        worker.wake += 1
        number, seconds = worker.wake, (self.size(lease) - worker.base) * worker.step_s
        self.timeline.after(seconds, lambda: self._task_ends(worker, number))

    def _task_ends(self, worker: SimulatedWorker, number: int) -> None:
        if worker.wake == number and worker.since is not None:
            lease = worker.held[0]
            self._pause(worker)
            assert self.model[lease.epoch, lease.task] == self.size(lease)
            self._finish(worker)

    def _finish(self, worker: SimulatedWorker) -> None:
        lease = worker.held.popleft()
        size = self.size(lease) if lease.type is TaskType.TRAINING else 0
        self.call(lambda call: e.TaskFinished(call, worker.index, worker.incarnation, lease.id, size), lambda _: None)
        self._compute(worker)
        self.ask(worker)

    def _done(self, worker: SimulatedWorker) -> int:
        """Return how many minibatches of a worker's task are in the model by now."""
        assert worker.since is not None
        steps = int((self.timeline.now - worker.since) / worker.step_s + 1e-6)
        return min(worker.base + steps, self.size(worker.held[0]))

    def _settle(self, worker: SimulatedWorker) -> None:
        """Add what a worker has computed so far to the model."""
        if worker.since is not None:
            lease = worker.held[0]
            name, done = (lease.epoch, lease.task), self._done(worker)
            self.model[name] = max(done, self.model.get(name, 0))

    def _settle_all(self) -> None:
        for worker in self._computing.values():
            self._settle(worker)

    def _pause(self, worker: SimulatedWorker, is_lost: bool = False) -> None:
        """Stop computing; a started minibatch is lost."""
        if worker.since is None:
            return
        self._settle(worker)
        lease = worker.held[0]
        done = self._done(worker)
        spent = self.timeline.now - worker.since
        worker.computed += spent * worker.speed
        worker.waited += spent * (1.0 - worker.speed)
        begun = spent - (done - worker.base) * worker.step_s
        if done < self.size(lease) and begun > 1e-6:
            self.num_again += 1
        worker.since = None
        del self._computing[lease.epoch, lease.task]
        if is_lost:
            worker.held.popleft()

    def _seconds(self, worker: SimulatedWorker) -> dict[str, float]:
        """Return the seconds of a worker since its start, by activity."""
        now = self.timeline.now
        start, spent = self.scenario.start, now - worker.since if worker.since is not None else 0.0
        computed = worker.computed + spent * worker.speed
        waited = worker.waited + spent * (1.0 - worker.speed)
        seconds = {
            "start": start,
            "compute": computed,
            "idle": max(0.0, now - worker.began - start - computed - waited),
        }
        seconds[self.workload.waits_for] = seconds.get(self.workload.waits_for, 0.0) + waited
        return seconds

    # Heartbeats -----------------------------------------------------------------------------------------------------

    def _heartbeat(self, process: Process) -> None:
        if not process.is_connected or self.end is not None:
            return
        if not isinstance(process, SimulatedWorker):
            self._ps_heartbeat(process)
        elif not process.is_leaving:
            self._worker_heartbeat(process)
        self.timeline.after(self.workload.heartbeat_s, lambda: self._heartbeat(process))

    def _ps_heartbeat(self, server: Process, is_leaving: bool = False) -> None:
        self.call(
            lambda call: e.HeartbeatReceived(call, Role.PS, server.index, server.incarnation, leaving=is_leaving),
            lambda _: None,
        )

    def _worker_heartbeat(self, worker: SimulatedWorker) -> None:
        self._report_progress(worker)
        done = self._done(worker) if worker.since is not None else 0
        positions = tuple(Position(one.id, done if k == 0 else 0) for k, one in enumerate(worker.held))
        seconds, seen = self._seconds(worker), 0 if worker.partition is None else worker.partition.version
        activity = "compute" if worker.since is not None else "idle"

        def answered(answer: Any) -> None:
            if answer.partition is not None:
                worker.partition = answer.partition
            for lease_id in answer.revoked:
                self._revoke(worker, lease_id)
            self._compute(worker)
            self.ask(worker)

        self.call(
            lambda call: e.HeartbeatReceived(
                call, Role.WORKER, worker.index, worker.incarnation, positions, activity, seconds, seen
            ),
            answered,
        )

    def _revoke(self, worker: SimulatedWorker, lease_id: int) -> None:
        if worker.held and worker.held[0].id == lease_id and worker.since is not None:
            self._pause(worker, is_lost=True)
        worker.held = deque(one for one in worker.held if one.id != lease_id)

    def _report_progress(self, worker: SimulatedWorker) -> None:
        if worker.since is None:
            return
        self._settle(worker)
        lease, done = worker.held[0], self._done(worker)
        if done > worker.reported:
            new, worker.reported = tuple(range(worker.reported, done)), done
            self.call(
                lambda call: e.ProgressReported(call, worker.index, worker.incarnation, lease.id, new, 0.5),
                lambda _: None,
            )
