"""CIFAR-10 as tf.train.Example: `image`, 3072 bytes, channels first, and `label`.

From CIFAR's python batches where they are; otherwise a generated set of the same shape: gratings of ten kinds, told
apart by steepness and width of their stripes, in random colours, places and noise.  A mirrored image is of the same
kind.  A linear model cannot tell them apart, a small convolutional network can.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets.split import Split
from elasticdl.data.example import encode_example
from elasticdl_client.errors import DataError

_FOLDER = "cifar-10-batches-py"
_TRAIN_FILES = tuple(f"data_batch_{k}" for k in range(1, 6))
_TEST_FILE = "test_batch"
_SIZE = 32
_NUM_BYTES = 3 * _SIZE * _SIZE
_BLOCK_SIZE = 500
_NUM_SLOPES = 5  # from lying to standing, either way
_WAVELENGTHS = (4.0, 9.0)  # pixels
_NOISE = 60.0
_GENERATED_TRAIN, _GENERATED_VALIDATION = 10_000, 2_000
_PLAIN = {  # all that a batch file of NumPy arrays, lists and words needs
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def cifar10(source: str) -> list[Split]:
    """The images of the python batches in a directory; without a directory, generated ones.

    Raises:
        DataError: files are missing or damaged.
    """
    if not source:
        return generated(_GENERATED_TRAIN, _GENERATED_VALIDATION)
    directory = os.path.join(source, _FOLDER) if os.path.isdir(os.path.join(source, _FOLDER)) else source
    batches = [_read(os.path.join(directory, name)) for name in _TRAIN_FILES]
    images = np.concatenate([batch[0] for batch in batches])
    labels = np.concatenate([batch[1] for batch in batches])
    return [_split("train", images, labels), _split("validation", *_read(os.path.join(directory, _TEST_FILE)))]


def generated(num_train: int, num_validation: int, seed: int = 0) -> list[Split]:
    """Gratings; the same ones for the same numbers."""
    return [
        Split("train", num_train, _gratings(num_train, seed)),
        Split("validation", num_validation, _gratings(num_validation, seed + 1)),
    ]


def _gratings(count: int, seed: int) -> Iterator[list[bytes]]:
    random = np.random.default_rng([20_201_120, seed])
    rows, columns = np.mgrid[0:_SIZE, 0:_SIZE].astype(np.float32)
    for start in range(0, count, _BLOCK_SIZE):
        num = min(_BLOCK_SIZE, count - start)
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
    starts = range(0, len(labels), _BLOCK_SIZE)
    blocks = (_encoded(images[k : k + _BLOCK_SIZE], labels[k : k + _BLOCK_SIZE]) for k in starts)
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
    """Images [n, 3072] and labels [n] of a batch file (format: cs.toronto.edu/~kriz/cifar.html)."""
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
