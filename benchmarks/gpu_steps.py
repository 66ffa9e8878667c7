"""Steps on minibatches in memory, by turns in one process: a part of gpu.py.

Plain; Local; AllReduce with one worker (`alone`); a member's part of a step of several workers, without the network
(`member`); a script with an ElasticController that runs alone.  Reading records and RPCs are not in it.

On a GPU it is the time until the device is done.  On the CPU it is the processor time of the thread that trains, which
computes alone, with minibatches so small that the host's part of a step, for which a GPU would wait, shows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.all_reduce_training import NETWORKS, Network
from benchmarks.images import image_records, random_images, random_pixels
from benchmarks.measured_job import ROOT
from benchmarks.peers.plain_torch import PlainTraining
from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Mode, Share, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch.computation import Computation
from elasticdl.model_def import ModelDefinition, load
from elasticdl_client.choices import Precision

NUM_BATCHES = 4
BATCHES_OF_SCRIPT = 4_096  # of an epoch
WARM_UP_STEPS = 3
STEPS_PER_TURN = 5
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Workload:
    """A network on minibatches of one size, all of them on the device.

    Attributes:
        turns: of `STEPS_PER_TURN` steps each.
        autocasts: trained in bfloat16 with channels last, on images of bytes.
    """

    network: Network
    batch: int
    turns: int = 20
    autocasts: bool = False

    @property
    def name(self) -> str:
        return f"{self.network.name}_{self.batch}"

    @property
    def computation(self) -> Computation:
        """The values of --precision and --channels_last."""
        return Computation(Precision.BF16, channels_last=True) if self.autocasts else Computation()

    def definition(self) -> ModelDefinition:
        """Return the module of benchmarks/zoo."""
        return load(str(ROOT / "benchmarks"), f"zoo.{self.network.model}", None, {}, required=("feed",))

    def images(self) -> tuple[Any, Any]:
        """Pixels and labels of all minibatches."""
        make = random_pixels if self.autocasts else random_images
        return make(NUM_BATCHES * self.batch, self.network.shape)


SMALL_CNN = Network("mnist_zoo", "torch_mnist.custom_model", (1, 28, 28))
SMALL_RESNET = Network("small_resnet50", "torch_resnet50.small_model", (3, 32, 32))
RESNET50 = Network("resnet50", "torch_resnet50.custom_model", (3, 224, 224))
WORKLOADS = {
    "cpu": (
        Workload(SMALL_CNN, 8),
        Workload(NETWORKS[1], 2),
        Workload(SMALL_RESNET, 2, turns=10, autocasts=True),
    ),
    "cuda": (
        Workload(NETWORKS[0], 64),
        Workload(NETWORKS[0], 512),
        Workload(RESNET50, 128, turns=10, autocasts=True),
    ),
}


def steps_of(workload: Workload) -> dict[str, Step]:
    """Functions that make one step each, every one with a model of its own."""
    local, alone, member = (
        TorchFramework(workload.definition(), workload.batch, 0, Metadata(), computation=workload.computation)
        for _ in range(3)
    )
    device = local.device
    batches = [replace(batch, data=batch.data.on(device)) for batch in _batches(local, workload)]
    in_turn = {name: cycle(batches) for name in ("plain", "local", "alone", "member")}
    seeds = count()
    following = {
        name: Share(next(in_turn[name]), next(seeds), 1.0, is_alone)
        for name, is_alone in (("alone", True), ("member", False))
    }
    training = PlainTraining.of(workload.definition(), device, workload.autocasts)
    script = _script(workload, device)

    def plain() -> None:
        samples = next(in_turn["plain"]).data
        training.step(samples.features, samples.labels)

    def all_reduce(framework: Any, name: str, is_alone: bool) -> None:
        share, following[name] = following[name], Share(next(in_turn[name]), next(seeds), 1.0, is_alone)
        gradient = framework.local_gradient([share], lambda buffer: None)
        if gradient.run_ahead is not None:
            gradient.run_ahead(None, following[name])
        gradient.told()
        framework.apply_gradient(gradient, None)

    return {
        "plain": plain,
        "local": lambda: local.train(next(in_turn["local"]), next(seeds)),
        "alone": partial(all_reduce, alone, "alone", True),
        "member": partial(all_reduce, member, "member", False),
        "script": lambda: next(script),
    }


def _batches(framework: TorchFramework, workload: Workload) -> list[Batch]:
    task = TaskRecords(1, 0, image_records(*workload.images()))
    return [batch for batch in framework.batches(Mode.TRAINING, iter([task])) if not batch.end]


def _script(workload: Workload, device: str) -> Iterator[None]:
    """Run a script that yields after every batch; its batches are slices of tensors on the device."""
    training = PlainTraining.of(workload.definition(), device, workload.autocasts)
    images, labels = (torch.from_numpy(array).to(device) for array in workload.images())
    state = [training.module, training.optimizer]
    controller = create_elastic_controller(batch_size=workload.batch, num_epochs=1_000, state=state)

    def cut(numbers: list[int]) -> tuple[Any, Any]:
        start = min(numbers) // workload.batch % NUM_BATCHES * workload.batch
        return images[start : start + workload.batch], labels[start : start + workload.batch]

    loader = controller.loader(range(BATCHES_OF_SCRIPT * workload.batch), collate_fn=cut)
    for _ in controller.epochs():
        for features, truth in loader:
            with controller.step():
                training.step(features, truth)
            yield


def measure(device: str, is_quick: bool, _directory: Path) -> Iterator[dict[str, float]]:
    """Yield milliseconds of a step by kind, and ratios, of one workload after the other."""
    torch.set_flush_denormal(True)  # models that have learnt the few minibatches by heart would compute with them
    for workload in WORKLOADS[device]:
        steps = steps_of(workload)
        script = steps.pop("script")  # its threads read ahead, which would disturb the others' turns
        turns = 5 if is_quick else workload.turns
        found = _by_turns(steps, turns, device)
        found |= _by_turns({"plain_by_script": steps["plain"], "script": script}, turns, device)
        figures: dict[str, float] = {}
        for kind, times in found.items():
            figures[f"{workload.name}_{kind}_ms"] = statistics.median(times)
            if not kind.startswith("plain"):
                peer = found["plain_by_script" if kind == "script" else "plain"]
                ratios = [plain / ours for plain, ours in zip(peer, times, strict=True)]
                figures[f"{workload.name}_{kind}_ratio_to_plain"] = statistics.median(ratios)
        print({name: round(value, 3) for name, value in figures.items()}, file=sys.stderr, flush=True)
        yield figures


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
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
