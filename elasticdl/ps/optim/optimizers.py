"""Optimizers from Keras configs: the rule's name, options and slots, and the numbers of each update.

The rules themselves are native (`elasticdl.kernels`), those of Keras 3 in float32 and in the same order of operations.
All of them are element-wise, so a PS applies them to any slice of the flat dense vector and to any set of rows:

* dense: equal to Keras on the whole variable;
* rows: equal to the same optimizer on each touched row alone, gradients of repeated ids summed first.  Untouched rows
  and their slots do not change: no momentum is added, no weight decays.  The step count (bias corrections, schedules)
  is the global one, the number of pushes this PS has applied; every PS gets every push, so it is the same on all.

`clipvalue` is done by the rules, on the summed gradient of a row; clipping by norm is not, because only the worker
sees a whole gradient.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticdl.ps.optim.schedules import F32, Constant, Schedule, build_schedule
from elasticdl_client.errors import ModelDefinitionError

_ONE = F32(1.0)
_DEFAULTS: dict[str, dict[str, float]] = {
    "SGD": {"momentum": 0.0, "nesterov": 0.0},
    "Adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": 0.0},
    "AdamW": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": 0.0},
    "Adamax": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Nadam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "RMSprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": 0.0},
    "Adadelta": {"rho": 0.95, "epsilon": 1e-7},
    "Ftrl": {
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
        "beta": 0.0,
    },
}
_WITHOUT_EFFECT = frozenset({"name", "ema_momentum", "ema_overwrite_frequency", "jit_compile", "is_legacy_optimizer"})
_HINT = f"Supported are {', '.join(_DEFAULTS)} of keras.optimizers; docs/optimizers.md has their options."


@dataclass(frozen=True, slots=True)
class Slot:
    """State that an optimizer keeps for each parameter, and its value before the first update."""

    name: str
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """A supported optimizer.

    Attributes:
        kind: Keras's class name.
        options: its hyperparameters by Keras's names; booleans are 0 and 1.
        slots: state beside each parameter, in the order of the native rule.
        clip_value: gradients are clipped to [-clip_value, clip_value]; 0: not.
        weight_decay: before an update, w ← w − w·weight_decay·rate.
    """

    kind: str
    options: Mapping[str, float]
    slots: tuple[Slot, ...]
    schedule: Schedule
    clip_value: float = 0.0
    weight_decay: float = 0.0
    _momentum: _NadamMomentum | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, config_json: str) -> OptimizerConfig:
        """From a Keras config, ``{"class_name": …, "config": {…}}``; empty: plain SGD with rate 0, changing nothing.

        Raises:
            ModelDefinitionError: it, or an option of it, is not supported; named.
        """
        if not config_json:
            return cls("SGD", dict(_DEFAULTS["SGD"]), (), Constant(F32(0.0)))
        described = json.loads(config_json)
        kind, module = described["class_name"], described.get("module") or "keras"
        if kind not in _DEFAULTS or not module.startswith("keras"):
            raise ModelDefinitionError(f"the optimizer {kind} is not supported by the parameter server", _HINT)
        given = {name: value for name, value in described["config"].items() if name not in _WITHOUT_EFFECT}
        schedule = build_schedule(given.pop("learning_rate", None), kind)
        clip_value = _number(kind, "clipvalue", given.pop("clipvalue", None) or 0.0)
        weight_decay = _number(
            kind, "weight_decay", given.pop("weight_decay", 0.004 if kind == "AdamW" else None) or 0.0
        )
        options = {name: _number(kind, name, given.pop(name, default)) for name, default in _DEFAULTS[kind].items()}
        for name, value in given.items():
            if value is not None and value is not False:
                raise ModelDefinitionError(
                    f"the option {name}={value!r} of the optimizer {kind} is not supported", _HINT
                )
        momentum = _NadamMomentum(options["beta_1"]) if kind == "Nadam" else None
        return cls(kind, options, _slots(kind, options), schedule, max(clip_value, 0.0), weight_decay, momentum)

    def learning_rate(self, step: int) -> float:
        """The optimizer's own rate for update number `step`, from 1."""
        return float(self.schedule.rate(step - 1))

    def scalars(self, step: int, learning_rate: float | None = None) -> tuple[float, ...]:
        """Return the scalars of the native rule for update number `step`, from 1, beside values and gradients.

        The learning rate, the weight decay, then what the rule of this kind takes (see kernels/src/optimizers.hpp).

        Args:
            learning_rate: instead of the optimizer's own.
        """
        rate = self.schedule.rate(step - 1) if learning_rate is None else F32(learning_rate)
        return (float(rate), float(F32(self.weight_decay)), *(float(value) for value in self._of_kind(step, rate)))

    def _of_kind(self, step: int, rate: np.float32) -> tuple[np.float32, ...]:
        if self.kind in ("Adam", "AdamW"):
            first, second = self._power("beta_1", step), self._power("beta_2", step)
            return (rate * np.sqrt(_ONE - second) / (_ONE - first),)
        if self.kind == "Adamax":
            return (_ONE - self._power("beta_1", step),)
        if self._momentum is not None:
            now, following = self._momentum.at(step), self._momentum.at(step + 1)
            product = self._momentum.product(step)
            powers = _ONE - self._power("beta_2", step)
            return following, _ONE - product * following, _ONE - now, _ONE - product, powers
        if self.kind == "Ftrl":
            l2, beta = F32(self.options["l2_regularization_strength"]), self.options["beta"]
            return (F32(2.0) * (l2 + F32(beta) / (F32(2.0) * rate) if beta else l2),)
        return ()

    def _power(self, option: str, step: int) -> np.float32:
        return F32(np.power(F32(self.options[option]), F32(step)))


