"""Features find the inputs of a Keras model by name, in every way that they reach it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import FeedError, Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.saving.loaded_model import LoadedKeras
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

MODULE = """
import keras
import tensorflow as tf

def _sum(b, c):
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(keras.layers.Concatenate()([b, c]))

def by_key():
    b, c = keras.Input((1,), name="b"), keras.Input((1,), name="c")
    return keras.Model({"b": b, "c": c}, _sum(b, c))

def in_a_list():
    b, c = keras.Input((1,), name="b"), keras.Input((1,), name="c")
    return keras.Model([c, b], _sum(b, c))

def unnamed():
    b, c = keras.Input((1,)), keras.Input((1,))
    return keras.Model([b, c], _sum(b, c))

def one_unnamed():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

def one_unbuilt():
    return keras.Sequential([keras.layers.Reshape((1,)), keras.layers.Dense(1)])

def whole():
    x = keras.Input((1,), name="a", dtype="int64")
    return keras.Model(x, keras.layers.Dense(1)(keras.ops.cast(x, "float32")))

@keras.saving.register_keras_serializable()
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

    def call(self, features, training=False):
        assert sorted(features) == ["a", "b", "c"], features
        return self.dense(tf.stack([features["b"], features["c"]], axis=1))

class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = by_key()

    def call(self, features):
        return self.inner(features)

ODD = ["class", "petal length", "1st", "ü", "self", "petal_length", "_x"]

def odd():
    inputs = {name: keras.Input((1,), name=name) for name in ODD}
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values()))))

class OwnOdd(keras.Model):
    def call(self, features):
        return tf.add_n([at * features[name] for at, name in enumerate(ODD, 1)])

def loss(labels, predictions):
    return tf.square(tf.cast(labels, tf.float32) - tf.reshape(predictions, [-1]))

def optimizer():
    return keras.optimizers.SGD(0.3)

def accuracy():
    return ["accuracy"]

def watching():
    return [keras.callbacks.EarlyStopping("val_accuracy")]

def eval_metrics_fn():
    return {"mse": keras.metrics.MeanSquaredError()}

def one_named():
    x = keras.Input((1,), name="x")
    return keras.Model(x, keras.layers.Dense(1)(x))

def labelled_feed(dataset, mode, metadata):
    def parse(row):
        a, b, c, y = tf.io.decode_csv(row, [[0.0]] * 4)
        return a[None], y
    return dataset.map(parse)

def pair_feed(dataset, mode, metadata):
    def parse(row):
        a, b, c, y = tf.io.decode_csv(row, [[0.0]] * 4)
        return (b, c), y
    return dataset.map(parse)

def tuple_feed(dataset, mode, metadata):
    def parse(row):
        a, b, c, y = tf.io.decode_csv(row, [[0.0]] * 4)
        return (b, c, a), y
    return dataset.map(parse)
"""
ROWS = [(a / 7, b / 5, ((a * b) % 3) / 2) for a in range(8) for b in range(6)]
B, C = 1.0, -2.0  # y = B b + C c; a has nothing to do with it


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the module, with a table."""
    directory = tmp_path_factory.mktemp("zoo")
    rows = [f"{a},{b},{c},{B * b + C * c}" for a, b, c in ROWS]
    (directory / "rows.csv").write_text("\n".join(["a,b,c,y", *rows]))
    (directory / "inputs_zoo.py").write_text(MODULE)
    return directory


@pytest.fixture(scope="module")
def table(zoo: Path) -> Any:
    return create_reader(str(zoo / "rows.csv"), label_column="y")


@pytest.fixture(scope="module")
def framework(zoo: Path, table: Any) -> Callable[..., KerasFramework]:
    def make(symbol: str, on_parameter_server: bool = False, metadata: Any = None, **symbols: str) -> KerasFramework:
        definition = load(str(zoo), f"inputs_zoo.{symbol}", symbols=symbols, required=())
        return KerasFramework(
            definition,
            8,
            3,
            metadata or table.metadata(),
            on_parameter_server,
            settings=KerasSettings(jit_compile=False),
        )

    return make


@pytest.fixture(scope="module")
def trained(framework: Callable[..., KerasFramework], table: Any) -> Callable[[str], KerasFramework]:
    """Trains a model for twenty epochs, once for all tests."""

    @cache
    def train(symbol: str) -> KerasFramework:
        made = framework(symbol)
        made.report()
        for batch in batches(made, Mode.TRAINING, table, 20):
            made.train(batch, batch.lease)
        return made

    return train


