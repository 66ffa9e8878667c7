"""Embedding tables on parameter servers: which ones are supported, and their description for the servers.

`Swap` moves large `keras.layers.Embedding` tables of the user's model to the parameter servers, without changes of the
user's code.

While the user's function makes the model, `Embedding.build` creates no variable for a large table: the layer becomes a
`MovedEmbedding` with rows from the placement.  A layer whose whole table is needed (its `embeddings` are read, or its
weights set) gets a variable after all, as long as the model is being made.

Owns the lists of supported settings; the parameter server checks them again, by name.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.frameworks.framework import Table
from elasticdl.layers.placement import LayerError, Placement, RowsNotFetched, TableSpec
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")

_MB = 1 << 20
_plain_build = keras.layers.Embedding.build
_plain_set_weights = keras.layers.Layer.set_weights


class Unmovable(LayerError):
    """The model is made, and its code wants a moved table as a whole: make it again with the table in the workers."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(
            f"The table of the embedding {layer} is on the parameter servers, but wanted as a whole: {reason}.",
            "Keep it in the workers: a larger --embedding_threshold.",
        )
        self.layer = layer
        self.reason = reason


class Swap:
    """The moved and the kept tables of one model."""

    def __init__(self, placement: Placement, threshold_bytes: int, kept: dict[str, str] | None = None) -> None:
        """
        Args:
            placement: The placement of moved tables.
            threshold_bytes: Larger tables are moved.
            kept: Paths of layers that are not moved, with the reason.
        """
        self.placement = placement
        self._threshold_bytes = threshold_bytes
        self._reasons = dict(kept or {})
        self._moved: dict[str, Any] = {}  # by table
        self._sizes: dict[str, int] = {}  # sizes of kept tables, by layer
        self._thread = threading.get_ident()
        self._making = False

    @contextmanager
    def making(self) -> Iterator[None]:
        """Return a context in which large tables of layers made by this thread are moved."""

        def build(layer: Any, input_shape: Any = None) -> None:
            if layer.built or threading.get_ident() != self._thread or not self._move(layer):
                _plain_build(layer, input_shape)

        def set_weights(layer: Any, weights: Any) -> None:
            if threading.get_ident() == self._thread:
                for part in list(layer._flatten_layers()):
                    if isinstance(part, MovedEmbedding):
                        self.keep(part, "its weights are set")
            _plain_set_weights(layer, weights)

        keras.layers.Embedding.build, keras.layers.Layer.set_weights = build, set_weights
        self._making = True
        try:
            yield
        finally:
            keras.layers.Embedding.build, keras.layers.Layer.set_weights = _plain_build, _plain_set_weights
            self._making = False

    def keep_frozen(self, model: Any) -> None:
        """Keep frozen tables in the model, since they need no parameter server; call this once the model is made."""
        for layer in list(model._flatten_layers()):
            if isinstance(layer, MovedEmbedding) and not layer.trainable:
                self.keep(layer, "it is not trainable")

    def drop_strangers(self, model: Any) -> None:
        """Remove tables of layers outside of the model, for example after a copy; call this once the model is made."""
        own = {id(layer) for layer in model._flatten_layers()}
        for table, layer in list(self._moved.items()):
            if id(layer) not in own:
                self.placement.remove(table)
                del self._moved[table]

    def log(self, model: Any) -> None:
        """Log which tables were moved, and which large ones were not, with the reason."""
        for layer in model._flatten_layers():
            known = isinstance(layer, MovedEmbedding) or layer.path in self._sizes
            if isinstance(layer, keras.layers.Embedding) and not known and _size_bytes(layer) > self._threshold_bytes:
                self._note(layer, "it was made before the function that makes the model was called")
        if self._moved:
            told = [
                f"{name} ({layer.input_dim:,} x {layer.output_dim}, {_size_bytes(layer) / _MB:,.1f} MB)"
                for name, layer in self._moved.items()
            ]
            _log.info("Embedding tables on the parameter servers: %s", ", ".join(told))
        for path, size_bytes in self._sizes.items():
            _log.info(
                "The embedding %s (%.1f MB) stays an ordinary variable: %s", path, size_bytes / _MB, self._reasons[path]
            )

    def keep(self, layer: MovedEmbedding, reason: str) -> None:
        """Give a moved layer its own variable.

        Raises:
            Unmovable: The model is already made.
        """
        if not self._making:
            raise Unmovable(layer.path, reason)
        self.placement.remove(layer.table)
        del self._moved[layer.table]
        self._note(layer, reason)
        for name in ("swap", "table"):
            object.__delattr__(layer, name)
        object.__setattr__(layer, "__class__", keras.layers.Embedding)
        layer.built = False
        layer._tracker.unlock()
        with layer._open_name_scope():
            _plain_build(layer)
        layer._lock_state()

    def _move(self, layer: Any) -> bool:
        if _size_bytes(layer) <= self._threshold_bytes:
            return False
        path = layer.path or layer.name
        spec = TableSpec(
            self._name(layer),
            layer.output_dim,
            layer.embeddings_initializer,
            layer.input_dim,
            layer.embeddings_regularizer,
            layer.embeddings_constraint,
        )
        reason = self._reasons.get(path) or _peculiarity(layer) or obstacle(spec)
        if reason:
            self._note(layer, reason)
            return False
        self.placement.add(spec)
        object.__setattr__(layer, "swap", self)
        object.__setattr__(layer, "table", spec.name)
        object.__setattr__(layer, "__class__", MovedEmbedding)
        self._moved[spec.name] = layer
        return True

    def _note(self, layer: Any, reason: str) -> None:
        path = layer.path or layer.name
        self._sizes[path], self._reasons[path] = _size_bytes(layer), reason

    def _name(self, layer: Any) -> str:
        """Return a unique table name: the layer's name; layers of the same name get the suffixes _1, _2 …"""
        name, number = layer.name, 0
        while name in self.placement.tables:
            number += 1
            name = f"{layer.name}_{number}"
        return str(name)


