"""Settings that `fit` heeds without a word are heeded with its numbers, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode, Parameters, Share
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.frameworks.keras.saving.loaded_model import LoadedKeras
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError
from tests.keras.conftest import ZOO

RATE = 0.1
NUMBERS = np.random.default_rng(6).normal(size=(24, 4)).astype("f4")
LABELS = np.random.default_rng(7).integers(0, 3, 24).astype("f4")
WITH_ZEROS = np.where(np.arange(96).reshape(24, 4) % 3 == 0, 0, NUMBERS).astype("f4")


def rows(numbers: Any = NUMBERS) -> Any:
    return np.concatenate([numbers, LABELS[:, None]], axis=1)


def same_as(tested: KerasFramework, symbol: str) -> Any:
    """The compiled model of Keras alone, with the values of a tested one."""
    model = load(ZOO, f"fitted.{symbol}", required=("feed",)).model()
    if not model.built:
        model(NUMBERS[:8])
    if symbol == "remembering":
        model.gru.reset_state()
    model.set_weights([variable.numpy() for variable in tested._built().model.weights])
    model.run_eagerly = True  # a few steps take less than tracing them
    return model


def weights_of(tested: KerasFramework) -> list[Any]:
    return [variable.numpy() for variable in tested._built().model.weights]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def evaluated(tested: Any, batches: list[Any]) -> dict[str, float]:
    evaluation = tested.evaluation()
    for batch in batches:
        evaluation.update(batch, None, {})
    results: dict[str, float] = evaluation.results(evaluation.states())
    return results


@pytest.mark.parametrize(
    ("symbol", "strategy"),
    [
        ("without_training", "Local"),
        ("without_training", "AllReduce"),
        ("without_training", "PS"),
        ("remembering", "Local"),
        ("halving", "Local"),
        ("halving", "AllReduce"),
        ("adapted", "Local"),
        ("adapted", "AllReduce"),
        ("adapted", "PS"),
        ("augmenting", "Local"),
        ("augmenting", "AllReduce"),
        ("augmenting", "PS"),
    ],
)
def test_steps_are_those_of_fit(framework: Any, rows_of: Any, minibatches: Any, symbol: str, strategy: str) -> None:
    """A `call` without `training`, an own `apply_gradients`, stateful, adapted, augmenting layers."""
    tested = framework(
        f"fitted.{symbol}", on_parameter_server=strategy == "PS", in_groups=strategy == "AllReduce", minibatch_size=8
    )
    tested.report()
    plain = same_as(tested, symbol)
    plain.fit(NUMBERS, LABELS, batch_size=8, shuffle=False, verbose=0)
    values = tested.initial().trainable.copy()
    for batch in minibatches(tested, rows_of(rows())):
        if strategy == "PS":
            parameters = Parameters(values, tested.initial().non_trainable)
            step = tested.gradients(batch, parameters, {}, 1)
            assert not step.change.any()
            values -= np.float32(RATE) * step.gradient
        elif strategy == "AllReduce":
            tested.apply_gradient(tested.local_gradient([Share(batch, 1, 1.0)], lambda _: None), None)
        else:
            tested.train(batch, 1)
    if strategy == "PS":
        trained = np.concatenate([variable.numpy().ravel() for variable in plain.trainable_variables])
        assert_same([values], [trained])
    else:
        assert_same(weights_of(tested), plain.get_weights())
        expected = plain.evaluate(NUMBERS, LABELS, batch_size=8, verbose=0, return_dict=True)
        assert evaluated(tested, minibatches(tested, rows_of(rows()), Mode.EVALUATION)) == pytest.approx(
            expected, rel=1e-4
        )


def test_metrics_leave_out_what_is_masked(framework: Any, rows_of: Any, minibatches: Any, tmp_path: Path) -> None:
    """Functions of `compile`, too; in the job's evaluations, and in those of what it has exported."""
    tested = framework("fitted.masked", on_parameter_server=False, feed="feed_masked")
    names = ["steps_mae", "steps_distance", "all_mse", "all_distance"]
    assert tested.report().metrics == (*names, "loss")
    labels = [np.broadcast_to(LABELS[:, None, None], (24, 4, 1)), LABELS[:, None]]
    expected = same_as(tested, "masked").evaluate(WITH_ZEROS, labels, batch_size=8, verbose=0, return_dict=True)
    found = evaluated(tested, minibatches(tested, rows_of(rows(WITH_ZEROS)), Mode.EVALUATION))
    assert found == pytest.approx({name: expected[name] for name in [*names, "loss"]}, rel=1e-5)
    tested.export(str(tmp_path / "exported"), None, ())
    definition = load(ZOO, "fitted.masked", None, {"feed": "feed_masked"}, required=("feed",))
    for path in (tmp_path / "exported", tmp_path / "exported" / "model.keras"):
        loaded = LoadedKeras(definition, path, 8, Metadata(), Mode.EVALUATION)
        found = evaluated(loaded, minibatches(loaded, rows_of(rows(WITH_ZEROS)), Mode.EVALUATION))
        assert found == pytest.approx({name: expected[name] for name in names}, rel=1e-5)


