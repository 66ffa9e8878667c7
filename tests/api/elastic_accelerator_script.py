"""A script with Accelerate as a user has it, with the elastic import; notes its updates.

elastic_accelerator_script.py NOTES [--hold-worker N --hold-at K] [--break-at K] [--trigger-worker N --trigger-at K] …
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from pytorch_squares import digest, squares
from script_waits import hold
from torch import nn
from torch.utils.data import DataLoader

from elasticdl.api.accelerate import ElasticAccelerator as Accelerator

EPOCHS = 3
parser = argparse.ArgumentParser()
parser.add_argument("notes", type=Path)
parser.add_argument("--hold-worker", default="")
parser.add_argument("--hold-at", type=int, default=-1)
parser.add_argument("--break-at", type=int, default=-1)
parser.add_argument("--trigger-worker", default="")
parser.add_argument("--trigger-at", type=int, default=-1)
given = parser.parse_args()
given.notes.mkdir(exist_ok=True)
worker = os.environ.get("WORKER_ID", "alone")

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, num_epochs=EPOCHS)
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
adam = torch.optim.Adam(net.parameters(), lr=0.01)
plain = DataLoader(squares(600, 1), batch_size=8, shuffle=True)
schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, total_iters=EPOCHS * len(plain) // 2)
model, optimizer, loader, scheduler = accelerator.prepare(net, adam, plain, schedule)
evaluated = accelerator.prepare(DataLoader(squares(60, 2), batch_size=20))
updates, rate, stops = 0, 0.0, False
for _ in range(EPOCHS):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if worker == given.hold_worker and updates == given.hold_at:
                    hold(given.notes)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates, rate = updates + 1, optimizer.param_groups[0]["lr"]
            with (given.notes / f"updates-{worker}").open("a") as notes:
                notes.write(json.dumps([updates, digest(net), rate]) + "\n")
            if worker == given.trigger_worker and updates == given.trigger_at:
                accelerator.set_trigger()
        stops = updates == given.break_at or bool(given.trigger_worker and accelerator.check_trigger())
        if stops:
            break
    if stops:
        break
accelerator.end_training()
right = []
for images, labels in evaluated:
    with torch.no_grad():
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
accelerator.save_state(str(given.notes / "state"))
accelerator.print(f"rank 0 ends: accuracy {torch.cat(right).float().mean():.2f}, rate {rate:.6f}")
(given.notes / f"end-{worker}").write_text(digest(net))
