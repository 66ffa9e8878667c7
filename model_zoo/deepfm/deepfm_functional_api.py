"""DeepFM on the frappe app-usage log with embeddings that are ordinary Keras layers (dense variables of the job)."""

import keras

from .frappe import NUM_FIELDS, NUM_IDS, deepfm, eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(embedding_dim: int = 16, hidden: int = 64) -> keras.Model:
    ids = keras.Input((NUM_FIELDS,), dtype="int64", name="feature")
    factors = keras.layers.Embedding(NUM_IDS, embedding_dim, name="factors")(ids)
    weights = keras.layers.Embedding(NUM_IDS, 1, embeddings_initializer="zeros", name="weights")(ids)
    return keras.Model(ids, deepfm(factors, weights, hidden), name="deepfm")
