"""Learning-rate schedules of Keras 3 from their configs, in float32 and in Keras's order of operations.

A schedule is a function of the number of updates made before this one (Keras: `optimizer.iterations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from elasticdl_client.errors import ModelDefinitionError

F32 = np.float32
_ZERO = F32(0.0)
_ONE = F32(1.0)
_HALF = F32(0.5)
_PI = F32(math.pi)


class Schedule(Protocol):
    """Learning rate by number of updates."""

    def rate(self, iterations: int) -> np.float32:
        """The rate of the update that `iterations` others went before."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: np.float32

    def rate(self, iterations: int) -> np.float32:
        return self.value


@dataclass(frozen=True, slots=True)
class _DecayByPeriods:
    """Of an initial rate, by periods of `decay_steps` updates; `staircase`: by whole ones."""

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
    """(initial − end) · (1 − iterations / decay_steps)^power + end; `cycle`: with a multiple of decay_steps."""

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
    """Half a cosine from the initial rate, or after a linear warm-up from `warmup_target`, down to alpha of it."""

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
    """Loshchilov and Hutter, 2016: cosine periods, each t_mul times as long and m_mul times as high as the last."""

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
    """A schedule's config; options that were not read stay in `rest`."""

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
    """From the `learning_rate` of a Keras optimizer's config: a number, or a schedule's own config.

    Args:
        optimizer: its name, for errors.

    Raises:
        ModelDefinitionError: it is not supported; named.
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
