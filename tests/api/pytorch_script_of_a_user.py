"""A PyTorch training script as a user has it; notes the model's digest after every step.

pytorch_script_of_a_user.py NOTES [--hold-worker N --hold-at K] …
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from threading import Event
from typing import Any

import torch
from script_waits import await_lock, hold, hold_lock, wait_to_begin
from torch import nn
from torch.utils.data import TensorDataset

from elasticdl.api.pytorch import ElasticController, create_elastic_controller
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.checkpoint import StateCheckpoints
from elasticdl_client.errors import CheckpointError

SIZE, WIDTH = 400, 6
_PATIENCE_S = 90.0


def digest(*modules: nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for module in modules:
        for value in module.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


class Records(TensorDataset):  # type: ignore[misc]
    """Of which one may be bad."""

    bad = -1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == self.bad:
            raise ValueError("the record is ugly")
        return tuple(column[index] for column in self.tensors)


def dataset() -> Records:
    features = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(5))
    return Records(features, features.sum(1, keepdim=True).sign())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--hold-worker", default="")
    parser.add_argument(
        "--hold-at", type=int, default=-1, help="that worker waits there, in its step, for a writer of the pipe `go`"
    )
    parser.add_argument(
        "--hold-size", type=int, default=1, help="members of its group before; smaller groups wait in a step for it"
    )
    parser.add_argument(
        "--ask-at", type=int, default=-1, help="the worker waits there, in its step, for the master to ask for a "
        "checkpoint, and in the next step as at --hold-at"
    )  # fmt: skip
    parser.add_argument("--keep-none", action="store_true", help="the script keeps no checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--loaders", type=int, default=1)
    parser.add_argument("--bad-record", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--end-worker", default="", help="ends after the step --end-at, before the end of the data")
    parser.add_argument("--end-at", type=int, default=-1)
    parser.add_argument("--stop-at", type=int, default=-1, help="worker 0 stops the training after that step")
    parser.add_argument("--nan-at", type=int, default=-1, help="from that step on worker 0 tells of a loss of NaN")
    parser.add_argument("--hold-end", action="store_true", help="worker 0 waits after its loop as at --hold-at")
    parser.add_argument("--refuse-late", action="store_true", help="storage refuses each checkpoint, see refuse_late")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def refuse_late(notes: Path, worker: str) -> None:
    """Let each checkpoint fail as storage that says no when the other members wait for it, or have ended."""
    works = hold_lock(notes, f"works-{worker}")
    share = GroupSession.share

    def wait_for_others(group: GroupSession, *given: Any) -> bytes:
        if group.rank != 0:
            works.close()
        return share(group, *given)

    def save(*arguments: object) -> None:
        for other in notes.glob("works-*"):
            if other.name != f"works-{worker}":
                await_lock(notes, other.name)
        raise CheckpointError("the storage refuses", "")

    GroupSession.share = wait_for_others  # type: ignore[method-assign]
    StateCheckpoints.save = save  # type: ignore[method-assign]


def note_requests(controller: ElasticController) -> Event:
    """Return what is set when the master asks for a checkpoint; the request is taken first."""
    link, asked = controller._parts.data.session.link, Event()
    save = link._save

    def noted() -> None:
        save()
        asked.set()

    link.on_checkpoint_request(noted)
    return asked


def misbehave(given: argparse.Namespace, worker: str, number: int, controller: ElasticController, asked: Event) -> None:
    """The events that the arguments set for the middle of a step."""
    if 0 <= given.ask_at <= number and not (given.notes / "held").exists():
        if number == given.ask_at:
            (given.notes / "asking").touch()
            asked.wait(_PATIENCE_S)
        else:
            hold(given.notes)
    if worker == given.hold_worker and 0 <= given.hold_at <= number and not (given.notes / "held").exists():
        hold(given.notes)
    if controller.size < given.hold_size and not controller.is_rehearsal and not (given.notes / "held").exists():
        controller.group._watch.await_own(controller.group.version, _PATIENCE_S)
    if number == given.raise_at and worker == "0":
        raise ValueError("the script is wrong")


def main() -> int:
    given = parse_arguments()
    worker = os.environ.get("WORKER_ID", "alone")
    wait_to_begin(given.notes, worker)
    if given.refuse_late:
        refuse_late(given.notes, worker)

    torch.manual_seed(int.from_bytes(worker.encode()))  # each begins with another model: the group's is that of one
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    run = torch.compile(model, backend="aot_eager") if given.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=1000)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = dataset()
    data.bad = given.bad_record

    controller = create_elastic_controller(
        batch_size=8,
        num_epochs=given.epochs,
        state=[model, optimizer, scheduler, by_epoch],
        checkpoint_dir="" if given.keep_none else None,
    )
    loader = controller.loader(data, num_workers=given.loaders)
    asked = note_requests(controller) if given.ask_at >= 0 else Event()

    @controller.on_evaluation(SIZE)
    def evaluate(indices: range) -> dict[str, float]:
        features, labels = (column[indices.start : indices.stop] for column in data.tensors)
        return {"accuracy": float((model(features).sign() == labels).float().mean())}

    number = last = 0
    with (given.notes / f"steps-{worker}").open("a") as notes:
        for epoch in controller.epochs():
            for features, labels in loader:
                with controller.step():
                    optimizer.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16, enabled=given.amp):
                        loss = nn.functional.mse_loss(run(features).float(), labels)
                    if 0 <= given.nan_at <= number:
                        loss = loss * float("nan")
                        controller.log_loss(loss)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    misbehave(given, worker, number, controller, asked)
                    optimizer.step()
                    scheduler.step()
                if not controller.is_rehearsal and controller.num_steps > last:
                    number, last = number + 1, controller.num_steps
                    rates = [group["lr"] for group in optimizer.param_groups]
                    notes.write(f"{controller.num_steps} {digest(model)} {rates} {epoch}\n")
                    notes.flush()
                if worker == "0" and number == given.stop_at:
                    controller.stop_training("it is enough")
                if worker == given.end_worker and number == given.end_at:
                    return 0
            by_epoch.step()
            with (given.notes / f"epochs-{worker}").open("a") as epochs:
                epochs.write(f"{epoch}\n")
        if given.hold_end and worker == "0":
            hold(given.notes)
    (given.notes / f"end-{worker}").write_text(f"{digest(model)} {controller.rank} {by_epoch.last_epoch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
