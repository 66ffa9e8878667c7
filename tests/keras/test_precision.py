"""`--precision` for Keras models, under each strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.frameworks.framework import Share
from elasticdl_client.choices import Precision

DTYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Puts the process's own policy back."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture
def records(rows_of: Any) -> Any:
    random = np.random.default_rng(0)
    return rows_of(np.concatenate([random.normal(size=(16, 64)), random.integers(0, 10, (16, 1))], axis=1))


def losses(made: Any, batches: Any, strategy: str) -> list[float]:
    """Of two steps."""
    found = []
    for batch in batches:
        if strategy == "Local":
            found.append(made.train(batch, batch.n))
        elif strategy == "AllReduce":
            gradient = made.local_gradient([Share(batch, batch.n, 1.0)], lambda buffer: None)
            found.append(float(gradient.told()[0]))
            made.apply_gradient(gradient, None)
        else:
            step = made.gradients(batch, made.initial(), {}, batch.n)
            assert step.gradient.dtype == np.float32
            assert not step.not_finite
            found.append(step.loss)
    return found


@pytest.mark.parametrize(
    ("precision", "strategy"),
    [
        (Precision.BF16, "Local"),
        (Precision.BF16, "AllReduce"),
        (Precision.BF16, "ParameterServer"),
        (Precision.FP16, "Local"),
        (Precision.FP16, "AllReduce"),
    ],
)
def test_steps_are_about_those_of_float32(
    framework: Any, minibatches: Any, records: Any, precision: Precision, strategy: str
) -> None:
    on_servers = strategy == "ParameterServer"
    usual = framework("conv.custom_model", {"dropout": 0.0}, on_parameter_server=on_servers)
    expected = losses(usual, minibatches(usual, records), strategy)
    tested = framework("conv.custom_model", {"dropout": 0.0}, on_parameter_server=on_servers, precision=precision)
    found = losses(tested, minibatches(tested, records), strategy)
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert found != expected
    assert any(layer.compute_dtype == DTYPES[precision] for layer in tested._built().model.layers)
    assert tested.initial().trainable.dtype == np.float32


def test_a_policy_that_a_module_sets_as_it_is_imported_stays(framework: Any) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    made = framework("conv.custom_model", on_parameter_server=False)
    assert any(layer.compute_dtype == "bfloat16" for layer in made._built().model.layers)


def test_a_state_with_a_loss_scale_is_loaded_again_and_the_scale_moves(
    framework: Any, minibatches: Any, records: Any
) -> None:
    made = framework("conv.custom_model", {"dropout": 0.0}, on_parameter_server=False, precision=Precision.FP16)
    batches = minibatches(made, records)
    blank = made.state()
    expected = losses(made, batches, "AllReduce")
    state = made.state()
    assert set(state) == set(blank)
    made.load_state(blank)
    assert losses(made, batches, "AllReduce") == expected
    (scale,) = (name for name in blank if name.endswith("dynamic_scale"))
    made.load_state({**blank, scale: blank[scale] / 8})
    np.testing.assert_allclose(losses(made, batches, "AllReduce"), expected, rtol=0.02)
