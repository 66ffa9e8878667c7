"""Exported models load in plain TensorFlow, in a process without elasticdl, and give the same predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import InitialRow, Mode, TableRows, TaskRecords
from elasticdl.frameworks.keras.embedding import describe_table
from elasticdl.frameworks.keras.saving.export import ServedTable
from elasticdl.layers.placement import TableSpec
from elasticdl.ps.optim.initializers import build_initializer, initial_row
from tests.lean_import import LEAN_IMPORT

ZEROS = InitialRow()

# Each model is loaded in a process of its own, forked from one that has imported TensorFlow and done nothing else.
_LOADS = """
import json, os, sys
sys.modules["elasticdl"] = None
import numpy as np
import tensorflow as tf

def load(model, features_file, results_file):
    loaded = tf.saved_model.load(model)
    given = np.load(features_file, allow_pickle=False)["features"]
    if given.dtype.kind == "U":
        given = given.astype("S")
    features = tf.constant(given)
    called = loaded(features)
    signature = loaded.signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    served = signature(**{name: features})
    called = called if isinstance(called, dict) else {"output": called}
    assert set(called) == set(served), (set(called), set(served))
    for key in called:
        np.testing.assert_array_equal(called[key], served[key])
    np.savez(results_file, **{key: value.numpy() for key, value in called.items()})

while line := sys.stdin.readline():
    pid = os.fork()
    if pid == 0:
        load(*json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Reload = Callable[[Path, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def reload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reload]:
    """Return an exported model's outputs for features."""
    directory = tmp_path_factory.mktemp("loads")
    script = directory / "loads.py"
    script.write_text(LEAN_IMPORT + _LOADS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], text=True, bufsize=1, cwd=directory, **pipes) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def reload(path: Path, features: Any) -> dict[str, Any]:
            given, results = path.parent / "given.npz", path.parent / "results.npz"
            np.savez(given, features=features)
            requests.write(json.dumps([str(path), str(given), str(results)]) + "\n")
            assert answers.readline() == "0\n"
            with np.load(results) as loaded:
                return dict(loaded)

        yield reload
        requests.close()
        assert process.wait(120) == 0


def _table(dim: int) -> Any:
    return np.random.default_rng(0).normal(size=(40, dim)).astype("f4")


def _rows(name: str, ids: Any, values: Any, chunk: int = 7, initial: InitialRow = ZEROS) -> TableRows:
    chunks = ((ids[at : at + chunk], values[at : at + chunk]) for at in range(0, len(ids), chunk))
    return TableRows(name, values.shape[1], len(ids), chunks, initial)


@pytest.mark.parametrize("symbol", ["custom_model", "CustomModel", "sequential_model"])
def test_a_model_without_tables(framework: Any, rows_of: Any, reload: Reload, tmp_path: Path, symbol: str) -> None:
    tested = framework(f"conv.{symbol}")
    random = np.random.default_rng(0)
    records = rows_of(np.concatenate([random.normal(size=(5, 64)), np.zeros((5, 1))], axis=1))
    batch, _ = tested.batches(Mode.PREDICTION, iter([TaskRecords(1, 0, records)]))
    parameters = tested.initial()
    expected = tested.predictions(batch, parameters, {}).numpy()
    tested.export(str(tmp_path / "model"), parameters, [])
    found = reload(tmp_path / "model", batch.data.element.numpy())
    np.testing.assert_allclose(found["output"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("symbol", ["functional", "Subclass", "looked_up"])
def test_a_model_with_whole_tables(
    framework: Any, minibatches: Any, reload: Reload, tmp_path: Path, symbol: str
) -> None:
    tested = framework(f"tables.{symbol}", feed="string_feed" if symbol == "looked_up" else "feed")
    (batch,) = minibatches(tested, [b"1 1 2 3 4 5 6", b"0 7 8 9 10 11 12"], Mode.EVALUATION)
    parameters = tested.initial()
    tables = {table.name: _table(table.dim) for table in tested.report().tables}
    rows = {name: table[batch.ids[name]] for name, table in tables.items()}
    expected = tested.predictions(batch, parameters, rows).numpy()
    tested.export(str(tmp_path / "model"), parameters, [_rows(n, np.arange(40), table) for n, table in tables.items()])
    features = batch.data.element[0].numpy()
    found = reload(tmp_path / "model", features.astype("U") if symbol == "looked_up" else features)
    np.testing.assert_allclose(found["output"], expected, rtol=1e-5, atol=1e-6)


def test_ids_that_were_never_trained_have_their_initial_row(framework: Any, reload: Reload, tmp_path: Path) -> None:
    tested = framework("tables.unbounded")
    ids, rows = np.array([5, -7, 2**60]), np.array([[1, 1], [10, 10], [100, 100]], "f4")
    (table,) = tested.report().tables
    initial = initial_row(table, 3)
    tested.export(str(tmp_path / "model"), tested.initial(), [_rows("unbounded", ids, rows, 2, initial)])
    found = reload(tmp_path / "model", np.array([[5, 5, 5, 5, 5, 5], [-7, 2**60, 6, 0, 0, 0]]))
    six, zero = build_initializer(table, 3).rows(np.array([6, 0]), 2).sum(axis=1)
    assert abs(six + 3 * zero) > 1e-3
    np.testing.assert_allclose(found["output"], [12, 220 + six + 3 * zero], rtol=1e-6)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Zeros(),
        keras.initializers.Ones(),
        keras.initializers.Constant(0.5),
        keras.initializers.RandomUniform(1.0, 2.0),
        keras.initializers.RandomUniform(seed=4),
        keras.initializers.RandomNormal(0.5, 0.1),
        keras.initializers.TruncatedNormal(),
    ],
    ids=lambda initializer: type(initializer).__name__,
)
def test_initial_rows_are_those_of_the_parameter_servers(initializer: Any) -> None:
    spec = TableSpec("unbounded", 70, initializer, 0)
    table = describe_table(spec)
    unknown = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)
    expected = build_initializer(table, 11).rows(unknown, 70)
    known, values = np.array([4, -9]), np.full((2, 70), 7.0, "f4")
    for ids, rows in ((known, values), (known[:0], values[:0])):
        served = ServedTable(spec, _rows("unbounded", ids, rows, initial=initial_row(table, 11)))
        np.testing.assert_array_equal(served(tf.constant(ids)), rows)
        np.testing.assert_array_max_ulp(served(tf.constant(unknown)).numpy(), expected, maxulp=2)


def test_a_model_with_named_outputs(framework: Any, rows_of: Any, reload: Reload, tmp_path: Path) -> None:
    tested = framework("scored.custom_model")
    tested.export(str(tmp_path / "model"), tested.initial(), [])
    found = reload(tmp_path / "model", np.ones((2, 3), "f4"))
    assert set(found) == {"logits", "probability"}
    np.testing.assert_allclose(found["probability"], tf.sigmoid(found["logits"]), rtol=1e-6)


def test_the_local_strategy_exports_its_own_variables(
    framework: Any, minibatches: Any, reload: Reload, tmp_path: Path
) -> None:
    tested = framework("tables.functional", on_parameter_server=False)
    (batch,) = minibatches(tested, [b"1 1 2 3 4 5 6", b"0 7 8 9 10 11 12"])
    tested.train(batch, 0)
    expected = tested.predictions(batch, None, {}).numpy()
    tested.export(str(tmp_path / "model"), None, [])
    found = reload(tmp_path / "model", batch.data.element[0].numpy())
    np.testing.assert_allclose(found["output"], expected, rtol=1e-5, atol=1e-6)
