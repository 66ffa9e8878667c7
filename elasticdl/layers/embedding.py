"""`Embedding`: a Keras layer with rows on the parameter servers, if the job has parameter servers.

Owns the arithmetic from ids to vectors; `placement` decides where the rows come from.  Without a placement the layer
is an ordinary Keras embedding with its own variable.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from elasticdl.layers.placement import LayerError, TableSpec, current_placement
from elasticdl_client.errors import ModelDefinitionError

Tensor = Any
COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="elasticdl")
class Embedding(keras.layers.Layer):  # type: ignore[misc]
    """Turns ids into trainable vectors: `Embedding(8, combiner="mean")` maps ids [B, L] to [B, 8].

    Dense ids [B, L] become [B, L, output_dim], or [B, output_dim] with a combiner, which combines over axis 1; a
    combiner treats ids [B] as rows of one id.  Ragged and sparse ids must have two dimensions and need a combiner; a
    row without ids becomes zeros.  Ids are cast to int64.

    Under ParameterServerStrategy the table is on the parameter servers: a row is created on first use, and without
    `input_dim` any int64 is an id.  With other strategies `input_dim` is required.

    Args:
        output_dim: Length of a vector.
        input_dim: Number of ids: they are in [0, input_dim).  None: any int64 is an id.
        embeddings_initializer: Keras initializer of the rows.
        mask_zero: Treat id 0 as padding: mask it for later layers, and ignore it in a combiner.
        input_length: Ignored; accepted for models written for older versions of Keras.
        combiner: None, "sum", "mean", or "sqrtn" (the sum divided by the square root of the number of ids).
        embeddings_regularizer: Keras regularizer.  With parameter servers it applies to the rows that a minibatch
            looks up, each counted once; otherwise to the whole table.
        embeddings_constraint: Keras constraint.  With parameter servers it applies to the updated rows; otherwise to
            the whole table.

    Raises:
        ModelDefinitionError: An argument is out of range, or `input_dim` is missing where it is required.
    """

    def __init__(
        self,
        output_dim: int,
        input_dim: int | None = None,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        input_length: int | None = None,
        combiner: str | None = None,
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if combiner is not None and combiner not in COMBINERS:
            raise ModelDefinitionError(f"Embedding {self.name!r}: combiner={combiner!r} is not one of {COMBINERS}.")
        if output_dim < 1 or (input_dim is not None and input_dim < 1):
            raise ModelDefinitionError(f"Embedding {self.name!r}: output_dim and input_dim must be positive.")
        self.output_dim = output_dim
        self.input_dim = input_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero = mask_zero
        self.input_length = input_length
        self.combiner = combiner
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.autocast = False
        self.supports_masking = mask_zero
        self._placement = current_placement()

    def build(self, input_shape: Any = None) -> None:
        if self._placement is not None:
            self._placement.add(
                TableSpec(
                    self.name,
                    self.output_dim,
                    self.embeddings_initializer,
                    self.input_dim or 0,
                    self.embeddings_regularizer,
                    self.embeddings_constraint,
                )
            )
        elif self.input_dim is None:
            raise ModelDefinitionError(
                f"elasticdl.layers.Embedding {self.name!r} has no input_dim.",
                "Give it one, or use --distribution_strategy=ParameterServerStrategy, where any int64 is an id.",
            )
        else:
            self.embeddings = self.add_weight(
                shape=(self.input_dim, self.output_dim),
                initializer=self.embeddings_initializer,
                name="embeddings",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
        self.built = True

    def call(self, inputs: Tensor) -> Tensor:
        return tf.cast(self._combined(inputs), self.compute_dtype)

    def _combined(self, inputs: Tensor) -> Tensor:
        """Return the result in float32 or float64: half precision cannot count beyond 256 or 2,048 ids."""
        if isinstance(inputs, tf.RaggedTensor):
            return self._combine_rows(inputs.values, inputs.value_rowids(), inputs.nrows(), "ragged", inputs.shape.rank)
        if isinstance(inputs, tf.SparseTensor):
            rows = inputs.dense_shape[0]
            return self._combine_rows(inputs.values, inputs.indices[:, 0], rows, "sparse", inputs.shape.rank)
        ids = tf.cast(inputs, tf.int64)
        if self.combiner is not None and ids.shape.rank == 1:
            ids = ids[:, None]
        vectors = tf.reshape(self._vectors(tf.reshape(ids, [-1])), tf.concat([tf.shape(ids), [self.output_dim]], 0))
        vectors.set_shape([*ids.shape, self.output_dim])
        if self.combiner is None:
            return vectors
        counted = tf.not_equal(ids, 0) if self.mask_zero else tf.ones_like(ids, tf.bool)
        weights = tf.cast(counted, vectors.dtype)[..., None]
        return self._normalize(tf.reduce_sum(vectors * weights, axis=1), tf.reduce_sum(weights, axis=1))

    def _combine_rows(self, values: Tensor, row: Tensor, num_rows: Tensor, kind: str, rank: int | None) -> Tensor:
        if self.combiner is None or (rank is not None and rank != 2):
            raise LayerError(
                f"elasticdl.layers.Embedding {self.name!r} is given {kind} ids"
                + (" without a combiner." if self.combiner is None else f" of {rank} dimensions."),
                "Such ids must have two dimensions, and the layer combiner='sum', 'mean' or 'sqrtn'.",
            )
        ids = tf.cast(values, tf.int64)
        vectors = self._vectors(ids)
        if self.mask_zero:
            vectors *= tf.cast(tf.not_equal(ids, 0), vectors.dtype)[:, None]
        counts = tf.ones_like(ids, vectors.dtype) if not self.mask_zero else tf.cast(ids != 0, vectors.dtype)
        total = tf.math.unsorted_segment_sum(vectors, row, num_rows)
        return self._normalize(total, tf.math.unsorted_segment_sum(counts, row, num_rows)[:, None])

    def _normalize(self, total: Tensor, counts: Tensor) -> Tensor:
        if self.combiner == "sum":
            return total
        return tf.math.divide_no_nan(total, counts if self.combiner == "mean" else tf.sqrt(counts))

    def _vectors(self, ids: Tensor) -> Tensor:
        dtype = tf.float64 if self.compute_dtype == "float64" else tf.float32
        if self._placement is None:
            return tf.cast(self.own_rows(ids), dtype)
        return tf.cast(self._placement.rows(self.name, ids, self.output_dim), dtype)

    def own_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of the ids from the layer's own variable."""
        return tf.gather(tf.convert_to_tensor(self.embeddings), ids)

    def compute_mask(self, inputs: Tensor, mask: Any = None) -> Tensor | None:
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_spec(self, inputs: Any) -> Any:
        if self.combiner is None and not getattr(inputs, "sparse", False) and not getattr(inputs, "ragged", False):
            return keras.KerasTensor((*inputs.shape, self.output_dim), self.compute_dtype)
        rest = () if self.combiner is None else inputs.shape[2:]
        return keras.KerasTensor((inputs.shape[0], *rest, self.output_dim), self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        kept = input_shape if self.combiner is None else (input_shape[0], *input_shape[2:])
        return (*kept, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "input_dim": self.input_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
            "input_length": self.input_length,
            "combiner": self.combiner,
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
        }
