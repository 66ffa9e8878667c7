"""ResNet-20 of model_zoo/cifar10, of images of floats that are not augmented."""

import torch
from torch import nn

from elasticdl.api.examples import parse_examples

from .examples import example
from .step_times import watched

resnet20_pytorch = example("cifar10.resnet20_pytorch")
SHAPE = (3, 32, 32)


def custom_model() -> nn.Module:
    return resnet20_pytorch.custom_model()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return resnet20_pytorch.loss(labels, predictions)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return watched(resnet20_pytorch.optimizer(model))


def feed(records: list[bytes], mode: str, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parse_examples(records, {"image": SHAPE, "label": ()})
    image, label = torch.from_numpy(columns["image"]), torch.from_numpy(columns["label"])
    order = torch.randperm(len(label))
    return image[order], label[order]
