"""Load an exported model of the digits in plain TensorFlow, and show its predictions for the validation data.

    python scripts/show_digits.py --model DIR --data DIR [--at_least ACCURACY]

The last step of `make demo`.  ElasticDL only reads the records here; it does not touch the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf

from elasticdl.data.factory import create_reader

NUM_SHOWN = 5
SHADES = " .:-=+*#%@"


def read_digits(directory: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images [N, 64] and labels [N]."""
    reader = create_reader(directory)
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    features = {"image": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_example(records, features)
    return example["image"].numpy(), example["label"].numpy()


def picture(image: np.ndarray) -> list[str]:
    """Return the eight rows of a scan as text."""
    return ["".join(SHADES[int(value * 9 / 16)] * 2 for value in row) for row in image.reshape(8, 8)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the SavedModel")
    parser.add_argument("--data", required=True, help="RecordIO directory of digits")
    parser.add_argument("--at_least", type=float, default=0.0, help="fail below this accuracy")
    arguments = parser.parse_args()
    images, labels = read_digits(arguments.data)
    serve = tf.saved_model.load(arguments.model).signatures["serving_default"]
    name = next(iter(serve.structured_input_signature[1]))
    predictions = next(iter(serve(**{name: tf.constant(images)}).values())).numpy().argmax(axis=1)
    for rows in zip(*(picture(image) for image in images[:NUM_SHOWN]), strict=True):
        print("  ".join(rows))
    for label, prediction in zip(labels[:NUM_SHOWN], predictions[:NUM_SHOWN], strict=True):
        print(f"{f'is {label}, found {prediction}':<18}", end="")
    accuracy = float(np.mean(predictions == labels))
    print(f"\naccuracy of the exported model on all {len(labels)} held-out digits: {accuracy:.4f}")
    if accuracy < arguments.at_least:
        print(f"that is less than {arguments.at_least}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
