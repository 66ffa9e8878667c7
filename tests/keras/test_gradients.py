"""Gradients of the framework against plain Keras."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import Parameters, Share
from elasticdl.frameworks.keras.model import StepSeeds, assign_flat, flat_values, generator_states
from elasticdl.frameworks.keras.optimizer import scheduled_at
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError
from tests.lean_import import LEAN_IMPORT


@pytest.fixture(scope="module")
def digits() -> Any:
    random = np.random.default_rng(0)
    return np.concatenate([random.normal(size=(100, 64)), random.integers(0, 10, (100, 1))], axis=1).astype("f4")


def _images(digits: Any) -> tuple[Any, Any]:
    return digits[:, :64].reshape(-1, 8, 8, 1), digits[:, 64].astype("i4")


def _oracle(zoo: str, model_def: str, parameters: Parameters, images: Any, labels: Any, seed: int) -> Any:
    """Loss, gradient and change by an eager GradientTape over a fresh model."""
    definition = load(zoo, model_def)
    model = definition.model()
    model(images[:1])
    trainable = model.trainable_variables
    frozen = [v for v in model.non_trainable_weights if v.dtype == "float32"]
    assign_flat(trainable, parameters.trainable)
    assign_flat(frozen, parameters.non_trainable)
    StepSeeds(generator_states(model), 0).assign(tf.constant(seed, tf.int64))
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(definition.loss(labels, model(images, training=True)))
        value = tf.add_n([value, *model.losses])
    gradient = np.concatenate([g.numpy().ravel() for g in tape.gradient(value, trainable)])
    return float(value), gradient, flat_values(frozen) - parameters.non_trainable


@pytest.mark.parametrize(
    "symbol",
    [
        *("custom_model", "CustomModel", "sequential_model"),
        *("RecomputingModel", "RecomputingAside", "BorrowingModel", "OverridingModel"),
    ],
)
def test_gradients_are_those_of_a_gradient_tape(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, symbol: str, request: Any
) -> None:
    zoo = str(request.path.parent / "zoo")
    tested = framework(f"conv.{symbol}", minibatch_size=32)
    parameters = tested.initial()
    start = 0
    for batch in minibatches(tested, rows_of(digits[:40])):
        images, labels = _images(digits[start : start + batch.size])
        start += batch.size
        step = tested.gradients(batch, parameters, {}, seed=77)
        loss, gradient, change = _oracle(zoo, f"conv.{symbol}", parameters, images, labels, 77)
        assert step.loss == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(step.gradient, gradient, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(step.change, change, rtol=1e-4, atol=1e-6)
    assert start == 40


@pytest.mark.parametrize(
    ("symbol", "variable"),
    [
        ("spectral_model", "kernel"),
        ("shrinking_model", "scale"),
        ("halving_model", "halved/kernel"),
        ("activating_model", "halved/kernel"),
    ],
)
def test_a_model_that_assigns_a_trainable_variable_is_refused(framework: Any, symbol: str, variable: str) -> None:
    """The assignment would not come to the servers, and the model that they hold is another than the trained one."""
    with pytest.raises(ModelDefinitionError, match=f"assigns its trainable variable .*{variable} in a training step"):
        framework(f"conv.{symbol}").report()


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("in_groups", [False, True])
def test_a_trainable_variable_that_the_loss_assigns_is_refused_before_the_first_update(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, in_groups: bool, jit_compile: bool
) -> None:
    options = {"loss": "halving_loss", "minibatch_size": 32, "jit_compile": jit_compile}
    tested = framework("conv.scoring_model", on_parameter_server=not in_groups, **options)
    tested.report()
    (batch, *_) = minibatches(tested, rows_of(digits))

    def step() -> None:
        if in_groups:
            tested.local_gradient([Share(batch, 1, 1.0)], lambda _: None)
        else:
            tested.gradients(batch, tested.initial(), {}, seed=1)

    with pytest.raises(ModelDefinitionError, match="such as loss, assigns its trainable variable halved/kernel"):
        step()


@pytest.mark.parametrize("symbol", ["twice", "TwiceModel"])
def test_layers_that_only_training_calls_are_trained(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, symbol: str
) -> None:
    tested = framework(f"conv.{symbol}", minibatch_size=32)
    assert [v.name.split("/")[-2] for v in tested.report().variables] == ["always"] * 2 + ["training"] * 2
    step = tested.gradients(minibatches(tested, rows_of(digits))[0], tested.initial(), {}, seed=1)
    always, training = np.split(step.gradient, 2)
    assert np.abs(training).max() > 0
    np.testing.assert_array_equal(training, always)


def test_fifty_steps_by_hand_are_those_of_model_fit(
    framework: Any, rows_of: Any, minibatches: Any, request: Any
) -> None:
    random = np.random.default_rng(1)
    digits = np.concatenate([random.normal(size=(400, 64)), random.integers(0, 10, (400, 1))], axis=1).astype("f4")
    tested = framework("conv.custom_model", {"dropout": 0.0}, minibatch_size=8)
    initial = tested.initial()
    trainable, frozen = initial.trainable.copy(), initial.non_trainable.copy()
    for batch in minibatches(tested, rows_of(digits)):
        step = tested.gradients(batch, Parameters(trainable, frozen), {}, seed=0)
        trainable, frozen = trainable - np.float32(0.05) * step.gradient, frozen + step.change
    definition = load(str(request.path.parent / "zoo"), "conv.custom_model", {"dropout": 0.0})
    model = definition.model()
    assign_flat(model.trainable_variables, initial.trainable)
    assign_flat(model.non_trainable_variables, initial.non_trainable)
    model.compile(optimizer=definition.optimizer(), loss=definition.loss)
    model.fit(*_images(digits), batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(trainable, flat_values(model.trainable_variables), atol=1e-5)
    np.testing.assert_allclose(frozen, flat_values(model.non_trainable_variables), atol=1e-5)


@pytest.mark.parametrize("symbol", ["custom_model", "CustomModel", "flipping_model"])
def test_chance_inside_a_step_depends_on_its_seed_alone(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, symbol: str
) -> None:
    first, second = framework(f"conv.{symbol}"), framework(f"conv.{symbol}")
    batch, *others = minibatches(first, rows_of(digits))
    step = first.gradients(batch, first.initial(), {}, seed=5)
    for other in others:
        first.gradients(other, first.initial(), {}, seed=6)
    again = second.gradients(minibatches(second, rows_of(digits))[0], second.initial(), {}, seed=5)
    differently = first.gradients(batch, first.initial(), {}, seed=6)
    np.testing.assert_array_equal(step.gradient, first.gradients(batch, first.initial(), {}, seed=5).gradient)
    np.testing.assert_array_equal(step.gradient, again.gradient)
    assert not np.array_equal(step.gradient, differently.gradient)


@pytest.fixture(scope="module")
def unclipped(framework: Any, rows_of: Any, minibatches: Any, digits: Any) -> tuple[Any, Parameters]:
    """A gradient, and the values where it is taken."""
    plain = framework("conv.plain_model")
    step = plain.gradients(minibatches(plain, rows_of(digits[:8]))[0], plain.initial(), {}, seed=0)
    return step.gradient, plain.initial()


@pytest.mark.parametrize("optimizer", ["clipnorm", "global_clipnorm"])
def test_a_worker_clips_its_own_gradient_by_norm_as_keras_does(
    framework: Any,
    rows_of: Any,
    minibatches: Any,
    digits: Any,
    unclipped: tuple[Any, Parameters],
    optimizer: str,
    request: Any,
) -> None:
    gradient, initial = unclipped
    clipping = framework("conv.plain_model", optimizer=optimizer)
    clipped = clipping.gradients(minibatches(clipping, rows_of(digits[:8]))[0], initial, {}, seed=0).gradient
    model = load(str(request.path.parent / "zoo"), "conv.plain_model").model()
    made = load(str(request.path.parent / "zoo"), "conv.plain_model", {}, {"optimizer": optimizer}).optimizer()
    assign_flat(model.trainable_variables, initial.trainable)
    before = flat_values(model.trainable_variables)
    pieces, start = [], 0
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        pieces.append(tf.reshape(gradient[start : start + size], variable.shape))
        start += size
    made.apply(pieces, model.trainable_variables)
    np.testing.assert_allclose(before - 0.05 * clipped, flat_values(model.trainable_variables), atol=1e-6)
    assert not np.allclose(gradient, clipped)
    assert f'"{optimizer}": null' in clipping.report().optimizer


def test_clipping_by_value_is_left_to_the_parameter_servers(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, unclipped: tuple[Any, Parameters]
) -> None:
    clipping = framework("conv.plain_model", optimizer="clipvalue")
    step = clipping.gradients(minibatches(clipping, rows_of(digits[:8]))[0], unclipped[1], {}, seed=0)
    np.testing.assert_array_equal(step.gradient, unclipped[0])
    assert '"clipvalue": 0.01' in clipping.report().optimizer


def test_an_optimizer_that_decays_some_variables_only_is_refused(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match="exclude_from_weight_decay"):
        framework("conv.plain_model", optimizer="excluding").report()
    framework("conv.plain_model", optimizer="excluding", on_parameter_server=False).report()


def test_what_is_not_finite_is_reported(framework: Any, rows_of: Any, minibatches: Any, digits: Any) -> None:
    tested = framework("conv.plain_model")
    batch = minibatches(tested, rows_of(digits))[0]
    parameters = tested.initial()
    assert tested.gradients(batch, parameters, {}, seed=0).not_finite == ""
    damaged = Parameters(np.full_like(parameters.trainable, np.nan), parameters.non_trainable)
    assert tested.gradients(batch, damaged, {}, seed=0).not_finite == "the loss is nan"
    flat = framework("conv.plain_model", loss="steep_loss")
    batch = minibatches(flat, rows_of(digits))[0]
    step = flat.gradients(batch, parameters, {}, seed=0)
    assert np.isfinite(step.loss)
    assert step.not_finite == "the gradient is not finite"


def test_sample_weights_weigh_the_loss(framework: Any, rows_of: Any, minibatches: Any, digits: Any) -> None:
    tested = framework("conv.plain_model", feed="weighted_feed")
    model = tested._built().model
    batch = minibatches(tested, rows_of(digits))[0]
    images, labels = _images(digits[:8])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    expected = model.evaluate(images, labels, sample_weight=labels.astype("f4"), verbose=0)
    assert tested.gradients(batch, tested.initial(), {}, seed=0).loss == pytest.approx(expected, rel=1e-5)


def test_sample_weights_and_a_scalar_loss_are_refused(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any
) -> None:
    tested = framework("conv.plain_model", feed="weighted_feed", loss="mean_loss")
    batch = minibatches(tested, rows_of(digits))[0]
    with pytest.raises(ModelDefinitionError, match="one number for the whole minibatch"):
        tested.gradients(batch, tested.initial(), {}, seed=0)


def test_short_minibatches_do_not_retrace(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, graphs: Any
) -> None:
    tested = framework("conv.custom_model", minibatch_size=16)
    for count in (16, 3, 40, 17):
        for batch in minibatches(tested, rows_of(digits[:count])):
            tested.gradients(batch, tested.initial(), {}, seed=0)
    assert len(graphs) == 1


_PRINT_INITIAL = """
import hashlib, sys
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.model_def import load
made = KerasFramework(load(sys.argv[1], sys.argv[2]), 8, 3, Metadata(), True)
initial = made.initial()
print(hashlib.sha256(initial.trainable.tobytes() + initial.non_trainable.tobytes()).hexdigest())
"""


@pytest.mark.parametrize("symbol", ["CustomModel"])
def test_initial_values_are_the_same_in_every_process(framework: Any, symbol: str, request: Any) -> None:
    zoo = str(request.path.parent / "zoo")
    command = [sys.executable, "-c", LEAN_IMPORT + _PRINT_INITIAL, zoo, f"conv.{symbol}"]
    there = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    initial = framework(f"conv.{symbol}").initial()
    here = hashlib.sha256(initial.trainable.tobytes() + initial.non_trainable.tobytes()).hexdigest()
    assert here == there
    assert not np.array_equal(framework(f"conv.{symbol}", seed=4).initial().trainable, initial.trainable)


def test_chance_that_no_seed_governs_is_warned_of(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, caplog: Any
) -> None:
    for loss, warned in (("chancy_loss", True), ("loss", False)):
        caplog.clear()
        tested = framework("conv.custom_model", loss=loss)
        tested.gradients(minibatches(tested, rows_of(digits))[0], tested.initial(), {}, seed=0)
        assert ("RandomUniform" in caplog.text) == warned


@pytest.mark.parametrize("strategy", ["AllReduceStrategy", "Local"])
def test_a_step_leaves_nothing_behind(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, strategy: str
) -> None:
    in_groups = strategy == "AllReduceStrategy"
    tested = framework("conv.custom_model", on_parameter_server=False, in_groups=in_groups)
    tested.report()
    (batch, *_) = minibatches(tested, rows_of(digits[:8]))

    def steps(numbers: range) -> int:
        """Returns Python's allocated blocks after steps that differ in every number."""
        for k in numbers:
            if in_groups:
                gradient = tested.local_gradient([Share(batch, k, 1 + 1 / k)], lambda _: None)
                gradient.rescale = 1 - 1 / k
                tested.apply_gradient(gradient, 1e-9 * k)
            else:
                tested.train(batch, k, 1e-9 * k)
        gc.collect()
        return sys.getallocatedblocks()

    start = 10_000 if in_groups else 20_000  # TensorFlow keeps every Python number that it gets, once
    before = steps(range(start, start + 200))
    assert steps(range(start + 200, start + 1200)) - before < 1000


def test_the_rate_of_a_schedule_leaves_nothing_behind() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9)

    def rates(steps: range) -> int:
        """Returns Python's allocated blocks after them."""
        for step in steps:
            scheduled_at(schedule, step)
        gc.collect()
        return sys.getallocatedblocks()

    before = rates(range(1000, 1200))
    assert rates(range(2000, 3000)) - before < 500
