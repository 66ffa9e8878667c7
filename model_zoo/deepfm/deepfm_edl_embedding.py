"""DeepFM on the frappe app-usage log with embedding rows on the parameter servers."""

import keras

from elasticdl.layers import Embedding

from .frappe import NUM_FIELDS, NUM_IDS, deepfm, eval_metrics_fn, feed, loss, optimizer

__all__ = ["custom_model", "eval_metrics_fn", "feed", "loss", "optimizer"]


def custom_model(embedding_dim: int = 16, hidden: int = 64) -> keras.Model:
    ids = keras.Input((NUM_FIELDS,), dtype="int64", name="feature")
    factors = Embedding(embedding_dim, input_dim=NUM_IDS, name="factors")(ids)
    weights = Embedding(1, input_dim=NUM_IDS, embeddings_initializer="zeros", name="weights")(ids)
    return keras.Model(ids, deepfm(factors, weights, hidden), name="deepfm")
