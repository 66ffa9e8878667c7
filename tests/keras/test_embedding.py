"""`elasticdl.layers.Embedding` with its rows outside, in every kind of model, against Keras's dense embedding."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import FeedError, Mode, TaskRecords
from elasticdl.frameworks.keras.model import StepSeeds, assign_flat, generator_states
from elasticdl.layers import Embedding
from elasticdl.layers.placement import Placement, Served, embedding_placement
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError


@pytest.fixture
def numbers() -> list[list[int]]:
    random = np.random.default_rng(2)
    return [[int(random.integers(2)), *map(int, random.integers(0, 40, 6))] for _ in range(30)]


def _records(numbers: list[list[int]]) -> list[bytes]:
    return [" ".join(map(str, row)).encode() for row in numbers]


def _table(name: str, dim: int) -> Any:
    return np.random.default_rng(len(name)).normal(size=(40, dim)).astype("f4")


def _rows(tested: Any, batch: Any) -> dict[str, Any]:
    return {table.name: _table(table.name, table.dim)[batch.ids[table.name]] for table in tested.report().tables}


MODELS = ["functional", "sequential", "masked", "Subclass", "nested", "looked_up"]


@pytest.mark.parametrize("symbol", MODELS)
def test_rows_from_outside_give_what_a_dense_embedding_gives(
    framework: Any, minibatches: Any, numbers: Any, symbol: str, request: Any
) -> None:
    feed = "string_feed" if symbol == "looked_up" else "feed"
    tested = framework(f"tables.{symbol}", feed=feed)
    definition = load(str(request.path.parent / "zoo"), f"tables.{symbol}", {"ours": False})
    model = definition.model()
    model(tf.zeros([2, 6], tf.string if symbol == "looked_up" else tf.int64))
    tables = {v.path.split("/")[-2]: v for v in model.trainable_variables if v.path.endswith("embeddings")}
    dense = [v for v in model.trainable_variables if not v.path.endswith("embeddings")]
    parameters = tested.initial()
    assign_flat(dense, parameters.trainable)
    for name, variable in tables.items():
        variable.assign(_table(name, variable.shape[1]))
    frozen = [v for v in model.non_trainable_weights if v.dtype == "float32"]
    for batch in minibatches(tested, _records(numbers)):
        assign_flat(frozen, parameters.non_trainable)
        StepSeeds(generator_states(model), 0).assign(tf.constant(9, tf.int64))
        features, labels = batch.data.element
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(definition.loss(labels, model(features, training=True)))
        dense_gradients, table_gradients = tape.gradient(loss, [[v.value for v in dense], dict(tables)])
        step = tested.gradients(batch, parameters, _rows(tested, batch), seed=9)
        assert step.loss == pytest.approx(float(loss), rel=1e-5)
        expected = np.concatenate([tf.convert_to_tensor(g).numpy().ravel() for g in dense_gradients])
        np.testing.assert_allclose(step.gradient, expected, rtol=1e-4, atol=1e-5)
        assert set(step.row_gradients) == set(tables)
        for name, gradient in table_gradients.items():
            whole = np.zeros(tables[name].shape, "f4")
            np.add.at(whole, batch.ids[name], step.row_gradients[name])
            np.testing.assert_allclose(whole, tf.convert_to_tensor(gradient).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feed", ["ragged_feed", "sparse_feed", "feed"])
def test_combiners_are_those_of_tensorflow(framework: Any, minibatches: Any, numbers: Any, feed: str) -> None:
    combiners = ["sum", "mean", "sqrtn"]
    lengths = [6] * 30 if feed == "feed" else [k % 7 for k in range(30)]
    cut = [row[: 1 + length] for row, length in zip(numbers, lengths, strict=True)]
    tested = framework("tables.Combined", feed=feed)
    parameters = tested.initial()
    kernel, bias = parameters.trainable[:9], parameters.trainable[9]
    start = 0
    for batch in minibatches(tested, _records(cut)):
        own = cut[start : start + batch.size]
        start += batch.size
        ids = tf.ragged.constant([row[1:] for row in own], dtype=tf.int64, ragged_rank=1).to_sparse()
        tables = {how: tf.Variable(_table(how, 3)) for how in combiners}
        with tf.GradientTape() as tape:
            found = [tf.nn.safe_embedding_lookup_sparse(table, ids, combiner=how) for how, table in tables.items()]
            vectors = tf.concat(found, axis=1)
            labels = tf.constant([float(row[0]) for row in own])
            loss = tf.reduce_mean(tf.square(labels - tf.linalg.matvec(vectors, kernel) - bias))
        step = tested.gradients(batch, parameters, _rows(tested, batch), seed=0)
        assert step.loss == pytest.approx(float(loss), rel=1e-4)
        for how, gradient in tape.gradient(loss, tables).items():
            whole = np.zeros((40, 3), "f4")
            np.add.at(whole, batch.ids[how], step.row_gradients[how])
            np.testing.assert_allclose(whole, tf.convert_to_tensor(gradient).numpy(), rtol=1e-4, atol=1e-5)
    assert start == 30


def test_the_report_describes_the_tables(framework: Any) -> None:
    report = framework("tables.functional").report()
    assert [(t.name, t.dim, t.input_dim) for t in report.tables] == [("shared", 3, 40), ("wide", 1, 40)]
    assert report.tables[0].initializer.startswith('{"class_name": "RandomNormal"')
    assert not any("embeddings" in variable.name for variable in report.variables)


def test_varying_numbers_of_ids_do_not_retrace(framework: Any, minibatches: Any, numbers: Any, graphs: Any) -> None:
    tested = framework("tables.functional")
    for count in (1, 3, 8, 30):
        for batch in minibatches(tested, _records(numbers[:count])):
            tested.gradients(batch, tested.initial(), _rows(tested, batch), seed=0)
    assert len(graphs) == 1


def test_an_id_out_of_range_is_an_error_that_names_the_layer(framework: Any) -> None:
    tested = framework("tables.functional", minibatch_size=1)
    for wrong in (-1, 40):
        records = _records([[1, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, wrong]])
        with pytest.raises(FeedError, match=rf"'shared': ids are not in \[0, 40\).*{wrong}") as raised:
            list(tested.batches(Mode.TRAINING, iter([TaskRecords(5, 0, records)])))
        assert (raised.value.lease, raised.value.n) == (5, 1)


def test_without_input_dim_any_integer_is_an_id(framework: Any, minibatches: Any) -> None:
    tested = framework("tables.unbounded")
    ids = [-(2**62), 2**62, 5, 5, 0, -1]
    (batch,) = minibatches(tested, _records([[1, *ids]]))
    assert batch.ids["unbounded"].tolist() == ids
    rows = {"unbounded": np.ones((6, 2), "f4")}
    step = tested.gradients(batch, tested.initial(), rows, seed=0)
    assert step.loss == pytest.approx(121.0)


def test_without_servers_it_is_an_ordinary_embedding(framework: Any, minibatches: Any, numbers: Any) -> None:
    tested = framework("tables.functional", on_parameter_server=False)
    assert tested.report().tables == ()
    (batch, *_) = minibatches(tested, _records(numbers))
    assert batch.ids == {}
    losses = [tested.train(batch, seed) for seed in range(20)]
    assert losses[-1] < losses[0]


def test_without_servers_an_input_dim_is_needed(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match="'unbounded' has no input_dim"):
        framework("tables.unbounded", on_parameter_server=False).report()


@pytest.mark.parametrize(("symbol", "message"), [("same_names", "'twin'"), ("orthogonal", "'turned'.*Orthogonal")])
def test_tables_that_no_server_can_hold_are_refused_by_name(framework: Any, symbol: str, message: str) -> None:
    with pytest.raises(ModelDefinitionError, match=message):
        framework(f"tables.{symbol}").report()


def test_the_layer_can_be_serialised() -> None:
    layer = Embedding(3, 7, "normal", mask_zero=True, combiner="mean", name="e")
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert copy.get_config() == layer.get_config()


def test_a_combiner_leaves_padding_out() -> None:
    layer = Embedding(2, 5, mask_zero=True, combiner="mean")
    dense = layer(tf.constant([[1, 2, 0], [0, 0, 0]]))
    rows = layer.embeddings.numpy()
    np.testing.assert_allclose(dense, [(rows[1] + rows[2]) / 2, [0, 0]], rtol=1e-6)
    ragged = layer(tf.ragged.constant([[1, 2, 0], []], dtype=tf.int64))
    np.testing.assert_allclose(ragged, dense, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_to_a_combiner_ids_of_one_dimension_are_rows_of_one_id(combiner: str) -> None:
    layer = Embedding(2, 5, combiner=combiner)
    vectors = layer(tf.constant([3, 1]))
    np.testing.assert_array_equal(vectors, layer.embeddings.numpy()[[3, 1]])
    assert layer(keras.KerasTensor((None,), "int64")).shape == (None, 2)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("is_placed", [False, True])
def test_combiners_count_in_no_less_than_float32(is_placed: bool, dtype: str) -> None:
    placement = Placement()
    with embedding_placement(placement if is_placed else None):
        layers = [Embedding(1, 5, "ones", combiner=how, dtype=dtype) for how in ("sum", "mean", "sqrtn")]
        plain = Embedding(1, 5, "ones", dtype=dtype)
    ids = tf.ones([1, 300], tf.int64)
    for given in (ids, tf.RaggedTensor.from_tensor(ids)):
        with placement.using(Served({layer.name: lambda ids: tf.ones([tf.size(ids), 1]) for layer in layers})):
            vectors = [layer(given) for layer in layers]
        assert [vector.dtype.name for vector in vectors] == 3 * [plain.compute_dtype]
        np.testing.assert_allclose([float(vector[0, 0]) for vector in vectors], [300, 1, 300**0.5], rtol=5e-3)
    assert plain(ids).dtype.name == plain.compute_dtype
