"""Losses, optimizers and metrics that are given by name or config are what Keras's `compile` makes of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.frameworks.framework import Mode, Parameters, Share
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError


@pytest.fixture
def numbers() -> Any:
    random = np.random.default_rng(6)
    return np.concatenate([random.normal(size=(20, 4)), random.integers(0, 3, (20, 1))], axis=1).astype("f4")


@pytest.fixture
def binary(numbers: Any) -> Any:
    return np.concatenate([numbers[:, :4], numbers[:, 4:] > 0], axis=1).astype("f4")


def oracle(request: Any, symbol: str, tested: Any, **compiled: Any) -> Any:
    """Plain Keras with the values of a tested model."""
    model = load(str(request.path.parent / "zoo"), f"described.{symbol}").model()
    start, flat = 0, tested.initial().trainable
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        variable.assign(flat[start : start + size].reshape(variable.shape))
        start += size
    model.compile(**compiled, run_eagerly=True)  # a few steps take less than tracing them
    return model


def of_model(symbol: str, numbers: Any) -> Any:
    labels, size = numbers[:, 4], numbers[:, :1]
    return {"both": {"kind": labels, "size": size}, "listed": [labels, size]}.get(symbol, labels)


LOSSES = [
    ("custom_model", "loss", "sparse_categorical_crossentropy"),
    ("custom_model", "crossentropy", "crossentropy"),
    ("number", "binary", "binary_crossentropy"),
    ("number", "mse", keras.losses.MeanSquaredError(reduction="sum")),
    ("number", "kind", "mae"),
    ("both", "by_output", {"kind": "sparse_categorical_crossentropy", "size": "mse"}),
    ("listed", "in_order", ["sparse_categorical_crossentropy", "mse"]),
]


@pytest.mark.parametrize(("symbol", "loss", "expected"), LOSSES, ids=[loss for _, loss, _ in LOSSES])
def test_a_step_with_a_loss_by_name_is_that_of_train_on_batch(
    framework: Any,
    rows_of: Any,
    minibatches: Any,
    numbers: Any,
    binary: Any,
    request: Any,
    symbol: str,
    loss: str,
    expected: Any,
) -> None:
    given = binary if symbol == "number" else numbers
    feed = f"feed_{symbol}" if symbol in ("both", "listed") else "feed"
    options: Any = {"loss": loss, "feed": feed, "minibatch_size": 16, "optimizer": "optimizer"}
    local = framework(f"described.{symbol}", on_parameter_server=False, **options)
    served = framework(f"described.{symbol}", jit_compile=loss in ("loss", "by_output"), **options)
    assert local.report().variables
    plain = oracle(request, symbol, local, optimizer="sgd", loss=expected)
    trainable = served.initial().trainable
    for batch, own in zip(minibatches(local, rows_of(given)), minibatches(served, rows_of(given)), strict=True):
        part = slice(16 * batch.n, 16 * batch.n + batch.size)
        labels = of_model(symbol, given[part])
        plain.reset_metrics()  # older Keras returns the mean of all batches
        wanted = plain.train_on_batch(given[part, :4], labels, return_dict=True)["loss"]
        assert local.train(batch, 1) == pytest.approx(float(wanted), rel=1e-5)
        step = served.gradients(own, Parameters(trainable, np.zeros(0, "f4")), {}, 1)
        assert step.loss == pytest.approx(float(wanted), rel=1e-5)
        trainable = trainable - np.float32(0.01) * step.gradient
    for values in (trainable, np.concatenate([part.numpy().ravel() for part in local._built().trainable])):
        expected_values = np.concatenate([variable.numpy().ravel() for variable in plain.trainable_variables])
        np.testing.assert_allclose(values, expected_values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["squared", "squared_by_hand"])
def test_labels_of_one_number_meet_predictions_of_one_number_each(
    framework: Any, rows_of: Any, minibatches: Any, binary: Any, request: Any, loss: str, caplog: Any
) -> None:
    tested = framework("described.number", loss=loss, minibatch_size=20, jit_compile=True)
    plain = oracle(request, "number", tested, loss="mse")
    step = tested.gradients(minibatches(tested, rows_of(binary))[0], tested.initial(), {}, 1)
    expected = plain.test_on_batch(binary[:, :4], binary[:, 4], return_dict=True)["loss"]
    assert step.loss == pytest.approx(float(expected), rel=1e-5)
    assert ("loss gets labels of shape [n, 1]" in caplog.text) == (loss == "squared")


@pytest.mark.parametrize("optimizer", ["optimizer", "named", "configured"])
def test_an_optimizer_by_name_is_keras_s_own(framework: Any, optimizer: str) -> None:
    made = framework("described.number", loss="binary", optimizer=optimizer, on_parameter_server=False)._optimizer()
    assert isinstance(made, keras.optimizers.SGD)
    assert float(made.learning_rate) == pytest.approx(0.01)


def test_metrics_by_name_are_those_of_evaluate(
    framework: Any, rows_of: Any, minibatches: Any, numbers: Any, request: Any
) -> None:
    tested = framework("described.both", feed="feed_both", eval_metrics_fn="metrics_of_both", on_parameter_server=False)
    names = ("acc", "sparse_categorical_crossentropy", "mae", "mse")
    assert tested.report().metrics == names
    metrics = {"kind": ["acc", "sparse_categorical_crossentropy"], "size": ["mae", "mse"]}
    plain = oracle(
        request, "both", tested, loss={"kind": "sparse_categorical_crossentropy", "size": "mse"}, metrics=metrics
    )
    expected = plain.evaluate(numbers[:, :4], of_model("both", numbers), verbose=0, return_dict=True)
    evaluation = tested.evaluation()
    for batch in minibatches(tested, rows_of(numbers), Mode.EVALUATION):
        evaluation.update(batch, None, {})
    results = evaluation.results(evaluation.states())
    wanted = {name: expected[f"{'kind' if name in metrics['kind'] else 'size'}_{name}"] for name in names}
    assert results == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("symbol", "kind"),
    [("custom_model", keras.metrics.SparseCategoricalAccuracy), ("number", keras.metrics.BinaryAccuracy)],
)
def test_which_accuracy_it_is_follows_from_the_shapes(framework: Any, symbol: str, kind: type) -> None:
    for function in ("metrics", "metrics_by_name", "one_metric"):
        tested = framework(f"described.{symbol}", eval_metrics_fn=function, on_parameter_server=False)
        assert isinstance(next(iter(tested._measures()))._metric, kind)
        names = {"metrics": ("accuracy", "mse", "auc", "far"), "metrics_by_name": ("right", "close", "curve")}
        assert tested.report().metrics == names.get(function, ("acc",))


@pytest.mark.parametrize(
    ("symbol", "symbols", "complaint"),
    [
        ("number", {"loss": "unknown"}, "loss = 'msee' raised ValueError"),
        ("number", {"loss": "binary", "optimizer": "misspelt"}, "the optimizer 'adamm' raised"),
        ("number", {"loss": "binary", "optimizer": "with_averages"}, "use_ema=True"),
        ("number", {"eval_metrics_fn": "unknown_metric"}, "the metric 'acuracy', which Keras does not know"),
        ("number", {"eval_metrics_fn": "nested_metrics"}, "metrics of several outputs"),
        (
            "both",
            {"eval_metrics_fn": "one_metric", "feed": "feed_both"},
            "returned 'acc', and the model has several outputs",
        ),
        ("flat", {"eval_metrics_fn": "one_metric", "loss": "mse"}, "'acc', and which accuracy that is cannot"),
        ("narrow", {"eval_metrics_fn": "one_metric", "loss": "squared"}, "described.py: the model, .* found shape="),
    ],
)
def test_what_keras_does_not_know_is_refused_before_the_first_step(
    framework: Any, symbol: str, symbols: dict[str, str], complaint: str
) -> None:
    feed = symbols.pop("feed", "feed")
    given = {"loss": "crossentropy", "optimizer": "optimizer"} | symbols
    with pytest.raises(ModelDefinitionError, match=complaint):
        framework(f"described.{symbol}", feed=feed, on_parameter_server=False, **given).report()


def test_stateful_layers_are_warned_of(framework: Any, caplog: pytest.LogCaptureFixture) -> None:
    framework("described.stateful", loss="binary", optimizer="optimizer", on_parameter_server=False).initial()
    (record,) = (record for record in caplog.records if "stateful" in record.message)
    assert "forward_gru" in record.message


def test_a_variable_that_its_gradient_overwrites_is_refused_where_others_have_gradients_of_it(
    framework: Any, rows_of: Any, minibatches: Any, binary: Any
) -> None:
    options = {"loss": "binary", "optimizer": "optimizer"}
    with pytest.raises(ModelDefinitionError, match="bias takes its gradient as its value"):
        framework("described.overwritten", **options).report()
    with pytest.raises(ModelDefinitionError, match="mean of what its members measure"):
        framework("described.overwritten", on_parameter_server=False, in_groups=True, **options).report()
    tested = framework("described.overwritten", on_parameter_server=False, **options)
    (batch, *_) = minibatches(tested, rows_of(binary))
    (gradient,) = tested.local_gradient([Share(batch, 1, 1.0)], lambda _: None).buffers
    tested.apply_gradient(tested.local_gradient([Share(batch, 1, 1.0)], lambda _: None), None)
    np.testing.assert_array_equal(tested._built().trainable[1].numpy(), np.from_dlpack(gradient)[4:5])


def test_constraints_and_scaled_losses_are_refused_with_parameter_servers_alone(
    framework: Any, rows_of: Any, minibatches: Any, binary: Any
) -> None:
    for symbol, named in (("constrained", "kernel has a constraint, NonNeg"), ("half", "policy is mixed_float16")):
        options = {"loss": "binary", "optimizer": "optimizer"}
        with pytest.raises(ModelDefinitionError, match=named):
            framework(f"described.{symbol}", **options).report()
        tested = framework(f"described.{symbol}", on_parameter_server=False, **options)
        for batch in minibatches(tested, rows_of(binary)):
            assert np.isfinite(tested.train(batch, 1))
        kernel = tested._built().trainable[0].numpy()
        assert symbol == "half" or (kernel.min() >= 0 and kernel.max() > 0)
        assert isinstance(tested._optimizer(), keras.optimizers.LossScaleOptimizer) == (symbol == "half")