@pytest.fixture(scope="module")
def exported(
    trained: Callable[[str], KerasFramework], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Exports a trained model, once for all tests."""

    @cache
    def export(symbol: str) -> Path:
        path = tmp_path_factory.mktemp("exported") / "export"
        trained(symbol).export(str(path), None, [])
        return path

    return export


def batches(framework: Any, mode: Mode, table: Any, epochs: int = 1) -> list[Any]:
    (shard,) = table.shards()
    tasks = [TaskRecords(epoch, 0, table.read(shard)) for epoch in range(epochs)]
    return [one for one in framework.batches(mode, iter(tasks)) if not one.end]


def mse(model: Any, table: Any) -> float:
    evaluation = model.evaluation()
    for batch in batches(model, Mode.EVALUATION, table):
        evaluation.update(batch, None, {})
    return float(evaluation.results(evaluation.states())["mse"])


def predicted(model: Any, table: Any) -> Any:
    found = [np.ravel(model.predict(batch, None, {})) for batch in batches(model, Mode.PREDICTION, table)]
    return np.concatenate(found)


Y = np.array([B * b + C * c for _, b, c in ROWS])


@pytest.mark.parametrize("symbol", ["by_key", "in_a_list", "Own"])
def test_a_table_with_further_columns_trains_evaluates_and_predicts_on_those_of_the_model(
    trained: Callable[[str], KerasFramework], table: Any, symbol: str
) -> None:
    made = trained(symbol)
    assert mse(made, table) < 1e-4
    np.testing.assert_allclose(predicted(made, table), Y, atol=0.05)


def test_gradients_for_parameter_servers_are_of_the_named_columns(
    framework: Callable[..., KerasFramework], table: Any
) -> None:
    made = framework("by_key", on_parameter_server=True)
    first = batches(made, Mode.TRAINING, table)[0]
    step = made.gradients(first, made.initial(), {}, 5)
    rows = np.array(ROWS[:8])
    np.testing.assert_allclose(step.gradient, -2 * (rows[:, 1:] * Y[:8, None]).mean(0), rtol=1e-5)


def test_what_no_input_takes_is_said_once(
    framework: Callable[..., KerasFramework], table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = framework("by_key")
    with caplog.at_level(logging.INFO, "elasticdl.keras"):
        for epoch in range(2):
            for batch in batches(made, Mode.TRAINING, table):
                made.train(batch, epoch)
        mse(made, table)
        batches(made, Mode.PREDICTION, table)
    (line,) = [record.getMessage() for record in caplog.records if "is not given" in record.getMessage()]
    assert "inputs are b, c" in line
    assert line.endswith("the features a")


@pytest.mark.parametrize("symbol", ["by_key", "in_a_list", "Own"])
def test_an_export_is_used_by_name_and_its_signature_is_the_models(
    exported: Callable[[str], Path], table: Any, zoo: Path, symbol: str
) -> None:
    path = exported(symbol)
    signature = tf.saved_model.load(str(path)).signatures["serving_default"].structured_input_signature[1]
    assert sorted(signature) == (["a", "b", "c"] if symbol == "Own" else ["b", "c"])
    shapes = {spec.shape.as_list()[1:] == [1] for spec in signature.values()}
    assert shapes == {symbol != "Own"}
    definition = load(str(zoo), f"inputs_zoo.{symbol}", required=())
    files = [path] if symbol == "Own" else [path, path / "model.keras"]
    for file in files:
        for mode in (Mode.EVALUATION, Mode.PREDICTION):
            loaded = LoadedKeras(definition, file, 8, table.metadata(), mode)
            loaded.report()
            if mode is Mode.EVALUATION:
                assert mse(loaded, table) < 1e-4
            else:
                np.testing.assert_allclose(predicted(loaded, table), Y, atol=0.05)


@pytest.mark.parametrize("symbol", ["odd", "OwnOdd"])
def test_columns_whose_names_are_no_names_of_arguments_are_exported(
    framework: Callable[..., KerasFramework], zoo: Path, tmp_path: Path, symbol: str
) -> None:
    columns = ["class", "petal length", "1st", "ü", "self", "petal_length", "_x"]
    (tmp_path / "odd.csv").write_text(
        "\n".join([",".join([*columns, "y"]), *[f"{k}.5,.1,.2,.3,.4,.5,.6,7" for k in range(9)]])
    )
    odd = create_reader(str(tmp_path / "odd.csv"), label_column="y")
    made = framework(symbol, metadata=odd.metadata())
    made.report()
    made.export(str(tmp_path / "export"), None, [])
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    features = {name: tf.constant([[float(at)]]) for at, name in enumerate(columns)}
    if symbol == "OwnOdd":
        features = {name: tf.reshape(value, [1]) for name, value in features.items()}
    names = ["class_", "petal_length_", "arg_1st", "arg__", "self_", "petal_length", "arg__x"]
    signature = loaded.signatures["serving_default"]
    assert sorted(signature.structured_input_signature[1]) == sorted(names)
    by_name = signature(**dict(zip(names, features.values(), strict=True)))
    np.testing.assert_array_equal(next(iter(by_name.values())), loaded(features))
    definition = load(str(zoo), f"inputs_zoo.{symbol}", required=())
    again = LoadedKeras(definition, tmp_path / "export", 8, odd.metadata(), Mode.PREDICTION)
    assert len(predicted(again, odd)) == 9


def test_an_export_takes_the_types_of_the_model_not_of_the_training_data(
    framework: Callable[..., KerasFramework], zoo: Path, tmp_path: Path
) -> None:
    (tmp_path / "whole.csv").write_text("\n".join(["b,c,y", *(f"{k % 5},{k % 3},{k}" for k in range(20))]))
    (tmp_path / "fractions.csv").write_text("\n".join(["b,c,y", *(f"{k % 5}.5,{k % 3}.25,{k}" for k in range(20))]))
    whole = create_reader(str(tmp_path / "whole.csv"), label_column="y")
    made = framework("by_key", metadata=whole.metadata())
    made.export(str(tmp_path / "export"), None, [])
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    serve = loaded.signatures["serving_default"]
    assert {spec.dtype for spec in serve.structured_input_signature[1].values()} == {tf.float32}
    assert loaded({"b": tf.constant([1, 2], tf.int64), "c": tf.constant([1, 2], tf.int64)}).shape == (2, 1)
    fractions = create_reader(str(tmp_path / "fractions.csv"), label_column="y")
    definition = load(str(zoo), "inputs_zoo.by_key", required=())
    other = LoadedKeras(definition, tmp_path / "export", 8, fractions.metadata(), Mode.PREDICTION)
    assert len(predicted(other, fractions)) == 20


@pytest.mark.parametrize("symbol", ["one_unnamed", "one_unbuilt"])
def test_the_only_column_is_the_only_input(
    framework: Callable[..., KerasFramework], zoo: Path, tmp_path: Path, symbol: str
) -> None:
    (tmp_path / "one.csv").write_text("\n".join(["x,y", *(f"{k}.5,{k}" for k in range(20))]))
    one = create_reader(str(tmp_path / "one.csv"), label_column="y")
    made = framework(symbol, metadata=one.metadata())
    made.report()
    (first, *_) = batches(made, Mode.TRAINING, one)
    assert made.train(first, 1) > 0
    made.export(str(tmp_path / "export"), None, [])
    definition = load(str(zoo), f"inputs_zoo.{symbol}", required=())
    loaded = LoadedKeras(definition, tmp_path / "export", 8, one.metadata(), Mode.PREDICTION)
    assert len(predicted(loaded, one)) == 20


@pytest.mark.parametrize(
    ("symbol", "symbols", "columns", "words"),
    [
        ("by_key", {}, ["a", "b"], ["c is missing", "b float32, c float32", "a float32, b float32"]),
        ("in_a_list", {}, ["a", "c"], ["b is missing", "c float32, b float32", "a float32, c float32"]),
        ("unnamed", {}, ["b", "c"], ["cannot be seen from their names"]),
        ("one_unnamed", {}, ["b", "c"], ["cannot be seen from their names"]),
        ("one_unbuilt", {}, ["b", "c"], ["cannot be seen from their names"]),
        ("in_a_list", {"feed": "tuple_feed"}, [], ["takes 2 and is given 3"]),
        ("by_key", {"feed": "tuple_feed"}, [], ["takes 2 and is given 3"]),
        ("whole", {}, ["a"], ["a int64", "float32", "column_dtypes"]),
        ("Nested", {}, [], ["given: a float32, b float32, c float32", "inputs: b float32, c float32"]),
    ],
)
def test_features_that_do_not_fit_are_refused_before_the_first_step_with_both_lists(
    framework: Callable[..., KerasFramework],
    zoo: Path,
    symbol: str,
    symbols: dict[str, str],
    columns: list[str],
    words: list[str],
) -> None:
    reader = create_reader(str(zoo / "rows.csv"), columns=columns, label_column="y")
    with pytest.raises(ModelDefinitionError) as error:
        framework(symbol, metadata=reader.metadata(), **symbols).report()
    for word in words:
        assert word in str(error.value)


def test_a_text_for_a_number_names_both_and_the_flag(framework: Callable[..., KerasFramework], tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("b,c,y\n1.5,high,1\n2.5,low,0\n")
    reader = create_reader(str(tmp_path / "texts.csv"), label_column="y")
    with pytest.raises(ModelDefinitionError, match="c float32 is given a feature of type string") as error:
        framework("by_key", metadata=reader.metadata()).report()
    assert "column_dtypes" in error.value.hint


def test_an_export_predicts_whatever_the_metrics_of_its_module(
    exported: Callable[[str], Path], table: Any, zoo: Path
) -> None:
    definition = load(str(zoo), "inputs_zoo.by_key", symbols={"eval_metrics_fn": "accuracy"}, required=())
    loaded = LoadedKeras(definition, exported("by_key"), 8, table.metadata(), Mode.PREDICTION)
    assert len(predicted(loaded, table)) == len(ROWS)


@pytest.mark.parametrize(
    ("symbol", "feed"), [("one_unnamed", "labelled_feed"), ("one_named", "labelled_feed"), ("by_key", "pair_feed")]
)
def test_labels_in_mode_prediction_are_named_as_what_does_not_fit(
    framework: Callable[..., KerasFramework], table: Any, zoo: Path, tmp_path: Path, symbol: str, feed: str
) -> None:
    made = framework(symbol, feed=feed)
    made.report()
    made.export(str(tmp_path / "export"), None, [])
    definition = load(str(zoo), f"inputs_zoo.{symbol}", symbols={"feed": feed}, required=())
    loaded = LoadedKeras(definition, tmp_path / "export", 8, table.metadata(), Mode.PREDICTION)
    with pytest.raises(ModelDefinitionError) as error:
        loaded.report()
    assert "PREDICTION" in error.value.hint
    assert "--columns" not in error.value.hint


def test_a_model_predicts_records_without_labels_whatever_its_metrics_and_callbacks(
    framework: Callable[..., KerasFramework], table: Any, zoo: Path
) -> None:
    framework("by_key")
    unlabelled = create_reader(str(zoo / "rows.csv"), columns=["b", "c"])
    symbols = {"eval_metrics_fn": "accuracy", "callbacks": "watching"}
    definition = load(str(zoo), "inputs_zoo.by_key", symbols=symbols, required=())
    made = KerasFramework(
        definition, 8, 3, unlabelled.metadata(), False, mode=Mode.PREDICTION, settings=KerasSettings(jit_compile=False)
    )
    assert made.report().metrics == ()
    (shard,) = unlabelled.shards()
    (first, *_) = made.batches(Mode.PREDICTION, iter([TaskRecords(1, 0, unlabelled.read(shard))]))
    assert np.shape(made.predict(first, made.initial(), {})) == (8, 1)


def test_an_evaluation_feed_of_other_features_is_refused_by_name(
    exported: Callable[[str], Path], table: Any, zoo: Path
) -> None:
    other = create_reader(str(zoo / "rows.csv"), columns=["a", "b"], label_column="y")
    definition = load(str(zoo), "inputs_zoo.by_key", required=())
    loaded = LoadedKeras(definition, exported("by_key"), 8, other.metadata(), Mode.PREDICTION)
    with pytest.raises(ModelDefinitionError, match="c is missing"):
        loaded.report()
    with pytest.raises(FeedError, match="c is missing"):
        batches(loaded, Mode.PREDICTION, other)


def test_features_by_position_go_to_the_inputs_in_the_order_of_the_model() -> None:
    z, a = keras.Input((1,), name="z"), keras.Input((1,), name="a")
    model = keras.Model({"z": z, "a": a}, keras.layers.Concatenate()([z, a]))
    first, second = tf.constant([[1.0]]), tf.constant([[2.0]])
    matched = ModelInputs.of("here", model).matched((first, second))
    assert model(matched).numpy().tolist() == [[1.0, 2.0]]


def test_a_nested_structure_of_inputs_is_left_to_keras() -> None:
    parts = {"pair": [keras.Input((1,)), keras.Input((1,))], "one": keras.Input((1,))}
    model = keras.Model(parts, keras.layers.Concatenate()([*parts["pair"], parts["one"]]))
    features = {"pair": (tf.ones((2, 1)), tf.zeros((2, 1))), "one": tf.ones((2, 1))}
    assert ModelInputs.of("here", model).matched(features) is features
