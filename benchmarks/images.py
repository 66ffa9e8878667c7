"""Random images for benchmarks in which nothing is learnt: arrays, or RecordIO files of the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.example import encode_examples
from elasticdl.data.recordio import RecordIOWriter

NUM_CLASSES = 10


def random_images(number: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Pixels from 0 to 255, and labels."""
    random = np.random.default_rng(1)
    images = random.random((number, *shape), np.float32) * np.float32(255)
    return images, random.integers(0, NUM_CLASSES, number)


def write_images(directory: Path, number: int, shape: tuple[int, ...]) -> Path:
    """The same as `tf.train.Example` with `image` and `label`; returns the directory."""
    directory.mkdir(parents=True)
    images, labels = random_images(number, shape)
    with RecordIOWriter(str(directory / "data-00000")) as writer:
        writer.write_all(encode_examples({"image": images.reshape(number, -1), "label": labels}))
    return directory
