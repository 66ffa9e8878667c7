"""Columns of the data in the rows of predictions: the right ones, of every source, though they are no features."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.csv import write_csv
from pyarrow.feather import write_feather

from elasticdl.data.example import encode_example
from elasticdl.data.recordio_format import RecordIOWriter
from elasticdl.data.sql import OutputTable
from elasticdl.model_def import load
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.inference.output_parts import open_rows
from elasticdl.worker.inference.prediction import CarriedColumns
from elasticdl.worker.tasks import HeldLease, TaskReading
from elasticdl_client.choices import PredictionFormat
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_spec import JobSpec
from tests.chaos.job import LocalJob

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, features):
        return self.factor * features["x"]

def custom_model():
    return Model()
"""
NUM_RECORDS = 30


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    directory = tmp_path / "zoo"
    directory.mkdir()
    (directory / "scaled.py").write_text(MODULE)
    return directory


def write(kind: str, directory: Path) -> Path:
    """Rows with an id, a name and x, which is twice the number of the record."""
    ids, names = [1000 + k for k in range(NUM_RECORDS)], [f"é {k}" for k in range(NUM_RECORDS)]
    values = [2.0 * k for k in range(NUM_RECORDS)]
    path = directory / f"rows.{kind}"
    if kind == "csv":
        rows = [f"{i},{n},{x}\n" for i, n, x in zip(ids, names, values, strict=True)]
        path.write_text("".join(["id,name,x\n", *rows]))
    elif kind == "parquet":
        pq.write_table(pa.table({"id": ids, "name": names, "x": values}), path, row_group_size=7)
    else:
        writer = RecordIOWriter(str(path))
        for i, n, x in zip(ids, names, values, strict=True):
            writer.write(encode_example({"id": i, "name": n, "x": x}))
        writer.close()
    return path


def spec(data: Path | str, zoo: Path, **flags: object) -> JobSpec:
    given = {"job_name": "j", "runtime": "local", "model_zoo": zoo, "model_def": "scaled.custom_model"}
    given |= {
        "prediction_data": data,
        "prediction_outputs": "/out",
        "minibatch_size": 4,
        "checkpoint_dir_for_init": "m",
    }
    return JobSpec.from_flags("predict", {**given, **flags})


IN_FLAGS = {"columns": "x"}
IN_PARAMS = {"data_reader_params": 'columns="x"; label_col="name"'}


@pytest.mark.parametrize(
    ("kind", "flags"), [("csv", IN_FLAGS), ("parquet", IN_FLAGS), ("parquet", IN_PARAMS), ("recordio", {})]
)
def test_the_columns_of_a_minibatch_are_those_of_its_records(
    kind: str, flags: dict[str, str], tmp_path: Path, zoo: Path
) -> None:
    data = write(kind, tmp_path)
    definition = load(str(zoo), "scaled.custom_model", required=())
    carried = CarriedColumns(spec(data, zoo, prediction_columns="name,id", **flags), definition)
    lease = pb.Lease(shard=pb.ShardMessage(name=str(data), start=10, end=20))
    held = HeldLease(lease, reading=TaskReading([10, 11, 13, 14, 15, 16, 18, 19]))  # two are quarantined
    found = carried.of(held, 0)
    assert list(found) == ["name", "id"]
    assert found["id"].tolist() == [1010, 1011, 1013, 1014]
    assert found["name"].tolist() == ["é 10", "é 11", "é 13", "é 14"]
    assert carried.of(held, 1)["id"].tolist() == [1015, 1016, 1018, 1019]


def test_a_column_that_is_not_there_is_named(tmp_path: Path, zoo: Path) -> None:
    definition = load(str(zoo), "scaled.custom_model", required=())
    wanted = spec(write("csv", tmp_path), zoo, prediction_columns="key")
    with pytest.raises(DataError, match="no column key, which --prediction_columns names") as caught:
        CarriedColumns(wanted, definition)
    assert caught.value.hint == "It has: id, name, x."


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        ([1, None], "record 1 of .* has no value of it, and it holds whole numbers", "Fill it in"),
        ([[1, 2], [3]], "", "one value in each record"),
    ],
    ids=["missing", "lists"],
)
def test_a_column_without_one_value_a_record_is_named_with_the_flag(
    values: list[object], what: str, hint: str, tmp_path: Path, zoo: Path
) -> None:
    data = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"k": values, "x": [1.0, 2.0]}), data)
    definition = load(str(zoo), "scaled.custom_model", required=())
    carried = CarriedColumns(spec(data, zoo, prediction_columns="k", columns="x"), definition)
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=str(data), start=0, end=2)), reading=TaskReading([0, 1]))
    with pytest.raises(DataError, match=f"--prediction_columns=k: {what}") as caught:
        carried.of(held, 0)
    assert hint in caught.value.hint


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(2)])
def test_keys_of_bytes_stay_apart(kind: pa.DataType, tmp_path: Path, zoo: Path) -> None:
    data = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"k": pa.array([b"\xfe1", b"\xff1"], kind), "x": [1.0, 2.0]}), data)
    definition = load(str(zoo), "scaled.custom_model", required=())
    carried = CarriedColumns(spec(data, zoo, prediction_columns="k", columns="x"), definition)
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=str(data), start=0, end=2)), reading=TaskReading([0, 1]))
    assert carried.of(held, 0)["k"].tolist() == ["\\xfe1", "\\xff1"]


