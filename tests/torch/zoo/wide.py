"""More than a first bucket of gradients."""

from collections import OrderedDict

from torch import nn
from torch_conv import feed, loss, optimizer

__all__ = ["custom_model", "feed", "loss", "optimizer"]


def custom_model() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            first=nn.Linear(64, 600),
            middle=nn.Linear(600, 600),
            last=nn.Linear(600, 10),
        )
    )