def test_auto_scale_loss_of_compile_is_honoured(framework: Any) -> None:
    for symbol in ("scaled", "unscaled"):
        tested = framework(f"fitted.{symbol}", on_parameter_server=False)
        assert isinstance(tested._optimizer(), keras.optimizers.LossScaleOptimizer) == (symbol == "scaled")
    with pytest.raises(ModelDefinitionError, match="policy is mixed_float16"):
        framework("fitted.scaled").report()
    framework("fitted.unscaled").report()


def test_losses_of_samples_that_fit_would_add_up_are_refused(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match=r"MeanSquaredError\(reduction=.*trains the sum"):
        framework("fitted.unreduced", on_parameter_server=False).report()


def test_statistics_of_all_workers_are_refused_where_there_are_several(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match=r"normal is a BatchNormalization\(synchronized=True\)"):
        framework("fitted.synchronized", on_parameter_server=False, in_groups=True).report()
    framework("fitted.synchronized", on_parameter_server=False).report()


@pytest.mark.parametrize(("symbol", "warned"), [("counting", True), ("counting_by_weight", False)])
def test_a_variable_that_keras_does_not_know_is_warned_of_by_name(
    framework: Any, caplog: pytest.LogCaptureFixture, symbol: str, warned: bool
) -> None:
    framework(f"fitted.{symbol}", on_parameter_server=False).report()
    assert ("no weights of the model: count of counter. Each worker keeps its own" in caplog.text) == warned
    assert ("no weights of the model" in caplog.text) == warned


def test_an_adapted_layer_normalizes_by_the_weights_of_the_checkpoint_that_is_restored(
    framework: Any, rows_of: Any, minibatches: Any, tmp_path: Path
) -> None:
    """Keras makes constants of them when it adapts the layer; a module may adapt it by other data than before."""
    first = framework("fitted.adapted", on_parameter_server=False)
    other, trained = (framework("fitted.adapted", {"scale": 7.0}, on_parameter_server=False) for _ in range(2))

    def batch(tested: Any, mode: Mode = Mode.TRAINING) -> Any:
        return minibatches(tested, rows_of(rows()), mode)[0]

    def predicted(tested: Any) -> Any:
        return tested.predict(batch(tested, Mode.EVALUATION), None, {})

    for tested in (first, trained):  # the steps are compiled before the checkpoint is read
        tested.train(batch(tested), 1)
    for tested in (other, trained):
        assert not np.allclose(predicted(tested), predicted(first), atol=1e-2)
    other.load_weights(first.state())
    trained.load_state(first.state())
    for tested in (other, trained):
        np.testing.assert_array_equal(predicted(tested), predicted(first))
    for tested in (first, trained):
        tested.train(batch(tested), 2)
    assert_same(weights_of(trained), weights_of(first))
    trained.export(str(tmp_path / "exported"), None, ())
    definition = load(ZOO, "fitted.adapted", {"scale": 7.0}, required=("feed",))
    for path in (tmp_path / "exported", tmp_path / "exported" / "model.keras"):
        loaded = LoadedKeras(definition, path, 8, Metadata(), Mode.EVALUATION)
        np.testing.assert_allclose(predicted(loaded), predicted(first), rtol=1e-5)
