"""A loss that is not finite ends the job through the master, not the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.framework import Batch, Mode, TaskRecords
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.loop import TrainingTasks, TrainingWork, WorkerLoop
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter, TaskFailures
from elasticdl.worker.tasks import Commit, HeldLease, NotFinite, TaskBatches, TaskStream
from elasticdl.worker.termination import Termination
from tests.worker.counting import Numbers
from tests.worker.scripted_master import TOKEN, ScriptedMaster


class OneByOne:
    """A framework whose minibatches are records."""

    def batches(self, mode: Mode, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        for task in tasks:
            yield from (Batch(task.lease, n, size=1) for n in range(len(task.records)))
            yield Batch(task.lease, len(task.records), end=True)


class Diverging:
    """A strategy whose third minibatch is not finite."""

    def begin(self, held: HeldLease) -> None: ...

    def train_task(self, held: HeldLease, batches: TaskBatches, commit: Commit) -> None:
        for batch in batches:
            if batch.n == 2:
                raise NotFinite(batch.n, "The loss is nan")
            commit(batch.n, 0.5)

    def close(self) -> None: ...


def test_what_is_not_finite_is_reported_and_the_lease_given_up() -> None:
    shard = pb.ShardMessage(name="s", start=0, end=4)
    master = ScriptedMaster(pb.Lease(id=100, type=pb.TRAINING, shard=shard))
    clock = ActivityClock()
    link = MasterLink(master.address, TOKEN, 0, "pod", clock, 20.0)
    strategy: Any = Diverging()
    framework: Any = OneByOne()
    exporter: Any = None
    tasks = TaskStream(link, lambda task_type: Numbers(), strategy.begin, seed=1, shuffle=False, clock=clock)
    training = TrainingTasks(TaskFailures(link, Reporter(link, 10)), framework, strategy, exporter)
    termination = Termination(clock)
    WorkerLoop(tasks, TrainingWork(training, strategy, termination), termination).run()
    reports = master.hears("progress", times=2)
    assert [n for report in reports[:-1] for n in report.committed] == [0, 1]
    assert (reports[-1].not_finite, list(reports[-1].committed)) == ("The loss is nan, in minibatch 2", [])
    assert link.leases.held() == []
    assert [name for name, _ in master.told if name in ("finished", "FailTask")] == []
    master.stop()
