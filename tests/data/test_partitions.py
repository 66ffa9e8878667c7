"""Columns in the names of directories, as Hive, Spark, DuckDB and others write them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

from elasticdl.api.source import read_records
from elasticdl.data.example import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.data.sources import partition_dtypes, with_partition_dtypes
from elasticdl.data.table_decoder import decode, table_of
from elasticdl_client.errors import DataError, StorageUnreachable
from elasticdl_client.job_spec import JobSpec


def everything(reader: Reader) -> list[bytes]:
    return [record for shard in reader.shards() for record in reader.read(shard)]


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


PARTITIONS = ("dt=2026-01-01/shop=01", "dt=2026-01-01/shop=__HIVE_DEFAULT_PARTITION__", "dt=a%2Fb/shop=12")


def partitioned(directory: Path, suffix: str) -> str:
    """Write files of two rows as Spark leaves them, with its marker of success."""
    for number, name in enumerate(PARTITIONS):
        (directory / name).mkdir(parents=True)
        table = pa.table({"price": [float(number), number + 0.5]})
        if suffix == "parquet":
            pq.write_table(table, directory / name / "part-0.parquet")
        else:
            write_feather(table, str(directory / name / "part-0.feather"))
    (directory / "_SUCCESS").touch()
    return str(directory)


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_names_of_directories_are_columns(tmp_path: Path, suffix: str) -> None:
    source = partitioned(tmp_path / "clicks", suffix)
    reader = create_reader(source)
    metadata = reader.metadata()
    assert dict(metadata.column_dtypes) == {"price": "float64", "dt": "string", "shop": "int64"}
    records = everything(reader)
    assert parse_examples(records, {"price": (), "dt": ()})["dt"].tolist() == [
        *[b"2026-01-01"] * 4,
        *[b"a/b"] * 2,
    ]
    whole = [records[row] for row in (0, 1, 4, 5)]
    assert parse_examples(whole, {"shop": ()})["shop"].tolist() == [1, 1, 12, 12]
    with pytest.raises(DataError, match="shop"):
        parse_examples(records, {"shop": ()})
    assert everything(create_reader(f"{source}/**/*.{suffix}")) == records
    assert everything(create_reader(f"{source}/dt=*/shop=*/*.{suffix}")) == records
    assert everything(create_reader(f"{tmp_path}//clicks/dt=*/shop=*/*.{suffix}")) == records
    part = tmp_path / "clicks" / PARTITIONS[0] / f"part-0.{suffix}"
    (part.parent / "SHA256SUMS").write_text(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n")
    assert len(create_reader(source).shards()) == 3
    shops = create_reader(source, columns=("shop",)).metadata()
    assert shops.column_names == ("shop",)
    assert len(everything(create_reader(source, columns=("shop",)))) == 6


def test_directories_that_are_named_are_no_columns(tmp_path: Path) -> None:
    source = partitioned(tmp_path / "run=3" / "clicks[1]", "parquet")
    assert create_reader(source).metadata().column_names == ("price", "dt", "shop")
    assert create_reader(f"{source}/dt=2026-01-01").metadata().column_names == ("price", "shop")
    assert create_reader(f"{source}/{PARTITIONS[0]}").metadata().column_names == ("price",)
    assert create_reader(f"{source}/{PARTITIONS[0]}/part-0.parquet").metadata().column_names == ("price",)


def test_a_column_of_a_file_counts_before_the_name_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "dt=1").mkdir()
    parquet(tmp_path / "dt=1" / "a.parquet", dt=[5, 6])
    assert parse_examples(everything(create_reader(str(tmp_path))), {"dt": ()})["dt"].tolist() == [5, 6]


def test_files_below_other_keys_are_refused(tmp_path: Path) -> None:
    for name in ("dt=1", "day=1"):
        (tmp_path / name).mkdir()
        parquet(tmp_path / name / "a.parquet", price=[1.0])
    with pytest.raises(DataError, match=r"The column (day|dt) of .* is not that of"):
        create_reader(str(tmp_path)).shards()


def write_rows(path: Path, kind: str, price: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "csv":
            path.write_text(f"price\n{price}\n")
        case "jsonl":
            path.write_text(json.dumps({"price": price}) + "\n")
        case _:
            parquet(path, price=[price])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_every_table_of_files_has_the_columns_of_its_directories(kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "shop=7" / "town=a%2C%22b" / f"0.{kind}", kind, 1.5)
    write_rows(tmp_path / f"shop={2**63 - 1}" / "town=c" / f"0.{kind}", kind, 2.5)
    reader = create_reader(str(tmp_path))
    metadata = reader.metadata()
    assert dict(metadata.column_dtypes) == {"price": "float64", "shop": "int64", "town": "string"}
    columns = decode(everything(reader), table_of(metadata, is_prediction=True, path=""))
    assert {name: list(values) for name, values in columns.items()} == {
        "price": [1.5, 2.5],
        "shop": [7, 2**63 - 1],
        "town": [b'a,"b', b"c"],
    }
    towns = create_reader(str(tmp_path), columns=("town",))
    columns = decode(everything(towns), table_of(towns.metadata(), is_prediction=True, path=""))
    assert {name: list(values) for name, values in columns.items()} == {"town": [b'a,"b', b"c"]}
    for directory in tmp_path.iterdir():
        write_rows(directory / f"0.{kind}", kind, 3.5)
    mixed = create_reader(f"{tmp_path}/**/*.{kind}")
    with pytest.raises(DataError, match=r"The column town|The header of|is in no directory town="):
        decode(everything(mixed), table_of(mixed.metadata(), is_prediction=True, path=""))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_value_beyond_int64_makes_texts(kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "id=1" / f"0.{kind}", kind, 1.5)
    write_rows(tmp_path / f"id={2**63}" / f"0.{kind}", kind, 1.5)
    assert dict(create_reader(str(tmp_path)).metadata().column_dtypes)["id"] == "string"


def test_a_column_of_a_text_file_counts_before_the_name_of_its_directory(tmp_path: Path) -> None:
    for kind, row in (("csv", "dt,x\n5,1\n"), ("jsonl", '{"dt": 5, "x": 1}\n')):
        (tmp_path / kind / "dt=1").mkdir(parents=True)
        (tmp_path / kind / "dt=1" / f"0.{kind}").write_text(row)
        reader = create_reader(str(tmp_path / kind))
        columns = decode(everything(reader), table_of(reader.metadata(), is_prediction=True, path=""))
        assert {name: list(values) for name, values in columns.items()} == {"dt": [5], "x": [1]}


def test_partitions_that_a_kind_of_file_cannot_show_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path / "dt=1" / "a.csv", "csv", 1.0)
    assert len(everything(create_reader(str(tmp_path), {"header": False}))) == 2
    assert "dt in the names of directories" in caplog.text
    assert "CSV files without a header" in caplog.text


def test_a_script_gets_rows_of_csv_files_as_they_are(tmp_path: Path) -> None:
    write_rows(tmp_path / "year=2024" / "a.csv", "csv", 1.5)
    assert read_records(str(tmp_path)) == [b"1.5"]


def test_keys_that_are_no_columns_may_be_there_twice(tmp_path: Path) -> None:
    write_rows(tmp_path / "run=1" / "run=2" / "a.txt", "csv", 1.5)
    assert everything(create_reader(str(tmp_path))) == [b"price", b"1.5"]


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "dt=1" / "dt=2" / "a.parquet", "parquet", 1.0)
    with pytest.raises(DataError, match="several directories dt="):
        create_reader(str(tmp_path))


@pytest.mark.parametrize("beside", ["b.parquet", "README", "metadata.json"])
def test_a_file_does_not_hide_partitions_beside_it(beside: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "dt=1" / "a.parquet", "parquet", 1.0)
    write_rows(tmp_path / beside, "parquet", 2.0)
    with pytest.raises(DataError, match=f"{beside} beside partitions"):
        create_reader(str(tmp_path))
    assert len(everything(create_reader(f"{tmp_path}/*=*/*.parquet"))) == 1
    assert (
        len(everything(create_reader(f"{tmp_path}/*.parquet" if ".parquet" in beside else str(tmp_path / "dt=1")))) == 1
    )


def test_results_of_another_kind_beside_data_hide_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", "csv", 1.0)
    (tmp_path / "rate=0.1").mkdir()
    (tmp_path / "rate=0.1" / "model.bin").write_bytes(b"\0")
    assert everything(create_reader(str(tmp_path))) == [b"1.0"]


def test_a_job_decides_on_types_once_for_all_its_data(tmp_path: Path) -> None:
    trained, validated = tmp_path / "train", tmp_path / "validate"
    write_rows(trained / "dt=1" / "shop=1" / "a.parquet", "parquet", 1.0)
    write_rows(validated / "dt=late" / "shop=2" / "a.parquet", "parquet", 1.0)
    spec = JobSpec(training_data=str(trained), validation_data=str(validated), data_reader_params="reader_type=Parquet")
    dtypes = partition_dtypes(spec)
    assert dtypes == {"dt": "string", "shop": "int64"}
    decided = with_partition_dtypes(spec, dtypes)
    write_rows(trained / "dt=2" / "shop=late" / "a.parquet", "parquet", 1.0)
    for source in (trained, validated):
        reader = create_reader(str(source), decided.data_reader_params_dict())
        assert dict(reader.metadata().column_dtypes) == {"price": "float64", "dt": "string", "shop": "int64"}
    reader = create_reader(str(trained), decided.data_reader_params_dict())
    assert len(reader.read(reader.shards()[0])) == 1
    with pytest.raises(DataError, match=r"shop=late, and shop holds whole numbers"):
        everything(reader)


def test_storage_that_does_not_answer_decides_on_no_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(source: str) -> list[str]:
        raise StorageUnreachable(f"{source} does not answer.")

    monkeypatch.setattr("elasticdl.data.sources.find_files", unreachable)
    with pytest.raises(StorageUnreachable):
        partition_dtypes(JobSpec(training_data="s3://bucket/clicks"))
    assert partition_dtypes(JobSpec(training_data="s3://bucket/clicks", job_command="python train.py")) == {}
    assert partition_dtypes(JobSpec(training_data="/data/clicks/*.csv")) == {}  # whose files are in no partition


def test_a_key_that_is_named_as_a_secret_does_not_hide_types_from_workers(tmp_path: Path) -> None:
    spec = JobSpec(training_data=str(tmp_path))
    decided = with_partition_dtypes(spec, {"token": "int64"})
    create_reader(parquet(tmp_path / "a.parquet", x=[1]), decided.public().data_reader_params_dict())


def test_types_that_flags_give_are_checked(tmp_path: Path) -> None:
    write_rows(tmp_path / "zip=02134" / "a.parquet", "parquet", 1.0)

    def dtypes(params: str) -> dict[str, str]:
        return partition_dtypes(JobSpec(training_data=str(tmp_path), data_reader_params=params))

    assert dtypes("") == {"zip": "int64"}
    assert dtypes('partition_dtypes={"zip": "string"}') == {"zip": "string"}
    with pytest.raises(DataError, match="no directory of the data is named code="):
        dtypes('partition_dtypes={"code": "string"}')
    write_rows(tmp_path / "zip=A1" / "a.parquet", "parquet", 1.0)
    with pytest.raises(DataError, match="zip=A1, and zip holds whole numbers"):
        dtypes('partition_dtypes={"zip": "int64"}')
    with pytest.raises(DataError, match="partition_dtypes is 'text'"):
        create_reader(str(tmp_path), {"partition_dtypes": "text"})
