"""Hugging Face's Trainer in one process: arguments that a job refuses, and what a worker of a job does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticdl.activities import Activity
from elasticdl.api.pytorch import ElasticController, join_job
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec

transformers = pytest.importorskip("transformers", reason="needs transformers")

REFUSED: dict[str, dict[str, Any]] = {
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "train_sampling_strategy=group_by_length": {"train_sampling_strategy": "group_by_length"},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "load_best_model_at_end": {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
    "lr_scheduler_type=reduce_lr_on_plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
    "num_train_epochs=1.5": {"num_train_epochs": 1.5},
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_argument_that_is_impossible_in_a_job_is_refused_by_name(what: str) -> None:
    from elasticdl.api.transformers import check_arguments

    with pytest.raises(JobError, match=what) as refused:
        check_arguments(transformers.TrainingArguments(use_cpu=True, **REFUSED[what]))
    assert refused.value.hint


def test_common_arguments_are_accepted() -> None:
    from elasticdl.api.transformers import check_arguments

    check_arguments(None)
    check_arguments(transformers.TrainingArguments(use_cpu=True, gradient_accumulation_steps=4, max_steps=100))


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.line(x) - labels) ** 2).mean()}


def trainer_of(tmp_path: Path, callbacks: Sequence[Any] = (), model: Any = None, **options: Any) -> Any:
    from elasticdl.api.transformers import ElasticTrainer

    silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 1}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "output"), **silent | options)
    samples = [{"x": torch.tensor([1.0, k / 16]), "labels": torch.tensor([2.0])} for k in range(16)]
    torch.manual_seed(1)
    given = {"args": arguments, "train_dataset": samples, "eval_dataset": samples, "callbacks": list(callbacks)}
    return ElasticTrainer(model=model or Line(), **given)


def elastic(trainer: Any, **flags: Any) -> Any:
    """The Trainer as in a job of these flags with one worker."""
    from elasticdl.api.transformers import ElasticCallbacks, ElasticTrainer, ElasticTraining

    session = replace(join_job(), spec=JobSpec(**flags))
    trainer._training = ElasticTraining(trainer, 1, session, super(ElasticTrainer, trainer).training_step)
    trainer.callback_handler = ElasticCallbacks(trainer.callback_handler, trainer._training)
    return trainer


def test_outside_of_a_job_it_is_the_plain_trainer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=3)
    assert trainer.train().global_step == 3
    assert trainer.callback_handler.__class__.__module__.startswith("transformers")


def test_before_training_a_worker_evaluates_and_saves(tmp_path: Path) -> None:
    trainer = elastic(trainer_of(tmp_path))
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model(str(tmp_path / "before"))
    assert trainer.is_world_process_zero()
    assert list((tmp_path / "before").iterdir())


def test_steps_that_are_a_part_of_all_are_of_the_updates_of_all_workers(tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "logging_steps": 0.5}
    trainer = elastic(trainer_of(tmp_path, **options), fixed_global_batch=4)
    assert trainer.train().global_step == 4
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [2, 4]


class Tokens(torch.nn.Module):
    """Its loss is divided by the number of items, or where none is given a mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.logits = torch.nn.Linear(2, 4)

    def forward(self, x: Any, labels: Any = None, num_items_in_batch: Any = None, **_: Any) -> dict[str, Any]:
        logits = self.logits(x)[:, None].expand(-1, 6, 4)
        return {"logits": logits} if labels is None else {"loss": loss_of_tokens(logits, labels, num_items_in_batch)}


