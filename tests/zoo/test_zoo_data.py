"""The data sets that are generated for the zoo where their originals are not here: Criteo's and ImageNet's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.data.datasets import Split, imagenet, tables
from elasticdl.data.datasets.catalogue import open_dataset
from elasticdl.data.factory import create_reader
from elasticdl_client.errors import DataError
from model_zoo.imagenet import imagenet_resnet50
from tests.zoo.entries import SOURCES


def records_of(split: Split) -> list[bytes]:
    records = [record for block in split.blocks for record in block]
    assert len(records) == split.num_records
    return records


def features_of(record: bytes) -> dict[str, object]:
    features = tf.train.Example.FromString(record).features.feature
    return {name: getattr(one, one.WhichOneof("kind")).value[0] for name, one in features.items()}


@pytest.mark.skipif(not (SOURCES / "criteo").is_dir(), reason="the sample of Criteo is not here")
def test_every_row_of_criteos_sample_is_in_one_split_and_what_is_missing_is_left_out() -> None:
    train, validation = open_dataset("criteo", str(SOURCES / "criteo"))
    assert (train.num_records, validation.num_records) == (190, 10)
    rows = [features_of(record) for record in records_of(train) + records_of(validation)]
    assert sum(row["label"] for row in rows) == 49
    first = rows[0]
    assert (first["I2"], first["I3"], first["C1"]) == (3.0, 260.0, b"05db9164")
    assert "I1" not in first
    assert "C26" not in first


def test_kaggles_rows_are_split_by_tabs_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    row = ["1", *map(str, range(13)), *(f"{k:08x}" for k in range(26))]
    (tmp_path / "train.txt").write_text("\n".join(["\t".join(row)] * 40) + "\n")
    train, validation = open_dataset("criteo", str(tmp_path))
    assert (len(records_of(train)), len(records_of(validation))) == (38, 2)
    (tmp_path / "train.txt").write_text("\t".join(row) + "\n" + "\t".join(row[:-1]) + "\n")
    with pytest.raises(DataError, match=r"train.txt, line 2: has 39 columns"):
        open_dataset("criteo", str(tmp_path))
    with pytest.raises(DataError, match="without it a log is generated"):
        open_dataset("criteo", str(tmp_path.parent))


def test_the_generated_log_has_criteos_columns_and_is_the_same_every_time() -> None:
    first, second = (records_of(tables.generated(300, 10)[0]) for _ in range(2))
    assert first == second
    rows = [features_of(record) for record in first]
    assert set().union(*rows) == {"label", *tables.COUNTS, *tables.CATEGORIES}
    assert 0.15 < np.mean([row["label"] for row in rows]) < 0.35
    assert any("I1" not in row for row in rows)


def test_the_generated_images_decode_and_are_the_same_every_time() -> None:
    first, second = (records_of(imagenet.generated(40, 1)[0]) for _ in range(2))
    assert first == second
    rows = [features_of(record) for record in first]
    images = [tf.io.decode_image(row["image"]) for row in rows]
    assert all(96 <= side <= 160 for image in images for side in image.shape[:2])
    assert {row["label"] for row in rows} == set(range(imagenet.NUM_GENERATED_CLASSES))


def test_a_png_file_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert np.array_equal(tf.io.decode_png(imagenet.png(pixels)), pixels)


def test_folders_of_images_are_labelled_in_order_of_their_names(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    for folder in ("train/n02/a.png", "train/n01/b.PNG", "train/n01/c.png", "val/n01/d.png"):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder).write_bytes(imagenet.png(pixels))
    (tmp_path / "train" / "n01" / "notes.txt").write_text("no image")
    train, validation = open_dataset("imagenet", str(tmp_path))
    assert sorted(features_of(record)["label"] for record in records_of(train)) == [0, 0, 1]
    assert [features_of(record)["label"] for record in records_of(validation)] == [0]
    with pytest.raises(DataError, match="has no directory train"):
        open_dataset("imagenet", str(tmp_path / "train"))


def test_folders_of_images_are_read_as_they_are_by_the_model_of_imagenet(tmp_path: Path) -> None:
    for label, shape in enumerate([(96, 120, 3), (30, 17, 3)]):
        (tmp_path / f"n{label}").mkdir()
        (tmp_path / f"n{label}" / "a.png").write_bytes(imagenet.png(np.full(shape, 40 * label, np.uint8)))
    reader = create_reader(str(tmp_path))
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    dataset = tf.data.Dataset.from_tensor_slices(records)
    for mode in ("training", "evaluation"):
        samples = sorted(imagenet_resnet50.feed(dataset, mode, None).as_numpy_iterator(), key=lambda one: one[1])
        assert [label for _, label in samples] == [0, 1]
        assert all(np.array_equal(image, np.full((224, 224, 3), 40 * label)) for image, label in samples)
    assert len(list(imagenet_resnet50.feed(dataset, "prediction", None))) == 2
