"""Native optimizers and learning-rate schedules against Keras itself, from the configs that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig
from tests.ps.reference_optimizers import fresh_slots

o, s = keras.optimizers, keras.optimizers.schedules
SCHEDULES: dict[str, Callable[[], Any]] = {
    "exponential": lambda: s.ExponentialDecay(0.1, 70, 0.8),
    "staircase": lambda: s.ExponentialDecay(0.1, 70, 0.8, staircase=True),
    "piecewise": lambda: s.PiecewiseConstantDecay([100, 300], [0.1, 0.05, 0.01]),
    "piecewise_one": lambda: s.PiecewiseConstantDecay([200], [0.1, 0.02]),
    "polynomial": lambda: s.PolynomialDecay(0.1, 600, 0.01, power=1.5),
    "polynomial_cycle": lambda: s.PolynomialDecay(0.1, 90, 0.01, power=0.5, cycle=True),
    "inverse_time": lambda: s.InverseTimeDecay(0.1, 50, 0.5),
    "inverse_time_staircase": lambda: s.InverseTimeDecay(0.1, 50, 0.5, staircase=True),
    "cosine": lambda: s.CosineDecay(0.1, 500, alpha=0.05),
    "cosine_warmup": lambda: s.CosineDecay(0.0, 500, alpha=0.05, warmup_target=0.1, warmup_steps=50),
    "restarts": lambda: s.CosineDecayRestarts(0.1, 100, t_mul=2.0, m_mul=0.8, alpha=0.1),
    "restarts_equal": lambda: s.CosineDecayRestarts(0.1, 100, t_mul=1.0, m_mul=0.9),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: o.SGD(0.01),
    "momentum": lambda: o.SGD(0.01, momentum=0.9),
    "nesterov": lambda: o.SGD(s.CosineDecay(0.02, 500), momentum=0.9, nesterov=True),
    "sgd_decay": lambda: o.SGD(0.01, momentum=0.9, weight_decay=0.01),
    "clipped": lambda: o.SGD(0.01, clipvalue=0.5),
    "adam": lambda: o.Adam(0.01),
    "amsgrad": lambda: o.Adam(0.003, beta_1=0.8, epsilon=1e-5, amsgrad=True),
    "adam_schedule": lambda: o.Adam(s.ExponentialDecay(0.01, 100, 0.9), clipvalue=1.0),
    "adamw": lambda: o.AdamW(0.01, weight_decay=0.05),
    "adamax": lambda: o.Adamax(0.01, beta_2=0.99),
    "nadam": lambda: o.Nadam(0.01),
    "nadam_decay": lambda: o.Nadam(0.01, beta_1=0.95, weight_decay=0.01),
    "adagrad": lambda: o.Adagrad(0.1, initial_accumulator_value=0.2),
    "rmsprop": lambda: o.RMSprop(0.01),
    "rmsprop_momentum": lambda: o.RMSprop(0.001, momentum=0.9, rho=0.8),
    "rmsprop_centered": lambda: o.RMSprop(0.01, centered=True, weight_decay=0.01),
    "rmsprop_both": lambda: o.RMSprop(0.001, centered=True, momentum=0.5),
    "adadelta": lambda: o.Adadelta(1.0),
    "adadelta_decay": lambda: o.Adadelta(0.5, rho=0.9, weight_decay=0.001),
    "ftrl": lambda: o.Ftrl(0.1),
    "ftrl_all": lambda: o.Ftrl(
        s.PiecewiseConstantDecay([500], [0.1, 0.05]),
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.1,
    ),
    "ftrl_power": lambda: o.Ftrl(0.05, learning_rate_power=-0.6, initial_accumulator_value=0.5),
}


def parsed(optimizer: Any) -> OptimizerConfig:
    return OptimizerConfig.parse(json.dumps(keras.saving.serialize_keras_object(optimizer)))


def close(ours: Any, theirs: Any) -> bool:
    return bool(np.all(np.abs(ours - theirs) <= 1e-5 * np.maximum(1.0, np.abs(theirs))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_updates_equal_keras_after_1000_steps(name: str) -> None:
    theirs = OPTIMIZERS[name]()
    ours = parsed(theirs)
    random = np.random.default_rng(0)
    start = random.standard_normal(300).astype(np.float32)
    gradients = random.standard_normal((1000, 300)) * 10.0 ** random.uniform(-3, 1, (1000, 1))
    gradients = gradients.astype(np.float32)

    variable = keras.Variable(start)
    theirs.build([variable])

    @tf.function
    def train(all_gradients: Any) -> None:
        for gradient in all_gradients:
            theirs.apply([gradient])

    train(gradients)
    weights, slots = start.copy(), fresh_slots(ours, start.shape)
    rule = _native.Optimizer(ours.kind, ours.options)
    for step, gradient in enumerate(gradients, 1):
        rule.apply(weights, slots, gradient, ours.scalars(step), ours.clip_value)
    assert close(weights, variable.numpy())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_keras_rate_at_every_step(name: str) -> None:
    theirs = SCHEDULES[name]()
    ours = parsed(o.SGD(theirs))
    expected = tf.function(lambda steps: tf.map_fn(theirs, steps, fn_output_signature=tf.float32))(tf.range(1000))
    np.testing.assert_allclose([ours.learning_rate(step) for step in range(1, 1001)], expected, rtol=1e-5, atol=1e-8)
