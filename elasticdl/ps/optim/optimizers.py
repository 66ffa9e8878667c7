"""Optimizers and learning rate schedules from Keras configs: rules, options, slots, and the scalars of each update.

The rules themselves are native (`elasticdl.kernels`): those of Keras 3, in float32, with the same order of operations.
They are all element-wise, so a PS applies them to any slice of the flat dense vector, and to any set of rows:

* dense: equal to Keras on the whole variable;
* rows: equal to the same optimizer on each touched row alone; gradients of repeated ids are summed first.  Untouched
  rows and their slots do not change: no momentum is added, no weight decays.  The step count (bias corrections,
  schedules) is global: the number of updates that this PS has applied; every PS gets every push, so all have the same.

The rules apply `clipvalue` to the summed gradient of a row; clipping by norm is done in the worker, since only it has
the whole gradient.

A schedule is a function of the number of updates before the current one (Keras: `optimizer.iterations`), in float32 and
with Keras's order of operations.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from elasticdl.frameworks.framework import Floats
from elasticdl_client.errors import ModelDefinitionError

F32 = np.float32
_ZERO = F32(0.0)
_HALF = F32(0.5)
_PI = F32(math.pi)


class Schedule(Protocol):
    """A learning rate as a function of the number of updates."""

    def rate(self, iterations: int) -> np.float32:
        """Return the rate of the update after `iterations` others."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: np.float32

    def rate(self, iterations: int) -> np.float32:
        return self.value


@dataclass(frozen=True, slots=True)
class _DecayByPeriods:
    """Decay per `decay_steps` updates; with `staircase`, only at whole multiples."""

    initial: np.float32
    decay_steps: np.float32
    decay_rate: np.float32
    staircase: bool = False

    def periods(self, iterations: int) -> np.float32:
        periods = F32(iterations) / self.decay_steps
        return F32(np.floor(periods) if self.staircase else periods)


class ExponentialDecay(_DecayByPeriods):
    """initial · decay_rate ^ (iterations / decay_steps)."""

    __slots__ = ()

    def rate(self, iterations: int) -> np.float32:
        return F32(self.initial * np.power(self.decay_rate, self.periods(iterations)))


@dataclass(frozen=True, slots=True)
class PiecewiseConstantDecay:
    """values[k] while iterations ≤ boundaries[k], then values[-1]."""

    boundaries: tuple[int, ...]
    values: tuple[np.float32, ...]

    def rate(self, iterations: int) -> np.float32:
        return self.values[sum(iterations > boundary for boundary in self.boundaries)]


@dataclass(frozen=True, slots=True)
class PolynomialDecay:
    """(initial − end) · (1 − iterations / decay_steps)^power + end; `cycle`: decay_steps is multiplied."""

    initial: np.float32
    decay_steps: np.float32
    end: np.float32
    power: np.float32
    cycle: bool = False

    def rate(self, iterations: int) -> np.float32:
        step, length = F32(iterations), self.decay_steps
        if self.cycle:
            length = F32(length * (np.ceil(step / length) if iterations else _ONE))
        else:
            step = min(step, length)
        return F32((self.initial - self.end) * np.power(_ONE - step / length, self.power) + self.end)


class InverseTimeDecay(_DecayByPeriods):
    """initial / (1 + decay_rate · iterations / decay_steps)."""

    __slots__ = ()

    def rate(self, iterations: int) -> np.float32:
        return F32(self.initial / (_ONE + self.decay_rate * self.periods(iterations)))


@dataclass(frozen=True, slots=True)
class CosineDecay:
    """Half a cosine from the initial rate (after a linear warm-up: from `warmup_target`) down to alpha of it."""

    initial: np.float32
    decay_steps: np.float32
    alpha: float = 0.0
    warmup_target: np.float32 | None = None
    warmup_steps: np.float32 = _ZERO

    def rate(self, iterations: int) -> np.float32:
        step = F32(iterations)
        if self.warmup_target is None:
            return self._decayed(min(step, self.decay_steps), self.initial)
        step = min(step, F32(self.decay_steps + self.warmup_steps))
        if step < self.warmup_steps:
            return F32((self.warmup_target - self.initial) * (step / self.warmup_steps) + self.initial)
        return self._decayed(F32(step - self.warmup_steps), self.warmup_target)

    def _decayed(self, step: np.float32, start: np.float32) -> np.float32:
        cosine = _HALF * (_ONE + np.cos(_PI * (step / self.decay_steps)))
        return F32(start * (F32(1 - self.alpha) * cosine + F32(self.alpha)))


