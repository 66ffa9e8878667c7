"""Images in classes as tf.train.Example: `image`, the bytes of an image file, and `label`.

The images come from ImageNet's folders, or from any folders with a directory per class; without them, PNG files of
several sizes are generated: horizontal, vertical or slanted stripes, and checks, each in red and in blue.  They can
still be distinguished after crops, scaling and mirroring.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets import Split
from elasticdl.data.example import encode_example
from elasticdl_client.errors import DataError

NUM_GENERATED_CLASSES = 8
_FOLDERS = (("train", ("train",)), ("validation", ("val", "validation")))
_ENDINGS = (".jpeg", ".jpg", ".png")
_ORDER_SEED = 2012
_BLOCK_SIZE = 64
_GENERATED_TRAIN, _GENERATED_VALIDATION = 1600, 400
_SIZES = (96, 161)  # pixels of a side
_WAVELENGTHS = (10.0, 30.0)
_NOISE = 20.0


def imagenet(source: str) -> list[Split]:
    """Return the images of SOURCE/train/CLASS/… and SOURCE/val/CLASS/…; labels follow the order of the classes' names.

    If `source` is empty, images are generated: 1,600 for training and 400 for validation.

    Raises:
        DataError: Folders are missing or empty, or a file cannot be read.
    """
    if not source:
        return generated(_GENERATED_TRAIN, _GENERATED_VALIDATION)
    return [_split(name, source, folders) for name, folders in _FOLDERS]


def generated(num_train: int, num_validation: int, seed: int = 0) -> list[Split]:
    """Generate images with patterns; the same arguments give the same images."""
    return [
        Split("train", num_train, _patterns(num_train, seed)),
        Split("validation", num_validation, _patterns(num_validation, seed + 1)),
    ]


def _split(name: str, source: str, folders: tuple[str, ...]) -> Split:
    root = next((path for folder in folders if os.path.isdir(path := os.path.join(source, folder))), None)
    if root is None:
        raise DataError(
            f"{source} has no directory {' or '.join(folders)}.",
            "--source holds train/CLASS/… and val/CLASS/…; without it a set is generated.",
        )
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    files = [
        (os.path.join(root, one, file), label)
        for label, one in enumerate(classes)
        for file in sorted(os.listdir(os.path.join(root, one)))
        if file.lower().endswith(_ENDINGS)
    ]
    if not files:
        raise DataError(f"{root} has no directory with images.", f"Images end in {', '.join(_ENDINGS)}.")
    order = np.random.default_rng(_ORDER_SEED).permutation(len(files))
    return Split(name, len(files), _read([files[k] for k in order]))


def _read(files: list[tuple[str, int]]) -> Iterator[list[bytes]]:
    for start in range(0, len(files), _BLOCK_SIZE):
        block: list[bytes] = []
        for path, label in files[start : start + _BLOCK_SIZE]:
            try:
                with open(path, "rb") as file:
                    block.append(encode_example({"image": file.read(), "label": label}))
            except OSError as error:
                raise DataError(f"The image {path} cannot be read: {error.strerror}.") from error
        yield block


def _patterns(count: int, seed: int) -> Iterator[list[bytes]]:
    random = np.random.default_rng([20_120_930, seed])
    for start in range(0, count, _BLOCK_SIZE):
        labels = random.integers(0, NUM_GENERATED_CLASSES, min(_BLOCK_SIZE, count - start))
        yield [encode_example({"image": png(_pattern(random, int(k))), "label": int(k)}) for k in labels]


def _pattern(random: np.random.Generator, label: int) -> NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of a pattern."""
    height, width = random.integers(*_SIZES, 2)
    y, x = np.mgrid[0:height, 0:width] * (2 * np.pi / random.uniform(*_WAVELENGTHS))
    first, second = random.uniform(0, 2 * np.pi, 2)
    slant = random.choice([-1, 1])
    waves = (
        np.sin(y + first),
        np.sin(x + first),
        np.sin((x + slant * y) / np.sqrt(2) + first),
        np.sin(x + first) * np.sin(y + second),
    )
    wave = waves[label % len(waves)][..., None]
    colour = np.array([200.0, 60.0, 60.0] if label < len(waves) else [60.0, 60.0, 200.0]) + random.uniform(-40, 40, 3)
    ground = random.uniform(40, 160) * np.ones(3)
    pixels: NDArray[np.float64] = (
        ground + (colour - ground) * (wave + 1) / 2 + random.normal(0, _NOISE, (height, width, 3))
    )
    return pixels.clip(0, 255).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels [height, width, 3] as a PNG file (format: www.w3.org/TR/png)."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
