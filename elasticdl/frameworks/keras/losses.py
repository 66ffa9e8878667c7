"""The loss of a minibatch: the user's `loss`, sample weights, losses added by layers, or the model's `compute_loss`.

Also decides whether a minibatch can be filled up with samples of weight 0 without changing its loss.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

from elasticdl.frameworks.framework import Floats
from elasticdl.frameworks.keras.compiled import call_model, is_overridden, no_loss
from elasticdl.frameworks.keras.samples import Examples
from elasticdl.layers.placement import Placement, RowsNotFetched
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")

Loss = Callable[..., Any]
_BINARY_LOSSES = (keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy)
_BINARY_FUNCTIONS = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
_OF_CLASSES = "SparseSoftmaxCrossEntropyWithLogits"  # its labels are class numbers
_OF_MISSING = frozenset({"IsNan", "IsFinite"})  # the loss excludes missing labels itself
_WITHOUT_LABELS = frozenset({_OF_CLASSES, "Shape"})  # results do not show missing labels


class TotalLoss:
    """The mean loss of a minibatch and the model's own losses.

    A model whose class overrides `compute_loss` says itself what is added up; Keras's own `compute_loss`
    uses the module's `loss`.
    """

    def __init__(
        self, model: Any, loss: Any, placement: Placement | None, loss_weights: Any = None, is_of_compile: bool = False
    ) -> None:
        """
        Args:
            model: The model.
            loss: A function, or a loss in the form of Keras's `compile`.
            placement: Placement of the model's embedding tables; `compute_loss` cannot look them up.
            loss_weights: Weights in the form of `compile`.
            is_of_compile: The loss is an argument of `compile`; the labels for a function of the module are unchanged.
        """
        self._model = model
        # Keras itself handles names, configs, classes, losses by output and functions of `compile`.
        self.is_described = not callable(loss) or inspect.isclass(loss) or loss_weights is not None
        self.is_described |= is_of_compile and not isinstance(loss, keras.losses.Loss)
        outputs = getattr(model, "output_names", None)
        self._loss = loss
        if self.is_described:
            self._loss = CompileLoss(_configured(loss), loss_weights, output_names=outputs)
        if self.is_described or is_of_compile:
            _check_reduced(_configured(loss))
        self.is_binary = _is_binary(loss) and not is_overridden(model, "compute_loss")
        self._placement = placement
        self._takes_weights = _takes_weights(self._loss)
        self._wants_column: bool | None = None  # known once called with labels [n] and predictions [n, 1]
        self.heeds_presence = False  # known once traced with `presence`
        self.num_classes: int | None = None  # known once traced; None: labels are not class numbers
        self.is_of_model = is_overridden(model, "compute_loss")
        if self.is_of_model:
            model._compile_loss = _CompiledLoss(self._mean)

    def __call__(self, examples: Examples, presence: Any = None) -> Any:
        """Return the loss of a training step as a float32 scalar; traceable.

        Args:
            examples: The minibatch.
            presence: Additional weight of each sample [batch], see `presence`; ignored if the result would not be
                exact, see `heeds_presence`.  None: all samples count.
        """
        predictions = call_model(self._model, examples.features, training=True)
        weights = examples.weights
        if presence is not None:
            may_heed = not self.is_of_model and self._loss is not no_loss and not self._heeds_mask(predictions)
            self.heeds_presence = may_heed and self._is_exact(examples, predictions)
            if self.heeds_presence:
                weights = presence if weights is None else _times(weights, presence)
        return self._total(examples, predictions, weights, training=True)

    def of_predictions(self, examples: Examples, predictions: Any) -> Any:
        """Return the loss of an evaluation as a float32 scalar, right after the model was called; traceable."""
        return self._total(examples, predictions, examples.weights, training=False)

    def _total(self, examples: Examples, predictions: Any, weights: Any, training: bool) -> Any:
        before = len(_operations())
        total = self._added_up(examples, predictions, weights, training)
        made = _operations()[before:]
        takes_classes = any(operation.type == _OF_CLASSES for operation in made)
        if takes_classes and tf.is_tensor(predictions) and predictions.shape.rank:
            self.num_classes = predictions.shape[-1]
            if not _looks_for_missing(made, examples.labels):
                total = _nan_where_missing(total, examples.labels)
        return total

    def _added_up(self, examples: Examples, predictions: Any, weights: Any, training: bool) -> Any:
        if self.is_of_model:
            return self._of_model(examples, predictions, weights, training)
        total = tf.cast(self._mean(examples.labels, predictions, weights), tf.float32)
        for extra in self._model.losses:
            total += tf.cast(tf.reduce_sum(extra), tf.float32)
        return total

    def _of_model(self, examples: Examples, predictions: Any, weights: Any, training: bool) -> Any:
        parts = {"x": examples.features, "y": examples.labels, "y_pred": predictions, "sample_weight": weights}
        with nullcontext() if self._placement is None else self._placement.using(_OutsideOfCall()):
            value = self._model._compute_loss(**parts, training=training)
        total = None if value is None else tf.convert_to_tensor(value)
        if total is None or total.shape.rank != 0:
            found = "None" if total is None else f"a tensor of shape {total.shape}"
            raise ModelDefinitionError(
                f"{type(self._model).__name__}.compute_loss returned {found}, not one number.",
                "Return the mean loss of the minibatch, a scalar.",
            )
        return tf.cast(total, tf.float32)

    def presence(self, count: int, size: int) -> Floats:
        """Return weights [size] with which the loss of `size` samples equals the loss of the first `count`."""
        weights = np.zeros(size, np.float32)
        is_sum = isinstance(self._loss, keras.losses.Loss) and self._loss.reduction == "sum"
        weights[:count] = 1.0 if is_sum else size / count
        return weights

    def _mean(self, labels: Any, predictions: Any, weights: Any) -> Any:
        if self._loss is no_loss:  # as in Keras, weights apply only to the user's loss
            return no_loss(labels, predictions)
        labels = self._as_column(labels, predictions)
        if weights is None:
            return tf.reduce_mean(tf.convert_to_tensor(self._loss(labels, predictions)))
        if self._takes_weights:
            return tf.reduce_mean(tf.convert_to_tensor(self._loss(labels, predictions, weights)))
        return _weighted_mean(tf.convert_to_tensor(self._loss(labels, predictions)), weights)

    def _as_column(self, labels: Any, predictions: Any) -> Any:
        """Return labels [n] reshaped to [n, 1] like the predictions, as in Keras, if the function needs that."""
        if isinstance(self._loss, keras.losses.Loss) or not (tf.is_tensor(labels) and tf.is_tensor(predictions)):
            return labels
        if labels.shape.rank != 1 or predictions.shape.rank != 2 or predictions.shape[1] != 1:
            return labels
        if self._wants_column is None:
            self._wants_column = _wants_column(self._loss, labels.dtype, predictions.dtype)
            if self._wants_column:
                _log.warning("loss gets labels of shape [n, 1]: it would compare [n] with every one of n predictions")
        return labels[:, None] if self._wants_column else labels

    def _heeds_mask(self, predictions: Any) -> bool:
        """Return whether the loss divides by the number of unmasked values, which includes samples of weight 0."""
        parts = tf.nest.flatten(predictions) if isinstance(self._loss, keras.losses.Loss) else []
        return any(getattr(part, "_keras_mask", None) is not None for part in parts)

    def _is_exact(self, examples: Examples, predictions: Any) -> bool:
        """Return whether weights 1 change nothing and weights of `presence` exclude samples; tested with numbers."""
        parts = (examples.labels, predictions, examples.weights)
        specs = [_mapped(lambda part: tf.TensorSpec(part.shape, part.dtype), part) for part in parts]
        try:
            with tf.init_scope():
                labels, guesses, weights = (_mapped(partial(_numbers, seed), spec) for seed, spec in enumerate(specs))
                size = int(tf.nest.flatten(guesses)[0].shape[0])
                count = size // 2 + 1
                some = [_mapped(lambda part: part[:count], parts) for parts in (labels, guesses, weights)]
                ones = tf.ones([size]) if weights is None else weights
                presence = tf.constant(self.presence(count, size))
                pairs = [
                    (self._mean(labels, guesses, ones), self._mean(labels, guesses, weights)),
                    (self._mean(labels, guesses, _times(ones, presence)), self._mean(*some)),
                ]
                return all(np.isclose(float(a), float(b), rtol=1e-4, atol=1e-6) for a, b in pairs)
        except Exception:  # noqa: BLE001  it takes no such numbers: then nothing is known of it
            return False


class _CompiledLoss:
    """Stands where `compile` would put the loss: Keras's own `compute_loss` adds it up."""

    metrics: tuple[Any, ...] = ()

    def __init__(self, mean: Callable[[Any, Any, Any], Any]) -> None:
        self._mean = mean

    def __call__(self, labels: Any, predictions: Any, sample_weight: Any = None) -> Any:
        return tf.cast(self._mean(labels, predictions, sample_weight), tf.float32)


