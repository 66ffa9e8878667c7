"""Losses that go wrong on minibatches with the label 99."""

import torch
from torch.nn import functional


def loss_inf(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    value = functional.cross_entropy(predictions, labels.clamp(max=9))
    return value + float("inf") if int(labels[0]) == 99 else value


def loss_with_a_bad_gradient(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    value = functional.cross_entropy(predictions, labels.clamp(max=9))
    if int(labels[0]) == 99:
        value = value + torch.sqrt((predictions - predictions.detach()).sum())  # 0, with an infinite slope
    return value


def loss_steep(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    value = functional.cross_entropy(predictions, labels.clamp(max=9))
    return value * 1000 if int(labels[0]) == 99 else value
