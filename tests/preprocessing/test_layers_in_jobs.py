"""Models of jobs with the layers: in the model or in `feed`, with XLA or not, tables in workers or on servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Mode, Parameters, TableRows, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.model_def import load

ZOO = str(Path(__file__).parent / "zoo")
FEEDS = {"in_model": "raw_feed", "in_feed": "ready_feed"}
ORDINARY = 1_000_000


def framework(symbol: str, jit_compile: bool = False, threshold: int = ORDINARY) -> KerasFramework:
    definition = load(ZOO, f"columns.{symbol}", None, {"feed": FEEDS[symbol]}, required=("feed",))
    return KerasFramework(definition, 8, 3, Metadata(seed=3), True, settings=KerasSettings(jit_compile, threshold))


def minibatches(tested: KerasFramework, records: list[bytes]) -> list[Batch]:
    *batches, end = tested.batches(Mode.TRAINING, iter([TaskRecords(1, 11, records)]))
    assert end.end
    return batches


@pytest.fixture
def records() -> list[bytes]:
    random = np.random.default_rng(4)
    words = ["red", "green", "blue", "grey", "white"]
    rows = []
    for _ in range(21):
        chosen = " ".join(random.choice(words, random.integers(0, 4)))
        rows.append(f"{random.uniform(-0.9, 3):.3f},{chosen},{random.integers(2)}".encode())
    return rows


at_length = pytest.mark.full


@pytest.mark.parametrize(
    ("symbol", "jit_compile"),
    [
        ("in_model", True),
        pytest.param("in_model", False, marks=at_length),
        pytest.param("in_feed", True, marks=at_length),
        pytest.param("in_feed", False, marks=at_length),
    ],
)
def test_layers_work_in_the_model_and_in_feed(symbol: str, jit_compile: bool, records: list[bytes]) -> None:
    plain, tested = framework("in_model"), framework(symbol, jit_compile)
    values = plain.initial()
    np.testing.assert_array_equal(values.trainable, tested.initial().trainable)
    pairs = list(zip(minibatches(plain, records), minibatches(tested, records), strict=True))
    assert [batch.size for batch, _ in pairs] == [8, 8, 5]
    for expected, batch in pairs:
        one, other = (part[0].gradients(part[1], values, {}, seed=1) for part in ((plain, expected), (tested, batch)))
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        np.testing.assert_allclose(other.gradient, one.gradient, rtol=1e-4, atol=1e-6)
        assert np.count_nonzero(one.gradient) > 10


@pytest.mark.full
@pytest.mark.parametrize("symbol", FEEDS)
def test_the_table_of_a_sparse_embedding_moves_to_parameter_servers(symbol: str, records: list[bytes]) -> None:
    ordinary, moved = framework(symbol), framework(symbol, threshold=0)
    (table,) = moved.report().tables
    assert (table.name, table.dim, table.input_dim) == ("shared", 3, 40)
    values = ordinary.initial().trainable
    rows, dense = _split(ordinary, values)
    assert dense.shape == moved.initial().trainable.shape
    for whole, batch in zip(minibatches(ordinary, records), minibatches(moved, records), strict=True):
        expected = ordinary.gradients(whole, Parameters(values, np.zeros(0, "f4")), {}, seed=1)
        ids = batch.ids["shared"]
        step = moved.gradients(batch, Parameters(dense, np.zeros(0, "f4")), {"shared": rows[ids]}, seed=1)
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        total = np.zeros_like(rows)
        np.add.at(total, ids, step.row_gradients["shared"])
        gradient, rest = _split(ordinary, expected.gradient)
        np.testing.assert_allclose(total, gradient, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(step.gradient, rest, rtol=1e-5, atol=1e-6)


def test_the_export_of_a_moved_table_is_whole_for_tensorflow_and_for_keras(
    records: list[bytes], tmp_path: Path
) -> None:
    ordinary, moved = framework("in_model"), framework("in_model", threshold=0)
    values = ordinary.initial().trainable
    rows, dense = _split(ordinary, values)
    table = TableRows("shared", 3, 40, iter([(np.arange(40), rows)]))
    moved.export(str(tmp_path / "model"), Parameters(dense, np.zeros(0, "f4")), [table])
    batch = minibatches(ordinary, records)[0]
    expected = ordinary.predict(batch, Parameters(values, np.zeros(0, "f4")), {})
    features = batch.data.element[0]
    served = tf.saved_model.load(str(tmp_path / "model"))(features)
    np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)
    loaded = keras.saving.load_model(tmp_path / "model" / "model.keras")
    np.testing.assert_allclose(loaded(features), expected, rtol=1e-5, atol=1e-6)


def _split(tested: KerasFramework, flat: Any) -> tuple[Any, Any]:
    """The table, and all else."""
    rest, start, table = [], 0, None
    for variable in tested.report().variables:
        part = flat[start : start + int(np.prod(variable.shape))]
        start += len(part)
        if variable.name.endswith("embeddings"):
            table = part.reshape(variable.shape)
        else:
            rest.append(part)
    assert table is not None
    return table, np.concatenate(rest)
