"""A compiled model in a module without loss, optimizer and metrics trains and is evaluated as Keras itself does it."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode, Parameters, Share
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

FEEDS = {"both": "feed_both", "listed": "feed_listed"}
NAMES = {
    "custom_model": {"accuracy", "top", "loss"},
    "both": {"kind_acc", "size_mae", "size_mean_squared_error", "loss"},
    "listed": {"kind_acc", "size_mae", "size_mse", "loss"},
}
NUMBERS = np.random.default_rng(6).normal(size=(24, 4)).astype("f4")
LABELS = np.random.default_rng(7).integers(0, 3, 24).astype("f4")
ROWS = np.concatenate([NUMBERS, LABELS[:, None]], axis=1)


def labels_of(symbol: str) -> Any:
    sizes = NUMBERS[:, :1]
    return {"both": {"kind": LABELS, "size": sizes}, "listed": [LABELS, sizes]}.get(symbol, LABELS)


def same_as(tested: KerasFramework, request: Any, symbol: str) -> Any:
    """The compiled model of Keras alone, with the values of a tested one."""
    model = load(str(request.path.parent / "zoo"), f"compiled.{symbol}", required=("feed",)).model()
    model.set_weights([variable.numpy() for variable in tested._built().trainable])
    model.run_eagerly = True  # a few steps take less than tracing them
    return model


@pytest.mark.parametrize("symbol", ["custom_model", "both", "listed"])
def test_steps_and_metrics_are_those_of_fit_and_evaluate(
    framework: Any, rows_of: Any, minibatches: Any, request: Any, symbol: str
) -> None:
    options = {"feed": FEEDS.get(symbol, "feed"), "minibatch_size": 24}
    local = framework(f"compiled.{symbol}", on_parameter_server=False, **options)
    served = framework(f"compiled.{symbol}", **options)
    assert served.report().optimizer == local.report().optimizer
    plain = same_as(local, request, symbol)
    (batch,), (own,) = minibatches(local, rows_of(ROWS)), minibatches(served, rows_of(ROWS))
    step = served.gradients(own, Parameters(served.initial().trainable, np.zeros(0, "f4")), {}, 1)
    wanted = plain.train_on_batch(NUMBERS, labels_of(symbol), return_dict=True)["loss"]
    assert step.loss == pytest.approx(float(wanted), rel=1e-5)
    assert local.train(batch, 1) == pytest.approx(float(wanted), rel=1e-5)
    for one, other in zip(local._built().trainable, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    evaluation = local.evaluation()
    for part in minibatches(local, rows_of(ROWS), Mode.EVALUATION):
        evaluation.update(part, None, {})
    expected = plain.evaluate(NUMBERS, labels_of(symbol), batch_size=24, verbose=0, return_dict=True)
    results = evaluation.results(evaluation.states())
    assert results == pytest.approx({name: expected[name] for name in results}, rel=1e-4)
    assert set(results) == NAMES[symbol]


def test_a_model_that_computes_its_loss_itself_may_be_compiled_without_one(
    framework: Any, rows_of: Any, minibatches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "elasticdl.keras")
    tested = framework("compiled.own", minibatch_size=24, on_parameter_server=False)
    tested.report()
    assert "loss, optimizer are those of compile()" in caplog.text
    (batch,) = minibatches(tested, rows_of(ROWS))
    model = tested._built().model
    wanted = float(np.abs(model(NUMBERS).numpy()[:, 0] - LABELS).mean())
    assert tested.train(batch, 1) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("strategy", ["Local", "AllReduce", "PS"])
def test_what_layers_add_may_be_the_whole_loss(
    framework: Any, rows_of: Any, minibatches: Any, request: Any, strategy: str
) -> None:
    tested = framework("compiled.reconstructing", minibatch_size=16, on_parameter_server=strategy == "PS")
    tested.report()
    plain = load(str(request.path.parent / "zoo"), "compiled.reconstructing", required=("feed",)).model()
    plain(NUMBERS[:1])
    start, flat = 0, tested.initial().trainable
    for variable in plain.trainable_variables:
        variable.assign(flat[start : (start := start + variable.value.shape.num_elements())].reshape(variable.shape))
    for number, batch in enumerate(minibatches(tested, rows_of(ROWS))):  # the second one is half full
        x = NUMBERS[16 * number : 16 * number + batch.size]
        with tf.GradientTape() as tape:
            plain(x, training=True)
            loss = sum(plain.losses)
        parts = tape.gradient(loss, plain.trainable_variables)
        gradient = np.concatenate([np.ravel(part) for part in parts])
        if strategy == "PS":
            step = tested.gradients(batch, tested.initial(), {}, seed=1)
            found, told = step.gradient, step.loss
        elif strategy == "AllReduce":
            share = tested.local_gradient([Share(batch, 1, 1.0)], lambda buffer: None)
            found, told = np.asarray(share.buffers[0].tensor)[: len(gradient)], share.told()[0]
        else:
            found, told = None, tested.train(batch, 1)
            plain.optimizer.apply(parts, plain.trainable_variables)
            state = [value for name, value in tested.state().items() if name.startswith("model/")]
            for value, expected in zip(state, plain.trainable_variables, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
        assert told == pytest.approx(float(loss), rel=1e-5)
        if found is not None:
            np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)
    assert (number, start) == (1, len(flat))


def test_a_loss_that_neither_module_nor_compile_has_is_named(request: pytest.FixtureRequest) -> None:
    zoo = str(request.path.parent / "zoo")
    definition = load(zoo, "compiled.without_loss", required=("feed",))
    tested = KerasFramework(definition, 8, 3, Metadata(), False, settings=KerasSettings(needed=("loss", "optimizer")))
    with pytest.raises(ModelDefinitionError, match="has no loss, and without_loss returned no model that is compiled"):
        tested.report()


def rows_with(column: int, values: Any) -> Any:
    rows = ROWS.copy()
    rows[:, column] = values
    return rows


@pytest.mark.parametrize(
    ("symbol", "feed", "rows"),
    [
        ("masked", "feed_steps", rows_with(1, [0.0] * 16 + [1.0] * 8)),
        ("partly_known", "feed", rows_with(4, LABELS - 1)),
        ("with_gaps", "feed", rows_with(4, [np.nan, 1.0, 2.0] * 8)),
        ("letters", "feed_letters", np.concatenate([np.arange(96).reshape(24, 4) + 150, LABELS[:, None]], axis=1)),
    ],
)
def test_a_step_of_any_strategy_is_that_of_train_on_batch(
    framework: Any, rows_of: Any, minibatches: Any, request: Any, symbol: str, feed: str, rows: Any
) -> None:
    options = {"feed": feed, "minibatch_size": 24}
    local = framework(f"compiled.{symbol}", on_parameter_server=False, **options)
    served = framework(f"compiled.{symbol}", **options)
    plain = same_as(local, request, symbol)
    (batch,) = minibatches(local, rows_of(rows))
    features, labels = (part.numpy() for part in batch.data.element)
    wanted = float(plain.compute_loss(features, labels, plain(features, training=True), None))
    (own,) = minibatches(served, rows_of(rows))
    assert served.gradients(own, served.initial(), {}, 1).loss == pytest.approx(wanted, rel=1e-5)
    assert local.local_gradient([Share(batch, 1, 1.0)], lambda _: None).told()[0] == pytest.approx(wanted, rel=1e-5)
    assert local.train(batch, 1) == pytest.approx(wanted, rel=1e-5)


def test_what_fills_up_a_short_minibatch_does_not_count_as_unmasked(
    framework: Any, rows_of: Any, minibatches: Any
) -> None:
    filled, exact = (framework("compiled.masked_samples", jit_compile=jit) for jit in (True, False))
    with_masked = np.where(np.arange(5)[:, None] % 3 == 1, np.zeros(5), ROWS[:5])
    for rows in (ROWS[:8], ROWS[:5], with_masked):
        losses = []
        for one in (filled, exact):
            (batch,) = minibatches(one, rows_of(rows))
            losses.append(one.gradients(batch, filled.initial(), {}, 1).loss)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_function_of_the_module_counts_what_is_masked_though_compile_has_it_too(
    framework: Any, rows_of: Any, minibatches: Any
) -> None:
    tested = framework("compiled.masked_samples", loss="squares", on_parameter_server=False)
    rows = ROWS[:8].copy()
    rows[::3, :4] = 0
    (batch,) = minibatches(tested, rows_of(rows))
    wanted = float(np.square(tested._built().model(rows[:, :4]).numpy()[:, 0] - rows[:, 4]).mean())
    assert tested.train(batch, 1) == pytest.approx(wanted, rel=1e-5)


def test_a_model_that_was_trained_with_a_schedule_can_be_loaded(
    framework: Any, rows_of: Any, minibatches: Any, tmp_path: Any
) -> None:
    member = framework("compiled.scheduled", on_parameter_server=False)
    (batch, *_) = minibatches(member, rows_of(ROWS))
    gradient = member.local_gradient([Share(batch, 1, 1.0)], lambda _: None)
    member.apply_gradient(gradient, member.learning_rate(0, 8))
    member.export(str(tmp_path / "exported"), None, ())
    optimizer = keras.saving.load_model(tmp_path / "exported" / "model.keras").optimizer
    assert isinstance(optimizer._learning_rate, keras.optimizers.schedules.PolynomialDecay)


def test_with_a_fixed_global_batch_a_schedule_counts_steps_as_fit_does(
    framework: Any, rows_of: Any, minibatches: Any, request: Any
) -> None:
    definition = load(str(request.path.parent / "zoo"), "compiled.scheduled", required=("feed",))
    settings = KerasSettings(jit_compile=False, fixed_global_batch=True)
    member = KerasFramework(definition, 8, 3, Metadata(), False, settings=settings)
    plain = same_as(member, request, "scheduled")
    batches = minibatches(member, rows_of(np.concatenate([ROWS, ROWS])))
    for step, version in ((batches[:3], 0), (batches[3:], 3), (batches[:3], 6)):
        plain.train_on_batch(NUMBERS, LABELS)
        gradient = member.local_gradient([Share(batch, 1, 1 / 3) for batch in step], lambda _: None)
        member.apply_gradient(gradient, member.learning_rate(0, version))
    for one, other in zip(member._built().trainable, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_a_variable_without_a_gradient_is_left_alone_as_by_fit(
    framework: Any, rows_of: Any, minibatches: Any, request: Any
) -> None:
    """Weight decay, too; a member that has no share knows it from the others."""
    options = {"feed": "feed_used", "minibatch_size": 8, "on_parameter_server": False}
    busy, idle = framework("compiled.half_used", **options), framework("compiled.half_used", **options)
    plain = same_as(busy, request, "half_used")
    for batch in minibatches(busy, rows_of(ROWS)):
        part = slice(8 * batch.n, 8 * batch.n + 8)
        plain.train_on_batch(NUMBERS[part], {"used": LABELS[part]})
        gradients = [busy.local_gradient([Share(batch, 1, 1.0)], lambda _: None), idle.local_gradient([], None)]
        buffers = [np.from_dlpack(gradient.buffers[0]) for gradient in gradients]
        gradients[0].buffers[0] = gradients[1].buffers[0] = buffers[0] + buffers[1]
        for member, gradient in zip((busy, idle), gradients, strict=True):
            member.apply_gradient(gradient, None)
    for member in (busy, idle):
        for one, other in zip(member._built().trainable, plain.trainable_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_a_loss_that_has_no_gradient_is_the_error_of_fit(framework: Any, rows_of: Any, minibatches: Any) -> None:
    member = framework("compiled.cut_off", on_parameter_server=False)
    (batch, *_) = minibatches(member, rows_of(ROWS))
    gradient = member.local_gradient([Share(batch, 1, 1.0)], lambda _: None)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        member.apply_gradient(gradient, None)


def test_a_model_without_trainable_weights_still_learns_its_statistics(
    framework: Any, rows_of: Any, minibatches: Any
) -> None:
    member = framework("compiled.counting", minibatch_size=24, on_parameter_server=False)
    (batch,) = minibatches(member, rows_of(ROWS))
    member.apply_gradient(member.local_gradient([Share(batch, 1, 1.0)], lambda _: None), None)
    moving_mean = member._built().model.layers[1].moving_mean.numpy()
    np.testing.assert_allclose(moving_mean, 0.01 * NUMBERS.mean(0), rtol=1e-5, atol=1e-6)
