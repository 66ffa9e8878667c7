"""The model definition of `elasticdl sql`: a function that builds the estimator named by a description.

The description is a JSON file written by the client: estimator, task, parameters, inputs and features.  A classifier
returns probabilities; a regressor returns numbers in the label's unit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from elasticdl.layers import Embedding
from elasticdl.tabular.features import (
    FeatureInputs,
    PartFeatures,
    indicators_of,
    layer_name,
    vectors_of,
)

Metrics = dict[str, keras.metrics.Metric | Callable[[Any, Any], Any]]
"""Keras metrics, and functions that return the value of each sample."""


def custom_model(description: str) -> keras.Model:
    """Build and compile the model of a description.

    Args:
        description: Path of the JSON file.
    """
    found = json.loads(Path(description).read_text())
    params, task = found["params"], found["task"]
    features = FeatureInputs(found)
    num_outputs = found["num_classes"] if task == "classes" else 1
    outputs = _ESTIMATORS[found["estimator"]](features, params, num_outputs)
    model = keras.Model(features.inputs, _result(outputs, task, found), name="estimator")
    model.compile(optimizer=_optimizer(params), loss=_loss(task, found))
    return model


def binary_metrics() -> Metrics:
    """Return the metrics for a label with two values."""
    return {
        "auc": keras.metrics.AUC(num_thresholds=1000),
        "accuracy": keras.metrics.BinaryAccuracy(),
        "precision": keras.metrics.Precision(),
        "recall": keras.metrics.Recall(),
        "loss": _binary_loss,
    }


def classes_metrics() -> Metrics:
    """Return the metrics for a label with more than two values."""
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy(), "loss": _classes_loss}


def regression_metrics() -> Metrics:
    """Return the metrics for a numeric label.

    They are functions of each sample, since Keras's own, for a tensor [batch], weigh a small minibatch as much as a
    large one.
    """
    return {"mse": _squared_error, "rmse": keras.metrics.RootMeanSquaredError(), "mae": _absolute_error}


def _binary_loss(labels: Any, predictions: Any) -> Any:
    return keras.ops.binary_crossentropy(keras.ops.cast(labels, "float32"), predictions)


def _classes_loss(labels: Any, predictions: Any) -> Any:
    return keras.ops.sparse_categorical_crossentropy(keras.ops.cast(labels, "int32"), predictions)


def _squared_error(labels: Any, predictions: Any) -> Any:
    return keras.ops.square(keras.ops.cast(labels, "float32") - predictions)


def _absolute_error(labels: Any, predictions: Any) -> Any:
    return keras.ops.abs(keras.ops.cast(labels, "float32") - predictions)


def _optimizer(params: Mapping[str, Any]) -> keras.optimizers.Optimizer:
    """Return the optimizer; Adam has little momentum, because late gradients of asynchronous workers act like it."""
    if params["optimizer"] == "adam":
        return keras.optimizers.Adam(params["learning_rate"], beta_1=0.5)
    made: keras.optimizers.Optimizer = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}[
        params["optimizer"]
    ](params["learning_rate"])
    return made


def _loss(task: str, description: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """Return the loss function, per sample; for regression in units of the label's variance."""
    deviation = description["deviation"]

    def regression(labels: Any, predictions: Any) -> Any:
        return _squared_error(labels, predictions) / deviation**2

    return {"binary": _binary_loss, "classes": _classes_loss, "regression": regression}[task]


def _result(outputs: keras.KerasTensor, task: str, description: Mapping[str, Any]) -> keras.KerasTensor:
    if task == "classes":
        return keras.layers.Softmax(name=layer_name("probabilities"))(outputs)
    flat = keras.layers.Reshape((), name=layer_name("output"))(outputs)
    if task == "binary":
        return keras.layers.Activation("sigmoid", name=layer_name("probability"))(flat)
    scaled = keras.layers.Rescaling(description["deviation"], description["mean"], name=layer_name("scaled"))
    return scaled(flat)


def _dense(features: PartFeatures, vectors: Sequence[keras.KerasTensor], role: str) -> keras.KerasTensor:
    """Return all inputs of a dense network as one tensor: vectors, indicators and numbers."""
    found = [*vectors, *indicators_of(features.categories, role)]
    if features.numbers is not None:
        found.append(features.numbers)
    return keras.layers.Concatenate(name=layer_name(role, "inputs"))(found) if len(found) > 1 else found[0]


