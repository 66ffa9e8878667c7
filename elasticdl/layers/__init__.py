"""Keras layers for the user's models."""

from elasticdl.layers.embedding import Embedding

__all__ = ["Embedding"]
