"""The evaluator of an Estimator, in this process, while the chief continues and keeps few checkpoints.

Runs where TensorFlow has Estimators: `make test-estimator`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

pytest.importorskip("tensorflow_estimator", reason="Estimators need TensorFlow 2.15: make test-estimator")

from elasticdl.api.tensorflow import train_and_evaluate
from model_zoo.iris.dnn_estimator import SPECIES

pytestmark = pytest.mark.estimator

SPECIFICATION = SimpleNamespace(steps=None, hooks=[], name=None, exporters=[])
CLUSTER = {"cluster": {"chief": ["chief:1"], "ps": ["ps:1"]}, "task": {"type": "evaluator", "index": 0}}


class Data:
    """The data service of a job whose training is over at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def is_training_over(self) -> bool:
        self.looks += 1
        return self.looks > 1


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(({"length": [1.0, 2.0, 3.0]}, [0, 1, 2])).repeat(2)


def test_a_checkpoint_that_is_removed_before_it_is_restored_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def estimator() -> Any:
        config = tf.estimator.RunConfig(str(tmp_path), save_checkpoints_steps=1, keep_checkpoint_max=1)
        columns = [tf.feature_column.numeric_column("length")]
        return tf.estimator.DNNClassifier([2], columns, n_classes=len(SPECIES), config=config)

    chief = estimator()
    chief.train(rows, max_steps=1)
    begun: list[str] = []

    def rows_while_the_chief_goes_on() -> tf.data.Dataset:
        newest = tf.train.latest_checkpoint(str(tmp_path))
        begun.append(newest)
        if len(begun) == 1:
            with tf.Graph().as_default():
                chief.train(rows, max_steps=2)
            assert not tf.io.gfile.exists(newest + ".index")
        return rows()

    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    specification = SimpleNamespace(**vars(SPECIFICATION), input_fn=rows_while_the_chief_goes_on)
    metrics = train_and_evaluate(estimator(), SimpleNamespace(), specification, Data())
    assert metrics["global_step"] == 2
    assert re.findall(r"Evaluation metrics\[step=(\d+)\]", capsys.readouterr().out) == ["2"]
