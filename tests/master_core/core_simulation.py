"""A simulated job around the real core: pods, workers, parameter servers, mail and time; no process and no clock.

The simulated parameter servers are the truth that the tests compare the core with.  Workers and PS keep to the
protocol of architecture §4: fencing by lease, incarnations, idempotent names, a push counts when every PS has it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import AppliedSet
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import (
    Array,
    HeldLease,
    Lease,
    MetricState,
    Partition,
    Phase,
    Position,
    Role,
    Shard,
    TaskType,
)

Names = dict[tuple[int, int], set[int]]


@dataclass
class SimPod:
    name: str
    role: Role
    index: int
    uid: str
    slot: int = 0
    phase: Phase = Phase.PENDING
    reason: str = ""
    is_stuck: bool = False  # its node is lost: the object stays until it is deleted without grace


@dataclass(frozen=True)
class Leaving:
    """What was so when a PS was told to end."""

    committed: AppliedSet
    mischief: tuple[int, int, int]


@dataclass
class SimPs:
    """A parameter server process; dies with its state."""

    pod: SimPod
    nonce: int
    incarnation: int = 0
    names: Names = field(default_factory=dict)
    num_applies: int = 0
    newest: dict[tuple[int, int], int] = field(default_factory=dict)
    is_ready: bool = False
    leaving: Leaving | None = None

    def standing(self, lease: Lease) -> bool:
        key = (lease.epoch, lease.task)
        if lease.id < self.newest.get(key, 0):
            return False
        self.newest[key] = lease.id
        return True

    def push(self, lease: Lease, n: int) -> bool:
        key = (lease.epoch, lease.task)
        if lease.id < self.newest.get(key, 0):
            return False
        names = self.names.setdefault(key, set())
        if n not in names:
            names.add(n)
            self.num_applies += 1
        return True

    def applied(self) -> AppliedSet:
        tasks = [(epoch, task, 0, tuple(names)) for (epoch, task), names in self.names.items()]
        return AppliedSet.of(tasks, self.num_applies)


@dataclass
class SimLease:
    lease: Lease
    has_asked: bool = False
    committed: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)  # told and acknowledged
    is_told: bool = False  # its end has been reported


@dataclass
class SimWorker:
    pod: SimPod
    id: int
    incarnation: int
    is_registered: bool = False
    is_stopped: bool = False
    is_leaving: bool = False
    is_gone: bool = False
    has_request: bool = False
    held: dict[int, SimLease] = field(default_factory=dict)
    partition: Partition | None = None


class World:
    """Everything outside the core.  `chaos` is over once `drain` is called."""

    def __init__(
        self,
        settings: JobSettings,
        shards: Sequence[Shard],
        sizes: Callable[[int], int] | None = None,
        is_bad: Callable[[int, int, int], bool] = lambda epoch, task, n: False,
    ) -> None:
        """Makes a world.

        Args:
            sizes: minibatches that a task has at most, by task.
            is_bad: whether the gradient of (epoch, task, n) is not finite.
        """
        self.is_bad = is_bad
        self.settings = settings
        self.shards = tuple(shards)
        self.sizes = sizes
        self.now = 0.0
        self.generation = 1
        self.job = Job(settings, 1, 0.0)
        self.disk: dict[str, Any] = {}
        self.written_at = 0.0
        self.pods: dict[str, SimPod] = {}
        self.ps: dict[int, SimPs] = {}
        self.workers: list[SimWorker] = []
        self.calls: dict[int, Callable[[Any], None]] = {}
        self.mail: list[tuple[SimWorker | None, Callable[[int], e.Event], Callable[[Any], None]]] = []
        self.jobs_for_shell: list[c.Command | e.Event] = []
        self.checkpoints: dict[str, dict[int, tuple[Names, int]]] = {}
        self.num_calls = 0
        self.num_uids = 0
        self.log: list[str] = []
        self.end: c.EndJob | None = None
        self.grants: dict[int, Lease] = {}
        self.losses = 0
        self.num_failed_checkpoints = 0
        self.memory_factors: dict[tuple[Role, int], float] = {}  # of the newest pod of each slot
        self._persist()
        self.tell(e.PodsListed(()))

    # The shell ------------------------------------------------------------------------------------------------------

    def tell(self, event: e.Event) -> None:
        if self.end is not None:
            return
        for command in self.job.handle(event, self.now):
            self.execute(command)
        self.job.validate_state()
        self.check_ledger()
        if self.now - self.written_at >= 1.0:
            self._persist()

    def _persist(self) -> None:
        self.disk = json.loads(json.dumps(self.job.snapshot()))
        self.written_at = self.now

    def execute(self, command: c.Command) -> None:
        match command:
            case c.Reply(call, answer):
                handler = self.calls.pop(call, None)
                assert handler is not None, f"answered twice or never asked: {command}"
                handler(answer)
            case c.Persist():
                self._persist()
            case c.CreatePod():
                self.create_pod(command)
            case c.DeletePod(name):
                if name in self.pods:
                    self.jobs_for_shell.append(command)
            case c.ListShards() | c.ReadAppliedSets() | c.SaveCheckpoint():
                self.jobs_for_shell.append(command)
            case c.Log(_, text):
                self.log.append(text)
            case c.EndJob():
                self.end = command

    def call(self, make: Callable[[int], e.Event], handler: Callable[[Any], None]) -> None:
        self.num_calls += 1
        self.calls[self.num_calls] = handler
        self.tell(make(self.num_calls))

    def shell_work(self, pick: int = 0, fail: bool = False) -> None:
        """Executes one of the commands that take time, and tells the core what came of it."""
        if not self.jobs_for_shell:
            return
        command = self.jobs_for_shell.pop(pick % len(self.jobs_for_shell))
        match command:
            case e.PodNotCreated():
                self.tell(command)
            case c.ListShards(kind):
                self.tell(e.ShardsListed(kind, self.shards))
            case c.DeletePod(name, grace_s):
                if name in self.pods:
                    self.delete_pod(self.pods[name], grace_s)
            case c.ReadAppliedSets(question, partition):
                reached = all(self._is_at(address.ps_id, address.incarnation) for address in partition)
                if fail or not reached:
                    self.tell(e.AppliedSetsUnreadable(question, "no answer"))
                else:  # the answer takes its time, and others report meanwhile
                    sets = {k: self.ps[k].applied() for k in self.ps}
                    self.jobs_for_shell.append(e.AppliedSetsRead(question, sets))
            case e.AppliedSetsRead():
                self.tell(command)
            case c.SaveCheckpoint(version, partition):
                reached = all(self._is_at(address.ps_id, address.incarnation) for address in partition)
                if fail or not reached:
                    self.num_failed_checkpoints += 1
                    self.tell(e.CheckpointFailed(version, "disk full"))
                else:
                    parts = {k: (copy.deepcopy(p.names), p.num_applies) for k, p in self.ps.items()}
                    self.checkpoints[f"version-{version}"] = parts
                    self.tell(e.CheckpointSaved(version, f"version-{version}"))

    def _is_at(self, ps_id: int, incarnation: int) -> bool:
        server = self.ps.get(ps_id)
        return server is not None and server.is_ready and server.incarnation == incarnation

    def restart_master(self) -> None:
        """The master is killed and starts again from what is on disk; the outstanding calls and commands are lost."""
        self.generation += 1
        self.calls.clear()
        self.jobs_for_shell.clear()
        for worker in self.workers:
            worker.has_request = False
        self.job = Job.restore(self.settings, self.disk, self.generation, self.now)
        self.job.validate_state()
        self.tell(e.PodsListed(tuple(self._pod_event(pod) for pod in self.pods.values())))

    # Pods -----------------------------------------------------------------------------------------------------------

    def _pod_event(self, pod: SimPod) -> e.PodChanged:
        return e.PodChanged(pod.name, pod.role, pod.index, pod.uid, pod.phase, pod.reason)

    def create_pod(self, command: c.CreatePod) -> None:
        place = (command.role, command.slot)
        before = self.memory_factors.get(place, 1.0)
        assert before <= command.memory_factor <= min(4.0, 1.5 * before), command
        self.memory_factors[place] = command.memory_factor
        old = self.pods.get(command.name)
        if old is not None and old.is_stuck:
            self.jobs_for_shell.append(e.PodNotCreated(command.name, "it exists already"))
            return
        assert old is None or old.phase not in (Phase.PENDING, Phase.RUNNING), command
        self.num_uids += 1
        self.pods[command.name] = SimPod(
            command.name, command.role, command.index, f"uid-{self.num_uids}", command.slot
        )

    def delete_pod(self, pod: SimPod, grace_s: float | None) -> None:
        if not pod.is_stuck:
            self.end_pod(pod, "Deleted")
        elif grace_s == 0:
            pod.phase = Phase.DELETED
            del self.pods[pod.name]
            self.tell(self._pod_event(pod))

    def block(self, pick: int) -> None:
        """The image of a pending pod cannot be pulled, although it could before."""
        pending = [pod for pod in self.pods.values() if pod.phase is Phase.PENDING]
        if pending and self.job._fleet.pods.has_run(pending[pick % len(pending)].role):
            event = self._pod_event(pending[pick % len(pending)])
            self.tell(replace(event, blocked="ImagePullBackOff"))

    def start_pod(self, pick: int = 0) -> None:
        pending = [pod for pod in self.pods.values() if pod.phase is Phase.PENDING]
        if not pending:
            return
        pod = pending[pick % len(pending)]
        pod.phase = Phase.RUNNING
        self.tell(self._pod_event(pod))
        if self.end is not None:
            return
        self.num_uids += 1
        if pod.role is Role.PS:
            self.ps[pod.index] = SimPs(pod, self.num_uids)
            self.join_ps(self.ps[pod.index])
        else:
            worker = SimWorker(pod, pod.index, self.num_uids)
            self.workers.append(worker)
            self.register(worker)

    def end_pod(self, pod: SimPod, reason: str, phase: Phase = Phase.FAILED) -> None:
        if pod.phase not in (Phase.PENDING, Phase.RUNNING):
            return
        pod.phase, pod.reason = phase, reason
        pod.is_stuck = reason == "NodeLost"
        num_faults = self.job._charges.num_faults
        forgiven = False
        if reason == "Deleted":
            pod.phase = Phase.DELETED
            del self.pods[pod.name]
        for worker in self.workers:
            if worker.pod is pod:
                worker.is_gone = True
                forgiven = worker.is_leaving
        server = self.ps.get(pod.index)
        if pod.role is Role.PS and server is not None and server.pod is pod:
            forgiven = server.leaving is not None
            del self.ps[pod.index]
            self.losses += 1
        self.tell(self._pod_event(pod))
        assert not forgiven or self.job._charges.num_faults <= num_faults, pod

    # Parameter servers ----------------------------------------------------------------------------------------------

    def join_ps(self, server: SimPs) -> None:
        def joined(answer: Any) -> None:
            if not isinstance(answer, c.PsAdmitted):
                self.mail.append((None, lambda call: e.Tick(), lambda _: None))
                return
            if answer.incarnation != server.incarnation:
                server.incarnation = answer.incarnation
                part = self.checkpoints.get(answer.restore_from, {}).get(server.pod.index)
                if part is not None:
                    server.names, server.num_applies = copy.deepcopy(part[0]), part[1]
            server.is_ready = True

        held = server.incarnation
        self.call(
            lambda call: e.PsJoined(call, server.pod.index, server.pod.name, "address", server.nonce, held), joined
        )
        if server.is_ready and self.ps.get(server.pod.index) is server:
            self.call(
                lambda call: e.PsReady(call, server.pod.index, server.incarnation, server.applied()), lambda _: None
            )

    # Workers --------------------------------------------------------------------------------------------------------

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.workers if not worker.is_gone]

    def register(self, worker: SimWorker) -> None:
        def joined(answer: Any) -> None:
            if isinstance(answer, c.Registered):
                worker.is_registered = True
                worker.partition = answer.partition or worker.partition
            else:
                worker.is_gone = True

        held = tuple(HeldLease(one.lease, tuple(one.committed)) for one in worker.held.values())
        self.call(lambda call: e.WorkerJoined(call, worker.id, worker.incarnation, worker.pod.name, held), joined)
        if worker.is_registered and not worker.is_gone:
            self.call(
                lambda call: e.ModelReported(call, worker.id, worker.incarnation, has_metrics=True), lambda _: None
            )
        if worker.is_gone and self.end is None:
            self.end_pod(worker.pod, "Error")

    def request(self, worker: SimWorker) -> None:
        if worker.has_request or worker.is_stopped or len(worker.held) >= 2:
            return

        def answered(answer: Any) -> None:
            worker.has_request = False
            if isinstance(answer, c.LeaseGranted):
                assert answer.lease.id not in self.grants
                assert answer.lease.id > max(self.grants, default=0), "lease ids must grow"
                self.grants[answer.lease.id] = answer.lease
                worker.held[answer.lease.id] = SimLease(answer.lease)
            elif isinstance(answer, c.UnknownWorker):
                worker.is_registered = False
            elif isinstance(answer, c.JobOver):
                worker.is_stopped = True

        worker.has_request = True
        self.call(lambda call: e.LeaseRequested(call, worker.id, worker.incarnation), answered)
        if not worker.is_registered and not worker.is_gone:
            self.register(worker)

    def step(self, worker: SimWorker, pick: int = 0) -> None:
        """Works a little on one of the leases that the worker holds; a stopped one does not."""
        open_leases = [one for one in worker.held.values() if not one.is_told]
        if worker.is_stopped or not open_leases:
            return
        held = open_leases[pick % len(open_leases)]
        match held.lease.type:
            case TaskType.TRAINING:
                self._train(worker, held, pick)
            case TaskType.EVALUATION:
                held.is_told = True
                data = Array((1,), b"\0" * 8)
                state = () if held.lease.merged else (MetricState("accuracy", (data,)),)
                results = {"accuracy": 0.5} if held.lease.merged else {}
                self.post(
                    worker,
                    held,
                    lambda call: e.EvaluationReported(
                        call, worker.id, worker.incarnation, held.lease.id, state, results
                    ),
                )
            case _:
                held.is_told = True
                self.post(
                    worker, held, lambda call: e.TaskFinished(call, worker.id, worker.incarnation, held.lease.id, 0)
                )

    def num_minibatches(self, lease: Lease) -> int:
        planned = -(-len(lease.shard) // self.settings.minibatch_size)
        return planned if self.sizes is None else min(planned, self.sizes(lease.task))

    def _train(self, worker: SimWorker, held: SimLease, pick: int) -> None:
        if worker.partition is None:
            return
        servers = [self.ps.get(address.ps_id) for address in worker.partition.ps]
        addresses = [address.incarnation for address in worker.partition.ps]
        reached = [s for s, inc in zip(servers, addresses, strict=True) if s and s.is_ready and s.incarnation == inc]
        if len(reached) < len(servers):
            return  # it waits for the new partition
        if not held.has_asked:
            if not all(server.standing(held.lease) for server in reached):
                worker.held.pop(held.lease.id)
                return
            held.has_asked = True
        size = self.num_minibatches(held.lease)
        key = (held.lease.epoch, held.lease.task)
        for n in range(size):
            if n in held.committed:
                continue
            lacking = [server for server in reached if n not in server.names.get(key, ())]
            if lacking and self.is_bad(*key, n) and n not in held.skipped:
                self._skip(worker, held, n)
                return
            if lacking and pick % 3:
                lacking = lacking[:1]  # not every push arrives at once
            if not all(server.push(held.lease, n) for server in lacking):
                worker.held.pop(held.lease.id)
                return
            if all(n in server.names.get(key, ()) for server in reached):
                held.committed.add(n)
                self.post(
                    worker,
                    held,
                    lambda call, n=n: e.ProgressReported(call, worker.id, worker.incarnation, held.lease.id, (n,), 0.5),
                )
            return
        held.is_told = True
        self.post(worker, held, lambda call: e.TaskFinished(call, worker.id, worker.incarnation, held.lease.id, size))

    def _skip(self, worker: SimWorker, held: SimLease, n: int) -> None:
        """Tells that a minibatch is left out; only once that is acknowledged is its name pushed."""

        def answered(answer: Any) -> None:
            if isinstance(answer, c.Accepted):
                held.skipped.add(n)
            else:
                worker.held.pop(held.lease.id, None)

        def make(call: int) -> e.ProgressReported:
            what = "The loss is nan"
            return e.ProgressReported(call, worker.id, worker.incarnation, held.lease.id, (), None, (n,), what)

        self.mail.append((worker, make, answered))

    def post(self, worker: SimWorker, held: SimLease, make: Callable[[int], e.Event]) -> None:
        def answered(answer: Any) -> None:
            if not isinstance(answer, c.Accepted) or held.is_told:
                worker.held.pop(held.lease.id, None)

        self.mail.append((worker, make, answered))

    def deliver(self, pick: int = 0, again: bool = False) -> None:
        """Hands one piece of mail over, not always the oldest, sometimes twice."""
        if not self.mail:
            return
        index = pick % len(self.mail)
        _, make, handler = self.mail[index]
        if not again:
            self.mail.pop(index)
        self.call(make, handler)

    def deliver_all(self, worker: SimWorker) -> None:
        for item in [item for item in self.mail if item[0] is worker]:
            if item in self.mail:
                self.mail.remove(item)
                self.call(item[1], item[2])

    def heartbeat(self, worker: SimWorker) -> None:
        def answered(answer: Any) -> None:
            for lease_id in answer.revoked:
                worker.held.pop(lease_id, None)
            worker.partition = answer.partition or worker.partition
            worker.is_registered = answer.known
            worker.is_stopped = worker.is_stopped or answer.stop

        positions = tuple(Position(i, len(one.committed)) for i, one in worker.held.items())
        seen = worker.partition.version if worker.partition is not None else 0
        self.call(
            lambda call: e.HeartbeatReceived(
                call, Role.WORKER, worker.id, worker.incarnation, positions, "computing", {"compute": 1.0}, seen
            ),
            answered,
        )
        if not worker.is_registered and not worker.is_gone:
            self.register(worker)

    def leave(self, worker: SimWorker) -> None:
        """Somebody tells a worker to end: it gives up what it has, says so once, and ends some time later."""
        worker.is_stopped, worker.is_leaving = True, True
        worker.held.clear()

        def answered(answer: Any) -> None:
            worker.is_leaving = answer.known

        self.call(
            lambda call: e.HeartbeatReceived(call, Role.WORKER, worker.id, worker.incarnation, leaving=True), answered
        )

    def leave_ps(self, server: SimPs) -> None:
        """Somebody tells a PS to end."""
        if server.is_ready and server.leaving is None:
            ledger = self.job._work.tasks.ledger() if self.job._is_open else AppliedSet()
            server.leaving = Leaving(ledger, self._mischief())

    def _mischief(self) -> tuple[int, int, int]:
        """Changes with everything that excuses a checkpoint for not being written."""
        return (self.generation, self.losses, self.num_failed_checkpoints)

    def ps_heartbeat(self, server: SimPs) -> None:
        answers: list[c.HeartbeatAnswer] = []
        leaving = server.leaving is not None
        self.call(
            lambda call: e.HeartbeatReceived(call, Role.PS, server.pod.index, server.incarnation, leaving=leaving),
            answers.append,
        )
        if not answers or self.ps.get(server.pod.index) is not server:
            return
        if not answers[0].known:
            self.join_ps(server)
        elif answers[0].stop and self.end is None:
            assert server.leaving is not None
            self.check_saved(server.leaving)
            self.end_pod(server.pod, "Error")

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.living():
                if not worker.is_stopped and not worker.is_leaving:
                    self.heartbeat(worker)
            for server in list(self.ps.values()):
                self.ps_heartbeat(server)
            self.tell(e.Tick())

    # What must hold -------------------------------------------------------------------------------------------------

    def check_ledger(self) -> None:
        """What the core calls committed is in every PS, as long as it does not doubt it."""
        if not self.job._is_open or len(self.ps) < self.settings.num_ps:
            return
        partition = self.job._fleet.servers.partition
        if partition is None or not all(self._is_at(a.ps_id, a.incarnation) for a in partition.ps):
            return
        for (epoch, task), applied in self.job._work.tasks.ledger().tasks.items():
            for server in self.ps.values():
                missing = set(applied) - server.names.get((epoch, task), set())
                assert not missing, (epoch, task, missing)

    def check_saved(self, leaving: Leaving) -> None:
        """A PS that was told to end leaves when what was committed before that is in the newest checkpoint."""
        if not self.settings.checkpoint_dir or leaving.mischief != self._mischief():
            return
        parts = self.checkpoints.get(self.job._checkpoints.newest, {})
        for (epoch, task), applied in leaving.committed.tasks.items():
            for names, _ in parts.values():
                assert set(applied) <= names.get((epoch, task), set()), (epoch, task)
            assert parts or not len(applied)

    def drain(self, rounds: int = 2000) -> None:
        """No more mischief: the job must come to its end."""
        for worker in self.living():
            worker.is_stopped = worker.is_leaving
            if worker.is_leaving:
                self.end_pod(worker.pod, "Error")
        for _ in range(rounds):
            if self.end is not None:
                return
            while any(pod.phase is Phase.PENDING for pod in self.pods.values()):
                self.start_pod()
            while self.jobs_for_shell:
                self.shell_work()
            for worker in self.living():
                self.request(worker)
                self.step(worker)
                self.step(worker, 1)
            while self.mail:
                self.deliver()
            self.pass_time(1)
            if self.job.status().phase == "Succeeded":
                for worker in self.living():
                    if worker.is_stopped:
                        self.end_pod(worker.pod, "Completed", Phase.SUCCEEDED)
        raise AssertionError(f"the job does not end: {self.job.status()} {self.log[-5:]}")
