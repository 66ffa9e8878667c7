"""Steps of PyTorch models of the zoo, and of a script, against a plain loop on the same minibatches in memory.

``python -m benchmarks.gpu [--device=cpu|cuda] [--quick] [--json]``: milliseconds of a step, by turns in one process:
plain; Local; AllReduce with one worker (`alone`); a member's part of a step of several workers, without the network
(`member`); a script with an ElasticController that runs alone.  Every ratio is that of the rates, ours to the plain
loop's: 1 is as fast.  Reading records and RPCs are not in it: `allreduce --only=training` measures whole jobs.

On a GPU it is the time until the device is done.  On the CPU it is the processor time of the thread that trains, which
computes alone, with minibatches so small that the host's part of a step, for which a GPU would wait, shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from typing import Any

from benchmarks.all_reduce_training import NETWORKS, Network
from benchmarks.images import random_images
from benchmarks.measured_job import ROOT
from elasticdl.data.example import encode_examples
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Mode, Share, TaskRecords
from elasticdl.model_def import ModelDefinition, load

NUM_BATCHES = 4
BATCHES_OF_SCRIPT = 4_096  # of an epoch
WARM_UP_STEPS = 3
STEPS_PER_TURN = 5
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Workload:
    """A network on minibatches of one size, all of them on the device."""

    network: Network
    batch: int

    @property
    def name(self) -> str:
        return f"{self.network.name}_{self.batch}"

    def definition(self) -> ModelDefinition:
        """The module of benchmarks/zoo."""
        return load(str(ROOT / "benchmarks"), f"zoo.{self.network.model}", None, {}, required=("feed",))


SMALL_CNN = Network("mnist_zoo", "torch_mnist.custom_model", (1, 28, 28))
WORKLOADS = {
    "cpu": (Workload(SMALL_CNN, 8), Workload(NETWORKS[1], 2)),
    "cuda": (Workload(NETWORKS[0], 64), Workload(NETWORKS[0], 512), Workload(NETWORKS[1], 64)),
}


def steps_of(workload: Workload) -> dict[str, Step]:
    """Functions that make one step each, every one with a model of its own."""
    local, batches = _framework(workload)
    alone, _ = _framework(workload)
    member, _ = _framework(workload)
    device = local.device
    batches = [replace(batch, data=batch.data.on(device)) for batch in batches]
    in_turn = {name: cycle(batches) for name in ("plain", "local", "alone", "member")}
    seeds = count()

    def plain(module: Any, optimizer: Any, loss: Any) -> None:
        samples = next(in_turn["plain"]).data
        optimizer.zero_grad()
        loss(samples.labels, module(samples.features)).backward()
        optimizer.step()

    def all_reduce(framework: Any, name: str, is_alone: bool) -> None:
        share = Share(next(in_turn[name]), next(seeds), 1.0, is_alone)
        gradient = framework.local_gradient([share], lambda buffer: None)
        gradient.told()
        framework.apply_gradient(gradient, None)

    definition = workload.definition()
    assert definition.optimizer is not None
    module = definition.model().to(device).train()
    script = _script(workload, device)
    return {
        "plain": partial(plain, module, definition.optimizer(module), definition.loss),
        "local": lambda: local.train(next(in_turn["local"]), next(seeds)),
        "alone": partial(all_reduce, alone, "alone", True),
        "member": partial(all_reduce, member, "member", False),
        "script": lambda: next(script),
    }


def _framework(workload: Workload) -> tuple[Any, list[Batch]]:
    from elasticdl.frameworks.torch import TorchFramework

    framework = TorchFramework(workload.definition(), workload.batch, 0, Metadata())
    images, labels = random_images(NUM_BATCHES * workload.batch, workload.network.shape)
    records = list(encode_examples({"image": images.reshape(len(labels), -1), "label": labels}))
    made = framework.batches(Mode.TRAINING, iter([TaskRecords(1, 0, records)]))
    return framework, [batch for batch in made if not batch.end]


def _script(workload: Workload, device: str) -> Iterator[None]:
    """A script that gives way after every batch; its batches are slices of tensors on the device."""
    import torch

    from elasticdl.api.pytorch import create_elastic_controller

    definition = workload.definition()
    assert definition.optimizer is not None
    assert callable(definition.loss)
    module = definition.model().to(device)
    optimizer = definition.optimizer(module)
    arrays = random_images(NUM_BATCHES * workload.batch, workload.network.shape)
    images, labels = (torch.from_numpy(array).to(device) for array in arrays)
    controller = create_elastic_controller(batch_size=workload.batch, num_epochs=1_000, state=[module, optimizer])

    def cut(numbers: list[int]) -> tuple[Any, Any]:
        start = min(numbers) // workload.batch % NUM_BATCHES * workload.batch
        return images[start : start + workload.batch], labels[start : start + workload.batch]

    loader = controller.loader(range(BATCHES_OF_SCRIPT * workload.batch), collate_fn=cut)
    for _ in controller.epochs():
        for features, truth in loader:
            with controller.step():
                optimizer.zero_grad()
                definition.loss(truth, module(features)).backward()
                optimizer.step()
            yield


def measure(is_quick: bool, device: str) -> dict[str, float]:
    """Milliseconds of a step by workload and kind, and ratios."""
    import torch

    torch.set_flush_denormal(True)  # models that have learnt the few minibatches by heart would compute with them
    figures: dict[str, float] = {}
    for workload in WORKLOADS[device]:
        steps = steps_of(workload)
        script = steps.pop("script")  # its threads read ahead, which would disturb the others' turns
        turns = 5 if is_quick else 20
        found = _by_turns(steps, turns, device)
        found |= _by_turns({"plain_by_script": steps["plain"], "script": script}, turns, device)
        for kind, times in found.items():
            figures[f"{workload.name}_{kind}_ms"] = statistics.median(times)
            if not kind.startswith("plain"):
                peer = found["plain_by_script" if kind == "script" else "plain"]
                ratios = [plain / ours for plain, ours in zip(peer, times, strict=True)]
                figures[f"{workload.name}_{kind}_ratio_to_plain"] = statistics.median(ratios)
        print({name: round(v, 3) for name, v in figures.items() if workload.name in name}, file=sys.stderr, flush=True)
    return figures


def _by_turns(steps: dict[str, Step], turns: int, device: str) -> dict[str, list[float]]:
    now = time.perf_counter if device == "cuda" else time.thread_time
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    found: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(turns):
        for kind, step in steps.items():
            _wait_for_device()
            began = now()
            for _ in range(STEPS_PER_TURN):
                step()
            _wait_for_device()
            found[kind].append((now() - began) / STEPS_PER_TURN * 1e3)
    return found


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    """Parses the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no GPU: --device=cpu runs without")
    figures = measure(arguments.quick, arguments.device)
    print(json.dumps(figures) if arguments.json else json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