@dataclass(frozen=True, slots=True)
class CosineDecayRestarts:
    """Cosine periods, each t_mul times as long and m_mul times as high as the last (Loshchilov and Hutter, 2016)."""

    initial: np.float32
    first_decay_steps: np.float32
    t_mul: np.float32
    m_mul: np.float32
    alpha: np.float32

    def rate(self, iterations: int) -> np.float32:
        fraction = F32(iterations) / self.first_decay_steps
        if self.t_mul == _ONE:
            restarts = np.floor(fraction)
            fraction -= restarts
        else:
            restarts = np.floor(np.log(_ONE - fraction * (_ONE - self.t_mul)) / np.log(self.t_mul))
            before = (_ONE - np.power(self.t_mul, restarts)) / (_ONE - self.t_mul)
            fraction = (fraction - before) / np.power(self.t_mul, restarts)
        cosine = _HALF * np.power(self.m_mul, restarts) * (_ONE + np.cos(_PI * fraction))
        return F32(self.initial * ((_ONE - self.alpha) * cosine + self.alpha))


class _Options:
    """A schedule's config; `rest` has the options that were not read."""

    def __init__(self, schedule: str, config: Mapping[str, Any]) -> None:
        self._schedule = schedule
        self.rest = {name: value for name, value in config.items() if name != "name"}

    def number(self, name: str, default: float | None = None) -> np.float32:
        return F32(self.python(name, default))

    def python(self, name: str, default: float | None = None) -> float:
        value = self.rest.pop(name, default)
        if isinstance(value, int | float):
            return float(value)
        raise ModelDefinitionError(f"the option {name}={value!r} of the schedule {self._schedule} is not a number")

    def numbers(self, name: str) -> list[float]:
        values = self.rest.pop(name, None)
        if isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values):
            return [float(value) for value in values]
        raise ModelDefinitionError(
            f"the option {name}={values!r} of the schedule {self._schedule} is not a list of numbers"
        )

    def flag(self, name: str) -> bool:
        return bool(self.rest.pop(name, False))


def _cosine(options: _Options) -> CosineDecay:
    target = options.rest.pop("warmup_target", None)
    return CosineDecay(
        options.number("initial_learning_rate"),
        options.number("decay_steps"),
        options.python("alpha", 0.0),
        None if target is None else F32(target),
        options.number("warmup_steps", 0.0),
    )


def _restarts(options: _Options) -> CosineDecayRestarts:
    return CosineDecayRestarts(
        options.number("initial_learning_rate"),
        options.number("first_decay_steps"),
        options.number("t_mul", 2.0),
        options.number("m_mul", 1.0),
        options.number("alpha", 0.0),
    )


def _piecewise(options: _Options) -> PiecewiseConstantDecay:
    boundaries, values = options.numbers("boundaries"), options.numbers("values")
    if len(values) != len(boundaries) + 1:
        raise ModelDefinitionError("the schedule PiecewiseConstantDecay needs one value more than boundaries")
    return PiecewiseConstantDecay(tuple(int(boundary) for boundary in boundaries), tuple(F32(v) for v in values))


_BY_NAME: dict[str, Callable[[_Options], Schedule]] = {
    "ExponentialDecay": lambda o: ExponentialDecay(
        o.number("initial_learning_rate"), o.number("decay_steps"), o.number("decay_rate"), o.flag("staircase")
    ),
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": lambda o: PolynomialDecay(
        o.number("initial_learning_rate"),
        o.number("decay_steps"),
        o.number("end_learning_rate", 0.0001),
        o.number("power", 1.0),
        o.flag("cycle"),
    ),
    "InverseTimeDecay": lambda o: InverseTimeDecay(
        o.number("initial_learning_rate"), o.number("decay_steps"), o.number("decay_rate"), o.flag("staircase")
    ),
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}


