"""The generated data sets: their content, on real data, and the errors of wrong sources."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elasticdl.data.datasets import Split
from elasticdl.data.datasets.catalogue import open_dataset, write_split
from elasticdl.data.datasets.tables import ClickLog
from elasticdl.data.factory import create_reader
from elasticdl_client.errors import DataError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gen_dataset.py"


def records_of(split: Split) -> list[bytes]:
    records = [record for block in split.blocks for record in block]
    assert len(records) == split.num_records
    return records


def features_of(record: bytes) -> dict[str, list[object]]:
    import tensorflow as tf

    features = tf.train.Example.FromString(record).features.feature
    return {name: list(getattr(feature, feature.WhichOneof("kind")).value) for name, feature in features.items()}


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_digits_are_those_of_scikit_learn_each_once_and_the_same_every_time() -> None:
    from sklearn.datasets import load_digits

    train, validation = (records_of(split) for split in open_dataset("digits"))
    assert (len(train), len(validation)) == (1437, 360)
    rows = [features_of(record) for record in train + validation]
    seen = sorted((row["image"], row["label"]) for row in rows)
    loaded = load_digits()
    assert seen == sorted(
        (image.tolist(), [int(label)]) for image, label in zip(loaded.data, loaded.target, strict=True)
    )
    assert train == records_of(open_dataset("digits")[0])


def test_mnist_without_its_training_images_uses_rows_of_the_test_images(test_data: Path) -> None:
    train, validation = open_dataset("mnist", str(test_data / "mnist"))
    assert (train.num_records, validation.num_records) == (9000, 1000)
    first = features_of(next(train.blocks)[0])
    assert first["label"] == [7]
    image = np.array(first["image"])
    assert (image.shape, image.min(), image.max()) == ((784,), 0, 255)
    raw = gzip.decompress((test_data / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    last = features_of(records_of(validation)[-1])
    assert last["image"] == list(raw[-784:])


def test_mnist_with_its_training_images_uses_both_files(tmp_path: Path) -> None:
    for prefix, size in (("train", 6), ("t10k", 2)):
        images = b"\0\0\x08\3" + b"".join(n.to_bytes(4, "big") for n in (size, 28, 28)) + bytes(784 * size)
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        labels = b"\0\0\x08\1" + size.to_bytes(4, "big") + bytes(range(size))
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    train, validation = open_dataset("mnist", str(tmp_path))
    assert (len(records_of(train)), validation.num_records) == (6, 2)


def test_a_truncated_image_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + bytes(12) + b"x")
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte is truncated"):
        open_dataset("mnist", str(tmp_path))


def test_frappe_trains_on_validation_where_its_training_file_is_missing(test_data: Path) -> None:
    train, validation = open_dataset("frappe", str(test_data / "frappe"))
    assert (train.num_records, validation.num_records) == (57_722, 28_860)
    records = records_of(train)
    assert features_of(records[0]) == {
        "feature": [266, 1244, 5042, 5049, 5054, 5055, 5058, 5062, 5074, 5149],
        "label": [1],
    }
    assert features_of(records[1])["label"] == [0]


def test_a_libfm_row_of_another_width_is_named_by_line(tmp_path: Path) -> None:
    good = "1 " + " ".join(f"{i}:1" for i in range(10))
    (tmp_path / "frappe.validation.libfm").write_text(f"{good}\n{good} 11:1\n")
    with pytest.raises(DataError, match=r"frappe\.validation\.libfm, line 2: has 11 ids, not 10"):
        open_dataset("frappe", str(tmp_path))


def test_census_has_typed_columns_and_labels_without_full_stops(test_data: Path) -> None:
    train, validation = open_dataset("census", str(test_data / "census"))
    assert (train.num_records, validation.num_records) == (32_561, 16_281)
    rows = [features_of(record) for record in records_of(validation)[:3]]
    assert [row["label"] for row in rows] == [[0], [0], [1]]
    assert (rows[0]["age"], rows[0]["workclass"], rows[0]["marital_status"]) == (
        [25.0],
        [b"Private"],
        [b"Never-married"],
    )
    assert len(rows[0]) == 15


def test_iris_is_split_and_typed(test_data: Path) -> None:
    train, validation = (records_of(split) for split in open_dataset("iris", str(test_data / "iris")))
    assert (len(train), len(validation)) == (120, 30)
    rows = [features_of(record) for record in train + validation]
    assert sorted(row["label"] for row in rows) == [[0]] * 50 + [[1]] * 50 + [[2]] * 50
    assert set(rows[0]) == {"sepal_length", "sepal_width", "petal_length", "petal_width", "label"}


def test_a_source_without_the_files_is_named(tmp_path: Path) -> None:
    for name in ("mnist", "frappe", "census", "iris"):
        with pytest.raises(DataError, match="has no"):
            open_dataset(name, str(tmp_path))
        with pytest.raises(DataError, match="is made from files"):
            open_dataset(name)


def test_the_click_log_is_the_same_for_the_same_seed_only() -> None:
    def records(seed: int) -> list[bytes]:
        return [record for split in ClickLog(9000, 1000, seed).splits() for record in records_of(split)]

    assert records(1) == records(1) != records(2)
    assert len(records(1)) == 9900


def test_a_longer_click_log_begins_with_the_blocks_of_a_shorter_one() -> None:
    shorter, longer = (records_of(ClickLog(size).splits()[0]) for size in (8192, 10_000))
    assert longer[:8192] == shorter


def test_ids_of_the_click_log_are_in_range_and_skewed() -> None:
    columns = ClickLog(1, num_ids=997).columns(0, 0, 20_000)
    ids = columns["ids"]
    assert (ids.min() >= 0, ids.max() < 997) == (True, True)
    _, counts = np.unique(ids[:, 0], return_counts=True)
    assert counts.max() > 20 * np.median(counts)
    assert 0.25 < columns["label"].mean() < 0.55


def test_a_linear_model_learns_the_click_log() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    log = ClickLog(1, num_ids=50)
    one_hot = np.eye(50, dtype=np.float32)

    def arrays(split: int) -> tuple[np.ndarray, np.ndarray]:
        columns = log.columns(split, 0, 6000)
        return np.hstack([one_hot[columns["ids"]].sum(axis=1), columns["dense"]]), columns["label"]

    model = LogisticRegression(max_iter=300).fit(*arrays(0))
    features, labels = arrays(1)
    assert roc_auc_score(labels, model.predict_proba(features)[:, 1]) > 0.8


def test_shards_hold_the_records_in_order(tmp_path: Path) -> None:
    records = [str(i).encode() for i in range(25)]
    reports: list[tuple[int, int]] = []
    blocks = iter([records[:7], [], records[7:]])
    split = Split("train", 25, blocks)
    paths = write_split(split, str(tmp_path), 10, on_progress=lambda *report: reports.append(report))
    assert paths == [str(tmp_path / "train" / f"data-{i:05d}") for i in range(3)]
    reader = create_reader(str(tmp_path / "train"))
    assert [len(shard) for shard in reader.shards()] == [10, 10, 5]
    assert [record for shard in reader.shards() for record in reader.read(shard)] == records
    assert reports == [(10, 1), (20, 2), (25, 3)]


def test_shards_of_two_runs_never_mix(tmp_path: Path) -> None:
    write_split(Split("train", 1, iter([[b"x"]])), str(tmp_path), 10)
    with pytest.raises(DataError, match="is not empty"):
        write_split(Split("train", 1, iter([[b"x"]])), str(tmp_path), 10)


def test_the_script_writes_what_a_job_reads(tmp_path: Path) -> None:
    output = tmp_path / "clicks"
    done = run_script(
        "clicks", "--output", output, "--num_records", 1500, "--records_per_shard", 1000, "--compressor", "snappy"
    )
    assert done.returncode == 0, done.stderr
    assert "train: 1,500 of 1,500 records, 2 files" in done.stderr
    reader = create_reader(str(output / "train"))
    assert [len(shard) for shard in reader.shards()] == [1000, 500]
    features = features_of(reader.read(reader.shards()[0])[0])
    assert {name: len(values) for name, values in features.items()} == {"ids": 10, "dense": 13, "label": 1}
    assert create_reader(str(output / "validation")).shards()[0].end == 150


def test_the_script_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    done = run_script("frappe", "--source", tmp_path / "none", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: The source directory {tmp_path / 'none'} does not exist.")
    assert "Traceback" not in done.stderr
