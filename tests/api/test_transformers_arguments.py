"""Arguments of Hugging Face's Trainer that a job refuses, and the parts of an update, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from elasticdl_client.errors import JobError

transformers = pytest.importorskip("transformers", reason="needs transformers")

REFUSED: dict[str, dict[str, Any]] = {
    "auto_find_batch_size": {"auto_find_batch_size": True},
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


def test_outside_of_a_job_it_is_the_plain_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from elasticdl.api.transformers import ElasticTrainer

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.line(x) - labels) ** 2).mean()}

    options = {"output_dir": "unused", "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 3}
    arguments = transformers.TrainingArguments(**options, disable_tqdm=True)
    samples = [{"x": torch.tensor([1.0, k]), "labels": torch.tensor([2.0])} for k in range(16)]
    trainer = ElasticTrainer(model=Line(), args=arguments, train_dataset=samples)
    assert trainer.train().global_step == 3
    assert trainer.callback_handler.__class__.__module__.startswith("transformers")
