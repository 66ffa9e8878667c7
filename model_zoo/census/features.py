"""UCI's Adult, the 1994 census: columns, their preprocessing, and other code shared by all models on it.

Does a person earn more than 50,000 dollars a year?  Records are `tf.train.Example` with a feature for each column,
numbers as floats and categories as bytes (missing: `?`), and `label` (int64, 0 or 1), as made by
`scripts/gen_dataset.py census`.

The default statistics are those of the training split; a file of `elasticdl analyze` named by ELASTICDL_STATISTICS
replaces them.
"""

import keras
import tensorflow as tf

from elasticdl_preprocessing import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    IndexLookup,
    Normalizer,
    get_avg,
    get_bucket_boundaries,
    get_stddev,
    get_vocabulary,
)

NUMBERS = {  # name: mean, standard deviation, boundaries of buckets
    "age": (38.6, 13.6, [18, 22, 26, 30, 34, 38, 42, 46, 50, 55, 60, 65, 70]),
    "education_num": (10.1, 2.6, [5, 7, 9, 10, 11, 12, 13, 14, 15]),
    "capital_gain": (1078.0, 7385.0, [1, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 10_000, 15_000, 99_000]),
    "capital_loss": (87.3, 403.0, [1, 1400, 1550, 1700, 1800, 1850, 1900, 1950, 2000, 2200, 2400]),
    "hours_per_week": (40.4, 12.3, [15, 25, 35, 40, 41, 45, 50, 55, 60]),
}
VOCABULARIES = {
    "workclass": [
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked", "?",
    ],
    "education": [
        "Preschool", "1st-4th", "5th-6th", "7th-8th", "9th", "10th", "11th", "12th", "HS-grad", "Some-college",
        "Assoc-voc", "Assoc-acdm", "Bachelors", "Masters", "Prof-school", "Doctorate",
    ],
    "marital_status": [
        "Never-married", "Married-civ-spouse", "Married-spouse-absent", "Married-AF-spouse", "Separated", "Divorced",
        "Widowed",
    ],
    "occupation": [
        "Adm-clerical", "Armed-Forces", "Craft-repair", "Exec-managerial", "Farming-fishing", "Handlers-cleaners",
        "Machine-op-inspct", "Other-service", "Priv-house-serv", "Prof-specialty", "Protective-serv", "Sales",
        "Tech-support", "Transport-moving", "?",
    ],
    "relationship": ["Husband", "Wife", "Own-child", "Not-in-family", "Other-relative", "Unmarried"],
    "race": ["White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other"],
    "sex": ["Male", "Female"],
}  # fmt: skip
HASHED = {"native_country": 64}  # name: number of hashes
PARSE_BATCH = 512


def column_inputs() -> dict[str, keras.KerasTensor]:
    """Return an input [batch, 1] for each column."""
    inputs = {name: keras.Input((1,), name=name) for name in NUMBERS}
    return inputs | {name: keras.Input((1,), dtype="string", name=name) for name in (*VOCABULARIES, *HASHED)}


def scaled_numbers(inputs: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    """Return the numbers [batch, 5], normalised to mean 0 and standard deviation 1."""
    scaled = []
    for name, (mean, deviation, _) in NUMBERS.items():
        scaled.append(Normalizer(get_avg(name, mean), get_stddev(name, deviation))(inputs[name]))
    return keras.layers.Concatenate()(scaled)


def column_ids(inputs: dict[str, keras.KerasTensor]) -> tuple[keras.KerasTensor, int]:
    """Return all columns as ids [batch, 13] in one range (numbers as buckets), and the number of ids."""
    ids, sizes = [], []
    for name, (_, _, boundaries) in NUMBERS.items():
        buckets = Discretization(get_bucket_boundaries(name, boundaries))
        ids.append(buckets(inputs[name]))
        sizes.append(buckets.num_bins())
    for name, vocabulary in VOCABULARIES.items():
        lookup = IndexLookup(get_vocabulary(name, vocabulary))
        ids.append(lookup(inputs[name]))
        sizes.append(lookup.vocab_size())
    for name, num_bins in HASHED.items():
        ids.append(Hashing(num_bins)(inputs[name]))
        sizes.append(num_bins)
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    return ConcatenateWithOffset(offsets)(ids), sum(sizes)


def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    """Return the loss of each sample for logits [batch]."""
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, tf.float32), logits=predictions)


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam with little momentum: late gradients of asynchronous workers already act like momentum."""
    return keras.optimizers.Adam(0.002, beta_1=0.5)


def feed(dataset: tf.data.Dataset, mode: str, metadata: object) -> tf.data.Dataset:
    def parse(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor] | dict[str, tf.Tensor]:
        columns = {name: tf.io.FixedLenFeature([1], tf.float32) for name in NUMBERS}
        columns |= {name: tf.io.FixedLenFeature([1], tf.string) for name in (*VOCABULARIES, *HASHED)}
        if mode == "prediction":
            return tf.io.parse_example(records, columns)
        example = tf.io.parse_example(records, columns | {"label": tf.io.FixedLenFeature([], tf.int64)})
        label = example.pop("label")
        return example, label

    if mode == "training":
        dataset = dataset.shuffle(4096)
    return dataset.batch(PARSE_BATCH).map(parse).unbatch()


def eval_metrics_fn() -> dict[str, keras.metrics.Metric]:
    return {
        "auc": keras.metrics.AUC(from_logits=True),
        "accuracy": keras.metrics.BinaryAccuracy(threshold=0.0),
    }
