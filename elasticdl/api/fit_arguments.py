"""Arguments that `elasticdl.fit` shares with Keras's `fit`: class weights, the validation split, callbacks."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.api.fit_results import BestWeights
from elasticdl.frameworks.keras.optimizer import make_callbacks
from elasticdl_client.errors import FlagError, ModelDefinitionError


def as_fitted(x: Any, y: Any, sample_weight: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Return the training data as one object.

    Raises:
        FlagError: The arguments contradict each other.
    """
    if x is None:
        raise FlagError("fit was given no data.", "Give x and y, a PyDataset or a tf.data.Dataset.")
    if isinstance(x, keras.utils.PyDataset | tf.data.Dataset):
        given = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        beside = [name for name, value in given.items() if value is not None]
        if beside:
            raise FlagError(f"fit was given {beside[0]} beside a {type(x).__name__}, which holds it.")
        return x
    if y is None:
        raise FlagError("fit was given x without y.", "Give labels; a model without labels is not trained.")
    if class_weight is not None:
        if sample_weight is not None:
            raise FlagError("fit was given both class_weight and sample_weight.", "Multiply them yourself.")
        sample_weight = _weights_of(y, class_weight)
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def _weights_of(y: Any, class_weight: Mapping[int, float]) -> Any:
    """Return the weight of each sample: the weight of its class, or 1 if the class has none."""
    if tf.nest.is_nested(y):
        raise FlagError(
            f"class_weight is for a single array of labels, and y is a {type(y).__name__}.",
            "Give the labels of a model with one output as an array; else sample_weight, one for each output.",
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels[..., 0]
    if labels.ndim != 1:
        raise FlagError(
            f"class_weight is for labels of one class a sample, and y has the shape {np.shape(y)}.",
            "Give sample_weight.",
        )
    labels = np.round(labels).astype("int32")  # as in Keras: a smoothed label also belongs to a class
    weights = np.ones(len(labels), keras.config.floatx())
    for one, weight in class_weight.items():
        weights[labels == one] = weight
    return weights


def split(training: Any, share: float) -> tuple[Any, Any]:
    """Split arrays into the training part and the last part, for validation.

    Args:
        share: Fraction of the samples for validation, in (0, 1).

    Raises:
        FlagError: A part would be empty, or the data are not arrays.
    """
    if not isinstance(training, tuple):
        raise FlagError(
            f"validation_split is for arrays, and x is a {type(training).__name__}.", "Give validation_data."
        )
    leaves = [_sliceable(leaf) for leaf in tf.nest.flatten(training)]
    at = math.floor(len(leaves[0]) * (1 - share))
    if not 0 < at < len(leaves[0]):
        raise FlagError(
            f"validation_split={share:g} of {len(leaves[0])} samples leaves none for training or none for validation.",
            "Give a share between 0 and 1, or validation_data.",
        )
    parts = ([leaf[:at] for leaf in leaves], [leaf[at:] for leaf in leaves])
    first, last = (tf.nest.pack_sequence_as(training, part) for part in parts)
    return first, last


def _sliceable(leaf: Any) -> Any:
    """Return an array with sliceable rows; pandas objects are sliced by position, whatever their index."""
    leaf = getattr(leaf, "iloc", leaf)
    leaf = leaf.obj.to_numpy() if hasattr(leaf, "obj") else leaf
    if not np.ndim(leaf):
        raise FlagError(
            f"validation_split is for arrays, and there is a {type(leaf).__name__} in x or y.", "Give NumPy arrays."
        )
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def write_callbacks(callbacks: Iterable[Any] | Any, path: Path, results: Path) -> list[Any]:
    """Write callbacks for the workers; their relative paths are resolved in this process.

    Args:
        callbacks: As in Keras, including a single one or None.
        results: The directory for results that `fit` reads after the job.

    Returns:
        The written callbacks; an EarlyStopping that restores the best weights is followed by a callback that saves
        them.

    Raises:
        ModelDefinitionError: A callback cannot work in a job, or cannot be sent to another process.
    """
    is_single = callbacks is not None and not isinstance(callbacks, Iterable)
    given = [callbacks] if is_single else list(callbacks or ())
    apart = [one for number, each in enumerate(given) for one in _restoring_apart(each, number, results)]
    of_job = [_anchored(one) for one in make_callbacks("elasticdl.fit", lambda: apart)]
    for one in of_job:
        kind = type(one)
        try:
            _Checked(io.BytesIO()).dump(one)
        except _OfScriptError as error:
            raise ModelDefinitionError(
                f"The callback {kind.__name__} needs {error}, which is of this script or notebook: no worker can "
                "import it.",
                "Put it into a module of its own, and import it from there.",
            ) from error
        except Exception as error:
            raise ModelDefinitionError(
                f"The callback {kind.__name__} cannot be sent to a worker: {error}",
                "Let it hold values that can be pickled; functions stand at the top of a module.",
            ) from error
    path.write_bytes(pickle.dumps(of_job))
    return of_job


class _OfScriptError(Exception):
    """A class or function that another process cannot import."""


class _Checked(pickle.Pickler):
    """A pickler that refuses references to names in `__main__`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise _OfScriptError(value.__qualname__)
        return NotImplemented


def read_callbacks(path: Path) -> list[Any]:
    """Read callbacks written by `write_callbacks`."""
    found: list[Any] = pickle.loads(path.read_bytes())
    return found


def _restoring_apart(callback: Any, number: int, results: Path) -> list[Any]:
    """Split an EarlyStopping that restores the best weights: one callback stops, another saves the weights."""
    if not isinstance(callback, keras.callbacks.EarlyStopping) or not callback.restore_best_weights:
        return [callback]
    stopping = copy.copy(callback)
    stopping.restore_best_weights = False
    return [stopping, BestWeights(stopping, number, results)]


def _anchored(callback: Any) -> Any:
    path = getattr(callback, "filepath", None)
    if not isinstance(path, str) or "://" in path:
        return callback
    own = copy.copy(callback)
    own.filepath = os.path.abspath(path)
    return own
