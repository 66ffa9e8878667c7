"""Exports and checkpoints of Keras models, loaded without training: the same outputs, of any structure."""

from __future__ import annotations

import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.example import encode_examples
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Inference, Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.frameworks.keras.saving.loaded_model import LoadedKeras
from elasticdl.model_def import ModelDefinition, load
from elasticdl_client.errors import CheckpointError

pytestmark = pytest.mark.timeout(240)
ZOO = """
import keras
import tensorflow as tf


def custom_model(units=3):
    x = keras.Input((4,), name="x")
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="tanh")(x))
    score = keras.layers.Dense(1, activation="sigmoid", name="score")(hidden)
    logits = keras.layers.Dense(units, name="logits")(hidden)
    return keras.Model(x, {"score": score, "logits": logits})


def feed(dataset, mode, metadata):
    columns = {"x": tf.io.FixedLenFeature([4], tf.float32)}
    if mode != "prediction":
        columns["y"] = tf.io.FixedLenFeature([], tf.int64)

    def parse(record):
        example = tf.io.parse_single_example(record, columns)
        return example["x"] if mode == "prediction" else (example["x"], example["y"])

    return dataset.map(parse)


def eval_metrics_fn():
    return {"score": {"auc": keras.metrics.AUC(num_thresholds=50)}}
"""
X = np.random.default_rng(3).normal(size=(21, 4)).astype(np.float32)
Y = np.arange(21) % 2


@pytest.fixture
def definition(tmp_path: Path) -> ModelDefinition:
    (tmp_path / "loaded_model.py").write_text(textwrap.dedent(ZOO))
    return load(str(tmp_path), "loaded_model.custom_model", required=("feed",))


def framework_of(definition: ModelDefinition, mode: Mode, seed: int = 1) -> KerasFramework:
    return KerasFramework(definition, 8, seed, Metadata(), on_parameter_server=False, mode=mode)


def records() -> list[bytes]:
    return encode_examples({"x": X, "y": Y})


def predicted(model: Inference) -> list[object]:
    batches = model.batches(Mode.PREDICTION, iter([TaskRecords(1, 0, records())]))
    return [model.predict(batch, None, {}) for batch in batches if not batch.end]


def auc_of(model: Inference) -> float:
    evaluation = model.evaluation()
    for batch in model.batches(Mode.EVALUATION, iter([TaskRecords(1, 0, records())])):
        if not batch.end:
            evaluation.update(batch, None, {})
    return model.evaluation().results(evaluation.states())["auc"]


@pytest.mark.parametrize("name", ["", "model.keras"])
def test_an_export_gives_the_same_outputs_and_metrics_as_the_model(
    name: str, tmp_path: Path, definition: ModelDefinition
) -> None:
    made = framework_of(definition, Mode.PREDICTION)
    made.export(str(tmp_path / "export"), None, ())
    loaded = LoadedKeras(definition, tmp_path / "export" / name, 8, Metadata(), Mode.PREDICTION)
    assert loaded.report().metrics == ()
    sizes = []
    for expected, found in zip(predicted(made), predicted(loaded), strict=True):
        assert isinstance(expected, dict)
        assert isinstance(found, dict)
        assert sorted(found) == ["logits", "score"]
        sizes.append(len(found["score"]))
        for key, values in expected.items():
            assert isinstance(found[key], np.ndarray)
            np.testing.assert_allclose(found[key], values, rtol=1e-5, atol=1e-6)
    assert sizes == [8, 8, 5]
    evaluated = LoadedKeras(definition, tmp_path / "export" / name, 8, Metadata(), Mode.EVALUATION)
    assert evaluated.report().metrics == ("auc",)
    assert auc_of(evaluated) == pytest.approx(auc_of(framework_of(definition, Mode.EVALUATION)), abs=1e-6)


def test_a_saved_model_from_elsewhere_is_called_by_its_signature(tmp_path: Path, definition: ModelDefinition) -> None:
    class Doubled(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "anything")])  # type: ignore[untyped-decorator]
        def run(self, anything: object) -> dict[str, object]:
            return {"twice": 2 * anything}  # type: ignore[operator]

    module = Doubled()
    tf.saved_model.save(module, str(tmp_path / "other"), signatures={"serving_default": module.run})
    found = predicted(LoadedKeras(definition, tmp_path / "other", 8, Metadata(), Mode.PREDICTION))
    np.testing.assert_array_equal(np.concatenate(found), 2 * X)  # type: ignore[arg-type]


def test_weights_come_back_from_a_state_without_an_optimizer(tmp_path: Path, definition: ModelDefinition) -> None:
    written, read = (framework_of(definition, Mode.PREDICTION, seed) for seed in (1, 2))
    state = {f"model/{name}": np.array(v.numpy()) for name, v in _named(written).items()}
    read.load_weights({**state, "optimizer/learning_rate": np.array(0.1)})
    for expected, found in zip(predicted(written), predicted(read), strict=True):
        assert isinstance(expected, dict)
        assert isinstance(found, dict)
        np.testing.assert_array_equal(found["logits"], expected["logits"])
    del state[next(iter(state))]
    with pytest.raises(CheckpointError, match="is of another model"):
        read.load_weights(state)


def _named(framework: KerasFramework) -> dict[str, keras.Variable]:
    built = framework._built()
    variables = [*built.trainable, *built.non_trainable, *built.own]
    return dict(zip([v.name for v in built.variables()] + [v.path for v in built.own], variables, strict=True))


@pytest.mark.parametrize("name", ["broken.keras", "broken"])
def test_what_cannot_be_loaded_is_named(name: str, tmp_path: Path, definition: ModelDefinition) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text("no archive")
    else:
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=str(path)):
        LoadedKeras(definition, path, 8, Metadata(), Mode.PREDICTION)
