"""The inputs that a Keras model declares, and the features of a minibatch matched to them by name.

Keras itself maps a dictionary to inputs by position where its keys are not theirs.  Works on structures of tensors and
of their specs alike; never looks at values.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional  # the class of all functional models has no public name

from elasticdl.frameworks.framework import FEATURES_ALONE
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")
_GENERATED = re.compile(r"(keras_tensor|input_layer|inputs|features)(_\d+)?|")  # of Keras's, of exports
_TAKE_STRUCTURES = (keras.layers.Lambda, keras.layers.TFSMLayer, keras.utils.FeatureSpace)
_NAMES_HINT = (
    "Give the inputs the names of the features, keras.Input(…, name=…), or let feed return what the model takes; "
    "--columns chooses among the columns of a table."
)
_POSITIONS_HINT = f"Let feed return what the model takes. {FEATURES_ALONE}"
_TEXT_HINT = (
    "Turn texts into numbers first (elasticdl_preprocessing: Hashing, StringLookup, ToNumber). If the column of a CSV "
    'table holds numbers: --data_reader_params=\'column_dtypes={"NAME": "float64"}\'.'
)
_NUMBER_HINT = 'Declare keras.Input(…, dtype="…") as the feature is; or turn it into texts in feed.'
_WHOLE_HINT = (
    "Fractions and NaN (missing cells) would be cut to whole numbers: tf.cast in feed, declare the input float32, or "
    'read the column as whole numbers: --data_reader_params=\'column_dtypes={"NAME": "int64"}\'.'
)


@dataclass(frozen=True, slots=True)
class _Input:
    """One input as the model declares it.

    Attributes:
        name: empty: Keras made one up.
        dtype: None: any.
        shape: of a minibatch; None: any.
    """

    name: str = ""
    dtype: Any = None
    shape: Any = None

    @classmethod
    def of(cls, tensor: Any, key: str = "") -> _Input:
        name = key or ("" if _GENERATED.fullmatch(tensor.name or "") else tensor.name)
        return cls(name, tf.as_dtype(tensor.dtype), tf.TensorShape(tensor.shape))

    def __str__(self) -> str:
        return _words(self.name or "(without a name)", self.dtype)


_Leaf = Callable[[_Input, Any], Any]  # from an input and its feature


class ModelInputs:
    """The declared inputs of one model."""

    def __init__(self, where: str, structure: Any) -> None:
        """
        Args:
            where: the model is defined, for messages.
            structure: an input, or a dictionary, list or tuple of them, each a tensor or a spec; None: nothing is
                known, as where the model's own code takes the features.
        """
        self._where = where
        self._logged: set[str] = set()
        self._keys: list[Any] | None = None  # of a dictionary
        self._is_one = False
        self._inputs: list[_Input] | None = None  # None: not known, or nested: Keras compares the structures itself
        if structure is None or any(map(tf.nest.is_nested, _parts(structure))):
            return
        if isinstance(structure, Mapping):
            self._keys = list(structure)
            self._inputs = [_Input.of(part, str(key)) for key, part in structure.items()]
        else:
            self._is_one = not tf.nest.is_nested(structure)
            self._inputs = [part if isinstance(part, _Input) else _Input.of(part) for part in _parts(structure)]

    @classmethod
    def of(cls, where: str, model: Any) -> ModelInputs:
        """Those of a model; nothing is known of a subclass with a `call` of its own."""
        return cls(where, _structure(model))

    def matched(self, features: Any) -> Any:
        """The features as the model is called with them; further ones are left out.

        Args:
            features: batched, or their spec: one, or a dictionary, list or tuple of them.

        Raises:
            ModelDefinitionError: an input has no feature, or one of a wrong type, or it is not clear which.
        """
        return self._each(features, lambda declared, feature: self._checked(declared, feature, features))

    def served(self, features: Any) -> Any:
        """The spec of features as the model declares it: names, types and shapes are the inputs'."""
        return self._each(features, _declared)

    def adjusted(self, features: Any) -> Any:
        """Matched tensors, cast and reshaped to what is declared, as a Keras model does it itself."""
        return self._each(self.matched(features), _adjusted)

    def named(self, features: Any) -> Any:
        """Matched features by the names of their inputs, for messages."""
        if self._inputs is None or isinstance(features, Mapping):
            return features
        pairs = zip(self._inputs, _parts(features), strict=True)
        return {declared.name or f"input {k}": feature for k, (declared, feature) in enumerate(pairs)}

    def log_left_out(self, features: Any) -> None:
        """Says once which of the features no input takes."""
        if self._inputs is None or not isinstance(features, Mapping):
            return
        names = [declared.name for declared in self._inputs]
        left_out = [str(key) for key in features if str(key) not in names]
        if not left_out or len(features) == len(names):
            return
        line = f"The model's inputs are {', '.join(names)}; it is not given the features {', '.join(left_out)}"
        if line not in self._logged:
            self._logged.add(line)
            _log.info(line)

    def _each(self, features: Any, leaf: _Leaf) -> Any:
        """`leaf` of every input and its feature, in the structure of the inputs."""
        if self._inputs is None:
            return features
        given = self._in_order(features)
        found = [leaf(declared, feature) for declared, feature in zip(self._inputs, given, strict=True)]
        if self._keys is not None:
            return dict(zip(self._keys, found, strict=True))
        return found[0] if self._is_one else tuple(found)

    def _in_order(self, features: Any) -> Sequence[Any]:
        """The feature of each input."""
        inputs = self._inputs or []
        if not isinstance(features, Mapping):
            if self._is_one and inputs[0].dtype is None:
                return [features]
            given = features if isinstance(features, list | tuple) else (features,)
            if len(given) != len(inputs):
                what = f"the model takes {len(inputs)} and is given {len(given)}"
                raise self._error(features, what, _POSITIONS_HINT)
            return given
        if len(inputs) == len(features) == 1 and _GENERATED.fullmatch(inputs[0].name):
            return list(features.values())
        keys = self._keys or [declared.name for declared in inputs]
        missing = [str(key) for key in keys if key != "" and key not in features]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise self._error(features, f"the model's {', '.join(missing)} {verb} missing")
        if "" not in keys and len(set(keys)) == len(keys):
            return [features[key] for key in keys]
        raise self._error(features, "which of them is which input cannot be seen from their names")

    def _checked(self, declared: _Input, feature: Any, features: Any) -> Any:
        if declared.dtype is None:
            return feature
        if tf.nest.is_nested(feature):
            hint = _NAMES_HINT if isinstance(features, Mapping) else _POSITIONS_HINT
            raise self._error(features, f"the input {declared} is given a {type(feature).__name__}", hint)
        dtype = tf.as_dtype(feature.dtype)
        if dtype == tf.string and declared.dtype != tf.string:
            hint = _TEXT_HINT
        elif dtype != tf.string and declared.dtype == tf.string:
            hint = _NUMBER_HINT
        elif dtype.is_floating and declared.dtype.is_integer:
            hint = _WHOLE_HINT
        else:
            return feature
        raise self._error(features, f"the input {declared} is given a feature of type {dtype.name}", hint)

    def _error(self, features: Any, what: str, hint: str = _NAMES_HINT) -> ModelDefinitionError:
        inputs = ", ".join(map(str, self._inputs or []))
        return ModelDefinitionError(
            f"{self._where}: the features do not fit the inputs of the model: {what}.\n"
            f"  inputs: {inputs}\n  features: {_listed(features)}",
            hint,
        )


