"""Rates that follow a metric (`ReduceLROnPlateau`): the same in all workers, whichever part of the data each has."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from noted_jobs import agreed_steps, noted_job, steps_of
from pytorch_loops import BATCH, Script, assert_equal, dataset, loop, loss_of, minibatches

from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.api.pytorch.alone import LoneGroup
from elasticdl.api.pytorch.plateau import AgreedMetrics, PlateauMetrics
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.protocol import Role
from elasticdl_client.errors import ModelDefinitionError
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).with_name("pytorch_plateau_script.py")
RECORDS, EPOCHS = 400, 5


def plateau_of(script: Script) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer, factor=0.5, patience=0, threshold=0.5)


def validation_loss(script: Script) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(script.bare.eval(), list(dataset().tensors))


def test_alone_the_model_is_that_of_a_plain_loop() -> None:
    plain = Script()
    scheduler = plateau_of(plain)
    epoch = [minibatch.indices for minibatch in minibatches() if minibatch.epoch == 0]  # one task: all are alike
    for _ in range(EPOCHS):
        plain.bare.train()
        for indices in epoch:
            plain.train([column[indices] for column in dataset().tensors])
        scheduler.step(validation_loss(plain))
    script = Script()
    ours = plateau_of(script)
    controller = create_elastic_controller(BATCH, EPOCHS, shuffle=False, state=[script.bare, script.optimizer, ours])
    loader = controller.loader(dataset())
    for _ in controller.epochs():
        script.bare.train()
        for batch in loader:
            with controller.step():
                script.train(batch)
        ours.step(metrics=validation_loss(script))
    assert ours.state_dict() == scheduler.state_dict()
    assert ours.get_last_lr()[0] < 0.05
    assert_equal(script.values(), plain.values())


def test_a_scheduler_that_is_not_registered_is_refused() -> None:
    script = Script()
    scheduler = plateau_of(script)
    controller = create_elastic_controller(BATCH, EPOCHS, state=[script.bare, script.optimizer])
    loop(controller, dataset(), script.train)
    with pytest.raises(ModelDefinitionError, match="ReduceLROnPlateau is not registered") as refused:
        scheduler.step(1.0)
    assert "state=[" in refused.value.hint


class InThreads:
    """Members of a group that are threads of this process: the exchanges of `PlateauMetrics`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.rows[rank] = value
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class Member(LoneGroup):
    def __init__(self, group: InThreads, rank: int) -> None:
        self.rank, self._group = rank, group

    def gather(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.stack(self._group.exchange(self.rank, numbers))

    def share(self, data: bytes | None, source: int = 0) -> bytes:
        return self._group.exchange(self.rank, data)[source]  # type: ignore[no-any-return]


class Worker:
    """A scheduler that is given metrics, as in one worker."""

    def __init__(self) -> None:
        self.script = Script()
        self.scheduler = plateau_of(self.script)
        state = RegisteredState()
        state.add(self.script.optimizer)
        state.add(self.scheduler)
        self.agreed = AgreedMetrics()
        self.metrics = PlateauMetrics(state, self.agreed, lambda: True)


def agree(*workers: Worker) -> None:
    """Until no worker has a metric of its own."""
    while any(worker.metrics.wish for worker in workers):
        group = InThreads(len(workers))
        with ThreadPoolExecutor(len(workers)) as threads:
            made = [threads.submit(one.metrics.agree, Member(group, rank)) for rank, one in enumerate(workers)]
            for future in made:
                future.result()


def test_a_metric_is_the_mean_over_the_records_of_those_that_give_one() -> None:
    workers = [Worker() for _ in range(3)]
    for worker, metric, records in zip(workers, (1.0, 4.0, None), (30, 10, 1000), strict=True):
        worker.metrics.num_records = records
        if metric is not None:
            worker.scheduler.step(metric)
    agree(*workers)
    assert [worker.scheduler.best for worker in workers] == [1.75] * 3


def test_a_worker_that_has_missed_the_exchange_takes_the_metric_of_the_others() -> None:
    workers = [Worker() for _ in range(3)]
    workers[0].scheduler.step(3.0)
    workers[1].scheduler.step(5.0)
    agree(workers[0])  # its exchange came through, and that of the others did not
    workers[1].scheduler.step(1.0)
    agree(*workers)
    assert [worker.agreed.newest for worker in workers] == [[[0, 3.0], [0, 1.0]]] * 3
    assert [worker.scheduler.best for worker in workers] == [1.0] * 3


def test_a_worker_that_gives_no_metric_takes_one_that_only_the_others_have_agreed_on() -> None:
    workers = [Worker() for _ in range(3)]
    workers[0].scheduler.step(3.0)
    agree(workers[0])  # then the group breaks, and the next one has all of them at the same step
    for worker in workers:
        worker.metrics.entered()
    agree(*workers)
    assert [worker.agreed.newest for worker in workers] == [[[0, 3.0]]] * 3
    assert [worker.scheduler.best for worker in workers] == [3.0] * 3


def test_a_worker_that_takes_the_state_of_others_forgets_the_metric_that_is_in_it() -> None:
    workers = [Worker() for _ in range(2)]
    for worker in workers:
        worker.scheduler.step(3.0)
    agree(workers[0])  # in a group without the other one, which joins later
    workers[1].agreed.load_state_dict(workers[0].agreed.state_dict())
    assert not workers[1].metrics.wish
    for worker, metric in zip(workers, (1.0, 2.0), strict=True):
        worker.scheduler.step(metric)
    agree(*workers)
    assert [worker.agreed.newest for worker in workers] == [[[0, 3.0], [0, 1.5]]] * 2


def check(tmp_path: Path, job: LocalJob) -> list[float]:
    """Every record was trained once, and all workers have the same model and rate after each step; return the rates."""
    assert [(c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(RECORDS, 0, 0)] * EPOCHS, job.story()
    return [float(rate) for _, rate, _ in agreed_steps(tmp_path)]


def test_all_workers_have_the_same_rate_where_each_step_has_a_metric(tmp_path: Path) -> None:
    job = noted_job(SCRIPT, tmp_path, "--every", num_workers=2, min_workers=2).start()
    assert job.wait(120) == 0, job.story()
    rates = check(tmp_path, job)
    assert rates[-1] < rates[0]


def test_workers_are_killed_while_others_wait_for_their_metric_and_while_they_wait_for_one(tmp_path: Path) -> None:
    """Worker 0 waits for that of worker 1, which is killed; then for that of its successor, and is killed itself."""
    job = noted_job(SCRIPT, tmp_path, "--hold 1:1 --hold 2:3", num_workers=2, min_workers=2).start()
    for holder, victim in (1, 1), (2, 0):
        place = tmp_path / "notes" / f"hold-{holder}"
        job.wait_until(f"worker {holder} to hold", (place / "held").exists, 90)
        os.kill(next(pod for pod in job.pods(Role.WORKER) if pod.index == victim).pid, signal.SIGKILL)
    (place / "go").write_text("")
    assert job.wait(150) == 0, job.story()
    assert set(steps_of(tmp_path)) == {"0", "1", "2", "3"}, job.story()
    rates = check(tmp_path, job)
    assert rates[-1] < rates[0]


def test_the_rates_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        flags = {"num_workers": number, "min_workers": number, "fixed_global_batch": 16, "minibatch_size": 8}
        job = noted_job(SCRIPT, tmp_path / str(number), "--metric validation", **flags).start()
        assert job.wait(120) == 0, job.story()
        rates = check(tmp_path / str(number), job)
        found.append([[float(rate), float(weight)] for _, rate, weight in agreed_steps(tmp_path / str(number))])
        assert rates[-1] < rates[0]
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-4, atol=1e-4)
