"""Census with a dense network over embeddings of the columns' ids; the embedding is an ordinary Keras layer."""

import keras

from .features import column_ids, column_inputs, eval_metrics_fn, feed, loss, optimizer, scaled_numbers

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(embedding_dim: int = 16, hidden: tuple[int, ...] = (16, 16)) -> keras.Model:
    inputs = column_inputs()
    ids, num_ids = column_ids(inputs)
    vectors = keras.layers.Embedding(num_ids, embedding_dim, name="vectors")(ids)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), scaled_numbers(inputs)])
    for units in hidden:
        x = keras.layers.Dense(units, activation="relu")(x)
    logits = keras.layers.Reshape((), name="logits")(keras.layers.Dense(1)(x))
    return keras.Model(inputs, logits, name="dnn")
