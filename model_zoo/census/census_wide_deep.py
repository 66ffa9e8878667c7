"""Census with a wide part (a weight per id) and a deep part (a dense network over embeddings of ids, and numbers).

Source: Cheng et al., arXiv:1606.07792.
"""

import keras

from elasticdl.layers import Embedding

from .features import column_ids, column_inputs, eval_metrics_fn, feed, loss, optimizer, scaled_numbers

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(embedding_dim: int = 8, hidden: tuple[int, ...] = (64, 32)) -> keras.Model:
    inputs = column_inputs()
    ids, num_ids = column_ids(inputs)
    wide = Embedding(1, input_dim=num_ids, embeddings_initializer="zeros", combiner="sum", name="wide")(ids)
    vectors = Embedding(embedding_dim, input_dim=num_ids, name="vectors")(ids)
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), scaled_numbers(inputs)])
    for units in hidden:
        deep = keras.layers.Dense(units, activation="relu")(deep)
    deep = keras.layers.Dense(1)(deep)
    logits = keras.layers.Reshape((), name="logits")(keras.layers.Add()([wide, deep]))
    return keras.Model(inputs, logits, name="wide_deep")