@pytest.mark.parametrize("kind", ["csv", "feather", "jsonl", "npz", "parquet", "sqlite"])
def test_fractions_keep_all_of_their_digits(kind: str, tmp_path: Path, zoo: Path) -> None:
    values = [0.1, 16777217.0, 1700000123.25, None if kind != "npz" else math.nan]
    table, data = pa.table({"n": [1, 2, 3, 4], "k": values, "x": [1.0] * 4}), tmp_path / f"rows.{kind}"
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(data)) as connection, connection:
            connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, k DOUBLE, x DOUBLE)")
            connection.executemany("INSERT INTO t VALUES (?, ?, ?)", zip(*table.to_pydict().values(), strict=True))
    elif kind == "npz":
        np.savez(data, **{name: column.to_numpy() for name, column in zip(table.column_names, table, strict=True)})
    elif kind == "jsonl":
        data.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        {"csv": write_csv, "feather": write_feather, "parquet": pq.write_table}[kind](table, str(data))
    source = f"sqlite:///{data}?table=t" if kind == "sqlite" else str(data)
    definition = load(str(zoo), "scaled.custom_model", required=())
    carried = CarriedColumns(spec(source, zoo, prediction_columns="n,k", columns="x"), definition)
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=source, start=0, end=4)), reading=TaskReading([0, 1, 2, 3]))
    found = carried.of(held, 0)
    assert found["n"].tolist() == [1, 2, 3, 4]
    assert found["k"].dtype == np.float64
    assert found["k"][:3].tolist() == values[:3]
    assert math.isnan(found["k"][3])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_short_fractions_are_carried_as_they_are(kind: str, dtype: str, tmp_path: Path, zoo: Path) -> None:
    table, data = {"k": np.array([0.1, 2.5, np.nan], dtype), "x": np.ones(3)}, tmp_path / f"rows.{kind}"
    if kind == "npz":
        np.savez(data, **table)
    else:
        pq.write_table(pa.table(table), data)
    carried = CarriedColumns(
        spec(data, zoo, prediction_columns="k", columns="x"), load(str(zoo), "scaled.custom_model", required=())
    )
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=str(data), start=0, end=3)), reading=TaskReading([0, 1, 2]))
    found = carried.of(held, 0)["k"]
    assert found.dtype == dtype
    assert found.astype(str).tolist() == ["0.1", "2.5", "nan"]
    rows = open_rows(PredictionFormat.PARQUET, tmp_path / "part-0.parquet")
    rows.write({"k": found})
    rows.close()
    assert pq.read_table(tmp_path / "part-0.parquet")["k"].to_numpy().dtype == dtype
    with contextlib.closing(sqlite3.connect(tmp_path / "out.db")) as connection, connection:
        OutputTable(f"sqlite:///{tmp_path / 'out.db'}?table=t", "k").replace({"k": found[:2]})
        assert connection.execute("SELECT k FROM t ORDER BY k").fetchall() == [(0.1,), (2.5,)]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_is_named_twice_is_carried_once(kind: str, tmp_path: Path, zoo: Path) -> None:
    data = write(kind, tmp_path)
    wanted = spec(data, zoo, prediction_columns="x,x", columns="x")
    carried = CarriedColumns(wanted, load(str(zoo), "scaled.custom_model", required=()))
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=str(data), start=0, end=2)), reading=TaskReading([0, 1]))
    assert {name: column.tolist() for name, column in carried.of(held, 0).items()} == {"x": [0.0, 2.0]}


def test_a_damaged_record_is_not_taken_for_a_wrong_column(tmp_path: Path, zoo: Path) -> None:
    data = tmp_path / "rows.recordio"
    writer = RecordIOWriter(str(data))
    writer.write(b"no example")
    writer.close()
    carried = CarriedColumns(
        spec(data, zoo, prediction_columns="k"), load(str(zoo), "scaled.custom_model", required=())
    )
    held = HeldLease(pb.Lease(shard=pb.ShardMessage(name=str(data), start=0, end=1)), reading=TaskReading([0]))
    with pytest.raises(DataError, match="--prediction_columns=k: ") as caught:
        carried.of(held, 0)
    assert "another feed" in caught.value.hint


def test_columns_without_a_place_for_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="there is no --prediction_outputs"):
        spec(tmp_path, tmp_path, prediction_columns="id", prediction_outputs="")


def test_predictions_have_the_key_of_their_record(tmp_path: Path, zoo: Path) -> None:
    torch.save({"factor": torch.tensor(0.5)}, tmp_path / "model.pt")
    flags = {
        "job_name": "keys",
        "model_zoo": zoo,
        "model_def": "scaled.custom_model",
        "prediction_data": write("csv", tmp_path),
        "columns": "x",
        "prediction_columns": "id,name",
        "prediction_outputs": tmp_path / "out",
        "prediction_format": "csv",
        "checkpoint_dir_for_init": tmp_path / "model.pt",
        "distribution_strategy": "Local",
        "num_workers": 1,
        "minibatch_size": 4,
        "num_minibatches_per_task": 2,
    }
    job = LocalJob(tmp_path / "job", flags, "predict").start()
    assert job.wait(120) == 0, job.story()
    rows = []
    for part in sorted((tmp_path / "out").glob("part-*.csv")):
        with part.open(newline="") as file:
            rows += list(csv.DictReader(file))
    assert [(row["id"], row["name"], float(row["prediction"])) for row in rows] == [
        (str(1000 + k), f"é {k}", float(k)) for k in range(NUM_RECORDS)
    ]
