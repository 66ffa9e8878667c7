"""`--precision` of Keras models: mixed policies, float32 around them, and a loss that is scaled in float16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Share
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.frameworks.keras.evaluation import assign_all
from elasticdl.model_def import load
from elasticdl_client.choices import Precision
from elasticdl_client.errors import CheckpointError, ModelDefinitionError
from tests.keras.conftest import ZOO


@pytest.fixture
def framework() -> Iterator[Callable[..., KerasFramework]]:
    """Makes a framework of a precision over a function of the module `described`."""
    before = keras.config.dtype_policy()

    def make(symbol: str, precision: Precision, loss: str = "binary") -> KerasFramework:
        symbols = {"loss": loss, "optimizer": "optimizer"}
        definition = load(ZOO, f"described.{symbol}", None, symbols, required=("feed",))
        return KerasFramework(definition, 8, 3, Metadata(seed=3), False, settings=KerasSettings(precision=precision))

    yield make
    keras.config.set_dtype_policy(before)


@pytest.fixture
def rows() -> Any:
    random = np.random.default_rng(0)
    return np.concatenate([random.normal(size=(16, 4)), random.integers(0, 2, (16, 1))], axis=1)


def stepped(tested: KerasFramework, batch: Any) -> list[float]:
    """Return the loss and its weight of a step of a group of one."""
    gradient = tested.local_gradient([Share(batch, 100, 1.0)], lambda buffer: None)
    tested.apply_gradient(gradient, None)
    return [float(one) for one in gradient.told()[:2]]


@pytest.mark.parametrize(
    ("precision", "dtype"), [(Precision.FP32, "float32"), (Precision.BF16, "bfloat16"), (Precision.FP16, "float16")]
)
def test_layers_compute_in_the_precision_and_all_that_is_summed_is_float32(
    framework: Any, rows_of: Any, minibatches: Any, rows: Any, precision: Precision, dtype: str
) -> None:
    tested = framework("mixed", precision)
    tested.report()
    built = tested._built()
    assert built.model.get_layer("hidden").compute_dtype == dtype
    assert {variable.dtype for variable in built.trainable} == {"float32"}
    before = built.trainable[0].numpy()
    for batch in minibatches(tested, rows_of(rows)):
        loss, weight = stepped(tested, batch)
        assert 0.1 < loss < 2
        assert weight == 1
    assert np.abs(built.trainable[0].numpy() - before).max() > 1e-6
    scales = [name for name in tested.state() if name.endswith("dynamic_scale")]
    assert len(scales) == (1 if precision is Precision.FP16 else 0)


def test_the_policy_that_a_module_sets_when_it_is_imported_holds(framework: Any) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert framework("mixed", Precision.FP32)._built().model.get_layer("hidden").compute_dtype == "bfloat16"


def test_a_gradient_that_overflows_is_passed_over_and_the_loss_is_scaled_less(
    framework: Any, rows_of: Any, minibatches: Any, rows: Any
) -> None:
    tested = framework("mixed", Precision.FP16, loss="steep")
    (batch, _) = minibatches(tested, rows_of(rows))
    kernel = tested._built().trainable[0]
    before = kernel.numpy()
    stepped(tested, batch)
    first = float(tested._optimizer().dynamic_scale)
    stepped(tested, batch)
    assert float(tested._optimizer().dynamic_scale) == first / 2
    assert (kernel.numpy() == before).all()
    other = framework("mixed", Precision.FP16, loss="steep")
    other.load_state(dict(zip(other.state(), tested.state().values(), strict=True)))
    stepped(other, minibatches(other, rows_of(rows))[0])
    assert float(other._optimizer().dynamic_scale) == first / 4


@pytest.mark.parametrize(
    ("symbol", "said"),
    [
        ("half", "has the policy mixed_float16"),
        ("number", "output of the model is bfloat16"),
        ("subclassed", "output of the model is bfloat16"),
    ],
)
def test_a_model_that_would_not_be_of_the_precision_is_refused(framework: Any, symbol: str, said: str) -> None:
    with pytest.raises(ModelDefinitionError, match=said):
        framework(symbol, Precision.BF16).report()


def test_weights_of_half_precision_come_back_from_a_file(framework: Any, tmp_path: Path) -> None:
    tested, other = (framework("half_frozen", Precision.FP32) for _ in range(2))
    frozen = tested._built().own[0]
    frozen.assign(frozen + 1)
    np.savez(tmp_path / "state.npz", **tested.state())
    for load_file in (other.load_state, other.load_weights):
        with np.load(tmp_path / "state.npz") as state:
            load_file(dict(zip(other.state(), state.values(), strict=True)))
        assert (other._built().own[0].numpy() == frozen.numpy()).all()
        other._built().own[0].assign(0 * frozen)


def test_bytes_of_another_type_are_refused(framework: Any) -> None:
    tested = framework("half_frozen", Precision.FP32)
    state = dict(tested.state())
    name = next(name for name, value in state.items() if value.dtype == np.float32 and value.size > 1)
    for load_file in (tested.load_state, tested.load_weights):
        with pytest.raises(CheckpointError, match=name):
            load_file({**state, name: state[name].view("V4")})


def test_two_bytes_are_bfloat16() -> None:
    variable = keras.Variable([0.0, 0.0, 0.0], dtype="bfloat16")
    assign_all({"w": variable}, {"w": np.full(3, 1.0, variable.dtype).view("V2")}, "model", "please")
    assert np.asarray(keras.ops.cast(variable, "float32")).tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_two_bytes_are_of_no_other_type(dtype: str) -> None:
    variable = keras.Variable([0.0, 0.0, 0.0], dtype=dtype)
    with pytest.raises(CheckpointError, match="another model: w"):
        assign_all({"w": variable}, {"w": np.zeros(3, "V2")}, "model", "please")
