"""A module written for the original ElasticDL: its imports, its TensorFlow functions on symbolic tensors, its job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.frameworks.keras.input.feed import TracedFeed
from elasticdl.layers.functions import TensorFlowFunction, accepted
from elasticdl.model_def import load
from elasticdl.worker.inference.prediction import make_process
from elasticdl_client.errors import ModelDefinitionError

ZOO = str(Path(__file__).parent / "zoo")
SYMBOLS = {"feed": "dataset_fn"}


@pytest.fixture(autouse=True)
def _modules_as_they_were() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] in ("shop", "model_zoo", "feeds"):
            del sys.modules[name]


def _records(count: int) -> list[bytes]:
    random = np.random.default_rng(1)
    rows = np.concatenate([random.integers(0, 40, (count, 4)), random.integers(0, 2, (count, 1))], axis=1)
    return [row.astype("<f4").tobytes() for row in rows]


def test_a_module_of_the_original_trains_evaluates_and_predicts_as_it_is() -> None:
    definition = load(ZOO, "shop.factorization.custom_model", symbols=SYMBOLS)
    framework = KerasFramework(definition, 8, 3, Metadata(seed=3), False)
    batches = list(framework.batches(Mode.TRAINING, iter([TaskRecords(1, 11, _records(16))])))
    assert [batch.n for batch in batches if not batch.end] == [0, 1]
    report = framework.report()
    assert report.metrics == ("accuracy", "auc")
    process = make_process(definition, worker_id=2)
    assert process is not None
    process({"probs": np.asarray([0.25, 0.5])}, (0, 0))
    assert sys.modules["shop.factorization"].seen == [(2, [0.25, 0.5])]


FEEDS = """
import tensorflow as tf
model = loss = optimizer = print

def without_metadata(dataset, mode):
    assert mode == "training"
    return dataset.map(lambda record: ({"x": tf.strings.to_number(record)}, 1))

def without_mode(dataset):
    return dataset.map(lambda record: ({"x": tf.strings.to_number(record)}, 1))

def of_fields(dataset, mode, _):
    return dataset.map(lambda record: ({"x": tf.strings.to_number(record[0:-1])}, tf.strings.to_number(record[-1])))
"""


@pytest.mark.parametrize("feed", ["without_metadata", "without_mode"])
def test_a_feed_that_takes_fewer_arguments_is_given_the_first_ones(feed: str, tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(FEEDS)
    definition = load(str(tmp_path), "feeds.model", symbols={"feed": feed})
    assert definition.feed is not None
    (features, _) = TracedFeed(definition.feed, Mode.TRAINING, Metadata(seed=3), 8).probe()
    assert features["x"].shape.as_list() == [None]


def test_a_feed_that_takes_records_for_lists_of_fields_is_refused_with_how_to_make_them(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(FEEDS)
    definition = load(str(tmp_path), "feeds.model", symbols={"feed": "of_fields"})
    assert definition.feed is not None
    with pytest.raises(ModelDefinitionError, match=r"tf\.io\.decode_csv\(record, \[\"\"\]"):
        TracedFeed(definition.feed, Mode.TRAINING, Metadata(seed=3), 8).probe()


def test_tensorflow_functions_of_a_functional_model_compute_what_keras_ops_do(tmp_path: Path) -> None:
    definition = load(ZOO, "shop.factorization.custom_model", symbols=SYMBOLS)
    keras.utils.set_random_seed(5)
    with accepted():
        model = definition.model()
    ids = np.asarray([[1, 4, 0, 0], [39, 5, 20, 7]])
    table = next(layer for layer in model.layers if hasattr(layer, "embeddings"))
    dense = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dense))
    vectors = np.asarray(table.embeddings)[ids] * (ids != 0)[..., None]
    total = vectors.sum(1)
    buckets = np.digitize(ids, [1, 5, 5, 20])
    kernel, bias = (np.asarray(weight) for weight in dense.get_weights())
    second = (0.5 * (total**2 - (vectors**2).sum(1))).sum(1)
    logits = second + (np.concatenate([buckets, total], 1) @ kernel + bias)[:, 0]
    np.testing.assert_allclose(model(ids)["logits"], logits, rtol=1e-5)
    np.testing.assert_allclose(model(ids)["probs"], 1 / (1 + np.exp(-logits)), rtol=1e-5)

    model.export(str(tmp_path / "saved"), verbose=False)
    saved = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(saved.serve(tf.constant(ids))["logits"], logits, rtol=1e-5)


def test_a_model_with_tensorflow_functions_is_saved_and_loaded_by_keras(tmp_path: Path) -> None:
    inputs = keras.Input((3,))
    with accepted():
        model = keras.Model(inputs, tf.reduce_sum(tf.concat([tf.reshape(inputs, (-1, 3)), 2.0 * inputs], 1), 1))
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(np.ones((2, 3))), [9.0, 9.0])


def test_outside_of_a_model_that_is_made_keras_refuses_as_ever() -> None:
    with accepted():
        pass
    with pytest.raises(ValueError, match="KerasTensor"):
        tf.reshape(keras.Input((3,)), (-1,))


def test_a_function_that_tensorflow_does_not_have_is_named() -> None:
    with pytest.raises(ModelDefinitionError, match=r"no function tf\.linalg\.nothing"):
        TensorFlowFunction("linalg.nothing")
