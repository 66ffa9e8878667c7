"""The network with BatchNorm, and buffers that are not finite before the first step."""

import torch
from torch import nn
from torch_conv import Net, adam, feed, loss, optimizer

__all__ = ["adam", "custom_model", "feed", "loss", "optimizer"]


def custom_model() -> nn.Module:
    net = Net(dropout=0.0)
    net.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    net.register_buffer("least", torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64))
    net.register_buffer("unset", torch.tensor(float("nan")))
    return net


def observed_model() -> nn.Module:
    """The largest value of its inputs so far is a buffer, as those of observers for quantization are."""
    net = Net(dropout=0.0)
    net.register_buffer("largest", torch.tensor(float("-inf")))
    net.register_forward_pre_hook(_observe)
    return net


def _observe(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    module.largest.copy_(inputs[0].amax().maximum(module.largest))
