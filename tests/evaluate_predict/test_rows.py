"""Rows of predictions: every format gives back what was written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from elasticdl.api.examples import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import MetricState
from elasticdl.worker.evaluation import as_json, evaluate_task
from elasticdl.worker.inference.output_parts import columns_of, open_rows
from elasticdl_client.choices import PredictionFormat

OUTPUTS = {
    "score": np.array([[0.1], [0.2], [1 / 3]], np.float32),
    "logits": np.arange(6, dtype=np.float32).reshape(3, 2) / 7,
    "best": np.array([1, -2, 3], np.int64),
}


def written(chosen: PredictionFormat, path: Path, *outputs: Any) -> Path:
    writer = open_rows(chosen, path)
    for one in outputs:
        writer.write(columns_of(one))
    writer.close()
    return path


def test_columns_are_named_by_keys_and_numbers() -> None:
    assert list(columns_of(OUTPUTS)) == ["score", "logits", "best"]
    assert columns_of(OUTPUTS)["score"].shape == (3,)
    assert list(columns_of(np.zeros((3, 2)))) == ["prediction"]
    assert list(columns_of((np.zeros(3), {"a": np.zeros(3)}))) == ["prediction_0", "prediction_1_a"]
    with pytest.raises(TypeError, match="one value for a whole minibatch"):
        columns_of({"loss": np.float32(1)})


def test_parquet_gives_back_numbers_and_lists(tmp_path: Path) -> None:
    table = pq.read_table(written(PredictionFormat.PARQUET, tmp_path / "p", OUTPUTS, OUTPUTS))
    assert table.column_names == ["score", "logits", "best"]
    np.testing.assert_array_equal(table["score"].to_numpy(), np.tile(OUTPUTS["score"][:, 0], 2))
    np.testing.assert_array_equal(np.array(table["logits"].to_pylist(), np.float32), np.tile(OUTPUTS["logits"], (2, 1)))
    assert table["best"].to_pylist() == [1, -2, 3] * 2


def test_minibatches_are_row_groups_of_parquet_together(tmp_path: Path) -> None:
    outputs = [np.full((2**10, 8), k, np.float64) for k in range(300)]  # 20 MB
    file = pq.ParquetFile(written(PredictionFormat.PARQUET, tmp_path / "p", *outputs))
    assert file.num_row_groups == 2
    values = file.read()["prediction"].combine_chunks().flatten().to_numpy()
    np.testing.assert_array_equal(values.reshape(-1, 8), np.concatenate(outputs))


def test_csv_gives_back_the_same_floats(tmp_path: Path) -> None:
    path = written(PredictionFormat.CSV, tmp_path / "c", OUTPUTS, OUTPUTS)
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["score", "logits_0", "logits_1", "best"]
    assert len(rows) == 6
    found = np.array([row[:3] for row in rows], np.float32)
    np.testing.assert_array_equal(found, np.tile(np.hstack([OUTPUTS["score"], OUTPUTS["logits"]]), (2, 1)))
    assert [row[3] for row in rows[:3]] == ["1", "-2", "3"]


def test_csv_refuses_minibatches_with_other_columns(tmp_path: Path) -> None:
    padded = [{"logits": np.zeros((2, width)), "best": np.ones(2)} for width in (3, 4)]
    with pytest.raises(TypeError, match=r"logits_3: .*parquet"):
        written(PredictionFormat.CSV, tmp_path / "c", *padded)


@pytest.mark.parametrize("chosen", [PredictionFormat.PARQUET, PredictionFormat.CSV])
def test_minibatches_may_have_the_columns_in_another_order(chosen: PredictionFormat, tmp_path: Path) -> None:
    path = written(chosen, tmp_path / "p", OUTPUTS, dict(reversed(OUTPUTS.items())))
    if chosen is PredictionFormat.CSV:
        header, *rows = csv.reader(path.open(newline=""))
        assert header == ["score", "logits_0", "logits_1", "best"]
        assert rows[3:] == rows[:3]
    else:
        assert pq.read_table(path)["best"].to_pylist() == [1, -2, 3] * 2


def test_recordio_gives_back_examples(tmp_path: Path) -> None:
    reader = create_reader(str(written(PredictionFormat.RECORDIO, tmp_path / "part-00000.recordio", OUTPUTS, OUTPUTS)))
    (shard,) = reader.shards()
    found = parse_examples(reader.read(shard), {"logits": (2,), "best": ()})
    np.testing.assert_array_equal(found["logits"], np.tile(OUTPUTS["logits"], (2, 1)))
    assert found["best"].tolist() == [1, -2, 3] * 2


@pytest.mark.parametrize("chosen", [PredictionFormat.PARQUET, PredictionFormat.CSV, PredictionFormat.RECORDIO])
def test_text_is_kept(chosen: PredictionFormat, tmp_path: Path) -> None:
    outputs = {"name": np.array([b"one\rline", b"two, too"], dtype=object), "n": np.array([1, 2])}
    path = written(chosen, tmp_path / "part.recordio", outputs)
    if chosen is PredictionFormat.PARQUET:
        assert pq.read_table(path)["name"].to_pylist() == [b"one\rline", b"two, too"]
    elif chosen is PredictionFormat.CSV:
        assert list(csv.reader(path.open(newline="")))[1:] == [["one\rline", "1"], ["two, too", "2"]]
    else:
        reader = create_reader(str(path))
        records = [record for shard in reader.shards() for record in reader.read(shard)]
        assert b"two, too" in records[1]


@pytest.mark.parametrize("chosen", [PredictionFormat.PARQUET, PredictionFormat.CSV, PredictionFormat.RECORDIO])
def test_without_rows_there_is_no_file(chosen: PredictionFormat, tmp_path: Path) -> None:
    assert not written(chosen, tmp_path / "none").exists()


def test_the_file_of_metrics_is_json_whatever_they_are() -> None:
    found = json.loads(as_json(90, {"accuracy": 0.5, "r2": float("nan"), "error": float("inf")}))
    assert found == {"step": 90, "metrics": {"accuracy": 0.5, "r2": None, "error": None}}


def test_a_metric_whose_state_no_message_holds_is_an_error_that_names_it() -> None:
    states = [MetricState("loss", (np.zeros(2),), True), MetricState("iou", (np.zeros((3000, 3000)),), True)]
    model: Any = SimpleNamespace(evaluation=lambda: SimpleNamespace(states=lambda: states))
    unused: Any = None
    no_batches: Any = iter(())
    with pytest.raises(ValueError, match="68 MiB, most of it that of iou"):
        evaluate_task(model, unused, unused, no_batches)
