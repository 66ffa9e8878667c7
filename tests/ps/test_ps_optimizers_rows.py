"""Rows of a native table against Keras's optimizer on each touched row alone, at the global step count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig

NUM_IDS, DIM = 4, 5
o = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: o.SGD(o.schedules.ExponentialDecay(0.1, 10, 0.9)),
    "momentum": lambda: o.SGD(0.01, momentum=0.9, weight_decay=0.01),
    "adam": lambda: o.Adam(0.01, clipvalue=1.0),
    "amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "adamw": lambda: o.AdamW(0.01),
    "adamax": lambda: o.Adamax(0.01),
    "nadam": lambda: o.Nadam(0.01),
    "adagrad": lambda: o.Adagrad(0.1, clipvalue=0.5),
    "rmsprop": lambda: o.RMSprop(0.01, momentum=0.5, centered=True),
    "adadelta": lambda: o.Adadelta(1.0),
    "ftrl": lambda: o.Ftrl(0.1, l1_regularization_strength=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_equal_keras_on_each_touched_row_alone(name: str) -> None:
    config = OptimizerConfig.parse(json.dumps(keras.saving.serialize_keras_object(OPTIMIZERS[name]())))
    table = _native.Table(
        DIM,
        _native.Initializer("uniform", 7, -1.0, 1.0),
        _native.Optimizer(config.kind, config.options),
        [slot.initial for slot in config.slots],
        _native.Constraint(),
    )
    all_ids = np.arange(NUM_IDS, dtype=np.int64)
    variables = [keras.Variable(row) for row in table.pull(all_ids, create=False)]
    theirs = [OPTIMIZERS[name]() for _ in all_ids]
    global_count = OPTIMIZERS[name]()  # the part of an optimizer's state that belongs to the step alone
    for optimizer, variable in zip([*theirs, global_count], [*variables, keras.Variable(np.zeros(1))], strict=True):
        optimizer.build([variable])
    random = np.random.default_rng(1)
    for step in range(1, 31):
        ids = random.integers(0, NUM_IDS, 3)  # with repetitions; some rows stay untouched
        gradients = random.standard_normal((3, DIM)).astype(np.float32)
        table.apply(ids, gradients, config.scalars(step), config.clip_value)
        for touched in np.unique(ids):
            optimizer = theirs[touched]
            optimizer.iterations.assign(step - 1)
            if name == "nadam":
                optimizer._u_product.assign(global_count._u_product)
            optimizer.apply([keras.ops.convert_to_tensor(gradients[ids == touched].sum(axis=0))])
        global_count.apply([keras.ops.zeros(1)])
    expected = np.stack([variable.numpy() for variable in variables])
    assert np.all(np.abs(table.pull(all_ids, create=False) - expected) <= 1e-5 * np.maximum(1.0, np.abs(expected)))
