"""Values between a worker and its PS client: pushes, pulls, their exceptions, and the worker's copy between pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elasticdl.frameworks.framework import Floats, Ids, Parameters
from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig


class PsUninitialized(Exception):
    """A PS holds no parameters: call `PsClient.initialize`, then repeat the call."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} holds no parameters yet")
        self.ps_id = ps_id


class LeaseRefused(Exception):
    """A PS knows a newer lease of the task: another worker has it now."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} has a successor")
        self.lease = lease


class TooStale(Exception):
    """A PS has gone on too far since the values were pulled: pull again, compute again, push under the same name."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} has gone on too far since the pull")
        self.ps_id = ps_id


@dataclass(frozen=True, slots=True)
class Push:
    """The update of a minibatch.

    Attributes:
        gradient: [T], flat; None: the minibatch changes nothing, only its name is left.
        change: of the non-trainable values, [N], flat; None together with `gradient`.
        row_gradients: table to ids [n] and gradients [n, dim]; those of the same id are summed before they are sent.
            The arrays of ids must not change after a call has seen them.
        pulled_versions: of the `Pulled` that the gradients were computed on.
        learning_rate: instead of the optimizer's own; None: that.
        num_records: its weight in a round of synchronous mode.
    """

    lease: int
    epoch: int
    task: int
    minibatch: int
    gradient: Floats | None
    change: Floats | None
    row_gradients: Mapping[str, tuple[Ids, Floats]] = field(default_factory=dict)
    pulled_versions: Sequence[int] = ()
    learning_rate: float | None = None
    num_records: int = 0


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for values.

    Attributes:
        dense: all dense values.
        ids: table to ids [n], which may repeat and must not change after a call has seen them.
        read_only: rows that do not exist are not created; their initial values are returned.
    """

    dense: bool
    ids: Mapping[str, Ids] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """The values of a `Pull`.

    Attributes:
        parameters: None if not asked for.
        rows: table to rows [n, dim] in the order of the ids.
        versions: pushes applied, by PS.
        repeated_push: by PS, whether the push's name was there before, so that it was ignored.
    """

    parameters: Parameters | None
    rows: Mapping[str, Floats]
    versions: tuple[int, ...]
    repeated_push: tuple[bool, ...] = ()


class LocalDenseValues:
    """Dense values that a worker computes with when it does not pull them for every minibatch (--get_model_steps).

    Between two pulls it applies its own gradients to its copy, with the same rules as the parameter servers; the next
    pull replaces the values.  The optimizer's slots are the worker's own and stay.  For one thread.
    """

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
