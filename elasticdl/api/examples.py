"""For a `feed` without TensorFlow: reads records that are tf.train.Example."""

from elasticdl.data.example import parse_examples

__all__ = ["parse_examples"]
