"""The DeepFM of the zoo trained by plain Keras in one process: prints its AUC.

python -m benchmarks.peers.frappe_fit TRAIN_DIR VALIDATION_DIR EPOCHS MINIBATCH_SIZE
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import tensorflow as tf

from elasticdl.data.factory import create_reader
from model_zoo.deepfm import deepfm_functional_api as zoo


def batches(origin: Path, mode: str, size: int) -> tf.data.Dataset:
    reader = create_reader(str(origin))
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    dataset = tf.data.Dataset.from_tensor_slices(records)
    if mode == "training":
        dataset = dataset.shuffle(len(records))
    return zoo.feed(dataset, mode, None).batch(size).prefetch(2)


def auc(train: Path, validation: Path, num_epochs: int, size: int) -> float:
    """Return it, of the validation data, after some epochs of minibatches of a size."""
    keras.utils.set_random_seed(0)
    model = zoo.custom_model()
    model.compile(zoo.optimizer(), zoo.loss, metrics=[zoo.eval_metrics_fn()["auc"]])
    model.fit(batches(train, "training", size), epochs=num_epochs, verbose=0)
    return float(model.evaluate(batches(validation, "evaluation", size), verbose=0)[1])


def main() -> None:
    train, validation, epochs, size = sys.argv[1:]
    print(auc(Path(train), Path(validation), int(epochs), int(size)))


if __name__ == "__main__":
    main()
