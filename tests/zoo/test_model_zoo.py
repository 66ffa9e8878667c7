"""Every example of the zoo follows the contract, and learns what it is for in plain Keras, without us."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.datasets import imagenet, tables
from elasticdl.data.datasets import images as cifar
from elasticdl.data.datasets.tables import CENSUS_COLUMNS, CENSUS_NUMERIC_COLUMNS, IRIS_COLUMNS
from elasticdl.data.example import encode_example, encode_examples
from elasticdl.data.factory import create_reader
from tests.chaos.jobs import DIGITS, FRAPPE, MNIST, RealJob

ROOT = Path(__file__).resolve().parents[2]
NUM_RECORDS = 70
GENERATED = {"cifar10": cifar, "criteo": tables, "imagenet": imagenet}
ZOO = {  # module: data set, arguments of the model
    "digits.digits_functional": ("digits", {}),
    "mnist.mnist_functional_api": ("mnist", {}),
    "mnist.mnist_sequential": ("mnist", {}),
    "mnist.mnist_subclass": ("mnist", {}),
    "deepfm.deepfm_functional_api": ("frappe", {}),
    "deepfm.deepfm_edl_embedding": ("frappe", {}),
    "deepfm.deepfm_subclass": ("frappe", {}),
    "deepfm.deepfm_large": ("clicks", {}),
    "cifar10.cifar10_functional_api": ("cifar10", {"width": 8, "dropout": 0.0}),
    "census.census_wide_deep": ("census", {}),
    "criteo.deepfm": ("criteo", {"max_bins": 1000}),
    "iris.iris_dnn": ("iris", {}),
}
AT_LENGTH = {
    "cifar10.cifar10_resnet20": ("cifar10", {"num_blocks": 1}),
    "cifar10.cifar10_mobilenetv2": ("cifar10", {"width": 0.25}),
    "imagenet.imagenet_resnet50": ("imagenet", {"num_classes": 8, "image_size": 32, "width": 0.125}),
    "census.census_dnn": ("census", {}),
    "criteo.wide_deep": ("criteo", {"max_bins": 1000}),
    "criteo.dcn": ("criteo", {"max_bins": 1000}),
    "criteo.xdeepfm": ("criteo", {"max_bins": 1000}),
}


def census_record(random: np.random.Generator) -> bytes:
    numbers = {name: float(random.integers(0, 90)) for name in CENSUS_NUMERIC_COLUMNS}
    words = {name: str(random.choice(["Private", "Sales", "?"])) for name in set(CENSUS_COLUMNS) - set(numbers)}
    return encode_example({**numbers, **words, "label": int(random.integers(0, 2))})


def records_like(dataset: str) -> list[bytes]:
    random = np.random.default_rng(0)
    if dataset in GENERATED:
        return [record for block in GENERATED[dataset].generated(NUM_RECORDS, 1)[0].blocks for record in block]
    if dataset == "census":
        return [census_record(random) for _ in range(NUM_RECORDS)]
    if dataset == "iris":
        measures = {name: random.uniform(0, 5, NUM_RECORDS) for name in IRIS_COLUMNS}
        return encode_examples({**measures, "label": random.integers(0, 3, NUM_RECORDS)})
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


def examples() -> Iterator[object]:
    for name, (dataset, params) in {**ZOO, **AT_LENGTH}.items():
        marks = [] if name in ZOO else [pytest.mark.full]
        yield pytest.param(name, dataset, params, id=name, marks=marks)


@pytest.mark.parametrize(("name", "dataset", "params"), list(examples()))
def test_an_example_of_the_zoo_follows_the_contract(
    name: str, dataset: str, params: dict[str, object], zoo: None
) -> None:
    keras.utils.set_random_seed(0)
    module = importlib.import_module(name)
    records = records_like(dataset)
    model = module.custom_model(**params)
    for mode in ("training", "evaluation"):
        sizes = [len(labels) for _, labels in batches(module, records, mode, 32)]
        assert sizes == [32, 32, 6]
    features, labels = next(iter(batches(module, records, "evaluation", 32)))
    (only_features,) = batches(module, records, "prediction", NUM_RECORDS)
    assert tf.nest.flatten(only_features)[0].shape[0] == NUM_RECORDS
    assert module.loss(labels, model(features)).shape in [(), (len(labels),)]
    model.compile(module.optimizer(), module.loss, metrics=list(module.eval_metrics_fn().values()))
    num_epochs = 4 if name in ZOO else 8
    history = model.fit(batches(module, records, "training", 32), epochs=num_epochs, verbose=0)
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("cifar10.cifar10_resnet20", 269_722),  # 0.27 million: table 6 of the paper
        ("cifar10.cifar10_mobilenetv2", 2_236_682),  # the paper's, with ten classes
        ("imagenet.imagenet_resnet50", 25_557_032),
    ],
)
def test_a_network_of_a_paper_has_its_number_of_parameters(name: str, num_parameters: int, zoo: None) -> None:
    model = importlib.import_module(name).custom_model()
    assert sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) == num_parameters
