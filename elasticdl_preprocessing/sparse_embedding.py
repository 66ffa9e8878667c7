"""`SparseEmbedding`: one vector for all ids of a row.

The layer contains an ordinary `keras.layers.Embedding`; its table moves to the parameter servers like other tables of
Keras.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from elasticdl_preprocessing.layer import PACKAGE, PreprocessingLayer, Tensor, as_tensor, keep_cells

COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package=PACKAGE)
class SparseEmbedding(PreprocessingLayer):
    """Combines the vectors of all ids of a row: `SparseEmbedding(100, 8)` maps ids [B, L] to [B, 8].

    Ids are sparse, ragged or dense; dense ids 0 are padding and are ignored.  A row without ids becomes zeros.

    Args:
        input_dim: Number of ids: they are in [0, input_dim).
        output_dim: Length of a vector.
        embeddings_initializer: Keras initializer of the vectors.
        combiner: "sum", "mean", or "sqrtn" (the sum divided by the square root of the number of ids).

    Raises:
        ValueError: `combiner` is unknown, or the ids do not have two dimensions.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        combiner: str = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if combiner not in COMBINERS:
            raise ValueError(f"SparseEmbedding: combiner={combiner!r} is not one of {COMBINERS}.")
        self.combiner = combiner
        self.embedding = keras.layers.Embedding(
            input_dim, output_dim, embeddings_initializer, name=self.name, dtype=self.dtype_policy
        )

    @property
    def input_dim(self) -> int:
        """The number of ids."""
        return int(self.embedding.input_dim)

    @property
    def output_dim(self) -> int:
        """The length of a vector."""
        return int(self.embedding.output_dim)

    def build(self, input_shape: Any = None) -> None:
        self.embedding.build((None,))
        self.built = True

    def call(self, inputs: Any) -> Tensor:
        inputs = as_tensor(inputs)
        if inputs.shape.rank not in (None, 2):
            raise ValueError(f"SparseEmbedding {self.name!r} is given ids of {inputs.shape.rank} dimensions, not two.")
        if isinstance(inputs, tf.Tensor):
            padding = tf.constant(0, inputs.dtype)
            inputs = keep_cells(tf.RaggedTensor.from_tensor(inputs), lambda ids: tf.not_equal(ids, padding))
        if isinstance(inputs, tf.RaggedTensor):
            ids, row, num_rows = inputs.values, inputs.value_rowids(), inputs.nrows()
        else:
            ids, row, num_rows = inputs.values, inputs.indices[:, 0], inputs.dense_shape[0]
        vectors = self.embedding(tf.cast(ids, tf.int64))
        if self.compute_dtype != "float64":  # half precision cannot count beyond 256 or 2,048 ids
            vectors = tf.cast(vectors, tf.float32)
        return tf.cast(self._combined(vectors, row, num_rows), self.compute_dtype)

    def _combined(self, vectors: Tensor, row: Tensor, num_rows: Tensor) -> Tensor:
        total = tf.math.unsorted_segment_sum(vectors, row, num_rows)
        if self.combiner == "sum":
            return total
        counts = tf.math.unsorted_segment_sum(tf.ones_like(vectors[:, :1]), row, num_rows)
        return tf.math.divide_no_nan(total, counts if self.combiner == "mean" else tf.sqrt(counts))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor((inputs.shape[0], self.output_dim), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embedding.embeddings_initializer),
            "combiner": self.combiner,
        }