@keras.saving.register_keras_serializable(package="elasticdl")
class MovedEmbedding(keras.layers.Embedding):  # type: ignore[misc]
    """A `keras.layers.Embedding` without a variable: no such layer is ever made, a layer becomes one.

    From its config a `keras.layers.Embedding` is made, so that a model can be made from another's.
    """

    swap: Swap
    table: str

    @property
    def embeddings(self) -> Any:
        self.swap.keep(self, "its embeddings are read")
        return self.embeddings

    @property
    def _embeddings(self) -> Any:
        return self.embeddings

    @_embeddings.setter
    def _embeddings(self, value: Any) -> None:
        raise AssertionError("a moved table has no variable")

    def call(self, inputs: Any) -> Any:
        if inputs.dtype not in ("int32", "int64"):
            inputs = tf.cast(inputs, tf.int32)
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._vectors(inputs.flat_values))
        return self._vectors(tf.sparse.to_dense(inputs) if isinstance(inputs, tf.SparseTensor) else inputs)

    def get_weights(self) -> Any:
        self.swap.keep(self, "its weights are read")
        return self.get_weights()

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        self.swap.keep(self, "it has LoRA")
        self.enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        self.swap.keep(self, "it is quantized")
        self.quantize(*args, **kwargs)

    def load_own_variables(self, store: Any) -> None:
        self.swap.keep(self, "its weights are loaded")
        self.load_own_variables(store)

    def save_own_variables(self, store: Any) -> None:
        """Save nothing: the rows are on the parameter servers."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return keras.layers.Embedding.from_config(config)

    def _vectors(self, inputs: Any) -> Any:
        if self.table not in self.swap.placement.tables:
            raise Unmovable(self.path, "the layer is no part of the model")
        ids = tf.cast(tf.reshape(inputs, [-1]), tf.int64)
        try:
            rows = self.swap.placement.rows(self.table, ids, self.output_dim)
        except RowsNotFetched as error:
            raise Unmovable(self.path, "compute_loss looks it up") from error
        vectors = tf.reshape(rows, tf.concat([tf.shape(inputs), [self.output_dim]], 0))
        vectors.set_shape([*inputs.shape, self.output_dim])
        return tf.cast(vectors, self.compute_dtype)


def _size_bytes(layer: Any) -> int:
    return int(layer.input_dim) * int(layer.output_dim) * 4


def _peculiarity(layer: Any) -> str:
    """Return the property of the layer itself that keeps its table in the workers."""
    if type(layer) is not keras.layers.Embedding:
        return f"{type(layer).__name__} is a subclass of keras.layers.Embedding"
    if layer.variable_dtype != "float32":
        return f"its rows are {layer.variable_dtype}, not float32"
    if not layer.trainable:
        return "it is not trainable"
    if layer.lora_rank:
        return "it has LoRA"
    return "it is quantized" if layer.quantization_mode else ""


_INITIALIZERS = (
    *("Zeros", "Ones", "Constant", "RandomUniform", "RandomNormal", "TruncatedNormal", "VarianceScaling"),
    *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal", "LecunUniform", "LecunNormal"),
)
_ALONG_ROWS = ("MaxNorm", "UnitNorm", "MinMaxNorm")
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def obstacle(spec: TableSpec) -> str:
    """Return why a parameter server cannot hold the table; empty: it can."""
    if not _supports_initializer(spec):
        return f"its initializer is {_name(spec.initializer)}; supported are {', '.join(_INITIALIZERS)}"
    if spec.regularizer is not None and type(spec.regularizer) not in _REGULARIZERS:
        return f"its embeddings_regularizer is {_name(spec.regularizer)}; supported are L1, L2, L1L2"
    if spec.constraint is not None and not _supports_constraint(spec.constraint):
        return (
            f"its embeddings_constraint is {_name(spec.constraint)}; supported are NonNeg, and "
            f"{', '.join(_ALONG_ROWS)} with axis=1, which bound each row alone"
        )
    return ""


def describe_table(spec: TableSpec) -> Table:
    """Return the description of a table for the parameter servers.

    Raises:
        ModelDefinitionError: A parameter server cannot hold the table.
    """
    found = obstacle(spec)
    if found:
        raise ModelDefinitionError(f"The embedding {spec.name!r} cannot be on a parameter server: {found}.")
    constraint = "" if spec.constraint is None else _config(keras.constraints.serialize(spec.constraint))
    initializer = _config(keras.initializers.serialize(spec.initializer))
    return Table(spec.name, spec.dim, initializer, spec.input_dim, constraint)


def _supports_initializer(spec: TableSpec) -> bool:
    if not isinstance(spec.initializer, keras.initializers.Initializer):
        return False
    described = keras.initializers.serialize(spec.initializer)
    if not _is_keras(described) or described["class_name"] not in _INITIALIZERS:
        return False
    config = described["config"]
    if config.get("input_axes") is not None or config.get("output_axes") is not None:
        return False
    return described["class_name"] != "Constant" or np.isscalar(config.get("value", 0.0))


def _supports_constraint(constraint: Any) -> bool:
    described = keras.constraints.serialize(constraint)
    if not _is_keras(described):
        return False
    if described["class_name"] in _ALONG_ROWS:
        return described["config"].get("axis", 0) in (1, -1, [1], [-1])
    return bool(described["class_name"] == "NonNeg")


def _is_keras(described: Any) -> bool:
    if not isinstance(described, dict) or described.get("registered_name"):
        return False
    return str(described.get("module")).startswith("keras")


def _config(described: dict[str, Any]) -> str:
    return json.dumps({"class_name": described["class_name"], "config": described["config"]}, sort_keys=True)


def _name(described: Any) -> str:
    return getattr(described, "__name__", None) or type(described).__name__
