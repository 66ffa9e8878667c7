"""Labels that no loss takes, and records that the user's own `feed` does not: column, value, record, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import FeedError, LabelError, Mode, Share, TaskRecords
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.quarantine import Quarantine, inspected
from elasticdl.worker.reporter import describe_error
from elasticdl.worker.tasks import HeldLease, TaskReading

KERAS = """
import keras
import tensorflow as tf

def custom_model():
    x = keras.Input((1,), name="x")
    return keras.Model({"x": x}, keras.layers.Dense(3, activation="softmax")(x))

loss = "sparse_categorical_crossentropy"
optimizer = "sgd"
"""
TORCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(1, 3)

    def forward(self, x):
        return self.dense(x[:, None].float())

def custom_model():
    return Model()

loss = torch.nn.CrossEntropyLoss()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
FEED = """
def feed(dataset, mode, metadata):
    def parse(row):
        x, y = tf.io.decode_csv(row, [[0.0], [0]])
        return {"x": x}, y

    return dataset.map(parse)
"""
LABELS = {
    "texts": (["cat", "dog"] * 20, ["column y", "'cat'", "Record 0 of", '["cat", "dog"]']),
    "truth values": (["True", "False"] * 4, ["'True'", '["False", "True"]']),
    "texts and gaps": (["cat", "", "dog"] * 20, ["'cat'", '["cat", "dog"]']),
    "from one": ([1, 2, 3] * 10, ["column y holds 3", "3 outputs", "Record 2 of", "subtract 1"]),
    "too many": ([*[0, 1, 2] * 4, 7, 1], ["column y holds 7", "Record 12 of", "8 outputs"]),
    "negative": ([*[0, 1, 2] * 3, -1, 1, 1], ["column y holds -1", "Record 9 of", "below 0"]),
    "missing": ([*[0.0, 1.0, 2.0] * 3, "", 1.0], ["column y", "Record 9 of", 'column_dtypes={"y": "int64"}']),
}


def framework_of(name: str, code: str, directory: Path, rows: list[str]) -> tuple[Any, TaskRecords]:
    """A framework, and all records as one task."""
    (directory / "rows.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    reader = create_reader(str(directory / "rows.csv"), label_column="y")
    (directory / "labels_zoo.py").write_text(code)
    definition = load(str(directory), "labels_zoo.custom_model", required=())
    made: Any
    if name == "keras":
        made = KerasFramework(definition, 8, 3, reader.metadata(), on_parameter_server=False)
    else:
        made = TorchFramework(definition, 8, 3, reader.metadata())
    (shard,) = reader.shards()
    records = reader.read(shard)
    return made, TaskRecords(1, 0, records, shard.name, range(len(records)))


def said_of_labels(made: Any, task: TaskRecords) -> str:
    """Return the error that the user reads when a worker trains on the task."""
    lease = pb.Lease(id=1)
    lease.shard.name = task.shard
    held = HeldLease(lease, reading=TaskReading(list(task.numbers)))
    batches = [batch for batch in made.batches(Mode.TRAINING, iter([task])) if not batch.end]
    with pytest.raises(LabelError) as raised:
        [made.train(batch, 1) for batch in batches]
    return describe_error(raised.value, held)[0]


@pytest.mark.parametrize("framework", ["keras", "torch"])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_a_loss_does_not_take_are_said_with_column_record_and_value(
    framework: str, kind: str, tmp_path: Path
) -> None:
    labels, words = LABELS[kind]
    code = KERAS if framework == "keras" else TORCH
    made, task = framework_of(framework, code, tmp_path, [f"{k}.5,{label}" for k, label in enumerate(labels)])
    message = said_of_labels(made, task)
    if framework == "torch" and kind == "missing":
        words = [word for word in words if not word.startswith("Record")]  # the type alone is refused, at once
    assert [word for word in words if word not in message] == [], message


def test_labels_that_give_no_finite_loss_with_xla_are_said_instead_of_the_learning_rate(tmp_path: Path) -> None:
    made, task = framework_of("keras", KERAS, tmp_path, [f"{k}.5,{k % 3 + 1}" for k in range(8)])
    (batch,) = (batch for batch in made.batches(Mode.TRAINING, iter([task])) if not batch.end)
    step = made.local_gradient([Share(batch, 1, 1.0)], lambda buffer: None)
    (what,) = step.not_finite.values()
    assert "column y holds 3, and the model has 3 outputs" in what
    assert "subtract 1" in what.partition("→")[2]


GUARDED = """
def loss(labels, predictions):
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions)
    return tf.where(tf.math.is_finite(losses), losses, 0.0)
