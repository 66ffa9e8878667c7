"""A Lightning training script as a user has it, with the elastic lines; notes its steps and its Trainer's epochs.

pytorch_lightning_script.py NOTES [--hold-worker N --hold-at K] …
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from pytorch_squares import digest, squares
from script_waits import hold
from torch import nn
from torch.utils.data import DataLoader

from elasticdl.api.pytorch import create_elastic_controller  # 1

EPOCHS = 3


class Classifier(LightningModule):  # type: ignore[misc]
    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.given, self.worker, self.epochs = given, os.environ.get("WORKER_ID", "alone"), []
        self.automatic_optimization = not given.manual
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        is_at = controller.num_steps == self.given.hold_at and not controller.is_rehearsal
        if self.worker == self.given.hold_worker and is_at:
            self.given.hold_at = -1
            hold(self.given.notes)
        if not self.given.manual:
            return self._loss(batch)
        with controller.step():  # 5
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch))
            optimizer.step()
        return None

    def _loss(self, batch):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def optimizer_step(self, *arguments, **keywords):
        if self.given.manual:
            return super().optimizer_step(*arguments, **keywords)
        with controller.step():  # 5
            super().optimizer_step(*arguments, **keywords)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if not controller.is_rehearsal:
            self._note("steps", [controller.num_steps, digest(self)])

    def validation_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def on_train_epoch_end(self):
        accuracy = round(float(self.trainer.callback_metrics.get("accuracy", -1)), 4)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self._note("epochs", [self.current_epoch, self.trainer.global_step, accuracy, rate])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def _note(self, kind: str, row: list[object]) -> None:
        with (self.given.notes / f"{kind}-{self.worker}").open("a") as notes:
            notes.write(json.dumps(row) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--hold-worker", default="")
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--records", type=int, default=600)
    parser.add_argument("--manual", action="store_true")
    parser.add_argument("--trainer", default="", help="an argument of the Trainer: name=number or name=word")
    return parser.parse_args()


given = parse_arguments()
given.notes.mkdir(exist_ok=True)
model = Classifier(given)
torch.manual_seed(int.from_bytes(model.worker.encode()))
saver = ModelCheckpoint(given.notes / f"saved-{model.worker}", monitor="accuracy", mode="max", save_top_k=-1)
controller = create_elastic_controller(batch_size=16, num_epochs=EPOCHS, state=[model])  # 2
loader = controller.loader(squares(given.records, 1))  # 3
options = {
    "max_epochs": EPOCHS,  # 4
    "accelerator": "cpu",
    "gradient_clip_val": None if given.manual else 1.0,
    "callbacks": [saver, TQDMProgressBar(refresh_rate=10)],
    "logger": False,
    "log_every_n_steps": 5,
}
if given.trainer:
    name, value = given.trainer.split("=")
    options[name] = value if value.isidentifier() else json.loads(value)
trainer = Trainer(**options)
trainer.fit(model, loader, DataLoader(squares(60, 2), batch_size=30))
(given.notes / f"end-{model.worker}").write_text(digest(model))
