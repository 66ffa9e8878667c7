"""Random images for benchmarks in which nothing is learnt: arrays, or records of the same."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.example import encode_example, encode_examples
from elasticdl.data.recordio import RecordIOWriter

NUM_CLASSES = 10
JPEG_SIZE = (500, 375)


def random_images(number: int, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Pixels from 0 to 255, and labels."""
    random = np.random.default_rng(1)
    images = random.random((number, *shape), np.float32) * np.float32(255)
    return images, random.integers(0, NUM_CLASSES, number)


def write_images(directory: Path, number: int, shape: tuple[int, ...]) -> Path:
    """Write the images of `random_images` as `tf.train.Example` with `image` and `label`; return the directory."""
    write_records(directory, image_records(*random_images(number, shape)))
    return directory


def write_records(directory: Path, records: list[bytes], num_names: int = 1) -> None:
    """Make a directory of one RecordIO file with several names, each of which is read as a file."""
    directory.mkdir(parents=True)
    first = directory / "data-00000"
    with RecordIOWriter(str(first)) as writer:
        writer.write_all(records)
    for number in range(1, num_names):
        (directory / f"data-{number:05}").hardlink_to(first)


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


def random_jpegs(number: int) -> tuple[list[bytes], NDArray[np.int64]]:
    """JPEG files of 500 × 375 pixels, smooth with a little noise, of 45 kB or so, and labels."""
    from PIL import Image

    random = np.random.default_rng(1)
    files = []
    for _ in range(number):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
        pixels = np.asarray(coarse.resize(JPEG_SIZE, Image.Resampling.BICUBIC), np.float32)
        noisy = np.clip(pixels + random.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    return files, random.integers(0, NUM_CLASSES, number)
