"""Image data sets as tf.train.Example: `image`, the raw pixel values as floats, and `label`.

digits: scikit-learn's 1,797 scans of 8 × 8 pixels.  mnist: 28 × 28 pixels from IDX files, or arrays of the caller.

cifar10: 32 × 32 pixels of three colours as 3072 bytes, channels first.

cifar10 is read from CIFAR's python batches if they are given; otherwise a data set of the same shape is generated:
gratings of ten classes, which differ in the slope and width of the stripes, with random colours, positions and noise.
A mirrored image has the same class.  A linear model cannot distinguish the classes, a small convolutional network can.
"""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets import Split
from elasticdl.data.example import encode_example, encode_examples
from elasticdl_client.errors import DataError

_BLOCK_SIZE = 1024
_DIGITS_SPLIT_SEED = 20201120
_NUM_VALIDATION_DIGITS = 360
_NUM_TRAIN_OF_TEST_FILE = 9000

Images = NDArray[np.uint8] | NDArray[np.float64]


def digits() -> list[Split]:
    """Return scikit-learn's digits: 1,437 for training and 360 for validation, split with a fixed seed.

    Raises:
        DataError: scikit-learn is not installed.
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
    """Return MNIST from the IDX files of a directory, gzipped or not.

    `train` are the 60,000 training images and `validation` the test images.  If there are only the test files, their
    rows 0–8,999 are `train` and the rest is `validation`.

    Raises:
        DataError: Files are missing or damaged.
    """
    test = _images_and_labels(source, "t10k")
    if _find(source, "train-images") is None:
        cut = _NUM_TRAIN_OF_TEST_FILE
        return image_splits((test[0][:cut], test[1][:cut]), (test[0][cut:], test[1][cut:]))
    return image_splits(_images_and_labels(source, "train"), test)


def image_splits(
    train: tuple[Images, NDArray[np.integer]], validation: tuple[Images, NDArray[np.integer]]
) -> list[Split]:
    """Return the splits for arrays (images, labels); images have the shape (records, …)."""
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
    """Return the array in an IDX file of unsigned bytes (format: yann.lecun.com/exdb/mnist)."""
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


_FOLDER = "cifar-10-batches-py"
_TRAIN_FILES = tuple(f"data_batch_{k}" for k in range(1, 6))
_TEST_FILE = "test_batch"
_SIZE = 32
_NUM_BYTES = 3 * _SIZE * _SIZE
_CIFAR_BLOCK_SIZE = 500
_NUM_SLOPES = 5  # from horizontal to vertical, in either direction
_WAVELENGTHS = (4.0, 9.0)  # pixels
_NOISE = 60.0
_GENERATED_TRAIN, _GENERATED_VALIDATION = 10_000, 2_000
_PLAIN = {  # the only classes in a batch file: NumPy arrays, lists and texts
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def cifar10(source: str) -> list[Split]:
    """Return the images of the python batches in a directory; if `source` is empty, generate images.

    Raises:
        DataError: Files are missing or damaged.
    """
    if not source:
        return generated(_GENERATED_TRAIN, _GENERATED_VALIDATION)
    directory = os.path.join(source, _FOLDER) if os.path.isdir(os.path.join(source, _FOLDER)) else source
    batches = [_read(os.path.join(directory, name)) for name in _TRAIN_FILES]
    images = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches])
    return [_split("train", images, labels), _split("validation", *_read(os.path.join(directory, _TEST_FILE)))]


def generated(num_train: int, num_validation: int, seed: int = 0) -> list[Split]:
    """Generate images of gratings; the same arguments give the same images."""
    return [
        Split("train", num_train, _gratings(num_train, seed)),
        Split("validation", num_validation, _gratings(num_validation, seed + 1)),
    ]


def _gratings(count: int, seed: int) -> Iterator[list[bytes]]:
    random = np.random.default_rng([20_201_120, seed])
    rows, columns = np.mgrid[0:_SIZE, 0:_SIZE].astype(np.float32)
    for start in range(0, count, _CIFAR_BLOCK_SIZE):
        num = min(_CIFAR_BLOCK_SIZE, count - start)
        labels = random.integers(0, 10, num)
        side = random.choice([-1, 1], num)
        angle = (side * (labels % _NUM_SLOPES) * np.pi / 2 / (_NUM_SLOPES - 1))[:, None, None]
        wavelength = np.array(_WAVELENGTHS)[labels // _NUM_SLOPES][:, None, None]
        phase = random.uniform(0, 2 * np.pi, (num, 1, 1))
        wave = np.sin((columns * np.cos(angle) + rows * np.sin(angle)) * 2 * np.pi / wavelength + phase)
        first, second = random.uniform(0, 255, (2, num, 3, 1, 1))
        images = first + (second - first) * (wave[:, None] + 1) / 2 + random.normal(0, _NOISE, (num, 3, _SIZE, _SIZE))
        yield _encoded(images.clip(0, 255).astype(np.uint8).reshape(num, -1), labels)


def _split(name: str, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Split:
    starts = range(0, len(labels), _CIFAR_BLOCK_SIZE)
    blocks = (_encoded(images[k : k + _CIFAR_BLOCK_SIZE], labels[k : k + _CIFAR_BLOCK_SIZE]) for k in starts)
    return Split(name, len(labels), blocks)


def _encoded(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> list[bytes]:
    return [
        encode_example({"image": image.tobytes(), "label": int(label)})
        for image, label in zip(images, labels, strict=True)
    ]


class _Batch(pickle.Unpickler):
    """Reads arrays, lists and words, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return super().find_class(module, name)


def _read(path: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images [n, 3072] and labels [n] of a batch file (format: cs.toronto.edu/~kriz/cifar.html)."""
    if not os.path.isfile(path):
        raise DataError(
            f"{path} does not exist.",
            "--source is a directory with the files of cifar-10-python.tar.gz; without it a set is generated.",
        )
    try:
        with open(path, "rb") as file:
            batch = _Batch(file, encoding="bytes").load()
        images, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is not a batch of CIFAR-10: {type(error).__name__}: {error}.") from error
    if images.dtype != np.uint8 or images.shape != (len(labels), _NUM_BYTES):
        raise DataError(f"{path} is not a batch of CIFAR-10: its images are {images.dtype} {images.shape}.")
    return images, labels
