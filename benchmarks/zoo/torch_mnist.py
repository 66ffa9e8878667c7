"""Networks for images of 28 × 28 in PyTorch: that of model_zoo/mnist, and a larger one of 1.2 M parameters."""

import torch
from torch import nn
from torch.nn import functional

from elasticdl.api.examples import parse_examples

from .examples import example
from .step_times import watched

mnist_pytorch = example("mnist.mnist_pytorch")
SHAPE = (1, 28, 28)


class LargeNet(nn.Module):  # type: ignore[misc]
    """Two convolutions and two dense layers, 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3)
        self.second = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * 12 * 12, 128)
        self.logits = nn.Linear(128, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(image / 255))
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        x = functional.dropout(x, 0.25, self.training)
        x = functional.dropout(functional.relu(self.hidden(x.flatten(1))), 0.5, self.training)
        return self.logits(x)


def custom_model() -> nn.Module:
    """That of the zoo."""
    return mnist_pytorch.custom_model()


def large_model() -> nn.Module:
    return LargeNet()


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return mnist_pytorch.loss(labels, predictions)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return watched(mnist_pytorch.optimizer(model))


def feed(records: list[bytes], mode: str, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parse_examples(records, {"image": SHAPE, "label": ()})
    image, label = torch.from_numpy(columns["image"]), torch.from_numpy(columns["label"])
    order = torch.randperm(len(label))
    return image[order], label[order]
