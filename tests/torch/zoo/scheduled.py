"""Two groups of parameters under a schedule."""

import torch
from torch import nn
from torch_conv import Net, feed, loss

__all__ = ["custom_model", "feed", "loss"]


def custom_model() -> nn.Module:
    return Net()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.conv.parameters()}, {"params": model.out.parameters(), "lr": 1.0}], lr=0.1)


def lr_scheduler(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def by_epoch(optimizer: torch.optim.Optimizer) -> object:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}
