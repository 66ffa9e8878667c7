"""A script with Hugging Face's Trainer as a user has it, with the elastic import; notes its steps and its log.

transformers_script.py NOTES [--hold {"N": K, …}] …: worker N waits in step K
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from pytorch_squares import digest
from script_waits import hold, wait_to_begin
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

from elasticdl.api.transformers import ElasticTrainer as Trainer

WORDS, LENGTH = 32, 8


class Sentences(Dataset):  # type: ignore[misc]
    """Sentences of words of the lower or the upper half of a vocabulary, and which it is."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 2
        words = torch.randint(1, WORDS // 2, (count, LENGTH), generator=generator)
        self.words = words + self.labels[:, None] * (WORDS // 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"input_ids": self.words[index], "labels": int(self.labels[index])}


class Notes(TrainerCallback):  # type: ignore[misc]
    """The values that a user's callback sees."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        rate = optimizer.param_groups[0]["lr"]
        note("steps", [state.global_step, digest(model), rate, state.epoch, state.max_steps])

    def on_log(self, args, state, control, logs=None, **kwargs):
        note("logs", [state.global_step, logs.get("loss"), state.is_world_process_zero])

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        note("evaluations", [state.global_step, metrics["eval_loss"], metrics["eval_accuracy"]])

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if given.hold.get(worker) == state.global_step:
            (given.notes / f"hold-{worker}").mkdir()
            hold(given.notes / f"hold-{worker}")

    def on_epoch_begin(self, args, state, control, **kwargs):
        note("epochs", ["begin", state.epoch])

    def on_epoch_end(self, args, state, control, **kwargs):
        note("epochs", ["end", state.epoch])


def note(kind: str, row: list[object]) -> None:
    with (given.notes / f"{kind}-{worker}").open("a") as notes:
        notes.write(json.dumps(row) + "\n")


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


parser = argparse.ArgumentParser()
parser.add_argument("notes", type=Path)
parser.add_argument("--hold", type=json.loads, default={})
parser.add_argument("--records", type=int, default=600)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--arguments", type=json.loads, default={}, help="more TrainingArguments")
given = parser.parse_args()
given.notes.mkdir(exist_ok=True)
worker = os.environ.get("WORKER_ID", "alone")
wait_to_begin(given.notes, worker)
torch.manual_seed(1)
config = BertConfig(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)
if given.lora:
    from peft import LoraConfig, TaskType, get_peft_model

    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"]))
options = {
    "output_dir": str(given.notes / "output"),
    "per_device_train_batch_size": 16,
    "num_train_epochs": 2,
    "learning_rate": 2e-3,
    "logging_steps": 5,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "report_to": "none",
    "use_cpu": True,
}
trainer = Trainer(
    model=model,
    args=TrainingArguments(**(options | given.arguments)),
    train_dataset=Sentences(given.records, 1),
    eval_dataset=Sentences(60, 2),
    compute_metrics=accuracy,
    callbacks=[Notes()],
)
trainer.model_accepts_loss_kwargs = False  # BERT's loss is a mean, whatever the number of items that it is given
judge = Trainer(model=model, args=TrainingArguments(**options), eval_dataset=Sentences(60, 2))
result = trainer.train()
trainer.save_model(str(given.notes / "final"))
note("end", [trainer.state.global_step, digest(model), result.training_loss])
judge.evaluate()
note("judge", [judge.state.is_world_process_zero, judge.is_world_process_zero(), trainer.is_world_process_zero()])
print(f"trained {trainer.state.global_step} steps, loss {result.training_loss:.4f}")
