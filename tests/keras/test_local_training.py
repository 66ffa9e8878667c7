"""Training with the user's own optimizer on the framework's own variables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import Mode, NotFiniteStep, TaskRecords
from elasticdl.frameworks.keras.model import assign_flat, flat_values
from elasticdl.frameworks.keras.step.step import _are_finite
from elasticdl.model_def import load
from elasticdl_client.errors import CheckpointError


@pytest.fixture
def digits() -> Any:
    random = np.random.default_rng(0)
    return np.concatenate([random.normal(size=(80, 64)), random.integers(0, 10, (80, 1))], axis=1).astype("f4")


def _train(tested: Any, records: list[bytes], seeds: int) -> list[float]:
    batches = tested.batches(Mode.TRAINING, iter([TaskRecords(1, 0, records)]))
    return [tested.train(batch, seeds + batch.n) for batch in batches if not batch.end]


@pytest.mark.parametrize("symbol", ["custom_model", "CustomModel"])
def test_a_restored_state_continues_bit_by_bit(framework: Any, rows_of: Any, digits: Any, symbol: str) -> None:
    records = rows_of(digits)
    straight = framework(f"conv.{symbol}", on_parameter_server=False, optimizer="adam")
    _train(straight, records, 0)
    state = straight.state()
    kept = {name: value.copy() for name, value in state.items()}
    expected = _train(straight, records, 100)
    restored = framework(f"conv.{symbol}", on_parameter_server=False, optimizer="adam", seed=99)
    restored.load_state(kept)
    assert _train(restored, records, 100) == expected
    for name, value in straight.state().items():
        np.testing.assert_array_equal(value, restored.state()[name])
        np.testing.assert_array_equal(state[name], kept[name])


def test_a_gradient_that_is_not_finite_ends_training_although_the_loss_is(
    framework: Any, rows_of: Any, digits: Any
) -> None:
    tested = framework("conv.rooted_model", on_parameter_server=False, optimizer="adam")
    _train(tested, rows_of(digits[:8]), 0)
    digits[8:16, :64] = 0.0  # the root's derivative at 0 is infinite, times a derivative of 0
    with pytest.raises(NotFiniteStep, match="The gradient is not finite"):
        _train(tested, rows_of(digits[8:16]), 0)


def test_a_gradient_whose_sum_overflows_is_finite() -> None:
    huge = tf.fill((20,), 3e37)
    sparse = tf.IndexedSlices(tf.fill((2, 3), -1e38), tf.constant([0, 1]), tf.constant([5, 3]))
    assert _are_finite([huge, None, sparse, tf.constant([1, 2]), tf.constant(1e300, tf.float64)])
    for part in (tf.constant([math.nan]), tf.constant([math.inf, -math.inf], tf.float16)):
        assert not _are_finite([huge, part])
    assert _are_finite([None])


def test_training_is_model_fit(framework: Any, rows_of: Any, digits: Any, request: Any) -> None:
    params = {"dropout": 0.0}
    tested = framework("conv.custom_model", params, on_parameter_server=False, optimizer="adam")
    initial = tested.initial()
    _train(tested, rows_of(digits), 0)
    definition = load(str(request.path.parent / "zoo"), "conv.custom_model", params, {"optimizer": "adam"})
    model = definition.model()
    assign_flat(model.trainable_variables, initial.trainable)
    assign_flat(model.non_trainable_variables, initial.non_trainable)
    model.compile(optimizer=definition.optimizer(), loss=definition.loss)
    images, labels = digits[:, :64].reshape(-1, 8, 8, 1), digits[:, 64].astype("i4")
    model.fit(images, labels, batch_size=8, shuffle=False, verbose=0)
    built = tested._built()
    np.testing.assert_allclose(
        flat_values(built.trainable), flat_values(model.trainable_variables), rtol=1e-3, atol=1e-4
    )


def test_the_state_of_another_model_is_refused(framework: Any) -> None:
    state = framework("conv.custom_model", on_parameter_server=False).state()
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        framework("conv.sequential_model", on_parameter_server=False).load_state(state)
    with pytest.raises(CheckpointError, match="optimizer/"):
        framework("conv.custom_model", on_parameter_server=False, optimizer="adam").load_state(state)
