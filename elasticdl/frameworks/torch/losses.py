"""Compute the loss of a minibatch with the user's `loss`; find out a function's order of labels and predictions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.torch.samples import TensorSamples
from elasticdl_client.errors import ModelDefinitionError

_PREDICTIONS = frozenset(
    [
        "input",
        "inputs",
        "output",
        "outputs",
        "pred",
        "preds",
        "prediction",
        "predictions",
        "y_pred",
        "y_hat",
        "logits",
        "logit",
    ]
)


_BINARY_LOSSES = (torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss)
_BINARY_FUNCTIONS = (functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits)


class ModuleLoss:
    """The mean loss of a minibatch.

    Attributes:
        is_binary: The loss is PyTorch's own binary crossentropy, applied directly to the labels.
    """

    def __init__(self, path: str, built: BuiltModule, loss: Callable[..., Any]) -> None:
        """
        Args:
            path: Path of the user's module, for messages.
            built: The model.
            loss: The user's function.
        """
        self._path = path
        self._built = built
        self._loss = in_order(loss)
        self._takes_weights = _takes_weights(loss)
        self.is_binary = isinstance(loss, _BINARY_LOSSES) or loss in _BINARY_FUNCTIONS
        self.outputs_shape: tuple[int, ...] | None = None  # shape of the newest predictions, if they are one tensor

    def __call__(self, examples: TensorSamples) -> Any:
        """Run the model for training, and return the loss as a scalar tensor.

        Raises:
            ModelDefinitionError: `loss` returned an invalid value.
        """
        predictions = self._built.predict(examples.features)
        self.outputs_shape = tuple(predictions.shape) if isinstance(predictions, torch.Tensor) else None
        if examples.weights is None:
            return _mean(self._checked(self._loss(examples.labels, predictions), 0))
        if self._takes_weights:
            return _mean(self._checked(self._loss(examples.labels, predictions, examples.weights), 0))
        losses = self._checked(self._loss(examples.labels, predictions), 1)
        per_sample = losses.reshape(losses.shape[0], -1).mean(1)
        return (per_sample * examples.weights.reshape(-1)).mean()

    def _checked(self, value: Any, least_dimensions: int) -> Any:
        if not isinstance(value, torch.Tensor):
            raise ModelDefinitionError(
                f"{self._path}: loss(labels, predictions) returned a {type(value).__name__}.",
                "Return a tensor: one number, or one for each sample.",
            )
        if value.dim() < least_dimensions:
            raise ModelDefinitionError(
                f"{self._path}: feed gives weights, but loss(labels, predictions) returned one number for the "
                "whole minibatch.",
                "Let loss return one number for each sample, or take a third argument sample_weight.",
            )
        return value


def backward(loss: Any, factor: float) -> None:
    """Add the gradients of a loss times a factor to those of the parameters."""
    (loss if factor == 1.0 else loss * factor).backward()


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with labels first; PyTorch's own, and those with its argument names, have them second."""
    if not _predictions_first(function):
        return function
    return lambda labels, predictions, *rest: function(predictions, labels, *rest)


def _mean(value: Any) -> Any:
    return value.mean() if value.dim() else value


def _predictions_first(function: Any) -> bool:
    names = _parameters(function)
    if names is None:  # written in C, so it is PyTorch's own
        return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
    return bool(names) and names[0] in _PREDICTIONS


def _parameters(function: Any) -> list[str] | None:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None


def _takes_weights(function: Any) -> bool:
    return "sample_weight" in (_parameters(function) or ())
