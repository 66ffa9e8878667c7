"""A training script on the images of gpu_jobs.py: a plain loop, or (`--elastic`) one with an ElasticController.

It trains without end.  Its data are in memory, and come as `--input` says: slices of pinned tensors; or by a DataLoader
with processes, sample by sample, raw ones or JPEG files that it decodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measured_job import ROOT
from benchmarks.peers.plain_torch import PlainTraining
from benchmarks.zoo.torch_resnet50 import cropped, feed
from elasticdl.api.examples import parse_examples
from elasticdl.api.pytorch import create_elastic_controller
from elasticdl.data.factory import create_reader
from elasticdl.model_def import load

LENGTH = 1 << 22  # samples of an epoch: those in memory, again and again
Batches = Iterator[tuple[Any, Any]]


class RawImages(Dataset[Any]):  # type: ignore[misc]
    """Pixels and a label by number."""

    def __init__(self, records: list[bytes], _batch: int) -> None:
        self._images, self._labels = feed(records, "training", None)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        place = number % len(self._labels)
        return self._images[place], self._labels[place]


class JpegImages(Dataset[Any]):  # type: ignore[misc]
    """The same of JPEG files, each decoded and cropped when it is asked for."""

    def __init__(self, records: list[bytes], _batch: int) -> None:
        columns = parse_examples(records, {"image": (), "label": ()})
        self._files, self._labels = columns["image"], columns["label"]

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Any, int]:
        place = number % len(self._labels)
        return cropped(self._files[place]).permute(2, 0, 1), int(self._labels[place])


class Slices:
    """Whole minibatches by the numbers of their records: slices of tensors, pinned where there is a GPU."""

    def __init__(self, records: list[bytes], batch: int) -> None:
        tensors = feed(records, "training", None)
        self._images, self._labels = (one.pin_memory() if torch.cuda.is_available() else one for one in tensors)
        self._batch = batch

    def __call__(self, numbers: list[int]) -> tuple[Any, Any]:
        start = min(numbers) // self._batch % (len(self._labels) // self._batch) * self._batch
        return self._images[start : start + self._batch], self._labels[start : start + self._batch]


INPUTS: dict[str, Callable[[list[bytes], int], Any]] = {"slices": Slices, "samples": RawImages, "jpeg": JpegImages}


def plain_batches(source: Any, batch: int, options: dict[str, Any]) -> Batches:
    """Minibatches as a plain script has them."""
    if isinstance(source, Slices):
        for start in range(0, LENGTH, batch):
            yield source([start])
        return
    yield from DataLoader(source, batch, **options)


def elastic_batches(controller: Any, source: Any, options: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Minibatches by the ledger."""
    if isinstance(source, Slices):
        loader = controller.loader(range(LENGTH), collate_fn=source)
    else:
        loader = controller.loader(source, **options)
    for _ in controller.epochs():
        yield from loader


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--model", required=True, help="a function of benchmarks/zoo/torch_resnet50.py")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--input", choices=INPUTS, required=True)
    parser.add_argument("--processes", type=int, required=True, help="of the DataLoader")
    parser.add_argument("--elastic", action="store_true")
    arguments = parser.parse_args()
    reader = create_reader(arguments.data)
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    source = INPUTS[arguments.input](records, arguments.batch)
    options = {"num_workers": arguments.processes, "pin_memory": torch.cuda.is_available()}
    definition = load(str(ROOT / "benchmarks"), f"zoo.torch_resnet50.{arguments.model}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = PlainTraining.of(definition, device, autocasts=True)
    if not arguments.elastic:
        for features, labels in plain_batches(source, arguments.batch, options):
            training.step(features, labels)
        return
    state = [training.module, training.optimizer]
    controller = create_elastic_controller(arguments.batch, num_epochs=1, state=state)
    for features, labels in elastic_batches(controller, source, options):
        with controller.step():
            training.step(features, labels)


if __name__ == "__main__":
    main()
