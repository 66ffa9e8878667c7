"""A missing cell of a table is NaN: where that spoils a step, the column is named, in Keras and PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import Mode, NotFiniteStep, Share, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load

KERAS = """
import keras

def custom_model():
    age, income = keras.Input((1,), name="age"), keras.Input((1,), name="income")
    joined = keras.layers.Concatenate()([age, income])
    return keras.Model([age, income], keras.layers.Dense(1)(joined))

def loss(labels, predictions):
    return keras.ops.mean(keras.ops.square(keras.ops.cast(labels, "float32") - predictions[:, 0]))

def optimizer():
    return keras.optimizers.SGD(0.1)
"""
TORCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(2, 1)

    def forward(self, age, income):
        return self.dense(torch.stack([age, income], dim=1))[:, 0]

def custom_model():
    return Model()

def loss(labels, predictions):
    return (labels - predictions) ** 2

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def table(tmp_path: Path) -> Any:
    rows = ["age,income,y", *(f"{k}.5,{'' if k in (2, 5) else k}.25,{k}.0" for k in range(8))]
    (tmp_path / "rows.csv").write_text("\n".join(rows).replace(",.25,", ",,"))
    return create_reader(str(tmp_path / "rows.csv"), label_column="y")


def first_batch(framework: Any, table: Any) -> Any:
    (shard,) = table.shards()
    return next(iter(framework.batches(Mode.TRAINING, iter([TaskRecords(1, 0, table.read(shard))]))))


def keras_framework(tmp_path: Path, table: Any, on_parameter_server: bool) -> KerasFramework:
    (tmp_path / "cells_zoo.py").write_text(KERAS)
    definition = load(str(tmp_path), "cells_zoo.custom_model", required=())
    return KerasFramework(
        definition, 8, 3, table.metadata(), on_parameter_server, settings=KerasSettings(jit_compile=False)
    )


WORDS = "the data hold NaN or infinity, income in 2 of 8 samples (a missing cell"


def test_gradients_for_parameter_servers_name_the_column(tmp_path: Path, table: Any) -> None:
    made = keras_framework(tmp_path, table, on_parameter_server=True)
    step = made.gradients(first_batch(made, table), made.initial(), {}, 5)
    assert step.not_finite.startswith("the loss is nan")
    assert WORDS in step.not_finite


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_shares_of_a_group_and_the_local_strategy_name_the_column(framework: str, tmp_path: Path, table: Any) -> None:
    if framework == "keras":
        made: Any = keras_framework(tmp_path, table, on_parameter_server=False)
    else:
        (tmp_path / "cells_zoo.py").write_text(TORCH)
        made = TorchFramework(load(str(tmp_path), "cells_zoo.custom_model", required=()), 8, 3, table.metadata())
    batch = first_batch(made, table)
    gradient = made.local_gradient([Share(batch, 1, 1.0)], lambda buffer: None)
    gradient.told()
    assert WORDS in gradient.not_finite[0]
    with pytest.raises(NotFiniteStep, match=re.escape(WORDS)):
        made.train(batch, 5)


def test_where_the_data_are_finite_they_are_not_blamed(tmp_path: Path, table: Any) -> None:
    made = keras_framework(tmp_path, table, on_parameter_server=True)
    batch = first_batch(made, table)
    values = made.initial()
    values.trainable[:] = float("inf")
    batch.data.leaves[:] = [tf.ones_like(leaf) for leaf in batch.data.leaves]
    step = made.gradients(batch, values, {}, 5)
    assert step.not_finite
    assert "the data hold" not in step.not_finite
