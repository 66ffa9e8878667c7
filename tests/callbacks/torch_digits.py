"""The digits, for PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from elasticdl.api.examples import parse_examples


def custom_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.002)


def feed(records: list[bytes], mode: str, metadata: object) -> tuple[torch.Tensor, torch.Tensor]:
    columns = parse_examples(records, {"image": (64,), "label": ()})
    return torch.from_numpy(columns["image"]), torch.from_numpy(columns["label"])


def accuracy(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return predictions.argmax(1) == labels


def eval_metrics_fn() -> dict[str, object]:
    return {"accuracy": accuracy}
