"""DeepFM on Criteo's display advertising as an Estimator with a `model_fn`, for TensorFlow's own parameter servers.

    python deepfm_estimator.py --training_data=criteo_sample.txt --model_dir=/tmp/deepfm            (alone)
    elasticdl train --job_command="python -m model_zoo.deepfm.deepfm_estimator …" --need_tf_config …

Rows are the label, 13 counts and 26 categories in hexadecimal, separated by commas, under a header; any of them may be
missing.  Categories are hashed.  Needs TensorFlow 2.15: pip install tensorflow==2.15.1.
"""

from __future__ import annotations

import argparse
from typing import Any

import tensorflow as tf

from elasticdl.api.data import DataShardService
from elasticdl.api.tensorflow import input_fn, train_and_evaluate

NUM_COUNTS, NUM_CATEGORIES = 13, 26
NUM_BUCKETS = 1000  # hashes per category
DIM = 4
HIDDEN = (64, 32)

Features = dict[str, tf.Tensor]


def parse(rows: tf.Tensor) -> tuple[Features, tf.Tensor]:
    """Parse rows of text [n] to {"counts": [n, 13] float32, "ids": [n, 26] int64} and labels [n, 1] float32."""
    defaults = [[0.0]] + [[0.0]] * NUM_COUNTS + [["missing"]] * NUM_CATEGORIES
    label, *columns = tf.io.decode_csv(rows, defaults)
    counts = tf.stack(columns[:NUM_COUNTS], axis=1)
    hashes = [tf.strings.to_hash_bucket_fast(column, NUM_BUCKETS) for column in columns[NUM_COUNTS:]]
    ids = tf.stack(hashes, axis=1) + NUM_BUCKETS * tf.range(NUM_CATEGORIES, dtype=tf.int64)
    features = {"counts": tf.math.log1p(tf.maximum(counts, 0.0)), "ids": ids}
    return features, label[:, None]


def model_fn(features: Features, labels: tf.Tensor, mode: str, params: dict[str, Any]) -> tf.estimator.EstimatorSpec:
    """Return the EstimatorSpec: a linear part, a factorization machine and a deep part over the same embeddings."""
    v1 = tf.compat.v1
    size = NUM_BUCKETS * NUM_CATEGORIES
    vectors = v1.get_variable("vectors", [size, DIM], initializer=v1.random_normal_initializer(stddev=0.01))
    weights = v1.get_variable("weights", [size, 1], initializer=v1.zeros_initializer())
    fields = tf.nn.embedding_lookup(vectors, features["ids"])  # [n, 26, DIM]
    first = tf.reduce_sum(tf.nn.embedding_lookup(weights, features["ids"]), axis=1)
    second = 0.5 * tf.reduce_sum(
        tf.reduce_sum(fields, axis=1) ** 2 - tf.reduce_sum(fields**2, axis=1), axis=1, keepdims=True
    )
    deep = tf.concat([tf.reshape(fields, [-1, NUM_CATEGORIES * DIM]), features["counts"]], axis=1)
    for units in HIDDEN:
        deep = v1.layers.dense(deep, units, tf.nn.relu)
    logits = first + second + v1.layers.dense(deep, 1)
    probabilities = tf.sigmoid(logits)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"probability": probabilities})
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"auc": v1.metrics.auc(labels, probabilities)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = v1.train.AdagradOptimizer(params["learning_rate"])
    train = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train)


def evaluation_input(path: str) -> tf.data.Dataset:
    return tf.data.TextLineDataset(path).skip(1).batch(64).map(parse)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--training_data", default="", help="default: the job's")
    arguments.add_argument("--validation_data", default="")
    arguments.add_argument("--model_dir", required=True)
    arguments.add_argument("--num_epochs", type=int, default=20)
    arguments.add_argument("--learning_rate", type=float, default=0.05)
    arguments.add_argument("--save_steps", type=int, default=200)
    given = arguments.parse_args()
    data = DataShardService(
        batch_size=20,
        num_epochs=given.num_epochs,
        shuffle=True,
        num_minibatches_per_shard=2,
        training_data=given.training_data,
        data_reader_params={"reader_type": "CSV"},
    )
    config = tf.estimator.RunConfig(
        given.model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=given.save_steps,
        experimental_max_worker_delay_secs=0,
    )
    estimator = tf.estimator.Estimator(model_fn, config=config, params={"learning_rate": given.learning_rate})
    validation = given.validation_data or data.session.spec.validation_data or given.training_data
    train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn(data, parse)),
        tf.estimator.EvalSpec(lambda: evaluation_input(validation), steps=None, start_delay_secs=0, throttle_secs=0),
        data,
    )


if __name__ == "__main__":
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    main()
