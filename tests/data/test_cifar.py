"""CIFAR-10: from its python batches, or generated."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from elasticdl.api.examples import parse_examples
from elasticdl.data.datasets.catalogue import open_dataset
from elasticdl.data.datasets.images import generated
from elasticdl_client.errors import DataError


def write_batches(directory: Path) -> tuple[np.ndarray, list[int]]:
    """Ten images in each of the six files; those of the training files."""
    random = np.random.default_rng(0)
    directory.mkdir(parents=True)
    images, labels = random.integers(0, 256, (60, 3072), np.uint8), random.integers(0, 10, 60).tolist()
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for k, name in enumerate(names):
        batch = {b"data": images[10 * k : 10 * k + 10], b"labels": labels[10 * k : 10 * k + 10]}
        (directory / name).write_bytes(pickle.dumps(batch, protocol=2))
    return images, labels


def test_the_python_batches_are_read(tmp_path: Path) -> None:
    images, labels = write_batches(tmp_path / "cifar-10-batches-py")
    train, validation = open_dataset("cifar10", str(tmp_path))
    assert (train.num_records, validation.num_records) == (50, 10)
    columns = parse_examples([record for block in train.blocks for record in block], {"image": (), "label": ()})
    assert [bytes(image) for image in columns["image"]] == [image.tobytes() for image in images[:50]]
    assert columns["label"].tolist() == labels[:50]


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_batches(tmp_path / "batches")
    (tmp_path / "batches" / "data_batch_3").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match=r"data_batch_3 is not a batch of CIFAR-10.*would call os.system"):
        open_dataset("cifar10", str(tmp_path / "batches"))
    with pytest.raises(DataError, match="does not exist"):
        open_dataset("cifar10", str(tmp_path))


def test_the_generated_set_has_the_shape_and_is_the_same_every_time() -> None:
    train, validation = open_dataset("cifar10")
    assert (train.num_records, validation.num_records) == (10_000, 2_000)
    first, second = ([record for block in generated(30, 20)[0].blocks for record in block] for _ in range(2))
    assert first == second
    columns = parse_examples(first, {"image": (), "label": ()})
    assert {len(image) for image in columns["image"]} == {3072}
    assert set(columns["label"].tolist()) <= set(range(10))
