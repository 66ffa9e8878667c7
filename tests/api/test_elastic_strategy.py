"""Lightning's Trainer in jobs of several workers, with the elastic strategy."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elasticdl.activities import Activity
from elasticdl.api.pytorch import join_job
from elasticdl.api.pytorch.trainers import LightningTrainer
from elasticdl.protocol import Role
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

pytest.importorskip("lightning")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from elasticdl.api.lightning import ElasticStrategy

KNOWS_TIMES = pytest.mark.skipif(
    "timedelta" not in str(inspect.signature(Trainer.__init__).parameters["val_check_interval"]),
    reason="this Lightning is older: validation is not by time",
)
SCRIPT = Path(__file__).parent / "elastic_strategy_script.py"
EPOCHS = 3


def rows_of(notes: Path, kind: str, worker: int) -> list[list[Any]]:
    return [json.loads(line) for line in (notes / f"{kind}-{worker}").read_text().splitlines()]


@pytest.mark.full  # a whole job; the Trainer's counters are tested with the five lines in every change
def test_lightnings_trainer_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = (str(SCRIPT), str(notes), "--hold-worker=1", "--hold-at=9")
    flags: dict[str, object] = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 2}
    job = LocalJob(tmp_path / "job", flags, "run", arguments=arguments, environment={"OMP_NUM_THREADS": "1"}).start()
    job.wait_until("worker 1 to hold", (notes / "held").exists, 150)
    os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == 1), signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(600, 600, 0, 0)] * EPOCHS
    assert rows_of(notes, "end", 0) == rows_of(notes, "end", 2), job.story()
    for worker in (0, 2):
        epochs = rows_of(notes, "epochs", worker)
        assert [row[0] for row in epochs] == list(range(EPOCHS)), job.story()
        assert [row[3] for row in epochs] == [0.01 * 0.5 ** (k + 1) for k in range(EPOCHS)], job.story()
        assert epochs[-1][2] == 1.0, "it has learnt"
    saved = sorted(path.name for path in (notes / "saved").iterdir())
    assert saved == sorted(f"epoch={row[0]}-step={row[1]}.ckpt" for row in rows_of(notes, "epochs", 0)), "rank 0's only"


class Line(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any) -> Any:
        return self.line(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(strategy: ElasticStrategy, **options: Any) -> Any:
    silent = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(strategy=strategy, accelerator="cpu", enable_model_summary=False, **silent, **options)


def elastic(**flags: Any) -> ElasticStrategy:
    """The strategy as in a job of these flags with one worker."""
    strategy = ElasticStrategy("cpu")
    strategy._session = replace(join_job(), spec=JobSpec(**flags))
    return strategy


def test_outside_of_a_job_it_is_the_strategy_of_one_device() -> None:
    class Logged(Line):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

    trainer = trainer_of(ElasticStrategy("cpu"), max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(Logged(), DataLoader(torch.ones(8, 2), batch_size=2))
    assert (trainer.global_step, trainer.is_global_zero) == (4, True)


def test_loaders_made_anew_in_each_epoch_give_whole_epochs(tmp_path: Path) -> None:
    """The first epoch of the second run is what its checkpoint has left of one."""
    data = torch.ones(16, 2)

    class Loaders(Line):
        def train_dataloader(self) -> Any:
            return DataLoader(data, batch_size=2)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if is_first and batch_idx == 4:
                self.trainer.strategy._controller.save_checkpoint()
                raise InterruptedError

    for is_first in (True, False):
        strategy = elastic(checkpoint_dir=str(tmp_path))
        trainer = trainer_of(strategy, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        with pytest.raises(InterruptedError) if is_first else nullcontext():
            trainer.fit(Loaders())
    assert trainer.global_step == 3 * 8
    assert strategy._controller is not None
    assert strategy._controller.epochs_trained == 3.0


def test_an_epoch_whose_last_step_is_several_batches_ends_with_that_step() -> None:
    class Watched(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lengths.append(len(self.trainer.train_dataloader) - batch_idx)
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            steps.append(self.trainer.global_step)

        def on_train_epoch_end(self) -> None:
            ends.append((self.current_epoch, self.trainer.global_step))

    lengths: list[int] = []
    steps: list[int] = []
    ends: list[tuple[int, int]] = []
    strategy, data = elastic(fixed_global_batch=4), torch.ones(8, 2)
    trainer = trainer_of(strategy, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Watched(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=8))
    assert strategy._controller is not None
    assert strategy._controller.epochs_trained == 2.0
    assert (steps, ends) == ([2, 4], [(0, 2), (1, 4)])
    assert lengths == [4, 3, 2, 1] * 2


def test_a_part_of_a_step_does_not_count_as_one() -> None:
    class Counted(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append((self.trainer.global_step, self.trainer.strategy._controller.num_steps))

    steps: list[tuple[int, int]] = []
    strategy = elastic(fixed_global_batch=4)
    trainer_of(strategy, max_epochs=2, max_steps=3).fit(Counted(), DataLoader(torch.ones(8, 2), batch_size=2))
    assert steps == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]


@pytest.mark.parametrize("option", ["limit_train_batches", "overfit_batches", "fast_dev_run"])
def test_a_number_of_batches_is_a_part_of_them_though_it_be_1(option: str) -> None:
    """The Trainer takes the integer 1 for one batch, and 1.0 for all."""

    class Checked(Line):
        def on_train_start(self) -> None:
            found = LightningTrainer.of([self])
            assert found is not None
            found.check(num_epochs=3, is_alone=False)

    trainer = trainer_of(ElasticStrategy("cpu"), max_epochs=3, **{option: 1})
    with pytest.raises(JobError, match=r"limit_train_batches=1 .* leaves records out"):
        trainer.fit(Checked(), DataLoader(torch.ones(8, 2), batch_size=2))


@pytest.mark.parametrize(
    ("interval", "num_validations"),
    [
        pytest.param(1, 8, id="each-batch"),
        pytest.param(1.0, 2, id="each-epoch"),
        pytest.param(3, 2, id="three-batches"),
        pytest.param(timedelta(microseconds=1), 8, id="a-time", marks=KNOWS_TIMES),
    ],
)
def test_validation_comes_as_often_as_val_check_interval_says(interval: Any, num_validations: int) -> None:
    class Validated(Line):
        def validation_step(self, batch: Any) -> None:
            steps.append(self.trainer.global_step)

    steps: list[int] = []
    trainer = trainer_of(elastic(), max_epochs=2, num_sanity_val_steps=0, val_check_interval=interval)
    data = torch.ones(8, 2)
    trainer.fit(Validated(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=8))
    assert len(steps) == num_validations, steps


def test_a_second_loader_for_training_is_refused() -> None:
    loaders = {name: DataLoader(torch.ones(8, 2), batch_size=2) for name in ("a", "b")}
    with pytest.raises(JobError, match="another data set"):
        trainer_of(elastic(), max_epochs=1).fit(Line(), loaders)


def test_a_second_training_in_one_job_is_refused() -> None:
    trainer, model, loader = trainer_of(elastic(), max_epochs=1), Line(), DataLoader(torch.ones(8, 2), batch_size=2)
    trainer.fit(model, loader)
    with pytest.raises(JobError, match="a second time"):
        trainer.fit(model, loader)


def test_a_trainer_that_stops_early_leaves_the_group(tmp_path: Path) -> None:
    class Saved(TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
            activities.append(strategy._session.clock.read()[0])
            super().save_checkpoint(*arguments, **keywords)

    strategy, activities = elastic(), []
    trainer = trainer_of(strategy, max_epochs=2, max_steps=3, plugins=[Saved()])
    trainer.fit(Line(), DataLoader(torch.ones(8, 2), batch_size=2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert activities == [Activity.CHECKPOINT], "slow storage is no hang"
    assert strategy._controller is not None
    assert strategy._controller.num_steps == 3
    assert strategy._controller.is_over, "the others would wait for its next step"


def test_the_script_of_the_page_runs_alone_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "pytorch_trainers.md"
    codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = next(code for code in codes if "ElasticStrategy" in code).replace("Trainer(", "trainer = Trainer(", 1)
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.replace(".fit(", "\ntrainer.fit(", 1), str(page), "exec"), given)
    assert given["trainer"].global_step == 3 * 38


def test_a_long_validation_is_no_hang() -> None:
    class Validated(Line):
        def validation_step(self, batch: Any) -> None:
            activities.append(strategy._session.clock.read()[0])

        def on_train_batch_end(self, *_: Any) -> None:
            activities.append(strategy._session.clock.read()[0])

    strategy, activities = elastic(), []
    data = DataLoader(torch.ones(4, 2), batch_size=2)
    trainer_of(strategy, max_epochs=1, num_sanity_val_steps=0).fit(Validated(), data, data)
    assert activities == [Activity.COMPUTE] * 2 + [Activity.EVALUATE] * 2
