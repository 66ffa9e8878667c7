"""The estimators of `elasticdl sql`, built from descriptions as the client writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOWNS = {"kind": "vocabulary", "column": "town", "values": ["a", "b"]}
AGES = {"kind": "bucket", "column": "age", "boundaries": [20.0, 40.0]}
FEATURES: list[dict[str, Any]] = [
    {"kind": "number", "column": "age", "mean": 40.0, "deviation": 10.0},
    {"kind": "category", "ids": AGES},
    {"kind": "category", "ids": TOWNS},
    {"kind": "category", "ids": {"kind": "hash", "column": "town", "size": 7}},
    {"kind": "category", "ids": {"kind": "identity", "column": "age", "size": 60}},
    {"kind": "category", "ids": {"kind": "cross", "of": [TOWNS, AGES], "size": 11}},
    {"kind": "embedding", "ids": TOWNS, "dimension": 8},
    {"kind": "indicator", "ids": AGES},
    {"kind": "category", "ids": TOWNS, "part": "wide"},
    {"kind": "number", "column": "age", "mean": 0.0, "deviation": 1.0, "part": "deep"},
]
INPUTS = [{"name": "dense", "column": "age", "form": "number"}, {"name": "town", "column": "town", "form": "text"}]
ROWS = {
    "dense": np.array([[19.0], [20.0], [np.nan], [99.0]], np.float32),
    "town": np.array([["a"], ["b"], [""], ["nowhere"]], object),
}
PARAMS = {"hidden_units": [4], "embedding_dim": 8, "dropout": 0.1, "learning_rate": 0.01, "optimizer": "adam"}
ESTIMATORS = [
    ("DNNClassifier", "binary"),
    ("DNNClassifier", "classes"),
    ("DNNRegressor", "regression"),
    ("LinearClassifier", "classes"),
    ("LinearRegressor", "regression"),
    ("WideAndDeepClassifier", "binary"),
    ("DeepFMClassifier", "binary"),
]


def description(directory: Path, estimator: str, task: str) -> str:
    found = {
        "estimator": estimator, "task": task, "params": PARAMS, "inputs": INPUTS, "features": FEATURES,
        "num_classes": 3 if task == "classes" else 2, "mean": 500.0, "deviation": 100.0,
    }  # fmt: skip
    path = directory / "model.json"
    path.write_text(json.dumps(found))
    return str(path)


@pytest.mark.full  # TensorFlow; by default tests/sql trains one of them
@pytest.mark.parametrize(("estimator", "task"), ESTIMATORS)
def test_an_estimator_takes_raw_columns_missing_and_unknown_values_too(
    tmp_path: Path, estimator: str, task: str
) -> None:
    import keras
    import tensorflow as tf

    from elasticdl.tabular import estimators

    model = estimators.custom_model(description(tmp_path, estimator, task))
    rows = {name: tf.constant(values) for name, values in ROWS.items()}
    labels = tf.constant([0, 1, 1, 0])
    with tf.GradientTape() as tape:
        outputs = model(rows, training=True)
        losses = model.loss(labels, outputs)
    assert outputs.shape == ((4, 3) if task == "classes" else (4,))
    assert losses.shape == (4,)
    assert np.isfinite(losses).all()
    gradients = tape.gradient(losses, model.trainable_variables)
    assert all(gradient is not None for gradient in gradients)
    values = outputs.numpy()
    if task == "regression":
        assert abs(values[2] - 500) < 100  # in the label's own unit from the start
    else:
        assert ((values >= 0) & (values <= 1)).all()
    of_all, of_parts = (getattr(estimators, f"{task}_metrics")() for _ in range(2))
    for name, metric in of_all.items():
        if not isinstance(metric, keras.metrics.Metric):
            assert metric(labels, outputs).shape == (4,), name
            continue
        metric.update_state(labels, outputs)
        of_parts[name].update_state(labels[:3], outputs[:3])
        of_parts[name].update_state(labels[3:], outputs[3:])
        assert float(of_parts[name].result()) == pytest.approx(float(metric.result()), rel=1e-5), name


@pytest.mark.full  # TensorFlow
def test_each_number_has_its_bucket_and_missing_ones_an_id_of_their_own() -> None:
    import tensorflow as tf

    from elasticdl.tabular.features import BucketOf, CrossOf, IdentityOf, ScaledNumbers

    numbers = tf.constant([[-5.0], [20.0], [39.9], [40.0], [np.nan]])
    buckets = BucketOf([20.0, 40.0])
    assert buckets(numbers).numpy().ravel().tolist() == [0, 1, 1, 2, 3]
    assert buckets.num_ids == 4
    identity = IdentityOf(40)
    assert identity(numbers).numpy().ravel().tolist() == [40, 20, 39, 40, 40]
    assert identity.num_ids == 41
    assert ScaledNumbers([10.0], [5.0])([numbers]).numpy().ravel().tolist() == pytest.approx(
        [-3.0, 2.0, 5.98, 6.0, 0.0]
    )
    crossed = CrossOf(1000)([buckets(numbers), identity(numbers)]).numpy().ravel()
    assert len(set(crossed.tolist())) == 5
    again = BucketOf.from_config(buckets.get_config())
    assert again(numbers).numpy().tolist() == buckets(numbers).numpy().tolist()
