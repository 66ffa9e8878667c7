"""A module's `dataset()`: samples are read by index and come back as they were; those without an index are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.reader import Metadata
from elasticdl.data.samples import SHARD
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.framework import KerasFramework, KerasSettings
from elasticdl.frameworks.keras.input.module_data import ModuleData, dataset_reader
from elasticdl.frameworks.keras.input.table_feed import traced_feed
from elasticdl.model_def import ModelDefinition
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError, ElasticDLError, ModelDefinitionError

X = np.random.default_rng(1).normal(size=(23, 3, 2))
Y = np.arange(23, dtype=np.int64)
WEIGHTS = np.linspace(0, 1, 23)
WORDS = np.array([["a" * (n % 4), f"ä{n}"] for n in range(23)])


class Batches(keras.utils.PyDataset):
    """X and Y in batches of five."""

    def __init__(self, size: int = 5, odd: int = -1) -> None:
        super().__init__()
        self.size = size
        self.odd = odd
        self.read: list[int] = []

    def __len__(self) -> int:
        return -(-23 // self.size)

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        part = slice(self.size * number, self.size * (number + 1) - (number == self.odd))
        return {"x": X[part], "word": WORDS[part]}, Y[part], WEIGHTS[part]


def definition(given: Any) -> ModelDefinition:
    return ModelDefinition("m.py", "custom_model", keras.Sequential, dataset=lambda mode: given)


def samples_of(given: Any, mode: Mode = Mode.TRAINING, start: int = 0, end: int = 23) -> list[Any]:
    """The samples of some rows, as they come out of the feed."""
    module = definition(given)
    reader = dataset_reader(module, mode, seed=5)
    assert reader.shards() == [Shard(SHARD, 0, 23)]
    records = reader.read(Shard(SHARD, start, end))
    feed = traced_feed(module, mode, Metadata(), 4)
    feed.probe()
    return list(feed(tf.constant(records), tf.constant(0, tf.int64)).as_numpy_iterator())


def as_tf_data(*parts: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).map(lambda *sample: sample).batch(4)


@pytest.mark.parametrize("kind", ["arrays", "batches", "tf.data"])
def test_samples_come_back_as_they_were(kind: str) -> None:
    features = {"x": X, "word": WORDS}
    given = {"arrays": (features, Y, WEIGHTS), "batches": Batches(), "tf.data": as_tf_data(features, Y, WEIGHTS)}[kind]
    samples = samples_of(given, start=3, end=17)
    assert len(samples) == 14
    for number, (found, label, weight) in enumerate(samples, start=3):
        np.testing.assert_array_equal(found["x"], X[number].astype("f4"))
        assert [word.decode() for word in found["word"]] == list(WORDS[number])
        assert (label, label.dtype, weight) == (number, np.int64, np.float32(WEIGHTS[number]))


def test_one_input_and_lists_of_them_are_what_the_model_gets() -> None:
    (x, y), *_ = samples_of((X.astype("f2"), Y > 3))
    assert (x.shape, x.dtype, y.dtype) == ((3, 2), np.float32, np.bool_)
    ((first, second), _), *_ = samples_of(([X, Y.astype("u1")], Y))
    assert (first.shape, second.dtype) == ((3, 2), np.uint8)


@pytest.mark.parametrize("given", [(X, Y), X, (X,)], ids=["labelled", "features", "tuple"])
def test_a_job_that_predicts_has_features_alone(given: Any) -> None:
    assert samples_of(given, Mode.PREDICTION)[4].shape == (3, 2)


def test_a_batch_is_read_once_for_the_rows_of_it() -> None:
    given = Batches()
    data = ModuleData(definition(given), Mode.TRAINING)
    assert len(data.rows) == 23
    given.read.clear()
    data.rows.read(5, 15)
    data.rows.read(15, 18)
    data.rows.read(18, 20)
    assert given.read == [1, 2, 3]


def test_a_job_without_validation_data_asks_for_no_set_of_them() -> None:
    asked = []

    def dataset(mode: str) -> Any:
        asked.append(mode)
        return X, Y

    def model() -> keras.Model:
        made = keras.Sequential([keras.Input((3, 2)), keras.layers.Flatten(), keras.layers.Dense(1)])
        made.compile("sgd", "mse", metrics=["mae"])
        return made

    module = ModelDefinition("m.py", "custom_model", model, dataset=dataset)
    tested = KerasFramework(module, 4, 1, Metadata(), False, settings=KerasSettings(evaluates=False))
    assert tested.report().metrics == ("mae", "loss")
    assert set(asked) == {"training"}


class Endless(keras.utils.PyDataset):
    """Without a number of batches."""

    def __getitem__(self, number: int) -> Any:
        return X[:2], Y[:2]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: as_tf_data(X, Y).filter(lambda x, y: True), "does not know its length"),
    "endless": (lambda: as_tf_data(X, Y).repeat(), "has no end"),
    "shuffled": (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9).batch(4), "has shuffle"),
    "random": (
        lambda: as_tf_data(X, Y).map(lambda x, y: (x + tf.random.normal([], dtype=tf.float64), y)),
        "has RandomStandardNormal",
    ),
    "single": (lambda: tf.data.Dataset.from_tensor_slices((X, Y)), "is of single samples"),
    "without a number": (Endless, "has no number of batches"),
    "another size": (lambda: Batches(odd=2), "Batch 2 of the Batches .* has 4 samples, the first one 5"),
    "another length": (lambda: (X, Y[:7]), "differ in length: 23 in array 0, 7 in array 1"),
    "complex": (lambda: (X.astype("c8"), Y), "is of type complex64"),
    "objects": (lambda: (np.array([{}] * 23), Y), "holds a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_index_or_no_record_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        samples_of(make())


@pytest.mark.parametrize("given", [X, (X, Y, Y, Y), [[1.0, 2.0], [3.0]], "files"], ids=["x", "four", "lists", "text"])
def test_what_is_no_data_set_is_refused(given: Any) -> None:
    with pytest.raises(ModelDefinitionError) as caught:
        samples_of(given)
    assert caught.value.hint
    assert isinstance(caught.value, ElasticDLError)