"""


@pytest.mark.parametrize("loss", ["", GUARDED], ids=["of Keras", "guarded"])
def test_a_missing_label_is_no_class_0_with_xla(loss: str, tmp_path: Path) -> None:
    rows = [f"{k}.5,{'' if k == 5 else k % 3}" for k in range(8)]
    made, task = framework_of("keras", KERAS + loss, tmp_path, rows)
    (batch,) = (batch for batch in made.batches(Mode.TRAINING, iter([task])) if not batch.end)
    (what,) = made.local_gradient([Share(batch, 1, 1.0)], lambda buffer: None).not_finite.values()
    assert "column y has no value (NaN)" in what
    assert "first in sample 5" in what


def test_a_text_in_a_feed_of_the_users_own_names_column_value_record_and_file(tmp_path: Path) -> None:
    rows = [f"{k}.5,{k % 3}" for k in range(600)]
    rows[476] = "x7,1"
    made, task = framework_of("keras", KERAS + FEED, tmp_path, rows)
    with pytest.raises(FeedError) as raised:
        list(inspected(made, Mode.TRAINING, iter([task]), Quarantine()))
    message = str(raised.value)
    for word in ("'x7'", "column x", f"record 476 of {tmp_path / 'rows.csv'}", "record_defaults", "--max_bad_records"):
        assert word in message, message
    assert raised.value.details == ""


PROBABILITIES = {
    "from one": ([1, 2] * 10, ["column y holds 2, and", "Record 1 of", "subtract 1"]),
    "signs": ([*[1] * 10, -1, 1], ["column y holds -1", "Record 10 of", "0 for -1", "hinge"]),
    "classes": ([0, 1, 2, 3] * 4, ["column y holds 2, 3, and", "Record 2 of", "4 classes"]),
    "values": ([0.5, 1.0, 1.25, 0.0], ["column y holds 1.25", "Record 2 of", "0 to 1"]),
}
BINARY = {
    "keras": KERAS.replace('Dense(3, activation="softmax")', 'Dense(1, activation="sigmoid")').replace(
        "sparse_categorical_crossentropy", "binary_crossentropy"
    ),
    "torch": TORCH.replace("Linear(1, 3)", "Linear(1, 1)")
    .replace("[:, None].float())", "[:, None].float())[:, 0]")
    .replace("torch.nn.CrossEntropyLoss()", "torch.nn.BCEWithLogitsLoss()"),
}


def binary_task(framework: str, directory: Path, labels: list[float], loss: str = "") -> tuple[Any, TaskRecords]:
    code = f"{BINARY[framework]}\nloss = {loss}" if loss else BINARY[framework]
    return framework_of(framework, code, directory, [f"{k}.5,{float(label)}" for k, label in enumerate(labels)])


@pytest.mark.parametrize("framework", ["keras", "torch"])
@pytest.mark.parametrize("kind", PROBABILITIES)
def test_labels_that_are_no_probabilities_are_said_before_binary_crossentropy_learns_them(
    framework: str, kind: str, tmp_path: Path
) -> None:
    labels, words = PROBABILITIES[kind]
    message = said_of_labels(*binary_task(framework, tmp_path, labels))
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("framework", "loss"),
    [
        ("keras", "keras.losses.BinaryCrossentropy(from_logits=True)"),
        ("keras", "keras.losses.binary_crossentropy"),
        ("keras", "keras.losses.BinaryFocalCrossentropy"),
        ("torch", "torch.nn.BCELoss()"),
        ("torch", "torch.nn.functional.binary_cross_entropy_with_logits"),
    ],
)
def test_binary_crossentropy_is_known_by_all_its_names_and_in_a_group_of_workers(
    framework: str, loss: str, tmp_path: Path
) -> None:
    made, task = binary_task(framework, tmp_path, [0, 1, 2, 1], loss)
    batch = next(made.batches(Mode.TRAINING, iter([task])))
    with pytest.raises(LabelError, match="column y holds 2"):
        made.local_gradient([Share(batch, 1, 1.0)], lambda buffer: None)


@pytest.mark.parametrize(
    ("framework", "loss", "labels"),
    [
        ("keras", "", [0, 1, 0.5, 1.0000001]),
        ("torch", "", [0, 1, 0.5, 1.0000001]),
        ("keras", "'hinge'", [-1, 1]),
        ("keras", "lambda labels, found: keras.losses.binary_crossentropy(labels[:, None] - 1, found)", [1, 2]),
        ("torch", "lambda labels, found: torch.nn.functional.soft_margin_loss(found, labels)", [-1, 1]),
    ],
)
def test_soft_labels_and_other_losses_are_left_alone(
    framework: str, loss: str, labels: list[float], tmp_path: Path
) -> None:
    made, task = binary_task(framework, tmp_path, labels, loss)
    batch = next(made.batches(Mode.TRAINING, iter([task])))
    assert made.train(batch, 1) >= 0


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_a_feed_that_takes_no_record_blames_none(framework: str, tmp_path: Path) -> None:
    code = (
        KERAS if framework == "keras" else TORCH
    ) + "\ndef feed(data, mode, metadata):\n    raise OSError('broken')\n"
    (tmp_path / "rows.csv").write_text("x,y\n1,1\n")
    made, task = framework_of(framework, code, tmp_path, ["1,1"] * 9)
    with pytest.raises((FeedError, Exception)) as raised:
        list(inspected(made, Mode.TRAINING, iter([task]), Quarantine()))
    assert "broken" in str(raised.value)
    assert "record" not in str(raised.value)
