"""A network without BatchNorm."""

import torch
from torch import nn
from torch_conv import adam, eval_metrics_fn, feed, loss, optimizer

__all__ = ["adam", "custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 10))


def cast(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
