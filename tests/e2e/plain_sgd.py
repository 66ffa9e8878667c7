"""Jobs with plain SGD whose minibatches are the records in order, and the same training by plain Keras.

The first half is what a job's flags name (``--feed=tests.e2e.plain_sgd.frappe_feed``), `train` the plain Keras of
tests/e2e/test_equality.py.
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.keras.framework import KerasFramework
from elasticdl.model_def import load
from elasticdl.ps.optim.initializers import build_initializer
from model_zoo.deepfm import deepfm_functional_api
from model_zoo.deepfm.frappe import NUM_IDS
from model_zoo.deepfm.frappe import feed as zoo_frappe_feed
from model_zoo.deepfm.frappe import loss as frappe_loss
from model_zoo.mnist import mnist_functional_api
from model_zoo.mnist.images import feed as zoo_mnist_feed
from model_zoo.mnist.images import loss as mnist_loss
from tests.chaos.job import REPOSITORY


def frappe_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05)


def mnist_sgd() -> keras.optimizers.Optimizer:
    """Slow: from 0.005 on, 100 steps make 0.01 of the rounding of sums; in plain Keras, too, with more threads."""
    return keras.optimizers.SGD(0.001)


def still() -> keras.optimizers.Optimizer:
    """Changes nothing."""
    return keras.optimizers.SGD(0.0)


def frappe_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return zoo_frappe_feed(dataset, "evaluation", metadata)  # that mode alone does not shuffle


def mnist_feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    return zoo_mnist_feed(dataset, "evaluation", metadata)


# Model function, its arguments, the module of the same model with Keras's own tables, feed, loss, optimizer.
MODELS = {
    "mnist": (
        "mnist.mnist_functional_api.custom_model",
        {"dropout": 0.0},
        mnist_functional_api,
        mnist_feed,
        mnist_loss,
        mnist_sgd,
    ),
    "frappe": (
        "deepfm.deepfm_edl_embedding.custom_model",
        {},
        deepfm_functional_api,
        frappe_feed,
        frappe_loss,
        frappe_sgd,
    ),
}


def train(name: str, file: Path, size: int, num_steps: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the values of a model that begins with those a job begins with, after steps of a minibatch each.

    They are `trainable` and `non_trainable`, flat; `initial`, the former before the first step; `table/NAME`.
    """
    keras.utils.clear_session()  # layers are named anew
    model_def, params, module, feed, loss, optimizer = MODELS[name]
    zoo = load(str(REPOSITORY / "model_zoo"), model_def, params)
    framework = KerasFramework(zoo, size, seed, None, on_parameter_server=True)
    initial, tables = framework.initial(), framework.report().tables
    model = module.custom_model(**params)
    embeddings = {layer.name: layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)}
    for table in tables:
        rows = build_initializer(table, seed).rows(np.arange(NUM_IDS), table.dim)
        embeddings[table.name].set_weights([rows])
    tabled = [id(layer.embeddings) for layer in embeddings.values()]
    dense = [variable for variable in model.trainable_variables if id(variable) not in tabled]
    _assign(dense, initial.trainable)
    _assign(model.non_trainable_variables, initial.non_trainable)

    reader = create_reader(str(file))
    (shard,) = reader.shards()
    made = optimizer()

    @tf.function
    def step(features: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(labels, model(features, training=True)))
        made.apply_gradients(
            zip(tape.gradient(value, model.trainable_variables), model.trainable_variables, strict=True)
        )

    made.build(model.trainable_variables)
    records = tf.data.Dataset.from_tensor_slices(list(reader.read(shard)))
    for features, labels in feed(records, "training", None).batch(size).take(num_steps):
        step(features, labels)
    flat = [np.ravel(variable.numpy()) for variable in model.non_trainable_variables]
    return {
        "initial": initial.trainable,
        "trainable": np.concatenate([np.ravel(variable.numpy()) for variable in dense]),
        "non_trainable": np.concatenate([np.zeros(0, np.float32), *flat]),
        **{f"table/{layer}": embeddings[layer].get_weights()[0] for layer in embeddings},
    }


def _assign(variables: list[keras.Variable], flat: np.ndarray) -> None:
    start = 0
    for variable in variables:
        count = int(np.prod(variable.shape))
        variable.assign(flat[start : start + count].reshape(variable.shape))
        start += count
    assert start == len(flat)
