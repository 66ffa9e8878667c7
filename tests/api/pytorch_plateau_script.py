"""A classifier whose rate follows a loss, by `ReduceLROnPlateau`; its five elastic lines are marked.

pytorch_plateau_script.py NOTES [--metric training|validation] …: notes model and rate after every step.
"""

import argparse
import os
from pathlib import Path

import torch
from pytorch_script_of_a_user import digest
from script_waits import hold
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from elasticdl.api.pytorch import create_elastic_controller  # 1

SIZE = 400


def points(count, seed):
    features = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, (features.sum(1) > 0).long())


def validate(model, dataset):
    model.eval()
    with torch.no_grad():
        loss = functional.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1])
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--metric", default="training")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", action="store_true", help="a metric after each step, in it")
    parser.add_argument("--hold", action="append", default=[], help="WORKER:EPOCH: waits in hold-WORKER, after that")
    args = parser.parse_args()
    worker = os.environ.get("WORKER_ID", "alone")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.4)
    controller = create_elastic_controller(8, args.epochs, state=[model, optimizer, scheduler])  # 2
    loader = controller.loader(points(SIZE, 1))  # 3
    notes = (args.notes / f"steps-{worker}").open("a")
    last = 0
    for epoch in controller.epochs():  # 4
        total, count = 0.0, 0
        for features, labels in loader:
            with controller.step():  # 5
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(features), labels)
                loss.backward()
                optimizer.step()
                total, count = total + loss.item() * len(labels), count + len(labels)
                if args.every:
                    scheduler.step(loss)
            if not controller.is_rehearsal and controller.num_steps > last:
                last = controller.num_steps
                rate = optimizer.param_groups[0]["lr"]
                notes.write(
                    f"{last} {digest(model)} {rate} {sum(p.double().sum().item() for p in model.parameters())}\n"
                )
                notes.flush()
        place = args.notes / f"hold-{worker}"
        if f"{worker}:{epoch}" in args.hold and not place.exists():
            place.mkdir()
            hold(place)
        if not args.every:
            scheduler.step(total / count if args.metric == "training" else validate(model, points(100, 2)))
    print("rate", optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
