"""Every example of the zoo follows the contract, and learns what it is for in plain Keras, without us."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.example import encode_examples
from elasticdl.data.factory import create_reader
from tests.chaos.jobs import DIGITS, FRAPPE, MNIST, RealJob

ROOT = Path(__file__).resolve().parents[2]
NUM_RECORDS = 70
ZOO = {
    "digits.digits_functional": "digits",
    "mnist.mnist_functional_api": "mnist",
    "mnist.mnist_sequential": "mnist",
    "mnist.mnist_subclass": "mnist",
    "deepfm.deepfm_functional_api": "frappe",
    "deepfm.deepfm_edl_embedding": "frappe",
    "deepfm.deepfm_large": "clicks",
}


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The zoo's modules by their names inside it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "model_zoo"))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("digits", "mnist", "deepfm"):
            del sys.modules[name]


def records_like(dataset: str) -> list[bytes]:
    random = np.random.default_rng(0)
    if dataset == "frappe":
        ids = random.integers(0, 5382, (NUM_RECORDS, 10))
        return encode_examples({"feature": ids, "label": random.integers(0, 2, NUM_RECORDS)})
    if dataset == "clicks":
        ids, labels = random.integers(0, 1_000_000, (NUM_RECORDS, 10)), random.integers(0, 2, NUM_RECORDS)
        return encode_examples({"ids": ids, "dense": random.uniform(size=(NUM_RECORDS, 13)), "label": labels})
    num_pixels, largest = (64, 16) if dataset == "digits" else (784, 255)
    images = random.uniform(0, largest, (NUM_RECORDS, num_pixels)).astype(np.float32)
    return encode_examples({"image": images, "label": random.integers(0, 10, NUM_RECORDS)})


def batches(module: ModuleType, records: list[bytes], mode: str, size: int) -> tf.data.Dataset:
    return module.feed(tf.data.Dataset.from_tensor_slices(records), mode, None).batch(size)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "dataset"), ZOO.items())
def test_an_example_of_the_zoo_follows_the_contract(name: str, dataset: str, zoo: None) -> None:
    module = importlib.import_module(name)
    records = records_like(dataset)
    model = module.custom_model()
    for mode in ("training", "evaluation"):
        sizes = [len(labels) for _, labels in batches(module, records, mode, 32)]
        assert sizes == [32, 32, 6]
    features, labels = next(iter(batches(module, records, "evaluation", 32)))
    (only_features,) = batches(module, records, "prediction", NUM_RECORDS)
    assert tf.nest.flatten(only_features)[0].shape[0] == NUM_RECORDS
    assert module.loss(labels, model(features)).shape == ()
    model.compile(module.optimizer(), module.loss, metrics=list(module.eval_metrics_fn().values()))
    history = model.fit(batches(module, records, "training", 32), epochs=8, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("job", "model_def"),
    [(DIGITS, "digits.digits_functional"), (MNIST, "mnist.mnist_functional_api"), (MNIST, "mnist.mnist_subclass"),
     (FRAPPE, "deepfm.deepfm_functional_api")],
)  # fmt: skip
def test_the_zoo_reaches_its_quality_in_plain_keras(job: RealJob, model_def: str, zoo: None, tmp_path: Path) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    module = importlib.import_module(model_def)
    data = job.make_data(tmp_path)

    def read(split: str, mode: str) -> tf.data.Dataset:
        reader = create_reader(str(data / split))
        records = [record for shard in reader.shards() for record in reader.read(shard)]
        return batches(module, records, mode, job.minibatch_size)

    model = module.custom_model()
    model.compile(module.optimizer(), module.loss, metrics=list(module.eval_metrics_fn().values()))
    model.fit(read("train", "training"), epochs=job.num_epochs, verbose=0)
    values = model.evaluate(read("validation", "evaluation"), verbose=0)
    by_name = dict(zip(["loss", *module.eval_metrics_fn()], values, strict=True))
    metric, least = job.quality
    assert by_name[metric] >= least
