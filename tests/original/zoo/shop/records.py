"""Records of the module beside it, which imports this as modules of the original did."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elasticdl.python.common.constants import Mode

LENGTH = 4


def parse(record: Any, mode: Any) -> Any:
    """Ids [LENGTH] and a label from float32 numbers; the ids alone in prediction."""
    numbers = tf.io.decode_raw(record, tf.float32)
    features = {"ids": tf.cast(numbers[:LENGTH], tf.int64)}
    return features if mode == Mode.PREDICTION else (features, tf.cast(numbers[LENGTH], tf.int32))
