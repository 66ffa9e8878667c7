"""The dense values that a worker computes with when it does not pull them for every minibatch (--get_model_steps).

Between two pulls it applies its own gradients to its copy, with the same rules as the parameter servers; the next pull
replaces the values.  The optimizer's slots are the worker's own and stay.
"""

from __future__ import annotations

import numpy as np

from elasticdl.frameworks.framework import Floats, Parameters
from elasticdl.kernels import _native
from elasticdl.ps.client.exchanges import Push
from elasticdl.ps.optim.optimizers import OptimizerConfig


class LocalDenseValues:
    """For one thread."""

    def __init__(self, optimizer: str, period: int) -> None:
        """
        Args:
            optimizer: Keras config as JSON.
            period: minibatches from one pull of dense values to the next.
        """
        self._config = OptimizerConfig.parse(optimizer)
        self._optimizer = _native.Optimizer(self._config.kind, self._config.options)
        self._period = period
        self._until_pull = 0
        self._parameters: Parameters | None = None
        self._slots: list[Floats] = []
        self._num_updates = 0
        self.versions: tuple[int, ...] = ()

    @property
    def parameters(self) -> Parameters:
        """The values to compute with."""
        assert self._parameters is not None
        return self._parameters

    def begin_minibatch(self) -> bool:
        """Whether the pull for the next minibatch must bring the dense values."""
        is_due = self._until_pull == 0
        self._until_pull = (self._period if is_due else self._until_pull) - 1
        return is_due

    def forget(self) -> None:
        """The next pull must bring the dense values."""
        self._until_pull = 0

    def replace(self, parameters: Parameters, versions: tuple[int, ...]) -> None:
        """Values from the parameter servers, and the versions of those."""
        self.versions = versions
        self._num_updates = 0
        if self._period == 1:
            self._parameters = parameters
        else:
            self._parameters = Parameters(np.array(parameters.trainable), np.array(parameters.non_trainable))

    def apply(self, push: Push) -> None:
        """One own update, which the parameter servers get as well."""
        if self._period == 1 or push.gradient is None or push.change is None:
            return
        weights = self.parameters.trainable
        if not self._slots:
            self._slots = [np.full_like(weights, slot.initial) for slot in self._config.slots]
        self._num_updates += 1
        scalars = self._config.scalars(max(self.versions, default=0) + self._num_updates, push.learning_rate)
        self._optimizer.apply(weights, self._slots, push.gradient, scalars, self._config.clip_value)
        np.add(self.parameters.non_trainable, push.change, out=self.parameters.non_trainable)
