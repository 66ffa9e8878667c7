"""The oracle of the native update rules: the same in NumPy, as Keras 3 writes them, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from elasticdl.frameworks.framework import Floats
from elasticdl.ps.optim.optimizers import OptimizerConfig

F32 = np.float32
Rule = Callable[[OptimizerConfig, Floats, Sequence[Floats], Floats, Sequence[np.float32]], None]


def apply_reference(
    config: OptimizerConfig,
    weights: Floats,
    slots: Sequence[Floats],
    gradient: Floats,
    step: int,
    learning_rate: float | None = None,
) -> None:
    """One update in place: `weights` and each of `slots` of the gradient's shape; step from 1."""
    if config.clip_value:
        gradient = np.clip(gradient, -F32(config.clip_value), F32(config.clip_value))
    rate, decay, *rest = (F32(scalar) for scalar in config.scalars(step, learning_rate))
    if config.weight_decay:
        weights -= weights * decay * rate
    _RULES[config.kind](config, weights, slots, gradient, [rate, *rest])


def fresh_slots(config: OptimizerConfig, shape: tuple[int, ...]) -> list[Floats]:
    return [np.full(shape, slot.initial, np.float32) for slot in config.slots]


def _moments(config: OptimizerConfig, slots: Sequence[Floats], gradient: Floats) -> tuple[Floats, Floats]:
    first, second = slots[0], slots[1]
    first += (gradient - first) * F32(1 - config.options["beta_1"])
    second += (gradient * gradient - second) * F32(1 - config.options["beta_2"])
    return first, second


def _sgd(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    change = gradient * scalars[0]
    momentum = F32(config.options["momentum"])
    if not momentum:
        weights -= change
        return
    velocity = slots[0]
    velocity[...] = velocity * momentum - change
    weights += velocity * momentum - change if config.options["nesterov"] else velocity


def _adam(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    first, second = _moments(config, slots, gradient)
    if config.options["amsgrad"]:
        np.maximum(slots[2], second, out=slots[2])
        second = slots[2]
    weights -= first * scalars[1] / (np.sqrt(second) + F32(config.options["epsilon"]))


def _adamax(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    first, norm = slots
    first += (gradient - first) * F32(1 - config.options["beta_1"])
    norm[...] = np.maximum(F32(config.options["beta_2"]) * norm, np.abs(gradient))
    weights -= scalars[0] * first / (scalars[1] * (norm + F32(config.options["epsilon"])))


def _nadam(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    rate, next_u, next_rest, rest_u, rest, correction = scalars
    first, second = slots
    first += (gradient - first) * (F32(1) - F32(config.options["beta_1"]))
    second += (gradient * gradient - second) * (F32(1) - F32(config.options["beta_2"]))
    estimate = next_u * first / next_rest + rest_u * gradient / rest
    weights -= estimate * rate / (np.sqrt(second / correction) + F32(config.options["epsilon"]))


def _adagrad(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    slots[0][...] += gradient * gradient
    weights -= scalars[0] * gradient / np.sqrt(slots[0] + F32(config.options["epsilon"]))


def _rmsprop(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    rho, rest = F32(config.options["rho"]), F32(1 - config.options["rho"])
    velocity = slots[0]
    velocity[...] = rho * velocity + rest * (gradient * gradient)
    denominator = velocity
    if config.options["centered"]:
        average = slots[-1]
        average[...] = rho * average + rest * gradient
        denominator = velocity - average * average
    change = scalars[0] * gradient / np.sqrt(denominator + F32(config.options["epsilon"]))
    if config.options["momentum"]:
        momenta = slots[1]
        momenta[...] = F32(config.options["momentum"]) * momenta + change
        change = momenta
    weights -= change


def _adadelta(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    rho, rest, epsilon = F32(config.options["rho"]), F32(1 - config.options["rho"]), F32(config.options["epsilon"])
    gradients, changes = slots
    gradients[...] = rho * gradients + rest * (gradient * gradient)
    change = -(np.sqrt(changes + epsilon) * gradient / np.sqrt(gradients + epsilon))
    changes[...] = rho * changes + rest * (change * change)
    weights += scalars[0] * change


def _ftrl(
    config: OptimizerConfig, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[np.float32]
) -> None:
    options = config.options
    rate, twice_l2 = scalars
    power, l1 = F32(-options["learning_rate_power"]), F32(options["l1_regularization_strength"])
    accumulator, linear = slots
    shrunk = gradient + F32(2 * options["l2_shrinkage_regularization_strength"]) * weights
    new = accumulator + gradient * gradient
    powered = np.power(new, power)
    linear += shrunk - (powered - np.power(accumulator, power)) / rate * weights
    weights[...] = (np.clip(linear, -l1, l1) - linear) / (powered / rate + twice_l2)
    accumulator[...] = new


_RULES: dict[str, Rule] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adamax": _adamax,
    "Nadam": _nadam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Adadelta": _adadelta,
    "Ftrl": _ftrl,
}