def loss_of_tokens(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
    return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def mean_over_samples(trainer: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return model(**inputs)["loss"]


def loss_of_super(trainer: Any, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
    return transformers.Trainer.compute_loss(trainer, model, inputs, *arguments, **keywords)


@pytest.mark.parametrize(
    "divides", ["the model", "the model, below a compute_loss", "a function", "no, as the class says", "no, as we say"]
)
def test_losses_are_combined_by_the_items_or_the_samples_that_they_are_divided_by(
    divides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of four minibatches is one of all their samples, whatever number of labels each of them has."""
    from elasticdl.api.transformers import ElasticTrainer

    found = []
    if divides.endswith("a compute_loss"):
        monkeypatch.setattr(ElasticTrainer, "compute_loss", loss_of_super)
    if divides == "no, as the class says":
        monkeypatch.setattr(ElasticTrainer, "compute_loss", mean_over_samples)
        monkeypatch.setattr(ElasticTrainer, "loss_is_scaled_for_ga", False, raising=False)
    if divides == "no, as we say":
        monkeypatch.setattr(transformers.Trainer, "compute_loss", mean_over_samples)
    for size, fixed_global_batch in ((1, 4), (4, 0)):
        options = {"num_train_epochs": 1, "train_sampling_strategy": "sequential", "learning_rate": 0.1}
        trainer = trainer_of(tmp_path, per_device_train_batch_size=size, model=Tokens(), **options)
        for number, sample in enumerate(trainer.train_dataset):
            labels = torch.arange(number, number + 6) % 4
            sample["labels"] = labels.where(torch.arange(6) < number % 4 * 2, -100)
        if divides == "a function":
            trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: loss_of_tokens(
                outputs["logits"], labels, num_items_in_batch
            )
        if divides == "no, as we say":
            trainer.loss_is_scaled_for_ga = False
        elastic(trainer, fixed_global_batch=fixed_global_batch).train()
        found.append(trainer.model.logits.weight)
    torch.testing.assert_close(*found)


def test_a_worker_that_joins_counts_on_and_evaluates_when_the_others_do(tmp_path: Path) -> None:
    """It takes over the state from a checkpoint here, as it does from another worker."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "eval_on_start": True, "metric_for_best_model": "loss"}
    options["greater_is_better"] = True  # so that the first model is the best
    patience = [transformers.EarlyStoppingCallback(9) for _ in range(2)]
    for epochs, callback in zip((2, 3), patience, strict=True):
        trainer = trainer_of(tmp_path, [callback], num_train_epochs=epochs, **options)
        elastic(trainer, checkpoint_dir=str(tmp_path / "checkpoints")).train()
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    assert evaluated == [0, 2, 4, 6]
    counts = [callback.early_stopping_patience_counter for callback in patience]
    assert counts[1] == counts[0] + 1 == 2


def test_a_callback_that_stops_after_the_evaluation_of_an_epoch_stops_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(ElasticController, "stop_training", lambda _, reason: reasons.append(reason))
    options: dict[str, Any] = {"eval_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(tmp_path, [transformers.EarlyStoppingCallback(1)], num_train_epochs=3, **options)
    assert elastic(trainer).train().global_step == 4
    assert reasons


def test_a_second_training_in_one_job_is_refused(tmp_path: Path) -> None:
    trainer = elastic(trainer_of(tmp_path, num_train_epochs=1))
    trainer.train()
    with pytest.raises(JobError, match="a second time"):
        trainer.train()


@pytest.mark.parametrize(("is_zero", "activity"), [(True, [Activity.CHECKPOINT]), (False, [])])
def test_rank_0_saves_a_model_and_slow_storage_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zero: bool, activity: list[Activity]
) -> None:
    """Outside of a job the Trainer decides which processes save."""
    from elasticdl.api.transformers import ElasticTrainer

    def save_model(*_: Any) -> None:
        activities.append(trainer._training and trainer._training.session.clock.read()[0])

    trainer, activities = trainer_of(tmp_path), []
    monkeypatch.setattr(transformers.Trainer, "save_model", save_model)
    monkeypatch.setattr(ElasticTrainer, "is_world_process_zero", lambda _: is_zero)
    trainer.save_model()
    elastic(trainer).save_model()
    assert activities == [None, *activity]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_removes_checkpoints_at_the_end(tmp_path: Path, rank: int) -> None:
    options: dict[str, Any] = {"metric_for_best_model": "loss", "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"greater_is_better": True, "save_total_limit": 1, "num_train_epochs": 2}  # the first model is the best
    trainer = elastic(trainer_of(tmp_path, **options))
    save = trainer._save_checkpoint

    def save_checkpoint(*arguments: Any, **keywords: Any) -> None:
        save(*arguments, **keywords)
        trainer._training.session.rank = rank if trainer.state.global_step == 4 else 0

    trainer._save_checkpoint = save_checkpoint
    trainer.train()
    found = sorted(path.name for path in (tmp_path / "output").iterdir())
    assert found == ["checkpoint-2", "checkpoint-4"][: 1 + rank], "rank 0 may be writing the last one"


def test_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    class Noted(transformers.TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            activities.add(trainer._training.session.clock.read()[0])

    activities: set[Activity] = set()
    trainer = elastic(trainer_of(tmp_path, [Noted()], num_train_epochs=1, eval_strategy="epoch"))
    trainer.train()
    assert activities == {Activity.EVALUATE}
    trainer.evaluate()
    assert activities == {Activity.EVALUATE}
