"""Port `Optimizer`: how a gradient changes parameters, and its NumPy implementations (the oracle of the tests).

Rules are those of Keras 3, in float32 and in the same order of operations.  All of them are element-wise, so a PS
applies them to any slice of the flat dense vector and to any set of embedding rows:

* dense: equal to Keras on the whole variable;
* rows: equal to the same optimizer on each touched row alone, gradients of repeated ids summed first.  Untouched rows
  and their slots do not change.  The step count (Adam's bias correction) is the global one, the number of pushes this
  PS has applied; every PS gets every push, so it is the same on all of them.

Norm clipping is not done here: only the worker sees a whole gradient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from elasticdl.frameworks.framework import Floats
from elasticdl_client.errors import ModelDefinitionError

_HINT = "supported now: SGD (momentum, nesterov), Adam (amsgrad), Adagrad, with a constant learning_rate and clipvalue"
_IGNORED = frozenset({"name", "ema_momentum", "jit_compile", "is_legacy_optimizer"})
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EPSILON = np.float32(1e-7)


@dataclass(frozen=True, slots=True)
class Slot:
    """State that an optimizer keeps for each parameter, and its value before the first update."""

    name: str
    initial: float = 0.0


class Optimizer(Protocol):
    """Changes parameters by gradients."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state it needs beside each parameter."""
        ...

    def apply(self, weights: Floats, slots: Sequence[Floats], gradient: Floats, step: int) -> None:
        """One update, in place.

        Args:
            weights: float32 of any shape; changed.
            slots: one array of that shape for each of `self.slots`; changed.
            gradient: of that shape; not changed.
            step: which update it is, from 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class SGD:
    """w ← w − lr·g; with momentum v ← μv − lr·g, w ← w + v; nesterov: w ← w + μv − lr·g."""

    learning_rate: np.float32
    momentum: np.float32 = _ZERO
    nesterov: bool = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum"),) if self.momentum else ()

    def apply(self, weights: Floats, slots: Sequence[Floats], gradient: Floats, step: int) -> None:
        step_change = gradient * self.learning_rate
        if not self.momentum:
            weights -= step_change
            return
        velocity = slots[0]
        velocity *= self.momentum
        velocity -= step_change
        weights += velocity * self.momentum - step_change if self.nesterov else velocity


@dataclass(frozen=True, slots=True)
class Adam:
    """Kingma and Ba, 2014, with Keras's epsilon ("epsilon hat")."""

    learning_rate: np.float32
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: np.float32 = _EPSILON
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        names = ("momentum", "velocity", "velocity_hat") if self.amsgrad else ("momentum", "velocity")
        return tuple(Slot(name) for name in names)

    def apply(self, weights: Floats, slots: Sequence[Floats], gradient: Floats, step: int) -> None:
        power = np.float32(step)
        beta_1_power = np.power(np.float32(self.beta_1), power)
        beta_2_power = np.power(np.float32(self.beta_2), power)
        alpha = self.learning_rate * np.sqrt(_ONE - beta_2_power) / (_ONE - beta_1_power)
        first, second = slots[0], slots[1]
        first += (gradient - first) * np.float32(1 - self.beta_1)
        second += (gradient * gradient - second) * np.float32(1 - self.beta_2)
        if self.amsgrad:
            np.maximum(slots[2], second, out=slots[2])
            second = slots[2]
        denominator = np.sqrt(second)
        denominator += self.epsilon
        change = first * alpha
        change /= denominator
        weights -= change


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Duchi et al., 2011."""

    learning_rate: np.float32
    initial_accumulator_value: float = 0.1
    epsilon: np.float32 = _EPSILON

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator_value),)

    def apply(self, weights: Floats, slots: Sequence[Floats], gradient: Floats, step: int) -> None:
        accumulator = slots[0]
        accumulator += gradient * gradient
        change = gradient * self.learning_rate
        change /= np.sqrt(accumulator + self.epsilon)
        weights -= change


@dataclass(frozen=True, slots=True)
class ClippedByValue:
    """Another optimizer on gradients clipped to [-limit, limit]."""

    inner: Optimizer
    limit: np.float32

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.inner.slots

    def apply(self, weights: Floats, slots: Sequence[Floats], gradient: Floats, step: int) -> None:
        self.inner.apply(weights, slots, np.clip(gradient, -self.limit, self.limit), step)


def build_optimizer(config_json: str) -> Optimizer:
    """The optimizer of a Keras config, ``{"class_name": …, "config": {…}}``.

    Raises:
        ModelDefinitionError: it, or an option of it, is not supported; named.
    """
    described = json.loads(config_json)
    name, module = described["class_name"], described.get("module") or "keras"
    if name not in ("SGD", "Adam", "Adagrad") or not module.startswith("keras"):
        raise ModelDefinitionError(f"the optimizer {name} is not supported by the parameter server", _HINT)
    options = {key: value for key, value in described["config"].items() if key not in _IGNORED}
    rate = _learning_rate(name, options.pop("learning_rate", None))
    clip_value = options.pop("clipvalue", None)
    optimizer = _build(name, rate, options)
    for option, value in options.items():
        if value is not None and value is not False:
            raise ModelDefinitionError(f"the option {option}={value!r} of the optimizer {name} is not supported", _HINT)
    return optimizer if clip_value is None else ClippedByValue(optimizer, np.float32(clip_value))


def check_optimizer(config_json: str) -> None:
    """For the worker, before the first update.

    Raises:
        ModelDefinitionError: the optimizer, or an option of it, is not supported by the parameter server; named.
    """
    build_optimizer(config_json)


def _build(name: str, rate: np.float32, options: dict[str, Any]) -> Optimizer:
    """Takes what it knows out of `options`."""
    if name == "SGD":
        return SGD(rate, np.float32(options.pop("momentum", 0.0)), bool(options.pop("nesterov", False)))
    epsilon = np.float32(options.pop("epsilon", 1e-7))
    if name == "Adagrad":
        return Adagrad(rate, float(options.pop("initial_accumulator_value", 0.1)), epsilon)
    beta_1, beta_2 = float(options.pop("beta_1", 0.9)), float(options.pop("beta_2", 0.999))
    return Adam(rate, beta_1, beta_2, epsilon, bool(options.pop("amsgrad", False)))


def _learning_rate(name: str, value: float | Mapping[str, Any] | None) -> np.float32:
    if isinstance(value, int | float):
        return np.float32(value)
    kind = value.get("class_name", "a schedule") if isinstance(value, Mapping) else repr(value)
    raise ModelDefinitionError(f"the option learning_rate={kind} of the optimizer {name} is not supported", _HINT)