def check_optimizer(config_json: str) -> None:
    """For the worker, before the first update.

    Raises:
        ModelDefinitionError: the optimizer, or an option of it, is not supported by the parameter server; named.
    """
    OptimizerConfig.parse(config_json)


class _NadamMomentum:
    """Nadam's momentum of each step and the running product of them; any thread may ask for any step."""

    _SMALLEST = 1e-12  # one minus less is one in float32

    def __init__(self, beta_1: float) -> None:
        self._beta_1 = F32(beta_1)
        self._lock = threading.Lock()
        self._products = array("f", [1.0])  # by step, from 0

    def at(self, step: int) -> np.float32:
        return F32(self._beta_1 * self._warm(F32(step)))

    def product(self, step: int) -> np.float32:
        """Of the momenta of the steps 1 … step."""
        with self._lock:
            products = self._products
            while len(products) <= step and products[-1] > self._SMALLEST:
                self._extend(min(step + 1 - len(products), 65536))
            return F32(products[step]) if step < len(products) else F32(0.0)

    def _extend(self, count: int) -> None:
        factors = np.empty(2 * count + 1, np.float32)
        factors[0] = self._products[-1]
        factors[1::2] = self._beta_1
        factors[2::2] = self._warm(np.arange(len(self._products), len(self._products) + count, dtype=np.float32))
        self._products.frombytes(np.multiply.accumulate(factors)[2::2].tobytes())

    @staticmethod
    def _warm(steps: Any) -> Any:
        return _ONE - F32(0.5) * np.power(F32(0.96), steps)


def _number(kind: str, option: str, value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise ModelDefinitionError(f"the option {option}={value!r} of the optimizer {kind} is not a number", _HINT)


def _slots(kind: str, options: Mapping[str, float]) -> tuple[Slot, ...]:
    names: tuple[str, ...]
    if kind == "SGD":
        names = ("momentum",) if options["momentum"] else ()
    elif kind in ("Adam", "AdamW"):
        names = ("momentum", "velocity", "velocity_hat") if options["amsgrad"] else ("momentum", "velocity")
    elif kind == "RMSprop":
        momentum = ("momentum",) if options["momentum"] > 0 else ()
        names = ("velocity", *momentum, *(("average_gradient",) if options["centered"] else ()))
    else:
        names = {
            "Adamax": ("momentum", "norm"),
            "Nadam": ("momentum", "velocity"),
            "Adagrad": ("accumulator",),
            "Adadelta": ("accumulated_grad", "accumulated_delta_var"),
            "Ftrl": ("accumulator", "linear"),
        }[kind]
    initial = options.get("initial_accumulator_value", 0.0)
    return tuple(Slot(name, initial if name == "accumulator" else 0.0) for name in names)
