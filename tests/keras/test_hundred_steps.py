"""A hundred steps of one worker with SGD on a parameter server are those of plain Keras; the server is an array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.example import encode_examples
from elasticdl.frameworks.framework import Parameters
from elasticdl.frameworks.keras.model import assign_flat, flat_values
from elasticdl.model_def import load

ZOO = str(Path(__file__).resolve().parents[2] / "model_zoo")
SIZE = 16
STEPS = 100


def _clicks(random: Any) -> list[bytes]:
    count = SIZE * STEPS
    ids, labels = random.zipf(1.3, (count, 10)) % 200, random.integers(0, 2, count)
    return encode_examples({"ids": ids, "dense": random.uniform(size=(count, 13)), "label": labels})


def _digits(random: Any) -> list[bytes]:
    count = SIZE * STEPS
    labels = random.integers(0, 10, count)
    images = random.uniform(0, 255, (10, 784))[labels] + random.uniform(0, 20, (count, 784))
    return encode_examples({"image": images.astype("f4"), "label": labels})


@pytest.mark.parametrize(
    ("model_def", "params", "make_records", "rate", "jit_compile"),
    [
        ("deepfm.deepfm_large.custom_model", {"num_ids": 200, "embedding_dim": 4}, _clicks, 0.05, True),
        ("deepfm.deepfm_large.custom_model", {"num_ids": 200, "embedding_dim": 4}, _clicks, 0.05, False),
        # The maximum of a pool jumps to another pixel for the last bit of a sum: small steps keep that small.
        ("mnist.mnist_functional_api.custom_model", {"filters": 2, "dropout": 0.0}, _digits, 0.001, False),
    ],
)
def test_a_hundred_steps_are_those_of_plain_keras(
    framework: Any, minibatches: Any, model_def: str, params: Any, make_records: Any, rate: float, jit_compile: bool
) -> None:
    random = np.random.default_rng(5)
    options = {"minibatch_size": SIZE, "zoo": ZOO, "embedding_threshold": 0, "jit_compile": jit_compile}
    tested = framework(model_def, params, **options)
    batches = minibatches(tested, make_records(random))
    assert len(batches) == STEPS
    plain = load(ZOO, model_def, params)
    model = plain.model()
    tables = {v.path.split("/")[0]: v for v in model.trainable_variables if v.path.endswith("embeddings")}
    dense = [v for v in model.trainable_variables if not v.path.endswith("embeddings")]
    rows = {table.name: tables[table.name].numpy().copy() for table in tested.report().tables}
    assert set(rows) == set(tables)
    trainable, frozen = tested.initial().trainable.copy(), tested.initial().non_trainable.copy()
    assign_flat(dense, trainable)
    assign_flat(model.non_trainable_variables[: len(model.non_trainable_weights)], frozen)
    model.compile(optimizer=keras.optimizers.SGD(rate), loss=plain.loss, jit_compile=False)
    for batch in batches:
        given = {name: table[batch.ids[name]] for name, table in rows.items()}
        step = tested.gradients(batch, Parameters(trainable, frozen), given, seed=0)
        trainable, frozen = trainable - np.float32(rate) * step.gradient, frozen + step.change
        for name, gradient in step.row_gradients.items():
            np.subtract.at(rows[name], batch.ids[name], np.float32(rate) * gradient)
    elements = [batch.data.element for batch in batches]
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *elements)
    model.fit(*whole, batch_size=SIZE, shuffle=False, verbose=0)
    np.testing.assert_allclose(trainable, flat_values(dense), atol=1e-5)
    np.testing.assert_allclose(frozen, flat_values(model.non_trainable_weights), atol=1e-4)
    for name, table in rows.items():
        np.testing.assert_allclose(table, tables[name].numpy(), atol=1e-5)
