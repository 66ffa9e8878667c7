"""Criteo's display advertising: columns, their preprocessing, and other code shared by all models on it.

Is an advertisement clicked on?  Records are `tf.train.Example` with `I1` to `I13` (counts, floats), `C1` to `C26`
(categories, bytes), without a feature for a missing value, and `label` (int64, 0 or 1), as made by
`scripts/gen_dataset.py criteo`.

A file of `elasticdl analyze` named by ELASTICDL_STATISTICS replaces the default statistics.
"""

import keras
import tensorflow as tf

from elasticdl.layers import Embedding
from elasticdl_preprocessing import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    Normalizer,
    get_bucket_boundaries,
    get_distinct_count,
)

COUNTS = {  # name: mean and standard deviation of log(1 + count)
    "I1": (0.7, 0.9), "I2": (2.0, 2.0), "I3": (2.3, 1.3), "I4": (1.8, 1.0), "I5": (7.1, 3.0), "I6": (3.5, 1.8),
    "I7": (1.6, 1.3), "I8": (2.0, 1.2), "I9": (3.6, 1.7), "I10": (0.4, 0.4), "I11": (0.9, 0.8), "I12": (0.3, 0.5),
    "I13": (1.9, 1.1),
}  # fmt: skip
BOUNDARIES = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024, 4096, 16_384]  # below 0: missing
DISTINCT = {  # name: different values among 46 million records
    "C1": 1460, "C2": 583, "C3": 10_131_227, "C4": 2_202_608, "C5": 305, "C6": 24, "C7": 12_517, "C8": 633, "C9": 3,
    "C10": 93_145, "C11": 5683, "C12": 8_351_593, "C13": 3194, "C14": 27, "C15": 14_992, "C16": 5_461_306, "C17": 10,
    "C18": 5652, "C19": 2173, "C20": 4, "C21": 7_046_547, "C22": 18, "C23": 15, "C24": 286_181, "C25": 105,
    "C26": 142_572,
}  # fmt: skip
MISSING = -1.0
PARSE_BATCH = 512


def column_inputs() -> dict[str, keras.KerasTensor]:
    """Return an input [batch, 1] for each column."""
    inputs = {name: keras.Input((1,), name=name) for name in COUNTS}
    return inputs | {name: keras.Input((1,), dtype="string", name=name) for name in DISTINCT}


def scaled_counts(inputs: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    """Return the logarithms of the counts [batch, 13], normalised; a missing count is treated as 0."""
    scaled = []
    for name, (mean, deviation) in COUNTS.items():
        logarithm = keras.ops.log1p(keras.ops.relu(inputs[name]))
        scaled.append(Normalizer(mean, deviation)(logarithm))
    return keras.layers.Concatenate()(scaled)


def column_ids(inputs: dict[str, keras.KerasTensor], max_bins: int) -> tuple[keras.KerasTensor, int]:
    """Return all columns as ids [batch, 39] in one range (counts as buckets), and the number of ids.

    Args:
        inputs: The inputs of the columns.
        max_bins: Maximum number of hashes per category; the default is the number of its values.
    """
    ids, sizes = [], []
    for name in COUNTS:
        buckets = Discretization(get_bucket_boundaries(name, BOUNDARIES))
        ids.append(buckets(inputs[name]))
        sizes.append(buckets.num_bins())
    for name, default in DISTINCT.items():
        num_bins = min(get_distinct_count(name, default), max_bins)
        ids.append(Hashing(num_bins)(inputs[name]))
        sizes.append(num_bins)
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    return ConcatenateWithOffset(offsets)(ids), sum(sizes)


def vectors_of(ids: keras.KerasTensor, num_ids: int, dim: int) -> keras.KerasTensor:
    """Return the embeddings of the ids [batch, 39, dim]; the table is on the parameter servers, if there are any."""
    return Embedding(dim, input_dim=num_ids, name="vectors")(ids)


def linear_part(ids: keras.KerasTensor, num_ids: int) -> keras.KerasTensor:
    """Return the sum of a weight per id, [batch, 1]."""
    return Embedding(1, input_dim=num_ids, embeddings_initializer="zeros", combiner="sum", name="weights")(ids)


def dense_part(x: keras.KerasTensor, hidden: tuple[int, ...]) -> keras.KerasTensor:
    """Return the output of dense layers, [batch, hidden[-1]]."""
    for units in hidden:
        x = keras.layers.Dense(units, activation="relu")(x)
    return x


def logits_of(*parts: keras.KerasTensor) -> keras.KerasTensor:
    """Return the sum of parts [batch, 1] as [batch]."""
    total = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
    return keras.layers.Reshape((), name="logits")(total)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Return the loss of each sample for logits [batch]."""
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, tf.float32), logits=predictions)


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam without momentum: embedding rows are used rarely, so the momentum of their last gradient is stale."""
    return keras.optimizers.Adam(0.001, beta_1=0.0)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor] | dict[str, tf.Tensor]:
        columns = {name: tf.io.FixedLenFeature([1], tf.float32, [MISSING]) for name in COUNTS}
        columns |= {name: tf.io.FixedLenFeature([1], tf.string, [""]) for name in DISTINCT}
        if mode == "prediction":
            return tf.io.parse_example(records, columns)
        example = tf.io.parse_example(records, columns | {"label": tf.io.FixedLenFeature([], tf.int64)})
        label = example.pop("label")
        return example, label

    if mode == "training":
        dataset = dataset.shuffle(10_000)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {"auc": keras.metrics.AUC(from_logits=True)}