class _OutsideOfCall:
    """Rows of tables on parameter servers, which are fetched for `call` alone."""

    def rows(self, table: str, ids: Any, dim: int) -> Any:
        raise RowsNotFetched(
            f"The embedding layer {table!r} is called in compute_loss, and its rows are fetched for call alone.",
            "Let call return what compute_loss needs of it, or keep the table in the workers: "
            "a keras.layers.Embedding, or --distribution_strategy=AllReduceStrategy.",
        )


def _wants_column(loss: Loss, of_labels: Any, of_predictions: Any) -> bool:
    """Return whether the loss is per sample only for labels [n, 1], not for labels [n]; tested with numbers."""
    try:
        with tf.init_scope():
            labels = tf.cast([0, 1, 1], of_labels)
            predictions = tf.cast([[0.2], [0.6], [0.9]], of_predictions)

            def mean(labels: Any, predictions: Any) -> float:
                return float(tf.reduce_mean(tf.convert_to_tensor(loss(labels, predictions))))

            flat, column = mean(labels, predictions), mean(labels[:, None], predictions)
            alone = sum(mean(labels[k : k + 1], predictions[k : k + 1]) for k in range(3))
    except Exception:  # noqa: BLE001  it takes no such numbers: then nothing is known of it
        return False
    fits = [any(np.isclose(value, whole, rtol=1e-4) for whole in (alone, alone / 3)) for value in (flat, column)]
    return fits == [False, True]


