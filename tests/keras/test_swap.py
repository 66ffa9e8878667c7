"""Large tables of Keras's own embeddings move to the parameter servers; gradients are those of the model as it is."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

from elasticdl.frameworks.framework import Mode, Parameters
from elasticdl_client.errors import ModelDefinitionError

ORDINARY = 1_000_000  # a threshold above every table here
FEEDS = {"ragged": "ragged_feed", "looked_up": "string_feed"}


@pytest.fixture
def records() -> list[bytes]:
    random = np.random.default_rng(2)
    rows = [[int(random.integers(2)), *map(int, random.integers(0, 40, 6))] for _ in range(19)]
    return [" ".join(map(str, row)).encode() for row in rows]


def _split(tested: Any, flat: Any) -> dict[str, Any]:
    """The trainable vector by variable."""
    parts, start = {}, 0
    for variable in tested.report().variables:
        if variable.trainable:
            size = int(np.prod(variable.shape))
            parts[variable.name] = flat[start : start + size].reshape(variable.shape)
            start += size
    return parts


def _shorter(records: list[bytes], lengths: int) -> list[bytes]:
    return [b" ".join(record.split()[: 2 + k % lengths]) for k, record in enumerate(records)]


def _equal(ordinary: Any, moved: Any, minibatches: Any, records: list[bytes], tables: dict[str, str]) -> None:
    """Steps of both models at the same values are the same; `tables` are those that moved, with their variables."""
    random = np.random.default_rng(7)
    flat = random.normal(size=ordinary.initial().trainable.shape).astype("f4") * 0.3
    values = _split(ordinary, flat)
    assert {t.name for t in moved.report().tables} == set(tables)
    rest = [part for name, part in values.items() if name not in tables.values()]
    dense = np.concatenate([part.ravel() for part in rest]) if rest else np.zeros(0, "f4")
    assert dense.shape == moved.initial().trainable.shape
    frozen = ordinary.initial().non_trainable
    pairs = list(zip(minibatches(ordinary, records), minibatches(moved, records), strict=True))
    assert pairs
    for whole, batch in pairs:
        expected = ordinary.gradients(whole, Parameters(flat, frozen), {}, seed=1)
        rows = {table: values[variable][batch.ids[table]] for table, variable in tables.items()}
        step = moved.gradients(batch, Parameters(dense, frozen), rows, seed=1)
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        gradients = _split(ordinary, expected.gradient)
        kept = [gradients.pop(name).ravel() for name in list(gradients) if name not in tables.values()]
        np.testing.assert_allclose(step.gradient, np.concatenate(kept) if kept else dense, rtol=1e-5, atol=1e-6)
        for table, variable in tables.items():
            total = np.zeros(values[variable].shape, "f4")
            np.add.at(total, batch.ids[table], step.row_gradients[table])
            np.testing.assert_allclose(total, gradients[variable], rtol=1e-5, atol=1e-6)


SHAPES = {
    "functional": {"shared": "shared/embeddings", "wide": "wide/embeddings"},
    "sequential": {"table": "sequential/table/embeddings"},
    "configured": {"table_1": "table/embeddings"},
    "cloned": {"table_1": "table/embeddings"},
    "masked": {"padded": "padded/embeddings"},
    "nested": {"table": "table/embeddings", "table_1": "table/embeddings_1"},
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
    ordinary = framework(f"swapped.{symbol}", feed=feed, embedding_threshold=ORDINARY)
    moved = framework(f"swapped.{symbol}", feed=feed, embedding_threshold=0)
    assert ordinary.report().tables == ()
    names = [v.name for v in ordinary.report().variables if "embeddings" in v.name]
    tables = {table: next(name for name in names if name.endswith(end)) for table, end in SHAPES[symbol].items()}
    given = _shorter(records, 6) if symbol == "ragged" else records
    _equal(ordinary, moved, minibatches, given, tables)


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
    made = [framework(f"swapped.{symbol}", embedding_threshold=threshold) for symbol in symbols]
    random = np.random.default_rng(7)
    size = made[0].initial().trainable.shape
    rows = random.normal(size=(40, 3)).astype("f4")
    for mode in (Mode.TRAINING, Mode.EVALUATION):
        for plain, compiled in zip(*(minibatches(one, records, mode) for one in made), strict=True):
            given = {table: rows[ids] for table, ids in plain.ids.items()}
            assert compiled.ids.keys() == plain.ids.keys()
            parameters = Parameters(random.normal(size=size).astype("f4"), made[0].initial().non_trainable)
            if mode is Mode.EVALUATION:
                expected, found = (
                    one.predict(batch, parameters, given) for one, batch in zip(made, (plain, compiled), strict=True)
                )
                np.testing.assert_allclose(found, expected, rtol=1e-5)
                continue
            steps = [
                one.gradients(batch, parameters, given, seed=1)
                for one, batch in zip(made, (plain, compiled), strict=True)
            ]
            assert steps[1].loss == pytest.approx(steps[0].loss, rel=1e-6)
            np.testing.assert_allclose(steps[1].gradient, steps[0].gradient, rtol=1e-5, atol=1e-6)
            for table, expected in steps[0].row_gradients.items():
                np.testing.assert_allclose(steps[1].row_gradients[table], expected, rtol=1e-5, atol=1e-6)


def test_a_table_that_keras_does_not_know_of_stays_as_it_was_begun(
    framework: Any, minibatches: Any, records: list[bytes], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    ordinary = framework("swapped.stranger", embedding_threshold=ORDINARY)
    moved = framework("swapped.stranger", embedding_threshold=0)
    _equal(ordinary, moved, minibatches, records, {"table": "table/embeddings"})
    assert "hidden (0.0 MB) stays an ordinary variable: the layer is no part of the model" in caplog.text


@pytest.mark.parametrize("optimizer", ["clipping", "clipping_each"])
def test_norms_are_those_of_summed_gradients(
    framework: Any, minibatches: Any, records: list[bytes], optimizer: str
) -> None:
    ordinary = framework("swapped.functional", embedding_threshold=ORDINARY, optimizer=optimizer)
    moved = framework("swapped.functional", embedding_threshold=0, optimizer=optimizer)
    _equal(ordinary, moved, minibatches, records, {"shared": "shared/embeddings", "wide": "wide/embeddings"})


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


@pytest.mark.parametrize("kind", KEPT)
def test_what_no_parameter_server_can_hold_stays_a_variable_and_the_log_says_why(
    framework: Any, minibatches: Any, records: list[bytes], kind: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    tested = framework("swapped.kept", {"kind": kind}, embedding_threshold=0)
    assert tested.report().tables == ()
    told = [record.getMessage() for record in caplog.records if "stays an ordinary variable" in record.getMessage()]
    assert len(told) == 1
    assert KEPT[kind] in told[0]
    batch = minibatches(tested, records)[0]
    assert np.isfinite(tested.gradients(batch, tested.initial(), {}, seed=0).loss)
    if kind in ("weights", "set", "got", "model", "array"):
        (table,) = [part for name, part in _split(tested, tested.initial().trainable).items() if "embeddings" in name]
        np.testing.assert_array_equal(table, np.ones((40, 3), "f4"))


@pytest.mark.parametrize(
    ("symbol", "params"),
    [("tied", {}), ("Tied", {}), ("Tied", {"only_training": True}), ("tied_inside", {})],
)
def test_tied_weights_stay_together(
    framework: Any, minibatches: Any, records: list[bytes], symbol: str, params: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    ordinary = framework(f"swapped.{symbol}", params, embedding_threshold=ORDINARY)
    moved = framework(f"swapped.{symbol}", params, embedding_threshold=0)
    names = [v.name for v in ordinary.report().variables if v.name.endswith("free/embeddings")]
    _equal(ordinary, moved, minibatches, records, dict(zip(["free"], names, strict=False)))
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
    with pytest.raises(ModelDefinitionError, match="kept/embeddings has a constraint, MaxNorm"):
        framework("swapped.kept", {"kind": "columns"}, embedding_threshold=0).report()
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
    ordinary = framework("swapped.WithNothing", embedding_threshold=ORDINARY, loss="loss_of_first")
    moved = framework("swapped.WithNothing", embedding_threshold=0, loss="loss_of_first")
    (name,) = (v.name for v in ordinary.report().variables if "embeddings" in v.name)
    _equal(ordinary, moved, minibatches, records, {"table": name})


def test_without_parameter_servers_nothing_moves(framework: Any) -> None:
    tested = framework("swapped.functional", embedding_threshold=0, on_parameter_server=False)
    assert tested.report().tables == ()
