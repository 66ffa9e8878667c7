"""A script of events against the real core, reading as prose; the invariants are checked after every event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import CommittedSet, TaskName
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, MetricArrays, PodState, Position, ReportedLease
from elasticdl.protocol import Role, Shard
from elasticdl_client.choices import DistributionStrategy

C = TypeVar("C")
Sets = dict[tuple[int, int], range | tuple[int, ...]]


class Like:
    """Equal to every record of a type whose named fields have these values."""

    def __init__(self, kind: type, /, **fields: Any) -> None:
        self._kind = kind
        self._fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self._kind) and all(getattr(other, k) == v for k, v in self._fields.items())

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{self._kind.__name__}(… {self._fields})"


def applied(
    names: Sets, num_applies: int | None = None, skipped: Mapping[TaskName, frozenset[int]] | None = None
) -> CommittedSet:
    rows = [(epoch, task, 0, tuple(n)) for (epoch, task), n in names.items()]
    return CommittedSet.of(rows, sum(map(len, names.values())) if num_applies is None else num_applies, skipped)


class Script:
    """A job of 2 tasks of 2 minibatches of 10 records each, unless told otherwise."""

    def __init__(self, records: int = 40, **settings: Any) -> None:
        values: dict[str, Any] = {"num_ps": 1, "minibatch_size": 10, "num_minibatches_per_task": 2}
        self.settings = JobSettings("j", **(values | settings))
        self.records = records
        self.now = 0.0
        self.job = Job(self.settings, 1, self.now)
        self.commands: list[c.Command] = []  # of the newest event
        self.history: list[c.Command] = []
        self._num_calls = 0
        self._requests: dict[int, int] = {}  # worker to the request that waits
        self.tell(e.PodsListed(()))

    # Telling --------------------------------------------------------------------------------------------------------

    def tell(self, event: e.Event) -> list[c.Command]:
        self.commands = self.job.handle(event, self.now)
        self.history += self.commands
        self.job.validate_state()
        return self.commands

    def ask(self, kind: type, *values: Any, **fields: Any) -> Any:
        """Makes a call; its answer, None if there is none yet."""
        self._num_calls += 1
        self.tell(kind(self._num_calls, *values, **fields))
        return self.answer(self._num_calls)

    def answer(self, call: int) -> Any:
        return next((one.answer for one in self.history if isinstance(one, c.Reply) and one.call == call), None)

    def told(self, kind: type[C]) -> list[C]:
        """The commands of a kind that the newest event led to."""
        return [one for one in self.commands if isinstance(one, kind)]

    def last(self, kind: type[C]) -> C:
        return [one for one in self.history if isinstance(one, kind)][-1]

    def log(self) -> list[str]:
        return [one.text for one in self.history if isinstance(one, c.Log)]

    def restart_master(self, resumed_at: float = 0.0, is_resumed: bool | None = None) -> None:
        self._requests.clear()
        snapshot = json.loads(json.dumps(self.job.snapshot()))
        generation = self.job.generation + 1
        self.job = Job.restore(self.settings, snapshot, generation, self.now, 0.0, resumed_at, is_resumed)
        self.job.validate_state()

    # Pods -----------------------------------------------------------------------------------------------------------

    def pod(self, role: Role, index: int, phase: PodState, reason: str = "", life: int = 1, message: str = "") -> None:
        name = self.settings.pod_name(role, index)
        self.tell(e.PodChanged(name, role, index, f"{name}/{life}", phase, reason, message=message))

    def kill(self, worker_id: int, reason: str = "Killed") -> None:
        self.pod(Role.WORKER, worker_id, PodState.FAILED, reason)

    def pass_time(
        self, seconds: float, alive: tuple[int, ...] = (), holding: dict[int, tuple[int, ...]] | None = None
    ) -> None:
        """Time passes while some workers (and every PS) send heartbeats, naming the leases that they hold."""
        commands = []
        for _ in range(round(seconds)):
            self.now += 1.0
            for worker_id in alive:
                self.heartbeat(worker_id, (holding or {}).get(worker_id, ()))
                commands += self.commands
            for server in self.job._fleet.servers.all():
                self.ask(e.HeartbeatReceived, Role.PS, server.id, server.incarnation)
                commands += self.commands
            commands += self.tell(e.Tick())
        self.commands = commands

    # Parameter servers ----------------------------------------------------------------------------------------------

    def ps_starts(self, ps_id: int = 0, life: int = 1, **restored: Any) -> Any:
        """A PS process starts and becomes ready; the answer to its registration."""
        self.pod(Role.PS, ps_id, PodState.RUNNING, life=life)
        answer = self.ps_joins(ps_id, life)
        if isinstance(answer, c.PsAdmitted):
            self.ask(e.PsReady, ps_id, answer.incarnation, **restored)
        return answer

    def ps_joins(self, ps_id: int = 0, life: int = 1, held: int = 0) -> Any:
        name = self.settings.pod_name(Role.PS, ps_id)
        return self.ask(e.PsJoined, ps_id, name, f"address-{ps_id}", 100 * ps_id + life, held)

    def ps_dies(self, ps_id: int = 0, life: int = 1, reason: str = "Killed") -> None:
        self.pod(Role.PS, ps_id, PodState.FAILED, reason, life)

    def sets_are_read(
        self, sets: Sets, num_applies: int | None = None, skipped: Mapping[TaskName, frozenset[int]] | None = None
    ) -> list[c.Command]:
        """Every PS holds the same."""
        question = self.last(c.ReadAppliedSets)
        held = applied(sets, num_applies, skipped)
        return self.tell(e.AppliedSetsRead(question.question, {one.ps_id: held for one in question.ps}))

    # Workers --------------------------------------------------------------------------------------------------------

    def worker_starts(self, worker_id: int = 0, held: tuple[ReportedLease, ...] = (), **fields: Any) -> Any:
        self.pod(Role.WORKER, worker_id, PodState.RUNNING)
        return self.worker_joins(worker_id, held, **fields)

    def worker_joins(
        self, worker_id: int, held: tuple[ReportedLease, ...] = (), incarnation: int = 7, **fields: Any
    ) -> Any:
        name = self.settings.pod_name(Role.WORKER, worker_id)
        return self.ask(e.WorkerJoined, worker_id, incarnation, name, held, **fields)

    def data_is_known(self) -> None:
        self.ask(e.ModelReported, 0, 7, has_metrics=True)
        for command in self.told(c.ListShards):
            self.tell(e.ShardsListed(command.kind, (Shard(str(command.kind), 0, self.records),)))

    def request(self, worker_id: int = 0) -> Lease | None:
        """Asks for a lease, or looks whether one has come for an earlier request; None if there is none now."""
        call = self._requests.pop(worker_id, None)
        if call is None:
            self.ask(e.LeaseRequested, worker_id, 7)
            call = self._num_calls
        answer = self.answer(call)
        if answer is None:
            self._requests[worker_id] = call
        return answer.lease if isinstance(answer, c.LeaseGranted) else None

    def lease(self, worker_id: int = 0) -> Lease:
        lease = self.request(worker_id)
        assert lease is not None, self.job.status()
        return lease

    def heartbeat(self, worker_id: int, leases: tuple[int, ...] = (), minibatch: int = 0, **fields: Any) -> Any:
        positions = tuple(Position(lease, minibatch) for lease in leases)
        return self.ask(e.HeartbeatReceived, Role.WORKER, worker_id, 7, positions, **fields)

    def progress(
        self, lease: Lease, *committed: int, worker_id: int = 0, loss: float | None = None, **fields: Any
    ) -> Any:
        return self.ask(e.ProgressReported, worker_id, 7, lease.id, committed, loss, **fields)

    def skip(self, lease: Lease, *skipped: int, worker_id: int = 0) -> Any:
        """A worker tells what it leaves out, then that it is committed."""
        answer = self.progress(lease, worker_id=worker_id, skipped=skipped, not_finite="The gradient is not finite")
        self.progress(lease, *skipped, worker_id=worker_id)
        return answer

    def finish(self, lease: Lease, worker_id: int = 0, num_minibatches: int = 2, **fields: Any) -> Any:
        return self.ask(e.TaskFinished, worker_id, 7, lease.id, num_minibatches, **fields)

    def fail(self, lease: Lease, worker_id: int = 0, error: str = "ValueError: bad", bad: tuple[int, ...] = ()) -> Any:
        return self.ask(e.TaskFailed, worker_id, 7, lease.id, 0, error, "Traceback …", bad)

    def evaluated(
        self, lease: Lease, *states: MetricArrays, worker_id: int = 0, surplus: int = 0, **results: float
    ) -> Any:
        return self.ask(e.EvaluationReported, worker_id, 7, lease.id, states, results, surplus, "filter")


def running(num_workers: int = 1, **settings: Any) -> Script:
    """A job whose PS and workers run and whose data is known."""
    script = Script(num_workers=num_workers, **settings)
    for ps_id in range(script.settings.num_ps):
        script.ps_starts(ps_id)
    for worker_id in range(num_workers):
        script.worker_starts(worker_id)
    script.data_is_known()
    if script.settings.strategy is DistributionStrategy.PARAMETER_SERVER and script.told(c.ReadAppliedSets):
        script.sets_are_read({})
    return script


def everything(script: Script, epochs: int = 1) -> Sets:
    """The content of a PS at the end."""
    slices = script.job._work.tasks.slices
    return {(epoch, task): range(-(-len(s) // 10)) for epoch in range(epochs) for task, s in enumerate(slices)}


def train_all(script: Script, worker_id: int = 0) -> None:
    """One worker trains everything there is; the PS says so."""
    while (lease := script.request(worker_id)) is not None:
        script.finish(lease, worker_id, -(-len(lease.shard) // 10))
    if any(isinstance(one, c.ReadAppliedSets) for one in script.history):
        script.sets_are_read(everything(script, len(script.job._work.tasks.epochs)))
