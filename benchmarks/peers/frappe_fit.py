"""The DeepFM of the zoo trained by plain Keras in one process: prints its AUC.

python -m benchmarks.peers.frappe_fit TRAIN_DIR VALIDATION_DIR EPOCHS MINIBATCH_SIZE
"""

from __future__ import annotations

import sys

import keras
import tensorflow as tf

from elasticdl.data.factory import create_reader
from model_zoo.deepfm import deepfm_functional_api as zoo


def batches(origin: str, mode: str, size: int) -> tf.data.Dataset:
    reader = create_reader(origin)
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    dataset = tf.data.Dataset.from_tensor_slices(records)
    if mode == "training":
        dataset = dataset.shuffle(len(records))
    return zoo.feed(dataset, mode, None).batch(size).prefetch(2)


def main() -> None:
    train, validation, epochs, size = sys.argv[1:]
    keras.utils.set_random_seed(0)
    model = zoo.custom_model()
    model.compile(zoo.optimizer(), zoo.loss, metrics=[zoo.eval_metrics_fn()["auc"]])
    model.fit(batches(train, "training", int(size)), epochs=int(epochs), verbose=0)
    print(model.evaluate(batches(validation, "evaluation", int(size)), verbose=0)[1])


if __name__ == "__main__":
    main()
