"""Fisher's iris by a `tf.estimator.DNNClassifier`: a script of its own under TensorFlow's parameter servers.

    python dnn_estimator.py --training_data=iris.csv --model_dir=/tmp/iris            (alone)
    elasticdl train --job_command="python -m model_zoo.iris.dnn_estimator …" --need_tf_config …

Rows are four measures and the species, without a header.  Needs TensorFlow 2.15: pip install tensorflow==2.15.1.
"""

from __future__ import annotations

import argparse

import tensorflow as tf

from elasticdl.api.data import DataShardService
from elasticdl.api.tensorflow import input_fn, train_and_evaluate

MEASURES = {  # name: mean, standard deviation
    "sepal_length": (5.8, 0.8),
    "sepal_width": (3.1, 0.4),
    "petal_length": (3.8, 1.8),
    "petal_width": (1.2, 0.8),
}
SPECIES = ("Iris-setosa", "Iris-versicolor", "Iris-virginica")


def parse(rows: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Rows [n] of text to features by name [n] and the species' number [n]."""
    *columns, species = tf.io.decode_csv(rows, [[0.0]] * len(MEASURES) + [[""]])
    labels = tf.argmax(tf.equal(species[:, None], tf.constant(SPECIES)[None]), axis=1)
    scaled = [(column - mean) / deviation for column, (mean, deviation) in zip(columns, MEASURES.values(), strict=True)]
    return dict(zip(MEASURES, scaled, strict=True)), labels


def evaluation_input(path: str) -> tf.data.Dataset:
    return tf.data.TextLineDataset(path).filter(lambda row: tf.strings.length(row) > 0).batch(64).map(parse)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--training_data", default="", help="default: the job's")
    arguments.add_argument("--validation_data", default="")
    arguments.add_argument("--model_dir", required=True)
    arguments.add_argument("--num_epochs", type=int, default=40)
    arguments.add_argument("--save_steps", type=int, default=100)
    arguments.add_argument("--max_steps", type=int, default=None, help="training ends there, if not with the data")
    given = arguments.parse_args()
    data = DataShardService(
        batch_size=16,
        num_epochs=given.num_epochs,
        shuffle=True,
        training_data=given.training_data,
        data_reader_params={"reader_type": "CSV", "header": False},
    )
    estimator = tf.estimator.DNNClassifier(
        hidden_units=[8, 4],
        feature_columns=[tf.feature_column.numeric_column(name) for name in MEASURES],
        n_classes=len(SPECIES),
        optimizer=lambda: tf.keras.optimizers.legacy.Adagrad(0.1),
        config=tf.estimator.RunConfig(
            given.model_dir,
            tf_random_seed=1,
            save_checkpoints_steps=given.save_steps,
            experimental_max_worker_delay_secs=0,
        ),
    )
    validation = given.validation_data or data.session.spec.validation_data or given.training_data
    train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn(data, parse), given.max_steps),
        tf.estimator.EvalSpec(lambda: evaluation_input(validation), steps=None, start_delay_secs=0, throttle_secs=0),
        data,
    )


if __name__ == "__main__":
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    main()
