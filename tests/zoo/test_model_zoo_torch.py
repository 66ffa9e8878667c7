"""Every PyTorch example of the zoo follows the contract, and learns in a plain loop, without us."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from elasticdl.data.datasets.images import generated
from elasticdl.data.example import encode_examples

ROOT = Path(__file__).resolve().parents[2]
NUM_RECORDS = 70
ZOO = {"mnist.mnist_pytorch": {}, "cifar10.resnet20_pytorch": {"num_blocks": 1, "width": 4}}


def records_like(name: str) -> list[bytes]:
    if name.startswith("cifar10"):
        return [record for block in generated(NUM_RECORDS, 1)[0].blocks for record in block]
    random = np.random.default_rng(0)
    images = random.uniform(0, 255, (NUM_RECORDS, 784)).astype(np.float32)
    return encode_examples({"image": images, "label": random.integers(0, 10, NUM_RECORDS)})


def step(module: ModuleType, model: torch.nn.Module, optimizer: torch.optim.Optimizer, records: list[bytes]) -> float:
    images, labels = module.feed(records, "training", None)
    optimizer.zero_grad()
    loss = module.loss(labels, model(images))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize(("name", "params"), ZOO.items())
def test_an_example_follows_the_contract(name: str, params: dict[str, int], zoo: None) -> None:
    module = importlib.import_module(name)
    records = records_like(name)
    torch.manual_seed(0)
    model = module.custom_model(**params)
    images, labels = module.feed(records, "evaluation", None)
    assert len(images) == len(labels) == NUM_RECORDS
    assert torch.equal(module.feed(records, "prediction", None), images)
    for metric in module.eval_metrics_fn().values():
        assert metric(labels, model(images)).shape == (NUM_RECORDS,)
    optimizer = module.optimizer(model)
    losses = [step(module, model, optimizer, records) for _ in range(12)]
    assert min(losses[-3:]) < losses[0]


def test_augmented_images_are_moved_and_mirrored_whole(zoo: None) -> None:
    module = importlib.import_module("cifar10.resnet20_pytorch")
    torch.manual_seed(0)
    images = torch.randint(1, 256, (20, 3, 32, 32), dtype=torch.uint8)
    for image, moved in zip(images, module.augmented(images), strict=True):
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1)  # [3, 9, 9, 32, 32]
        found = [(windows == wanted[:, None, None]).all(dim=(0, 3, 4)).any() for wanted in (moved, moved.flip(2))]
        assert any(found)


def test_resnet_20_has_the_papers_number_of_parameters(zoo: None) -> None:
    module = importlib.import_module("cifar10.resnet20_pytorch")
    assert sum(parameter.numel() for parameter in module.custom_model().parameters()) == 269_722
