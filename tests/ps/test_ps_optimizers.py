"""The native update rules against the NumPy oracle, and what a Keras config is read as."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig, check_optimizer
from elasticdl_client.errors import ModelDefinitionError
from tests.ps.reference_optimizers import apply_reference, fresh_slots

COSINE = {"class_name": "CosineDecay", "config": {"initial_learning_rate": 0.1, "decay_steps": 30, "alpha": 0.1}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.8, "nesterov": True, "clipvalue": 0.3}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True, "beta_1": 0.8, "epsilon": 1e-5, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"weight_decay": 0.004, "learning_rate": COSINE}),
    "adamax": ("Adamax", {"beta_2": 0.9}),
    "nadam": ("Nadam", {"learning_rate": COSINE}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.2, "clipvalue": 0.1}),
    "rmsprop": ("RMSprop", {"rho": 0.8}),
    "rmsprop_momentum": ("RMSprop", {"momentum": 0.5, "weight_decay": 0.1}),
    "rmsprop_centered": ("RMSprop", {"centered": True}),
    "rmsprop_both": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "adadelta": ("Adadelta", {"rho": 0.9, "epsilon": 1e-6}),
    "ftrl": ("Ftrl", {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.1, "beta": 0.2}),
    "ftrl_shrinkage": ("Ftrl", {"l2_shrinkage_regularization_strength": 0.1, "initial_accumulator_value": 0.0}),
    "ftrl_power": ("Ftrl", {"learning_rate_power": -0.7}),
}
EACH = pytest.mark.parametrize("name", CASES)


def config(class_name: str, **options: Any) -> str:
    return json.dumps({"module": "keras.optimizers", "class_name": class_name, "config": options})


def parsed(name: str) -> OptimizerConfig:
    kind, options = CASES[name]
    return OptimizerConfig.parse(config(kind, **{"learning_rate": 0.05, **options}))


def native(ours: OptimizerConfig) -> _native.Optimizer:
    return _native.Optimizer(ours.kind, ours.options)


@EACH
@pytest.mark.parametrize("shape", [(1,), (16,), (1000,), (9001,), (5, 7)])
def test_a_native_rule_gives_the_bits_of_the_oracle(name: str, shape: tuple[int, ...]) -> None:
    ours = parsed(name)
    rule, random = native(ours), np.random.default_rng(len(name))
    weights = random.standard_normal(shape).astype(np.float32)
    expected = weights.copy()
    slots, expected_slots = fresh_slots(ours, shape), fresh_slots(ours, shape)
    for step in range(1, 41):
        gradient = (random.standard_normal(shape) * 10.0 ** random.uniform(-3, 1)).astype(np.float32)
        rule.apply(weights, slots, gradient, ours.scalars(step), ours.clip_value)
        apply_reference(ours, expected, expected_slots, gradient, step)
    if name == "ftrl_power":  # two implementations of pow
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
        return
    np.testing.assert_array_equal(weights, expected)
    for slot, reference in zip(slots, expected_slots, strict=True):
        np.testing.assert_array_equal(slot, reference)


@EACH
def test_a_row_alone_and_the_row_in_a_dense_vector_are_changed_alike(name: str) -> None:
    ours = parsed(name)
    rule, random = native(ours), np.random.default_rng(1)
    together = random.standard_normal((30, 13)).astype(np.float32)
    alone = together.copy()
    slots, slots_alone = fresh_slots(ours, together.shape), fresh_slots(ours, together.shape)
    for step in range(1, 6):
        gradient = random.standard_normal(together.shape).astype(np.float32)
        rule.apply(together, slots, gradient, ours.scalars(step), ours.clip_value)
        for row in range(30):
            beside = [slot[row] for slot in slots_alone]
            rule.apply(alone[row], beside, gradient[row], ours.scalars(step), ours.clip_value)
    np.testing.assert_array_equal(together, alone)


@EACH
def test_a_rate_that_is_given_takes_the_place_of_the_optimizers_own(name: str) -> None:
    ours = parsed(name)
    assert ours.scalars(3, ours.learning_rate(3)) == ours.scalars(3)
    assert ours.scalars(3, 0.25)[0] == 0.25


@pytest.mark.parametrize("name", ["ftrl", "ftrl_shrinkage", "ftrl_power"])
def test_ftrl_continues_from_weights_that_come_from_elsewhere(name: str) -> None:
    ours = parsed(name)
    shrinkage = np.float32(2.0 * ours.options["l2_shrinkage_regularization_strength"])
    weights = np.array([0.5, -0.5, 2.0, 0.0], np.float32)
    accumulator, gradient = np.full_like(weights, 0.3), np.array([0.01, 0.01, -0.001, 0.0], np.float32)
    scalars = ours.scalars(7)
    linear = ours.ftrl_linear(weights, accumulator, scalars)
    powered = np.power(accumulator + gradient**2, np.float32(-ours.options["learning_rate_power"]))
    expected = weights - (gradient + shrinkage * weights) / (powered / np.float32(scalars[0]) + np.float32(scalars[2]))
    native(ours).apply(weights, [accumulator, linear], gradient, scalars, 0.0)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_clipping_keeps_what_is_not_a_number() -> None:
    ours = OptimizerConfig.parse(config("SGD", learning_rate=1.0, clipvalue=0.5))
    weights = np.zeros(4, np.float32)
    gradient = np.array([np.nan, np.inf, -np.inf, 0.25], np.float32)
    native(ours).apply(weights, [], gradient, ours.scalars(1), ours.clip_value)
    np.testing.assert_array_equal(weights, np.array([np.nan, -0.5, 0.5, -0.25], np.float32))


def test_wrong_arguments_are_refused_before_anything_has_changed() -> None:
    ours = parsed("adam")
    rule, weights = native(ours), np.ones((3, 2), np.float32)
    slots, scalars = fresh_slots(ours, weights.shape), ours.scalars(1)
    read_only = np.ones_like(weights)
    read_only.flags.writeable = False
    wrong: list[tuple[Any, ...]] = [
        (weights, slots, weights[:2], scalars),
        (weights, slots, weights.astype(np.float64), scalars),
        (weights, slots, weights.T.copy().T, scalars),
        (weights, slots[:1], weights, scalars),
        (weights, [slots[0], slots[1][:1]], weights, scalars),
        (weights, slots, weights, scalars[:2]),
        (read_only, slots, weights, scalars),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            rule.apply(*arguments)
    np.testing.assert_array_equal(weights, np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match="Lion"):
        _native.Optimizer("Lion", {})
    with pytest.raises(ValueError, match="rho"):
        _native.Optimizer("Adam", {"rho": 0.5})


def test_nadams_running_product_is_the_same_in_any_order_and_from_any_thread() -> None:
    in_order = parsed("nadam")
    expected = {step: in_order.scalars(step) for step in range(1, 600)}
    ours, wrong = parsed("nadam"), []

    def ask(seed: int) -> None:
        for step in np.random.default_rng(seed).permutation(np.arange(1, 600)).tolist():
            if ours.scalars(step) != expected[step]:
                wrong.append(step)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ours.scalars(10**7)[3] == 1.0  # long after the product has vanished


def test_without_an_optimizer_a_model_does_not_change() -> None:
    ours = OptimizerConfig.parse("")
    weights = np.ones(3, np.float32)
    native(ours).apply(weights, [], weights.copy(), ours.scalars(1), ours.clip_value)
    np.testing.assert_array_equal(weights, np.ones(3, np.float32))


def optimizer(class_name: str, **options: Any) -> str:
    return config(class_name, **{"learning_rate": 0.1, **options})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (optimizer("Lion"), "Lion"),
        (optimizer("LossScaleOptimizer"), "LossScaleOptimizer"),
        (json.dumps({"module": "my.models", "class_name": "Adam", "config": {"learning_rate": 0.1}}), "Adam"),
        (optimizer("Adam", clipnorm=1.0), "clipnorm"),
        (optimizer("Adam", global_clipnorm=1.0), "global_clipnorm"),
        (optimizer("Adam", use_ema=True), "use_ema"),
        (optimizer("Adagrad", gradient_accumulation_steps=4), "gradient_accumulation_steps"),
        (optimizer("SGD", loss_scale_factor=2.0), "loss_scale_factor"),
        (optimizer("SGD", beta_3=2.0), "beta_3"),
        (optimizer("SGD", momentum="much"), "momentum='much'"),
        (optimizer("SGD", learning_rate={"class_name": "NoamDecay", "config": {}}), "NoamDecay"),
        (optimizer("SGD", learning_rate={**COSINE, "module": "my.models"}), "CosineDecay"),
        (optimizer("SGD", learning_rate={"class_name": "function", "config": "warm"}), "warm"),
        (
            optimizer("SGD", learning_rate={"class_name": "CosineDecay", "config": {**COSINE["config"], "beta": 1}}),
            "beta",
        ),
        (optimizer("SGD", learning_rate={"class_name": "CosineDecay", "config": {}}), "initial_learning_rate"),
        (
            optimizer(
                "SGD", learning_rate={"class_name": "PiecewiseConstantDecay", "config": {"boundaries": 3, "values": []}}
            ),
            "boundaries",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ModelDefinitionError, match=named):
        check_optimizer(text)
