"""Hugging Face's Accelerator in jobs of several workers, with the elastic import."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticdl.activities import Activity
from elasticdl.api.pytorch import join_job
from elasticdl.protocol import Role
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "elastic_accelerator_script.py"
EPOCHS = 3


def rows_of(notes: Path, worker: int) -> dict[int, list[Any]]:
    rows = [json.loads(line) for line in (notes / f"updates-{worker}").read_text().splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_a_loop_with_accumulation_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = (str(SCRIPT), str(notes), "--hold-worker=1", "--hold-at=9")
    flags: dict[str, object] = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2}
    job = LocalJob(tmp_path / "job", flags, "run", arguments=arguments, environment={"OMP_NUM_THREADS": "1"}).start()
    job.wait_until("worker 1 to hold", (notes / "held").exists, 150)
    os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == 1), signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(600, 600, 0, 0)] * EPOCHS
    updates = rows_of(notes, 0)
    assert [updates[number] for number in range(1, 10)] == [rows_of(notes, 1)[number] for number in range(1, 10)]
    assert (notes / "end-0").read_text() == (notes / "end-2").read_text(), "the model of all workers is the same"
    assert min(rate for _, rate in updates.values()) == 0.0, "the schedule counts the minibatches of all workers"
    said = "".join(job.log(f"elasticdl-elastic-accelerator-script-worker-{worker}") for worker in (0, 2))
    assert said.count("rank 0 ends: accuracy 1.00") == 1, job.story()
    assert len(list((notes / "state").iterdir())) >= 4, "model, optimizer, scheduler, random states"


@pytest.mark.parametrize("arguments", ["--break-at=9", "--trigger-worker=1 --trigger-at=9"], ids=["break", "trigger"])
def test_a_loop_that_is_left_by_all_stops_the_job_with_one_model(arguments: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    flags: dict[str, object] = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2}
    command, environment = (str(SCRIPT), str(notes), *arguments.split()), {"OMP_NUM_THREADS": "1"}
    job = LocalJob(tmp_path / "job", flags, "run", arguments=command, environment=environment).start()
    assert job.wait(200) == 0, job.story()
    assert rows_of(notes, 0) == rows_of(notes, 1), job.story()
    assert max(rows_of(notes, 0)) == 9, job.story()
    assert (notes / "end-0").read_text() == (notes / "end-1").read_text()
    (coverage,) = coverage_of(job)
    assert coverage.committed + coverage.unplanned == 600
    assert coverage.unplanned > 0
    assert "Training stops at step" in job.master_log()


def test_outside_of_a_job_it_is_the_plain_accelerator() -> None:
    import torch
    from accelerate import Accelerator

    from elasticdl.api.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True, num_epochs=3)
    loader = torch.utils.data.DataLoader(torch.arange(8.0).reshape(4, 2), batch_size=2)
    prepared = accelerator.prepare(loader)
    assert type(prepared) is type(Accelerator(cpu=True).prepare(loader))
    assert accelerator.is_main_process
    assert [float(accelerator.gather(batch).sum()) for batch in prepared] == [6.0, 22.0]
    with pytest.raises(JobError, match="there is no job"):
        _ = accelerator.mean_loss


def elastic_loop(num_epochs: int) -> tuple[Any, Any, Callable[[], None]]:
    """Return an accelerator as in a job, its loader, and a loop over it."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from elasticdl.api.accelerate import AcceleratorTraining, ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True)
    accelerator._training = AcceleratorTraining(accelerator, join_job(), num_epochs)
    net = torch.nn.Linear(2, 1)
    model, loader = accelerator.prepare(net, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))

    def train() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                net.zero_grad()
                accelerator.backward(model(batch).mean())

    return accelerator, loader, train


def test_an_error_of_one_worker_does_not_stop_the_job_by_the_end_of_its_script(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another takes its place; `try: … finally: accelerator.end_training()` is a common script."""
    accelerator, loader, train = elastic_loop(num_epochs=2)
    assert len(loader) == 4
    accelerator.end_training()  # before any loop there is no early end
    assert not accelerator._training.controller.is_over
    train()

    def fail() -> None:
        try:
            raise OSError("of this machine")
        finally:
            accelerator.end_training()

    with pytest.raises(OSError, match="of this machine"):
        fail()
    assert not accelerator._training.controller.is_over
    assert "call end_training() after the except block" in caplog.text
    accelerator.end_training()
    assert accelerator._training.controller.is_over
    assert "1 of its 2 epochs are trained" in caplog.text


def test_the_end_after_all_epochs_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    accelerator, _, train = elastic_loop(num_epochs=1)
    train()
    try:
        raise OSError("of this machine")
    except OSError:
        accelerator.end_training()
    accelerator.end_training()
    assert not [record for record in caplog.records if "end_training" in record.message]


def test_a_trigger_without_a_prepared_loader_is_refused() -> None:
    from elasticdl.api.accelerate import AcceleratorTraining, ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True)
    accelerator._training = AcceleratorTraining(accelerator, join_job(), 1)
    for method in (accelerator.set_trigger, accelerator.check_trigger):
        with pytest.raises(JobError, match="no DataLoader is prepared"):
            method()


def test_a_schedule_with_an_end_stays_there(tmp_path: Path) -> None:
    """OneCycleLR raises after its last step, and the steps of the last update may pass it."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from elasticdl.api.accelerate import AcceleratorTraining, ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True)
    session = replace(join_job(), spec=JobSpec(fixed_global_batch=4))
    accelerator._training = AcceleratorTraining(accelerator, session, 1)
    net = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=7)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)))
    model, optimizer, loader, scheduler = accelerator.prepare(net, sgd, loader, schedule)
    counts, activities = [], []
    accelerator.register_save_state_pre_hook(lambda *_: activities.append(session.clock.read()[0]))
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            counts.append(schedule.last_epoch)
            accelerator.save_state(str(tmp_path / "state"))
    assert counts == [4, 7]
    assert activities == [Activity.CHECKPOINT] * 2, "slow storage is no hang"


@pytest.mark.parametrize("method", ["save", "save_model"])
@pytest.mark.parametrize(("is_main", "activity"), [(True, [Activity.CHECKPOINT]), (False, [])])
def test_rank_0_saves_and_slow_storage_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, method: str, is_main: bool, activity: list[Activity]
) -> None:
    """Outside of a job Accelerate decides which processes save."""
    from accelerate import Accelerator

    from elasticdl.api.accelerate import AcceleratorTraining, ElasticAccelerator

    def save(*_: Any) -> None:
        activities.append(accelerator._training and accelerator._training.session.clock.read()[0])

    accelerator, activities = ElasticAccelerator(cpu=True), []
    monkeypatch.setattr(Accelerator, method, save)
    monkeypatch.setattr(ElasticAccelerator, "is_main_process", is_main)
    getattr(accelerator, method)(None, "")
    accelerator._training = AcceleratorTraining(accelerator, join_job(), 1)
    getattr(accelerator, method)(None, "")
    assert activities == [None, *activity]


def test_the_script_of_the_page_runs_alone_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "pytorch_trainers.md"
    script = next(
        code for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "accumulate" in code
    )
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}
    exec(compile(script, str(page), "exec"), given)
    assert given["scheduler"].scheduler.last_epoch == 3 * 38  # the last of 75 batches is an update of its own
    assert (tmp_path / "state").is_dir()
