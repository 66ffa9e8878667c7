"""Image data sets as tf.train.Example: `image`, the raw pixel values as floats, and `label`.

digits: scikit-learn's 1,797 scans of 8 × 8 pixels.  mnist: 28 × 28 pixels from IDX files, or arrays of the caller.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets.split import Split
from elasticdl.data.example import encode_examples
from elasticdl_client.errors import DataError

_BLOCK_SIZE = 1024
_DIGITS_SPLIT_SEED = 20201120
_NUM_VALIDATION_DIGITS = 360
_NUM_TRAIN_OF_TEST_FILE = 9000

Images = NDArray[np.uint8] | NDArray[np.float64]


def digits() -> list[Split]:
    """scikit-learn's digits: 1,437 to train and 360 to validate, drawn with a fixed seed.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "The digits come with scikit-learn, which is not installed.", "Run: pip install scikit-learn"
        ) from error
    loaded = load_digits()
    order = np.random.default_rng(_DIGITS_SPLIT_SEED).permutation(len(loaded.target))
    images, labels = loaded.data[order], loaded.target[order]
    return image_splits(
        (images[:-_NUM_VALIDATION_DIGITS], labels[:-_NUM_VALIDATION_DIGITS]),
        (images[-_NUM_VALIDATION_DIGITS:], labels[-_NUM_VALIDATION_DIGITS:]),
    )


def mnist(source: str) -> list[Split]:
    """MNIST from the IDX files of a directory, gzipped or not.

    With the files of the 60,000 training images these are `train` and the test images `validation`; with the test
    files alone their rows 0–8,999 are `train`, the rest `validation`.

    Raises:
        DataError: if files are missing or damaged.
    """
    test = _images_and_labels(source, "t10k")
    if _find(source, "train-images") is None:
        cut = _NUM_TRAIN_OF_TEST_FILE
        return image_splits((test[0][:cut], test[1][:cut]), (test[0][cut:], test[1][cut:]))
    return image_splits(_images_and_labels(source, "train"), test)


def image_splits(
    train: tuple[Images, NDArray[np.integer]], validation: tuple[Images, NDArray[np.integer]]
) -> list[Split]:
    """Splits of (images, labels) arrays, images of shape (records, …)."""
    named = [("train", train), ("validation", validation)]
    return [Split(name, len(labels), _blocks(images, labels)) for name, (images, labels) in named]


def _blocks(images: Images, labels: NDArray[np.integer]) -> Iterator[list[bytes]]:
    for start in range(0, len(labels), _BLOCK_SIZE):
        rows = slice(start, start + _BLOCK_SIZE)
        yield encode_examples({"image": images[rows].astype(np.float32), "label": labels[rows]})


def _images_and_labels(source: str, prefix: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images, labels = _read_idx(source, f"{prefix}-images"), _read_idx(source, f"{prefix}-labels")
    if len(images) != len(labels):
        raise DataError(f"{source} has {len(images)} {prefix} images but {len(labels)} labels.")
    return images, labels


def _find(source: str, stem: str) -> str | None:
    for dimensions in ("idx3", "idx1"):
        for name in (f"{stem}-{dimensions}-ubyte", f"{stem}.{dimensions}-ubyte"):
            for ending in (".gz", ""):
                path = os.path.join(source, name + ending)
                if os.path.isfile(path):
                    return path
    return None


def _read_idx(source: str, stem: str) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes (format: yann.lecun.com/exdb/mnist)."""
    path = _find(source, stem)
    if path is None:
        raise DataError(
            f"{source} has no file {stem}-idx…-ubyte.gz.", "--source must be a directory with MNIST's IDX files."
        )
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"The IDX file {path} cannot be read: {error}.") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of unsigned bytes: it begins with {data[:4].hex()}.")
    num_dimensions = data[3]
    start = 4 + 4 * num_dimensions
    shape = struct.unpack_from(f">{num_dimensions}I", data, 4) if len(data) >= start else ()
    if len(data) < start or len(data) - start != int(np.prod(shape, dtype=np.int64)):
        raise DataError(f"The IDX file {path} is truncated: it has {len(data)} bytes, its header names shape {shape}.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
