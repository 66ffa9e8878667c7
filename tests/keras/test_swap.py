"""Large tables of Keras's own embeddings move to the parameter servers; gradients are those of the model as it is."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

from elasticdl.frameworks.framework import Mode, Parameters
from elasticdl_client.errors import ModelDefinitionError
from tests.keras.eager_steps import NUM_IDS, Reference

ORDINARY = 1_000_000  # a threshold above every table here
FEEDS = {"ragged": "ragged_feed", "looked_up": "string_feed"}


@pytest.fixture
def records() -> list[bytes]:
    random = np.random.default_rng(2)
    rows = [[int(random.integers(2)), *map(int, random.integers(0, 40, 6))] for _ in range(19)]
    return [" ".join(map(str, row)).encode() for row in rows]


def _shorter(records: list[bytes], lengths: int) -> list[bytes]:
    return [b" ".join(record.split()[: 2 + k % lengths]) for k, record in enumerate(records)]


def _equal(
    moved: Any,
    reference: Reference,
    minibatches: Any,
    records: list[bytes],
    tables: dict[str, str],
    decay: float = 0.0,
) -> None:
    """Steps of a framework at random values are those of Keras; `tables` are those that moved, with their variables."""
    random = np.random.default_rng(7)
    assert {t.name for t in moved.report().tables} == set(tables)
    dims = {t.name: t.dim for t in moved.report().tables}
    values = {name: random.normal(size=(NUM_IDS, dims[name])).astype("f4") * 0.3 for name in tables}
    dense = random.normal(size=moved.initial().trainable.shape).astype("f4") * 0.3
    parameters, start = Parameters(dense, moved.initial().non_trainable), 0
    for batch in minibatches(moved, records):
        given, start = records[start : start + batch.size], start + batch.size
        expected = reference.step(given, parameters, [(tables[name], values[name]) for name in tables], decay)
        rows = {table: values[table][batch.ids[table]] for table in tables}
        step = moved.gradients(batch, parameters, rows, seed=1)
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        np.testing.assert_allclose(step.gradient, expected.gradient, rtol=1e-5, atol=1e-6)
        for table, wanted in zip(tables, expected.of_tables, strict=True):
            total = np.zeros(wanted.shape, "f4")
            np.add.at(total, batch.ids[table], step.row_gradients[table])
            np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-6)
    assert start == len(records)


SHAPES = {
    "functional": {"shared": "shared/embeddings", "wide": "wide/embeddings"},
    "sequential": {"table": "sequential/table/embeddings"},
    "configured": {"table_1": "table/embeddings"},
    "cloned": {"table_1": "table/embeddings"},
    "masked": {"padded": "padded/embeddings"},
    "nested": {"table": "table/embeddings", "table_1": "table/embeddings"},
    "ragged": {"table": "table/embeddings"},
    "looked_up": {"names": "names/embeddings", "hashed": "hashed/embeddings"},
    "numbered": {"looked": "looked/embeddings", "floats": "floats/embeddings", "places": "places/embeddings"},
    "half": {"half": "half/embeddings"},
}


@pytest.mark.parametrize("symbol", SHAPES)
def test_a_model_with_moved_tables_has_the_gradients_of_the_model_as_it_is(
    framework: Any, minibatches: Any, records: list[bytes], symbol: str
) -> None:
    feed = FEEDS.get(symbol, "feed")
    moved = framework(f"swapped.{symbol}", feed=feed, embedding_threshold=0)
    given = _shorter(records, 6) if symbol == "ragged" else records
    _equal(moved, Reference(symbol, feed=feed), minibatches, given, SHAPES[symbol])


@pytest.mark.parametrize(
    "symbols",
    [
        *(("Subclass", "Compiled"), ("SlopingByHand", "Sloping"), ("WeighingPlainly", "Weighing")),
        ("joined_by_hand", "joined"),
    ],
)
@pytest.mark.parametrize("threshold", [0, ORDINARY])
def test_a_part_that_is_a_tf_function_gets_the_values_of_each_step(
    framework: Any, minibatches: Any, records: list[bytes], threshold: int, symbols: tuple[str, str]
) -> None:
    plain, compiled = Reference(symbols[0]), framework(f"swapped.{symbols[1]}", embedding_threshold=threshold)
    tables = {} if threshold else {"table": "table/embeddings"}
    decay = 0.0 if "joined" in symbols or threshold else 0.01
    _equal(compiled, plain, minibatches, records, tables, decay)
    random = np.random.default_rng(8)
    table = random.normal(size=(NUM_IDS, 3)).astype("f4")
    start = 0
    for batch in minibatches(compiled, records, Mode.EVALUATION):
        values = random.normal(size=compiled.initial().trainable.shape).astype("f4")
        parameters = Parameters(values, compiled.initial().non_trainable)
        given, start = records[start : start + batch.size], start + batch.size
        found = compiled.predict(batch, parameters, {name: table[ids] for name, ids in batch.ids.items()})
        expected = plain.predict(given, parameters, [(end, table) for end in tables.values()])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_table_that_keras_does_not_know_of_stays_as_it_was_begun(
    framework: Any, minibatches: Any, records: list[bytes], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    moved = framework("swapped.stranger", embedding_threshold=0)
    _equal(moved, Reference("stranger"), minibatches, records, {"table": "table/embeddings"})
    assert "hidden (0.0 MB) stays an ordinary variable: the layer is no part of the model" in caplog.text


@pytest.mark.parametrize("optimizer", ["clipping", "clipping_each"])
def test_norms_are_those_of_summed_gradients(
    framework: Any, minibatches: Any, records: list[bytes], optimizer: str
) -> None:
    moved = framework("swapped.functional", embedding_threshold=0, optimizer=optimizer)
    _equal(moved, Reference("functional", optimizer=optimizer), minibatches, records, SHAPES["functional"])


def test_only_larger_tables_move_and_the_log_says_which(framework: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    tested = framework("swapped.functional", embedding_threshold=40 * 3 * 4)
    assert [(t.name, t.dim, t.input_dim) for t in tested.report().tables] == [("wide", 6, 40)]
    assert "Embedding tables on the parameter servers: wide (40 x 6, 0.0 MB)" in caplog.text
    initializer = json.loads(framework("swapped.functional", embedding_threshold=0).report().tables[0].initializer)
    assert initializer["class_name"] == "GlorotUniform"
    assert set(initializer["config"].values()) == {None}  # its seed and, in newer Keras, its axes


KEPT = {
    "subclass": "Special is a subclass",
    "reversible": "ReversibleEmbedding is a subclass",
    "orthogonal": "its initializer is Orthogonal",
    "array": "its initializer is Constant",
    "weights": "its weights are set",
    "set": "its weights are set",
    "got": "its weights are read",
    "model": "its weights are set",
    "custom": "its embeddings_regularizer is OrthogonalRegularizer",
    "frozen": "it is not trainable",
    "thawed": "it is not trainable",
    "lora": "it has LoRA",
    "late": "it has LoRA",
    "outside": "it was made before",
}


# Those whose values were set have them all set to ones.
SET = {"weights", "set", "got", "model", "array"}
ALONE = {"model", "reversible"}  # it sets the values of all tables; older Keras has no such layer


@pytest.mark.parametrize("kinds", [" ".join(kind for kind in KEPT if kind not in ALONE), *sorted(ALONE)])
def test_what_no_parameter_server_can_hold_stays_a_variable_and_the_log_says_why(
    framework: Any, minibatches: Any, records: list[bytes], kinds: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    tested = framework("swapped.kept", {"kinds": kinds}, embedding_threshold=0)
    assert tested.report().tables == ()
    lines = [record.getMessage() for record in caplog.records if "stays an ordinary variable" in record.getMessage()]
    assert len(lines) == len(kinds.split())
    for kind in kinds.split():
        (line,) = (line for line in lines if f"{kind} (0.0 MB)" in line)
        assert KEPT[kind] in line
    batch = minibatches(tested, records)[0]
    assert np.isfinite(tested.gradients(batch, tested.initial(), {}, seed=0).loss)
    trainable, start = tested.initial().trainable, 0
    for variable in (variable for variable in tested.report().variables if variable.trainable):
        size = int(np.prod(variable.shape))
        layer, _, name = variable.name.rpartition("/")
        if name == "embeddings" and layer in SET:
            np.testing.assert_array_equal(trainable[start : start + size], np.ones(size, "f4"))
        start += size


@pytest.mark.parametrize(
    ("symbol", "params"),
    [("tied", {}), ("Tied", {}), ("Tied", {"only_training": True}), ("tied_inside", {})],
)
def test_tied_weights_stay_together(
    framework: Any, minibatches: Any, records: list[bytes], symbol: str, params: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    moved = framework(f"swapped.{symbol}", params, embedding_threshold=0)
    tables = {} if symbol == "tied_inside" else {"free": "free/embeddings"}
    _equal(moved, Reference(symbol, params), minibatches, records, tables)
    assert "tied (0.0 MB) stays an ordinary variable: its embeddings are read" in caplog.text


def test_a_regularizer_counts_the_rows_of_the_minibatch_once_each(
    framework: Any, minibatches: Any, records: list[bytes]
) -> None:
    plain = framework("swapped.sequential", embedding_threshold=0)
    tested = framework("swapped.regularized", embedding_threshold=0)
    table = np.random.default_rng(1).normal(size=(40, 3)).astype("f4")
    batch, parameters = minibatches(tested, records)[0], tested.initial()
    ids = batch.ids["table"]
    step = tested.gradients(batch, parameters, {"table": table[ids]}, seed=0)
    without = plain.gradients(minibatches(plain, records)[0], parameters, {"table": table[ids]}, seed=0)
    rows = table[np.unique(ids)]
    assert len(rows) < len(ids)
    expected = 0.1 * np.abs(rows).sum() + 0.2 * np.square(rows).sum()
    assert step.loss - without.loss == pytest.approx(expected, rel=1e-4)
    change = np.zeros_like(table)
    np.add.at(change, ids, step.row_gradients["table"] - without.row_gradients["table"])
    np.testing.assert_allclose(change[np.unique(ids)], 0.1 * np.sign(rows) + 0.4 * rows, rtol=1e-4, atol=1e-4)


def test_a_constraint_that_no_server_applies_is_refused(framework: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ModelDefinitionError, match="columns/embeddings has a constraint, MaxNorm"):
        framework("swapped.kept", {"kinds": "columns"}, embedding_threshold=0).report()
    assert "stays an ordinary variable: its embeddings_constraint is MaxNorm" in caplog.text


def test_constraints_along_a_row_go_to_the_parameter_servers(framework: Any) -> None:
    first, second = framework("swapped.constrained", embedding_threshold=0).report().tables
    assert json.loads(first.constraint) == {"class_name": "MaxNorm", "config": {"max_value": 1.5, "axis": 1}}
    assert json.loads(second.constraint)["class_name"] == "NonNeg"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("rows", "depend on the rows of an embedding"),
        ("variable", "depend on the variable"),
        ("chance", "depend on the variable"),
        ("random", "depend on the random operation"),
        ("loop", "inside a loop"),
    ],
)
def test_ids_that_are_unknown_before_the_step_are_refused_by_layer(framework: Any, kind: str, cause: str) -> None:
    with pytest.raises(ModelDefinitionError, match=f"(?s)'second'.*{cause}"):
        framework("swapped.Dependent", {"kind": kind}, embedding_threshold=0).report()


def test_rows_that_would_get_no_gradient_are_refused(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match=r"inside tf\.recompute_grad"):
        framework("swapped.Dependent", {"kind": "recomputed"}, embedding_threshold=0).report()


def test_a_model_may_return_none_beside_its_outputs(framework: Any, minibatches: Any, records: list[bytes]) -> None:
    moved = framework("swapped.WithNothing", embedding_threshold=0, loss="loss_of_first")
    plain = Reference("WithNothing", loss="loss_of_first")
    _equal(moved, plain, minibatches, records, {"table": "table/embeddings"})


def test_without_parameter_servers_nothing_moves(framework: Any) -> None:
    tested = framework("swapped.functional", embedding_threshold=0, on_parameter_server=False)
    assert tested.report().tables == ()
