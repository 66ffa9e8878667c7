"""Steps compiled by XLA for the shapes of a full minibatch, and everything that does not go through them."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import FeedError, Mode
from elasticdl.frameworks.keras.operations import IdOutOfRange, IdWatch
from tests.keras.eager_steps import Reference


@pytest.fixture
def records() -> list[bytes]:
    random = np.random.default_rng(4)
    rows = [[int(random.integers(2)), *map(int, random.integers(0, 40, 6))] for _ in range(21)]
    return [" ".join(map(str, row)).encode() for row in rows]


def _tables(tested: Any) -> dict[str, Any]:
    return {t.name: np.random.default_rng(t.dim).normal(size=(40, t.dim)).astype("f4") for t in tested.report().tables}


def _rows(tested: Any, batch: Any) -> dict[str, Any]:
    return {name: table[batch.ids[name]] for name, table in _tables(tested).items()}


def _totals(batch: Any, step: Any) -> dict[str, Any]:
    """Gradients by id."""
    totals = {}
    for name, gradients in step.row_gradients.items():
        totals[name] = np.zeros((40, gradients.shape[1]), "f4")
        np.add.at(totals[name], batch.ids[name], gradients)
    return totals


def _same_steps(compiled: Any, plain: Reference, minibatches: Any, records: list[bytes]) -> None:
    parameters, tables = compiled.initial(), _tables(compiled)
    start = 0
    for batch in minibatches(compiled, records):
        given, start = records[start : start + batch.size], start + batch.size
        step = compiled.gradients(batch, parameters, _rows(compiled, batch), seed=3)
        expected = plain.step(given, parameters, [(f"{name}/embeddings", table) for name, table in tables.items()])
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        np.testing.assert_allclose(step.gradient, expected.gradient, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(step.change, expected.change, rtol=1e-4, atol=1e-6)
        totals = _totals(batch, step)
        for (name, table), wanted in zip(tables.items(), expected.of_tables, strict=True):
            np.testing.assert_allclose(totals[name], wanted, rtol=1e-4, atol=1e-6)
            assert step.row_gradients[name].shape == (len(batch.ids[name]), table.shape[1])
    assert start == len(records)


def _both(framework: Any, symbol: str, **symbols: str) -> tuple[Any, Reference]:
    """Compiled with XLA, and plain Keras."""
    compiled = framework(f"swapped.{symbol}", embedding_threshold=0, jit_compile=True, **symbols)
    return compiled, Reference(symbol, **symbols)


def test_state_of_the_models_own_sees_each_minibatch_once(
    framework: Any, minibatches: Any, records: list[bytes]
) -> None:
    compiled, plain = _both(framework, "Counting", loss="keras_loss")
    for _ in range(2):  # a short minibatch is the last of its task
        _same_steps(compiled, plain, minibatches, records)


@pytest.mark.parametrize("optimizer", ["optimizer", "clipping"])
@pytest.mark.parametrize(
    ("symbol", "loss"),
    [
        ("functional", "loss"),
        ("functional", "mean_of_weighted"),
        ("adapted", "loss"),
        ("column", "keras_loss"),
        ("column", "keras_sum"),
    ],
)
def test_a_short_minibatch_is_filled_up_and_its_step_stays_the_same(
    framework: Any, minibatches: Any, records: list[bytes], graphs: Any, symbol: str, loss: str, optimizer: str
) -> None:
    compiled, plain = _both(framework, symbol, loss=loss, optimizer=optimizer)
    _same_steps(compiled, plain, minibatches, records)
    assert len(graphs) == 1  # for 8, 8 and 5 samples


def test_weights_of_the_users_own_count(framework: Any, minibatches: Any, records: list[bytes], graphs: Any) -> None:
    compiled, plain = _both(framework, "column", feed="weighted_feed", loss="keras_loss")
    _same_steps(compiled, plain, minibatches, records)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("symbol", "loss"),
    [
        ("functional", "mean_loss"),
        ("functional", "sum_of_weighted"),
        ("functional", "keras_loss"),
        ("functional", "keras_sum"),
        ("normalized", "loss"),
        ("contrasted", "loss"),
    ],
)
def test_where_samples_see_each_other_a_short_minibatch_keeps_its_shape(
    framework: Any, minibatches: Any, records: list[bytes], graphs: Any, symbol: str, loss: str
) -> None:
    compiled, plain = _both(framework, symbol, loss=loss)
    _same_steps(compiled, plain, minibatches, records)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("symbol", "feed", "reason"),
    [
        ("looked_up", "string_feed", ""),
        ("ragged", "ragged_feed", ""),
        ("hashed", "feed", "not compiled with XLA: "),
        ("varying", "feed", "not compiled with XLA: "),
        ("convolved", "feed", "not compiled with XLA: Conv2D is slower"),
    ],
)
def test_what_xla_lacks_runs_without_it(
    framework: Any, minibatches: Any, records: list[bytes], symbol: str, feed: str, reason: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    compiled, plain = _both(framework, symbol, feed=feed)
    _same_steps(compiled, plain, minibatches, records)
    told = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert len(told) == bool(reason)
    assert all(reason in text for text in told)


def test_predictions_take_any_size(framework: Any, minibatches: Any, records: list[bytes]) -> None:
    tested = framework("swapped.functional", embedding_threshold=0, jit_compile=True)
    parameters = tested.initial()
    sizes = [
        len(tested.predictions(batch, parameters, _rows(tested, batch)))
        for batch in minibatches(tested, records, Mode.EVALUATION)
    ]
    assert sizes == [8, 8, 5]


@pytest.mark.parametrize(("threshold", "jit_compile"), [(0, True), (1_000_000, True), (1_000_000, False)])
def test_an_id_without_a_row_is_an_error_wherever_the_table_is(
    framework: Any, minibatches: Any, threshold: int, jit_compile: bool
) -> None:
    tested = framework("swapped.sequential", embedding_threshold=threshold, jit_compile=jit_compile, minibatch_size=2)

    def run(last: int) -> None:
        for batch in minibatches(tested, [b"1 1 2 3 4 5 6", f"0 1 2 3 4 5 {last}".encode()]):
            tested.gradients(batch, tested.initial(), _rows(tested, batch), seed=0)

    for wrong in (-1, 40):
        with pytest.raises((FeedError, IdOutOfRange), match=r"the embedding layer 'table': .* not in \[0, 40\)"):
            run(wrong)
    run(39)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_an_embedding_of_elasticdls_without_servers_refuses_an_id_without_a_row(
    framework: Any, minibatches: Any, jit_compile: bool
) -> None:
    options = {"on_parameter_server": False, "jit_compile": jit_compile, "minibatch_size": 2}
    tested = framework("swapped.combined", **options)
    for wrong in (-1, 40):
        (batch,) = minibatches(tested, [b"1 1 2 3 4 5 6", f"0 1 2 3 4 5 {wrong}".encode()])
        with pytest.raises(IdOutOfRange, match=r"the embedding layer 'table': .* not in \[0, 40\)"):
            tested.gradients(batch, tested.initial(), {}, seed=0)


def test_ids_may_be_constants_of_the_model(framework: Any, minibatches: Any, records: list[bytes]) -> None:
    tested = framework("swapped.Positioned", on_parameter_server=False, jit_compile=True)
    for batch in minibatches(tested, records):
        assert np.abs(tested.gradients(batch, tested.initial(), {}, seed=0).gradient).all()


@pytest.mark.parametrize("are_constants", [False, True])
def test_ids_of_a_look_up_inside_a_condition_are_not_watched(are_constants: bool) -> None:
    constants, table = tf.constant([1, 2]), keras.layers.Embedding(4, 2)
    table.build()

    @tf.function  # type: ignore[untyped-decorator]
    def step(ids: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        watch = IdWatch()
        with watch.watched():
            looked_up = constants if are_constants else ids
            rows = tf.cond(ids[0] > 0, lambda: table(looked_up), lambda: tf.zeros((2, 2)))
        return rows, watch.in_range()

    rows, in_range = step(constants)
    assert np.abs(rows).all()
    assert in_range == []
