"""Whole jobs on tables: modules without a `feed`, every strategy, bad records set aside."""

from __future__ import annotations

import base64
import json
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.scenarios import coverage_of
from tests.house.documents import clone, run_page

NUM_ROWS = 1200
KERAS = """
import keras

def custom_model():
    inputs = {"n": keras.Input((1,), name="n", dtype="int64"), "f": keras.Input((1,), name="f")}
    sum = keras.layers.Concatenate()([keras.ops.cast(inputs["n"], "float32") / 100.0, inputs["f"]])
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(sum))

def loss(labels, predictions):
    return keras.losses.BinaryCrossentropy()(keras.ops.reshape(labels, (-1, 1)), predictions)

def optimizer():
    return keras.optimizers.Adam(0.1)

def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: (predictions[:, 0] > 0.5) == (labels > 0)}
"""
TORCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(2, 1)

    def forward(self, features):
        return self.dense(torch.stack([features["n"] / 100.0, features["f"]], dim=1).float())[:, 0]

def custom_model():
    return Model()

def loss(labels, predictions):
    return torch.nn.functional.binary_cross_entropy_with_logits(predictions, labels.float())

def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)

def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: (predictions > 0) == (labels > 0)}
"""


def columns(count: int, first: int = 0) -> dict[str, list[object]]:
    random = np.random.default_rng(first)
    numbers, fractions = random.integers(-100, 100, count), random.normal(size=count)
    return {
        "n": numbers.tolist(),
        "f": fractions.tolist(),
        "unused": [f"text {i}" for i in range(count)],
        "y": (numbers / 100 + fractions > 0).astype(int).tolist(),
    }


def write_parquet(directory: Path, missing: dict[int, int] | None = None) -> str:
    """Two files of 600 rows.

    Args:
        missing: file to the row without its whole number.
    """
    for number in range(2):
        made = columns(NUM_ROWS // 2, number)
        if missing and number in missing:
            made["n"][missing[number]] = None
        pq.write_table(pa.table(made), directory / f"part-{number}.parquet", row_group_size=250)
    return str(directory / "*.parquet")


def write_sqlite(path: Path) -> str:
    with sqlite3.connect(path) as database:
        database.execute("create table t (id integer primary key, n bigint, f real, unused text, y integer)")
        rows = zip(*columns(NUM_ROWS).values(), strict=True)
        database.executemany("insert into t (n, f, unused, y) values (?, ?, ?, ?)", rows)
    database.close()
    return f"sqlite:///{path}?table=t"


def job(directory: Path, code: str, data: str, **flags: object) -> LocalJob:
    (directory / "zoo").mkdir()
    (directory / "zoo" / "table.py").write_text(code)
    common = {
        "job_name": "table",
        "model_zoo": directory / "zoo",
        "model_def": "table.custom_model",
        "training_data": data,
        "validation_data": data,
        "columns": "n,f",
        "label_column": "y",
        "minibatch_size": 20,
        "num_minibatches_per_task": 5,
        "num_epochs": 2,
    }
    return LocalJob(directory / "job", common | flags)


def assert_exact_and_good(running: LocalJob, num_quarantined: int = 0) -> None:
    assert running.wait(240) == 0, running.story()
    covered = coverage_of(running)
    assert len(covered) == 2
    for epoch in covered:
        assert (epoch.committed, epoch.repeated, epoch.lost) == (NUM_ROWS - num_quarantined, 0, 0)
    assert running.metrics()["accuracy"] > 0.9, running.story()


@pytest.mark.timeout(300)
def test_a_table_trains_without_a_feed_and_its_bad_records_are_set_aside(tmp_path: Path) -> None:
    data = write_parquet(tmp_path, missing={1: 321})  # validated on the same record
    flags = {"num_workers": 1, "num_minibatches_per_task": 30}  # each task that is checked is a pipeline of its own
    running = job(tmp_path, KERAS, data, max_bad_records=1, shuffle=True, **flags).start()
    assert_exact_and_good(running, num_quarantined=1)
    (file,) = (tmp_path / "job" / "bad_records").iterdir()
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert (line["shard"], line["record"]) == (str(tmp_path / "part-1.parquet"), 321)
    assert base64.b64decode(line["base64"])
    assert "n" in line["error"]
    assert f"{tmp_path / 'part-1.parquet'}:321; they and their errors are in" in running.master_log()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_pytorch_trains_on_a_table_of_sqlite_under_all_reduce(tmp_path: Path) -> None:
    data = write_sqlite(tmp_path / "rows.db")
    flags = {"distribution_strategy": "AllReduceStrategy", "records_per_shard": 500}
    assert_exact_and_good(job(tmp_path, TORCH, data, **flags).start())


@pytest.mark.full
@pytest.mark.timeout(300)
def test_bad_records_of_parquet_are_set_aside_under_all_reduce(tmp_path: Path) -> None:
    data = write_parquet(tmp_path, missing={0: 7, 1: 599})
    flags = {"distribution_strategy": "AllReduceStrategy", "max_bad_records": 2}
    running = job(tmp_path, TORCH, data, **flags).start()
    assert_exact_and_good(running, num_quarantined=2)
    assert len(list((tmp_path / "job" / "bad_records").iterdir())) == 2


@pytest.mark.full
@pytest.mark.timeout(300)
def test_one_worker_trains_on_rows_of_csv(tmp_path: Path) -> None:
    made = columns(NUM_ROWS)
    lines = [",".join(made), *(",".join(map(str, row)) for row in zip(*made.values(), strict=True))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    assert_exact_and_good(job(tmp_path, KERAS, str(tmp_path / "rows.csv"), distribution_strategy="Local").start())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("code", [KERAS, pytest.param(TORCH, marks=pytest.mark.full)], ids=["keras", "torch"])
def test_validation_data_that_lack_a_column_end_the_job_before_anything_is_trained(code: str, tmp_path: Path) -> None:
    made = pa.table(columns(NUM_ROWS)).drop_columns(["unused"])
    for name, table in (("training", made), ("validation", made.drop_columns(["n"]))):
        pyarrow.csv.write_csv(table, tmp_path / f"{name}.csv")
    flags = {"validation_data": tmp_path / "validation.csv", "columns": "", "num_epochs": 1000}
    data = str(tmp_path / "training.csv")
    running = job(tmp_path, code, data, distribution_strategy="Local", num_workers=1, **flags).start()
    assert running.wait(150) == 1, running.story()
    text = "\n".join(running.output)
    assert "Job table failed" in text, text
    assert "--validation_data are f, y" in text, text
    assert "Loss = " not in running.story()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_page_on_data_works_word_for_word(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    page = REPOSITORY / "docs" / "data.md"
    said = run_page(page, clone(tmp_path / "elasticdl"), Path(sys.executable).parent, 240, HOME=str(home))
    assert said.count("records 120, committed 120, repeated 0, lost 0") >= 10, said
    assert "Job iris-table succeeded." in said, said
