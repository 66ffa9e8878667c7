"""The data sources of a job, as its workers open them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticdl.model_def import load
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.factories import Readers
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec

MODULE = "def custom_model(): ...\ndef loss(labels, predictions): ...\ndef optimizer(): ...\n"
FEED = "def feed(dataset, mode, metadata): ...\n"


def readers(directory: Path, validation: Path, module: str = MODULE) -> Readers:
    (directory / "rows.csv").write_text("a,b,y\n1.5,2.5,0\n")
    (directory / "zoo").mkdir(exist_ok=True)
    (directory / "zoo" / "m.py").write_text(module)
    spec = JobSpec(training_data=str(directory / "rows.csv"), validation_data=str(validation), label_column="y")
    return Readers(spec, load(str(directory / "zoo"), "m.custom_model", required=()))


def test_rows_for_validation_have_the_columns_of_those_for_training(tmp_path: Path) -> None:
    validation = tmp_path / "validation.csv"
    validation.write_text("b,a,y\n2.5,1.5,0\n")
    with pytest.raises(DataError, match=r"--validation_data are b, a, y; those of --training_data are a, b, y"):
        readers(tmp_path, validation).of(pb.EVALUATION)
    validation.write_text("a,b,y\n1,2,0\n")
    assert readers(tmp_path, validation).of(pb.EVALUATION).metadata().column_names == ("a", "b", "y")


@pytest.mark.parametrize("module", [MODULE, MODULE + FEED])
def test_data_for_validation_are_of_the_kind_of_those_for_training(module: str, tmp_path: Path) -> None:
    validation = tmp_path / "validation.parquet"
    pq.write_table(pa.table({"a": [1.5], "b": [2.5], "y": [0]}), validation)
    opened = readers(tmp_path, validation, module)
    if FEED in module:  # it may read both
        opened.of(pb.EVALUATION)
        return
    with pytest.raises(DataError, match=r"--training_data has rows of CSV .* --validation_data has no rows of CSV"):
        opened.of(pb.EVALUATION)


@pytest.mark.parametrize("module", [MODULE, MODULE + FEED])
def test_a_feed_of_the_users_own_gets_rows_of_csv_files_without_partitions(module: str, tmp_path: Path) -> None:
    (tmp_path / "rows" / "year=2024").mkdir(parents=True)
    (tmp_path / "rows" / "year=2024" / "0.csv").write_text("x,y\n1.5,0\n")
    (tmp_path / "m.py").write_text(module)
    definition = load(str(tmp_path), "m.custom_model", required=())
    reader = Readers(JobSpec(training_data=str(tmp_path / "rows")), definition).of(pb.TRAINING)
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    if FEED in module:  # which may take the last field for the label
        assert (records, reader.metadata().column_names) == ([b"1.5,0"], ("x", "y"))
    else:
        assert (records, reader.metadata().column_names) == ([b"1.5,0,2024"], ("x", "y", "year"))


def test_rows_for_validation_need_no_partition_that_columns_does_not_name(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"dt={day}").mkdir()
        (tmp_path / f"dt={day}" / "0.csv").write_text("x,y\n1.5,0\n")
    (tmp_path / "m.py").write_text(MODULE)
    spec = JobSpec(
        training_data=f"{tmp_path}/dt=*/0.csv", validation_data=str(tmp_path / "dt=2"), columns="x", label_column="y"
    )
    opened = Readers(spec, load(str(tmp_path), "m.custom_model", required=()))
    assert opened.of(pb.EVALUATION).metadata() == opened.of(pb.TRAINING).metadata()
    assert opened.of(pb.TRAINING).read(opened.of(pb.TRAINING).shards()[0]) == [b"1.5,0"]