@contextmanager
def nested_models_checked(where: str) -> Iterator[None]:
    """Functional models called inside, by the user's own code, must not be given dictionaries of other keys.

    Raises:
        ModelDefinitionError: one is.
    """
    call = Functional.call

    @functools.wraps(call)  # Keras looks at the arguments of `call`, as `call_model` does
    def checked(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        declared = model.input
        if isinstance(inputs, Mapping) and isinstance(declared, Mapping) and set(inputs) != set(declared):
            raise ModelDefinitionError(
                f"{where}: the model {model.name!r} inside it is called with other keys than those of its inputs, "
                f"which Keras would take by position.\n  inputs: {_listed(declared)}\n  given: {_listed(inputs)}",
                "Call it with its own inputs alone: {name: features[name] for name in …}.",
            )
        return call(model, inputs, *args, **kwargs)

    Functional.call = checked
    try:
        yield
    finally:
        Functional.call = call


def _structure(model: Any) -> Any:
    """Return the inputs that a model declares; None if it declares none."""
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        first = model.layers[0] if model.layers else None
        if isinstance(first, keras.Model):
            return _structure(first)
        declared = _inputs_of(model)
        if declared is not None and len(declared) == 1:
            return declared[0]
        is_keras = type(first).__module__.partition(".")[0] == "keras"
        return _Input() if is_keras and not isinstance(first, _TAKE_STRUCTURES) else None
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model.input
    return None


def _inputs_of(model: Any) -> Any:
    """A list, or None before a Sequential model is built."""
    try:
        return model.inputs
    except (AttributeError, ValueError):  # the type depends on Keras's version
        return None


def _declared(declared: _Input, feature: Any) -> Any:
    if declared.dtype is None or type(feature) is not tf.TensorSpec:
        return feature
    return tf.TensorSpec([None, *declared.shape[1:]], declared.dtype, declared.name or None)


def _adjusted(declared: _Input, feature: Any) -> Any:
    if declared.dtype is None or not tf.is_tensor(feature) or isinstance(feature, tf.RaggedTensor | tf.SparseTensor):
        return feature
    if feature.shape.rank + 1 == declared.shape.rank and declared.shape[-1] == 1:
        feature = tf.expand_dims(feature, -1)
    return feature if feature.dtype == declared.dtype else tf.cast(feature, declared.dtype)


def _parts(structure: Any) -> list[Any]:
    if isinstance(structure, Mapping):
        return list(structure.values())
    return list(structure) if isinstance(structure, list | tuple) else [structure]


def _listed(features: Any) -> str:
    """Describe names and types."""
    if isinstance(features, Mapping):
        return ", ".join(_words(str(key), getattr(part, "dtype", None)) for key, part in features.items())
    return ", ".join(_words("(without a name)", getattr(part, "dtype", None)) for part in _parts(features))


def _words(name: str, dtype: Any) -> str:
    return name if dtype is None else f"{name} {tf.as_dtype(dtype).name}"
