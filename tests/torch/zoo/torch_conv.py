"""A small network with BatchNorm and dropout on rows of 65 floats: an image of 8 × 8 pixels and its label."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, dropout: float = 0.25, spare: bool = False, channels: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.conv = nn.Conv2d(channels, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(4 * 36, 10)
        if spare:
            self.spare = nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(images.expand(-1, self.channels, -1, -1))))
        return self.out(self.dropout(x).flatten(1))


def custom_model(dropout: float = 0.25, spare: bool = False, channels: int = 1) -> nn.Module:
    return Net(dropout, spare, channels)


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def adagrad(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


def feed(records: list[bytes], mode: str, metadata: object) -> object:
    rows = torch.from_numpy(np.frombuffer(b"".join(records), np.float32).reshape(len(records), 65).copy())
    images = rows[:, :64].reshape(-1, 1, 8, 8)
    return images if mode == "prediction" else (images, rows[:, 64].long())


def accuracy(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return predictions.argmax(1) == labels


class Recall:
    """Of class 3."""

    def __init__(self) -> None:
        self.found = torch.zeros((), dtype=torch.int64)
        self.all = 0

    def update(self, labels: torch.Tensor, predictions: torch.Tensor) -> None:
        is_three = labels == 3
        self.found += (is_three & (predictions.argmax(1) == 3)).sum()
        self.all += int(is_three.sum())

    def compute(self) -> float:
        return float(self.found) / max(self.all, 1)

    def state_dict(self) -> dict[str, object]:
        return {"found": self.found, "all": self.all}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.found, self.all = state["found"], state["all"]


def eval_metrics_fn() -> dict[str, object]:
    return {"accuracy": accuracy, "loss": functional.cross_entropy, "recall": Recall()}
