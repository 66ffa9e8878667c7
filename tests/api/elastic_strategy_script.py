"""A script with Lightning's Trainer as a user has it, with the elastic strategy; notes its steps and epochs.

elastic_strategy_script.py NOTES [--hold-worker N --hold-at K]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_squares import digest, squares
from script_waits import hold
from torch import nn
from torch.utils.data import DataLoader

from elasticdl.api.lightning import ElasticStrategy

parser = argparse.ArgumentParser()
parser.add_argument("notes", type=Path)
parser.add_argument("--hold-worker", default="")
parser.add_argument("--hold-at", type=int, default=-1)
given = parser.parse_args()
given.notes.mkdir(exist_ok=True)
worker = os.environ.get("WORKER_ID", "alone")


def note(kind: str, row: list[object]) -> None:
    with (given.notes / f"{kind}-{worker}").open("a") as notes:
        notes.write(json.dumps(row) + "\n")


class Classifier(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        if worker == given.hold_worker and self.trainer.global_step == given.hold_at:
            given.hold_at = -1
            hold(given.notes)
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        note("steps", [self.trainer.global_step, digest(self)])

    def validation_step(self, batch):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        accuracy = round(float(self.trainer.callback_metrics["accuracy"]), 4)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        note("epochs", [self.current_epoch, self.trainer.global_step, accuracy, rate])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


torch.manual_seed(4)
model = Classifier()
saver = ModelCheckpoint(given.notes / "saved", monitor="accuracy", mode="max", save_top_k=-1)
trainer = Trainer(
    strategy=ElasticStrategy("cpu"), accelerator="cpu", max_epochs=3, callbacks=[saver], logger=False,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(model, DataLoader(squares(600, 1), batch_size=16, shuffle=True), DataLoader(squares(60, 2), batch_size=30))
note("end", [trainer.global_step, digest(model)])
