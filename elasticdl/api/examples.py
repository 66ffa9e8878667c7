"""Parse tf.train.Example records in a `feed` without TensorFlow."""

from elasticdl.data.example import parse_examples

__all__ = ["parse_examples"]
