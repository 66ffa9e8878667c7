"""An Accelerate training script as a user has it, with the five elastic lines; notes its steps.

pytorch_accelerate_script.py NOTES [--hold-worker N --hold-at K] …
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from pytorch_squares import digest, squares
from script_waits import hold
from torch import nn

from elasticdl.api.pytorch import create_elastic_controller  # 1

parser = argparse.ArgumentParser()
parser.add_argument("notes", type=Path)
parser.add_argument("--hold-worker", default="")
parser.add_argument("--hold-at", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=1)
given = parser.parse_args()
given.notes.mkdir(exist_ok=True)
worker = os.environ.get("WORKER_ID", "alone")
torch.manual_seed(int.from_bytes(worker.encode()))

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given.accumulate)
net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
adam = torch.optim.Adam(net.parameters(), lr=0.01)
one_cycle = torch.optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=1000)
model, optimizer, scheduler = accelerator.prepare(net, adam, one_cycle)
controller = create_elastic_controller(batch_size=16, num_epochs=3, state=[model, optimizer, scheduler])  # 2
loader = accelerator.prepare(controller.loader(squares(600, 1)))  # 3
for _ in controller.epochs():  # 4
    for images, labels in loader:
        with controller.step(), accelerator.accumulate(model):  # 5
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if worker == given.hold_worker and controller.num_steps == given.hold_at and not controller.is_rehearsal:
                hold(given.notes)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not controller.is_rehearsal:
            with (given.notes / f"steps-{worker}").open("a") as notes:
                notes.write(json.dumps([controller.num_steps, digest(net)]) + "\n")
    rate = optimizer.param_groups[0]["lr"]
    print(f"step {controller.num_steps}: rate {rate:.6f}")
images, labels = squares(60, 2).tensors
right = accelerator.gather_for_metrics(accelerator.unwrap_model(model).eval()(images).argmax(1) == labels)
print(f"accuracy {right.float().mean():.2f}")
(given.notes / f"end-{worker}").write_text(digest(net))