def _network(x: keras.KerasTensor, params: Mapping[str, Any], num_outputs: int, role: str) -> keras.KerasTensor:
    for number, units in enumerate(params["hidden_units"]):
        x = keras.layers.Dense(units, activation="relu", name=layer_name(role, "dense", str(number)))(x)
        if params["dropout"]:
            x = keras.layers.Dropout(params["dropout"], name=layer_name(role, "dropout", str(number)))(x)
    return keras.layers.Dense(num_outputs, name=layer_name(role, "outputs"))(x)


def _weighted(features: PartFeatures, num_outputs: int, role: str) -> keras.KerasTensor:
    """Return a linear model: the sum of a weight for each number and each id."""
    terms = []
    for number, one in enumerate(features.categories):
        name = layer_name(role, "weights", str(number))
        weights = Embedding(num_outputs, input_dim=one.num_ids, embeddings_initializer="zeros", name=name)
        terms.append(keras.layers.Reshape((num_outputs,), name=f"{name}_flat")(weights(one.ids)))
    if features.numbers is not None:
        dense = keras.layers.Dense(num_outputs, kernel_initializer="zeros", name=layer_name(role, "weights"))
        terms.append(dense(features.numbers))
    return keras.layers.Add(name=layer_name(role, "sum"))(terms) if len(terms) > 1 else terms[0]


def _linear(inputs: FeatureInputs, params: Mapping[str, Any], num_outputs: int) -> keras.KerasTensor:
    return _weighted(inputs.of("wide"), num_outputs, "wide")


def _dnn(inputs: FeatureInputs, params: Mapping[str, Any], num_outputs: int) -> keras.KerasTensor:
    features = inputs.of("deep")
    vectors = vectors_of(features.categories, params["embedding_dim"], "deep")
    return _network(_dense(features, vectors, "deep"), params, num_outputs, "deep")


def _wide_and_deep(inputs: FeatureInputs, params: Mapping[str, Any], num_outputs: int) -> keras.KerasTensor:
    """Return the sum of a linear model and a network.  Source: Cheng et al., arXiv:1606.07792."""
    wide, deep = _linear(inputs, params, num_outputs), _dnn(inputs, params, num_outputs)
    return keras.layers.Add(name=layer_name("wide", "deep"))([wide, deep])


@keras.saving.register_keras_serializable(package="elasticdl")
class PairwiseProducts(keras.layers.Layer):  # type: ignore[misc]
    """The sum of the inner products of all pairs of vectors [batch, fields, d], as [batch, 1]."""

    def call(self, vectors: Any) -> Any:
        of_sum = keras.ops.square(keras.ops.sum(vectors, axis=1))
        of_squares = keras.ops.sum(keras.ops.square(vectors), axis=1)
        return 0.5 * keras.ops.sum(of_sum - of_squares, axis=1, keepdims=True)


def _deepfm(inputs: FeatureInputs, params: Mapping[str, Any], num_outputs: int) -> keras.KerasTensor:
    """Return a factorization machine plus a network.  Source: Guo et al., arXiv:1703.04247."""
    features, size = inputs.of("deep"), params["embedding_dim"]
    vectors = vectors_of(features.categories, size, "deep")
    fields = [keras.layers.Reshape((1, size), name=layer_name("field", str(at)))(one) for at, one in enumerate(vectors)]
    products = PairwiseProducts(name=layer_name("products"))(
        keras.layers.Concatenate(axis=1, name=layer_name("fields"))(fields)
    )
    deep = _network(_dense(features, vectors, "deep"), params, num_outputs, "deep")
    linear = _weighted(inputs.of("wide"), num_outputs, "wide")
    return keras.layers.Add(name=layer_name("deepfm"))([linear, products, deep])


_ESTIMATORS: dict[str, Callable[[FeatureInputs, Mapping[str, Any], int], keras.KerasTensor]] = {
    "DNNClassifier": _dnn,
    "DNNRegressor": _dnn,
    "LinearClassifier": _linear,
    "LinearRegressor": _linear,
    "WideAndDeepClassifier": _wide_and_deep,
    "DeepFMClassifier": _deepfm,
}
