"""Keras layers for the user's models; layers for raw columns are in `elasticdl_preprocessing`."""

from elasticdl.layers.embedding import Embedding

__all__ = ["Embedding"]
