"""Random images for benchmarks in which nothing is learnt: arrays, or records of the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.example import encode_example, encode_examples
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
        writer.write_all(image_records(images, labels))
    return directory


def random_pixels(number: int, shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels of bytes, and labels."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (number, *shape), np.uint8)
    return images, random.integers(0, NUM_CLASSES, number)


def image_records(images: NDArray[np.generic], labels: NDArray[np.int64]) -> list[bytes]:
    """`tf.train.Example` with `image`, as floats or as bytes, and `label`."""
    if images.dtype != np.uint8:
        flat = images.reshape(len(labels), -1).astype(np.float32, copy=False)
        return encode_examples({"image": flat, "label": labels})
    pairs = zip(images, labels.tolist(), strict=True)
    return [encode_example({"image": image.tobytes(), "label": label}) for image, label in pairs]
