"""Dense layers of equal width in PyTorch, trained with Adam: much state for little computation."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 4096
SMALL_WIDTH = 512
NUM_LAYERS = 6
NUM_CLASSES = 10


def custom_model(width: int = WIDTH) -> nn.Module:
    """100,728,842 parameters; takes [batch, width]."""
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def small_model() -> nn.Module:
    return custom_model(SMALL_WIDTH)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4)
