"""Optimizers of the PS against Keras itself."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.frameworks.framework import Table
from elasticdl.ps.optimizers import build_optimizer, check_optimizer
from elasticdl.ps.parameters import DenseSlice, DenseSnapshot, NumpyTable
from elasticdl_client.errors import ModelDefinitionError

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.003, beta_1=0.8, epsilon=1e-5, amsgrad=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.2),
    "clipped": lambda: keras.optimizers.SGD(0.01, clipvalue=0.5),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def serialized(optimizer: Any) -> str:
    return json.dumps(keras.saving.serialize_keras_object(optimizer))


def close(ours: Any, theirs: Any) -> bool:
    return bool(np.all(np.abs(ours - theirs) <= 1e-5 * np.maximum(1.0, np.abs(theirs))))


@pytest.mark.ci
@EACH
def test_dense_updates_equal_keras_after_1000_steps(name: str) -> None:
    theirs = OPTIMIZERS[name]()
    random = np.random.default_rng(0)
    start = random.standard_normal(300).astype(np.float32)
    variable = keras.Variable(start)
    ours = DenseSlice(DenseSnapshot(start), build_optimizer(serialized(theirs)))
    theirs.build([variable])
    for step in range(1, 1001):
        gradient = (random.standard_normal(300) * 10.0 ** random.uniform(-3, 1)).astype(np.float32)
        theirs.apply([keras.ops.convert_to_tensor(gradient)])
        ours.apply(gradient, step)
    assert close(ours.values, variable.numpy())


@pytest.mark.ci
@EACH
def test_rows_equal_keras_on_each_touched_row_alone(name: str) -> None:
    table = Table("t", 4, json.dumps({"class_name": "RandomNormal", "config": {}}))
    ours = NumpyTable(table, build_optimizer(serialized(OPTIMIZERS[name]())), seed=1)
    all_ids = np.arange(6, dtype=np.int64)
    variables = [keras.Variable(row) for row in ours.pull(all_ids, create=False)]
    theirs = [OPTIMIZERS[name]() for _ in all_ids]
    for optimizer, variable in zip(theirs, variables, strict=True):
        optimizer.build([variable])
    random = np.random.default_rng(1)
    for step in range(1, 101):
        ids = random.integers(0, 6, 5)  # with repetitions
        gradients = random.standard_normal((5, 4)).astype(np.float32)
        ours.apply(ours.reserve(ids), gradients, step)
        for touched in np.unique(ids):
            theirs[touched].iterations.assign(step - 1)  # the global count
            theirs[touched].apply([keras.ops.convert_to_tensor(gradients[ids == touched].sum(axis=0))])
    assert close(ours.pull(all_ids, create=False), np.stack([v.numpy() for v in variables]))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (lambda: keras.optimizers.Ftrl(), "Ftrl"),
        (lambda: keras.optimizers.SGD(weight_decay=0.1), "weight_decay"),
        (lambda: keras.optimizers.Adam(clipnorm=1.0), "clipnorm"),
        (lambda: keras.optimizers.Adam(global_clipnorm=1.0), "global_clipnorm"),
        (lambda: keras.optimizers.Adam(use_ema=True), "use_ema"),
        (lambda: keras.optimizers.Adagrad(gradient_accumulation_steps=4), "gradient_accumulation_steps"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=2.0), "loss_scale_factor"),
        (lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), "ExponentialDecay"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(ModelDefinitionError, match=named):
        check_optimizer(serialized(optimizer()))


@pytest.mark.ci
def test_a_subclass_of_the_users_is_not_taken_for_keras_own() -> None:
    text = json.dumps({"module": "my.models", "class_name": "Adam", "config": {"learning_rate": 0.1}})
    with pytest.raises(ModelDefinitionError, match="Adam"):
        check_optimizer(text)