def _operations() -> list[Any]:
    """Return those of the graph being traced, in order."""
    return list(tf.compat.v1.get_default_graph().get_operations())


def _looks_for_missing(made: Sequence[Any], labels: Any) -> bool:
    """Return whether some of these operations look for NaN in labels; in a loss they may, against bad steps."""
    leaves = tf.nest.flatten(labels, expand_composites=True)
    of_labels = {leaf.op.name for leaf in leaves if tf.is_tensor(leaf)}
    for operation in made:
        if operation.type in _WITHOUT_LABELS or of_labels.isdisjoint(part.op.name for part in operation.inputs):
            continue
        if operation.type in _OF_MISSING:
            return True
        of_labels.add(operation.name)
    return False


def _nan_where_missing(total: Any, labels: Any) -> Any:
    """Return the loss, or NaN if a label is NaN: with XLA a missing number would become class 0."""
    for part in tf.nest.flatten(labels):
        if tf.is_tensor(part) and part.dtype.is_floating:
            total = tf.where(tf.reduce_any(tf.math.is_nan(part)), tf.constant(float("nan"), total.dtype), total)
    return total


def _is_binary(loss: Any) -> bool:
    """Return whether a loss is Keras's own binary crossentropy; a subclass may accept other labels."""
    try:
        found = keras.losses.get(loss) if isinstance(loss, str) else _configured(loss)
    except ValueError:  # an unknown name; building the loss raises the error
        return False
    kind = found if inspect.isclass(found) else type(found)
    return kind in _BINARY_LOSSES or any(found is function for function in _BINARY_FUNCTIONS)


def _configured(loss: Any) -> Any:
    """Convert configs of losses to objects; any other dictionary means losses by output, as in `compile`."""
    if isinstance(loss, Mapping):
        if "class_name" in loss:
            return keras.losses.get(dict(loss))
        return {output: _configured(one) for output, one in loss.items()}
    return [_configured(one) for one in loss] if isinstance(loss, list | tuple) else loss


def _check_reduced(configured: Any) -> None:
    """Refuse losses without reduction: Keras shows the mean over samples, but trains with the gradient of the sum.

    Raises:
        ModelDefinitionError: There is such a loss.
    """
    for one in tf.nest.flatten(configured):
        if isinstance(one, keras.losses.Loss) and one.reduction in (None, "none"):
            raise ModelDefinitionError(
                f"The model is compiled with {type(one).__name__}(reduction={one.reduction!r}), of which fit shows the "
                "mean over samples and trains the sum.",
                'Say which is meant: reduction="sum_over_batch_size" or "sum"; or give the module a loss(labels, '
                "predictions), whose values of samples are averaged.",
            )


def _takes_weights(loss: Loss) -> bool:
    if isinstance(loss, keras.losses.Loss):
        return True
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError:
        return False
    return "sample_weight" in parameters


def _weighted_mean(values: Any, weights: Any) -> Any:
    if values.shape.rank == 0:
        raise ModelDefinitionError(
            "feed returns sample weights, but loss(labels, predictions) returns one number for the whole minibatch.",
            "Let loss return one value per sample, or take a third argument sample_weight.",
        )
    weights = tf.cast(weights, values.dtype)
    per_sample = tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)
    return tf.reduce_mean(per_sample * tf.reshape(weights, [-1]))


def _times(weights: Any, presence: Any) -> Any:
    shape = [-1, *[1] * (weights.shape.rank - 1)]
    return weights * tf.reshape(tf.cast(presence, weights.dtype), shape)


def _mapped(function: Callable[[Any], Any], parts: Any) -> Any:
    return None if parts is None else tf.nest.map_structure(function, parts)


def _numbers(seed: int, spec: Any) -> Any:
    """Return a tensor for a spec: floats between 0 and 1, or integers 0."""
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(tf.random.stateless_uniform(spec.shape, (seed, 2), 0.1, 0.9), spec.dtype)
