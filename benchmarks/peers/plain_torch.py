"""A plain PyTorch loop over the model of a module of benchmarks/zoo: the peer of steps and of jobs on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.model_def import ModelDefinition


@dataclass(frozen=True, slots=True)
class PlainTraining:
    """A model with its optimizer, and the loop's body for a minibatch.

    Attributes:
        module: on its device.
        autocasts: to bfloat16, with images whose channels are last in memory.
    """

    module: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    device: torch.device
    autocasts: bool

    @classmethod
    def of(cls, definition: ModelDefinition, device: str, autocasts: bool) -> PlainTraining:
        """Make a model and its optimizer."""
        assert definition.optimizer is not None
        assert callable(definition.loss)
        module = definition.model().to(device).train()
        if autocasts:
            module = module.to(memory_format=torch.channels_last)
        return cls(module, definition.optimizer(module), definition.loss, torch.device(device), autocasts)

    def step(self, features: Any, labels: Any) -> None:
        """Train on a minibatch; copy pinned memory without waiting."""
        features = features.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        precision: Any = contextlib.nullcontext()
        if self.autocasts:
            features = features.contiguous(memory_format=torch.channels_last)
            precision = torch.autocast(self.device.type, torch.bfloat16)
        self.optimizer.zero_grad()
        with precision:
            outputs = self.module(features)
        self.loss(labels, outputs.float() if self.autocasts else outputs).backward()
        self.optimizer.step()