def build_schedule(described: float | Mapping[str, Any] | None, optimizer: str) -> Schedule:
    """Return the schedule of a Keras optimizer's `learning_rate`: a number, or a schedule's config.

    Args:
        optimizer: Name of the optimizer, for errors.

    Raises:
        ModelDefinitionError: the schedule, which is named, is not supported.
    """
    hint = f"Use a number or one of keras.optimizers.schedules: {', '.join(_BY_NAME)}; or a LearningRateScheduler."
    if isinstance(described, int | float):
        return Constant(F32(described))
    name = described.get("class_name", "") if isinstance(described, Mapping) else ""
    module = (described.get("module") or "keras") if isinstance(described, Mapping) else ""
    if not isinstance(described, Mapping) or name not in _BY_NAME or not module.startswith("keras"):
        kind = described.get("config") if name == "function" and isinstance(described, Mapping) else name or described
        raise ModelDefinitionError(f"learning_rate={kind} of the optimizer {optimizer} is not supported", hint)
    options = _Options(name, described["config"])
    schedule = _BY_NAME[name](options)
    if options.rest:
        raise ModelDefinitionError(f"the options {sorted(options.rest)} of the schedule {name} are not supported", hint)
    return schedule


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
        options: Hyperparameters by Keras's names; booleans are 0 and 1.
        slots: State of each parameter, in the order of the native rule.
        clip_value: Gradients are clipped to [-clip_value, clip_value]; 0: not clipped.
        weight_decay: Before an update, w ← w − w·weight_decay·rate.
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
        """Parse a Keras config, ``{"class_name": …, "config": {…}}``; empty: SGD with rate 0, which changes nothing.

        Raises:
            ModelDefinitionError: the optimizer, or a named option of it, is not supported.
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
        """Return the optimizer's own rate for update number `step`, from 1."""
        return float(self.schedule.rate(step - 1))

    def scalars(self, step: int, learning_rate: float | None = None) -> tuple[float, ...]:
        """Return the scalar arguments of the native rule for update number `step`, from 1.

        They are the learning rate, the weight decay, and those of this kind of rule (see kernels/src/optimizers.hpp).

        Args:
            step: Number of the update, from 1.
            learning_rate: Replaces the optimizer's own; None: that.
        """
        rate = self.schedule.rate(step - 1) if learning_rate is None else F32(learning_rate)
        return (float(rate), float(F32(self.weight_decay)), *(float(value) for value in self._of_kind(step, rate)))

    def ftrl_linear(self, weights: Floats, accumulator: Floats, scalars: Sequence[float]) -> Floats:
        """Return the slot `linear` from which Ftrl computes exactly these weights: its rule, solved for `linear`.

        Ftrl computes weights from its slots only, so weights from elsewhere last only with the matching slot.

        Args:
            weights, accumulator: Of the same shape.
            scalars: Scalars of the next update.
        """
        powered = np.power(accumulator, F32(-self.options["learning_rate_power"]))
        quadratic = powered / F32(scalars[0]) + F32(scalars[2])
        l1 = F32(self.options["l1_regularization_strength"])
        return np.asarray(-(weights * quadratic + np.sign(weights) * l1), F32)

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
    """Check an optimizer, in the worker, before the first update.

    Raises:
        ModelDefinitionError: the optimizer, or a named option of it, is not supported by the parameter server.
    """
    OptimizerConfig.parse(config_json)


class _NadamMomentum:
    """Nadam's momentum of each step, and their running product.  Thread-safe."""

    _SMALLEST = 1e-12  # one minus anything smaller is one in float32

    def __init__(self, beta_1: float) -> None:
        self._beta_1 = F32(beta_1)
        self._lock = threading.Lock()
        self._products = array("f", [1.0])  # by step, from 0

    def at(self, step: int) -> np.float32:
        return F32(self._beta_1 * self._warm(F32(step)))

    def product(self, step: int) -> np.float32:
        """Return the product of the momenta of steps 1 … step."""
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
