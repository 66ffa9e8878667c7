"""A plain training script under DistributedDataParallel with Gloo, as torchrun starts it: data in memory.

``torch_ddp.py --model=MODULE.FUNCTION --batch=N --records=N [--seconds=S]``: of a module of benchmarks.zoo.  With
--seconds rank 0 prints samples per second of all processes together; else it trains without end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.images import random_images

WARM_UP_S = 4.0


def batches(image: torch.Tensor, label: torch.Tensor, size: int, rank: int, world_size: int) -> Iterator[Any]:
    """Minibatches of this process's share of the records, in another order every epoch, without end."""
    while True:
        order = torch.randperm(len(label))[rank::world_size]
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield image[chosen], label[chosen]


def train(model: str, batch: int, records: int, seconds: float) -> float:
    """Samples per second of all processes; never returns without `seconds`."""
    module_name, _, function = model.partition(".")
    zoo = importlib.import_module(f"benchmarks.zoo.{module_name}")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(rank)
    network = DistributedDataParallel(getattr(zoo, function)())
    optimizer = zoo.optimizer(network)
    images, labels = random_images(records, zoo.SHAPE)
    steps = 0  # that are measured
    began = 0.0
    first = time.monotonic()
    flag = torch.zeros(1)
    made = batches(torch.from_numpy(images), torch.from_numpy(labels), batch, rank, world_size)
    for number, (image, label) in enumerate(made, 1):
        optimizer.zero_grad()
        zoo.loss(label, network(image)).backward()
        optimizer.step()
        now = time.monotonic()
        if began:
            steps += 1
        elif now - first > WARM_UP_S:
            began = now
        if seconds and number % 10 == 0:  # all stop at the same step
            flag[0] = float(steps > 0 and now - began > seconds)
            torch.distributed.broadcast(flag, 0)
            if flag[0]:
                return float(steps * batch * world_size / (now - began))
    raise AssertionError("batches never end")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.distributed.init_process_group("gloo")
    rate = train(arguments.model, arguments.batch, arguments.records, arguments.seconds)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"samples_per_second": rate}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
