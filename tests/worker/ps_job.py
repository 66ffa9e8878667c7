"""Parameter servers behind real sockets that tests kill and start again, and workers in threads that train on them.

The model says by itself what is in it: each minibatch adds 1 to an element of its own of the non-trainable values, and
to a row of its own, and takes 1 off the trainable ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.framework import Batch, Floats, ModelReport, Parameters, Step, Table, Variable
from elasticdl.ps.applied import AppliedSet
from elasticdl.ps.client import PsClient, Pull
from elasticdl.ps.partition import even_buckets
from elasticdl.ps.server.service import PsService, register_service
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.servers import serve
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.ps.strategy import Gradients, ParameterServerStrategy, PipelinedTraining, SynchronousTraining
from elasticdl.worker.tasks import HeldLease, TaskBatches
from elasticdl_client.job_spec import JobSpec
from tests.worker.scripted_master import TOKEN, ScriptedMaster

NUM_TASKS, TASK_MINIBATCHES = 4, 8
NUM_NAMES = NUM_TASKS * TASK_MINIBATCHES
NUM_TRAINABLE = 6
SGD = json.dumps({"class_name": "SGD", "config": {"learning_rate": 1.0}})
ZEROS = json.dumps({"class_name": "Zeros", "config": {}})
REPORT = ModelReport(
    (Variable("w", (NUM_TRAINABLE,), True), Variable("counts", (NUM_NAMES,), False)),
    (Table("rows", 1, ZEROS),),
    SGD,
    (),
)


def name_of(task: int, minibatch: int) -> int:
    return task * TASK_MINIBATCHES + minibatch


class Counting:
    """The framework.

    Attributes:
        computed: task, minibatch, seed and the counts that it was computed on.
        before: called before each minibatch is computed.
        losses: by minibatch; otherwise 0.5.
    """

    def __init__(self) -> None:
        self.computed: list[tuple[int, int, int, Floats]] = []
        self.weights: list[float] = []
        self.before: Callable[[Batch], None] = lambda batch: None
        self.losses: dict[int, float] = {}
        self.not_finite: dict[int, str] = {}
        self.rates: dict[int, float] = {}  # by epoch

    def initial(self) -> Parameters:
        return Parameters(np.zeros(NUM_TRAINABLE, np.float32), np.zeros(NUM_NAMES, np.float32))

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return self.rates.get(epoch)

    def gradients(self, batch: Batch, parameters: Parameters, rows: Mapping[str, Floats], seed: int) -> Step:
        self.before(batch)
        self.computed.append((batch.data, batch.n, seed, np.array(parameters.non_trainable)))
        self.weights.append(float(parameters.trainable[0]))
        assert rows["rows"].shape == (3, 1)
        change = np.zeros(NUM_NAMES, np.float32)
        change[name_of(batch.data, batch.n)] = 1.0
        thirds = np.full((3, 1), -1 / 3, np.float32)
        loss = self.losses.get(batch.n, 0.5)
        ones = np.ones(NUM_TRAINABLE, np.float32)
        return Step(loss, ones, change, {"rows": thirds}, self.not_finite.get(batch.n, ""))


@dataclass
class PsJob:
    """Servers, by PS id, and their addresses and counts."""

    num_ps: int
    updates: UpdateSettings
    master: ScriptedMaster
    make_service: Callable[[int, ServerState], PsService]
    services: list[PsService] = field(default_factory=list)
    servers: list[grpc.Server] = field(default_factory=list)
    partition: pb.Partition = field(default_factory=pb.Partition)
    workers: list[Worker] = field(default_factory=list)

    def start(self, ps_id: int, state: ServerState | None = None) -> None:
        """A new life of a PS."""
        made = state or ServerState(self.updates, even_buckets(ps_id, self.num_ps))
        service = self.make_service(ps_id, made)
        incarnations = [ps.incarnation for ps in self.partition.ps]
        service.incarnation = max(incarnations, default=9) + 1
        server, port = serve(lambda s: register_service(s, service, lambda: None), "127.0.0.1", 0, TOKEN, 32)
        address = pb.PsAddress(ps_id=ps_id, address=f"127.0.0.1:{port}", incarnation=service.incarnation)
        if ps_id == len(self.services):
            self.services.append(service)
            self.servers.append(server)
            self.partition.ps.append(address)
        else:
            self.services[ps_id], self.servers[ps_id] = service, server
            self.partition.ps[ps_id].CopyFrom(address)

    def restart(self, ps_id: int) -> None:
        """Kills a PS; its next life has what the old one had applied, but not what it held."""
        self.servers[ps_id].stop(None).wait()
        snapshot = self.services[ps_id].state.snapshot()
        state = ServerState(self.updates, even_buckets(ps_id, self.num_ps))
        if snapshot is not None:
            state.restore(snapshot, False)
        self.start(ps_id, state)

    def announce(self) -> None:
        """As the heartbeats of servers do; workers learn of it by refusals."""
        self.partition.version += 1
        for service in self.services:
            service.accept_partition(self.known_partition())
        for worker in self.workers:
            worker.link.learn_partition(self.known_partition())

    def known_partition(self) -> pb.Partition:
        known = pb.Partition()
        known.CopyFrom(self.partition)
        return known

    def set_pushing(self, number: int) -> None:
        for service in self.services:
            service.num_pushing = number

    def client(self) -> PsClient:
        return PsClient(self.known_partition(), REPORT, TOKEN, timeout_s=20)

    def values(self) -> tuple[Floats, Floats, Floats]:
        """Trainable values, counts, rows by name."""
        client = self.client()
        pulled = client.exchange(None, Pull(True, {"rows": np.arange(NUM_NAMES)}, read_only=True))
        client.close()
        assert pulled.parameters is not None
        return pulled.parameters.trainable, pulled.parameters.non_trainable, pulled.rows["rows"][:, 0]

    def applied(self) -> list[set[int]]:
        """By PS, the numbers of the names that it holds; each counted once."""
        found = []
        for service in self.services:
            applied, _, _ = service.state.applied()
            names = [name_of(name.task, name.n) for name in AppliedSet.from_message(applied)]
            assert applied.num_applies == len(names) == len(set(names))
            found.append(set(names))
        return found


class Worker:
    """One worker with its own link to the master."""

    def __init__(
        self,
        job: PsJob,
        get_model_steps: int = 1,
        skips: bool = False,
        timeout_s: float = 20.0,
        token: str = TOKEN,
    ) -> None:
        clock = ActivityClock()
        self.framework = Counting()
        self.link = MasterLink(job.master.address, TOKEN, len(job.workers), "pod", clock, 20.0)
        self.link.learn_partition(job.known_partition())
        framework: Any = self.framework
        self.session = PsSession(self.link, framework, REPORT, token, JobSpec(seed=1), timeout_s)
        gradients = Gradients(framework, self.link, 1, skips)
        training = (
            PipelinedTraining(self.session, gradients, get_model_steps)
            if job.updates.use_async
            else SynchronousTraining(self.session, gradients)
        )
        self.strategy = ParameterServerStrategy(self.link, self.session, training)
        self.committed: list[tuple[int, int, float | None]] = []
        self.is_leaving = False
        self._clock = clock
        job.workers.append(self)

    def hold(self, task: int, lease: int, epoch: int = 0) -> HeldLease:
        return self.link.leases.add(pb.Lease(id=lease, type=pb.TRAINING, epoch=epoch, task=task))

    def train(self, held: HeldLease, num_minibatches: int) -> None:
        """Takes a task over and works it off."""
        task = held.lease.task

        def batches() -> Iterator[Batch]:
            for n in range(num_minibatches):
                ids = np.full(3, name_of(task, n), np.int64)
                yield Batch(held.id, n, size=2, ids={"rows": ids}, data=task)
            yield Batch(held.id, num_minibatches, end=True)

        self.strategy.begin(held)
        every = batches()
        taken = TaskBatches(held, next(every), every, self._clock, lambda: self.is_leaving)
        self.strategy.train_task(held, taken, lambda n, loss: self.committed.append((task, n, loss)))

    def computed(self) -> list[int]:
        return [minibatch for _, minibatch, _, _ in self.framework.computed]


@contextmanager
def ps_job(
    num_ps: int,
    updates: UpdateSettings | None = None,
    make_service: Callable[[int, ServerState], PsService] = PsService,
) -> Iterator[PsJob]:
    job = PsJob(num_ps, updates or UpdateSettings(), ScriptedMaster(ends=False), make_service)
    try:
        for ps_id in range(num_ps):
            job.start(ps_id)
        job.announce()
        yield job
    finally:
        for worker in job.workers:
            worker.strategy.close()
        for server in job.servers:
            server.stop(None).wait()
        job.master.stop()
