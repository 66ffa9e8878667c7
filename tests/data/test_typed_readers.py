"""The columns of typed sources, and the errors for values that they cannot read."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typed_sources as typed
from pyarrow.csv import write_csv
from pyarrow.feather import write_feather

from elasticdl.data import arrow
from elasticdl.data.example import encode_example, parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.data.sources import need
from elasticdl.data.table_decoder import decode, table_of
from elasticdl.protocol import Shard
from elasticdl.storage.remote_file import PART_BYTES
from elasticdl_client.errors import DataError


def everything(reader: Reader) -> list[bytes]:
    return [record for shard in reader.shards() for record in reader.read(shard)]


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_every_type_of_arrow_becomes_numbers_or_bytes(tmp_path: Path) -> None:
    moment = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    path = parquet(
        tmp_path / "types.parquet",
        truth=[True, False],
        small=pa.array([1, 255], pa.uint8()),
        half=pa.array(np.array([0.5, 2.0], np.float16)),
        money=[decimal.Decimal("1.25"), None],
        moment=pa.array([moment, moment]),
        day=[datetime.date(1970, 1, 3), datetime.date(1970, 1, 1)],
        word=pa.array(["x", "y"]).dictionary_encode(),
        blob=[b"\x00\xff", None],
        inner=[{"a": 1, "b": {"c": "deep"}}, {"a": 2, "b": {"c": "er"}}],
        point=pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        many=[[1, 2, 3], []],
        words=[["a", "b"], ["c"]],
    )
    reader = create_reader(path)
    metadata = reader.metadata()
    names = ["truth", "small", "half", "money", "moment", "day", "word", "blob", "inner.a", "inner.b.c"]
    assert list(metadata.column_names) == [*names, "point", "many", "words"]
    assert dict(metadata.column_shapes) == {"point": (2,), "many": (-1,), "words": (-1,)}
    first, second = everything(reader)
    found = parse_examples([first], dict.fromkeys(names, ()) | {"point": (2,), "many": (3,), "words": (2,)})
    assert {name: found[name].tolist()[0] for name in found} == {
        "truth": 1,
        "small": 1,
        "half": 0.5,
        "money": 1.25,
        "moment": int(moment.timestamp()) * 1_000_000,
        "day": 2,
        "word": b"x",
        "blob": b"\x00\xff",
        "inner.a": 1,
        "inner.b.c": b"deep",
        "point": [1.0, 2.0],
        "many": [1, 2, 3],
        "words": [b"a", b"b"],
    }
    found = parse_examples([second], {"money": (), "blob": ()})
    assert np.isnan(found["money"][0])
    assert found["blob"].tolist() == [b""]


def test_only_the_columns_that_are_named_are_read_and_the_label(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", a=[1, 2], bad=[[[1]], [[2]]], c=["x", "y"], label=[0, 1])
    reader = create_reader(path, columns=["a"], label_column="label")
    assert everything(reader) == [encode_example({"a": 1, "label": 0}), encode_example({"a": 2, "label": 1})]
    assert reader.metadata().label_column == "label"
    older = create_reader(path, {"columns": ["a", "label"], "label_col": "label"})
    assert older.metadata() == reader.metadata()
    with pytest.raises(DataError, match="column bad is of type list<element: list<") as caught:
        create_reader(path).shards()
    assert "--columns" in caught.value.hint
    with pytest.raises(DataError, match="no column d, which --columns names") as caught:
        create_reader(path, columns=["d"]).shards()
    assert "a, bad, c, label" in caught.value.hint


@pytest.mark.parametrize("kind", ["csv", "feather", "parquet"])
def test_a_table_of_very_many_columns_is_read_at_once(tmp_path: Path, kind: str) -> None:
    path, names = tmp_path / f"rows.{kind}", [f"c{number}" for number in range(6_000 if kind != "csv" else 30_000)]
    table = pa.table({name: [1, 2] for name in names})
    {"csv": write_csv, "feather": write_feather, "parquet": pq.write_table}[kind](table, str(path))
    began = time.process_time()
    reader = create_reader(str(path))
    (shard,) = reader.shards()
    found = decode(reader.read(shard), table_of(reader.metadata(), True, "m.py"))
    assert time.process_time() - began < 15.0
    assert list(found) == names


def test_files_of_different_columns_are_refused_by_name(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", a=[1], b=[2])
    parquet(tmp_path / "b.parquet", a=[1], b=[2.5])
    with pytest.raises(DataError, match=r"column b of .*b\.parquet is not that of .*a\.parquet"):
        create_reader(str(tmp_path)).shards()


def test_times_of_different_units_are_refused_and_timestamps_are_microseconds(tmp_path: Path) -> None:
    for name, kind in (("a", pa.timestamp("ms")), ("b", pa.timestamp("ns", "UTC"))):
        pq.write_table(pa.table({"day": pa.array([1_000_000], kind)}), tmp_path / f"{name}.parquet")
    reader = create_reader(str(tmp_path))
    found = [parse_examples(reader.read(shard), {"day": ()})["day"].tolist() for shard in reader.shards()]
    assert found == [[1_000_000_000], [1_000]]
    pq.write_table(pa.table({"day": pa.array([1], pa.date32())}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"column day of .*c\.parquet is not that of .*a\.parquet"):
        create_reader(str(tmp_path)).shards()


def test_several_sources_are_one_and_must_be_of_one_kind(tmp_path: Path) -> None:
    first, second = parquet(tmp_path / "a.parquet", a=[1]), parquet(tmp_path / "b.parquet", a=[2, 3])
    reader = create_reader(f"{first}, {second}")
    assert [(shard.name, shard.end) for shard in reader.shards()] == [(first, 1), (second, 2)]
    assert len(everything(reader)) == 3
    with pytest.raises(DataError, match="two of the data sources"):
        create_reader(f"{first},{tmp_path}/*.parquet")
    (tmp_path / "c.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"is read as Parquet, .*c\.csv as CSV"):
        create_reader(f"{first},{tmp_path}/c.csv")


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 5000])
def test_shards_of_any_size_are_in_the_order_of_the_records(tmp_path: Path, size: int) -> None:
    path = parquet(tmp_path / "a.parquet", a=list(range(2300)))
    reader = create_reader(path, records_per_shard=size)
    shards = reader.shards()
    assert shards == sorted(shards)
    assert {len(shard) for shard in shards[:-1]} <= {size}
    assert everything(reader) == everything(create_reader(path))


@pytest.mark.parametrize("values", [[1, 2], [1.5, 2.5], ["x", "y"], [True, False]])
def test_a_column_without_a_value_in_a_file_is_of_the_type_that_others_have(
    tmp_path: Path, values: list[object]
) -> None:
    nothing = pa.nulls(2)
    for name, column in (("a", nothing), ("b", values), ("c", nothing)):
        parquet(tmp_path / f"{name}.parquet", n=[1, 2], s=column, e=nothing)
    reader, alone = create_reader(str(tmp_path)), create_reader(str(tmp_path / "b.parquet"))
    assert reader.metadata() == alone.metadata()
    assert dict(reader.metadata().column_dtypes)["e"] == "string"
    records = everything(reader)
    assert records[2:4] == everything(alone)
    if isinstance(values[0], float | str):
        found = decode(records, table_of(reader.metadata(), True, "m.py"))
        assert str(list(found["s"])[:2]) == str([b"", b""] if isinstance(values[0], str) else [np.float32("nan")] * 2)
    assert len(records) == 6


def test_files_are_opened_together_to_find_the_type_of_an_empty_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(8)

    class Slow(arrow.ParquetFile):
        def __init__(self, path: str) -> None:
            if not path.endswith("/00.parquet"):
                together.wait(30)
            super().__init__(path)

    monkeypatch.setattr(arrow, "ParquetFile", Slow)
    for number in range(17):
        parquet(tmp_path / f"{number:02}.parquet", n=[1, 2], s=[1, 2] if number == 16 else pa.nulls(2))
    assert dict(create_reader(str(tmp_path)).metadata().column_dtypes)["s"] == "int64"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "sqlite", "huggingface"])
def test_whole_numbers_of_which_some_are_missing_are_read_as_fractions_where_the_user_says_so(
    kind: str, tmp_path: Path
) -> None:
    rows = [{"k": 1, "n": 5, "t": "a"}, {"k": 2, "n": None, "t": "b"}]
    source = str(tmp_path / f"rows.{kind}")
    match kind:
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), source)
        case "jsonl":
            Path(source).write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "huggingface":
            datasets.Dataset.from_list(rows).save_to_disk(source)
        case _:
            with contextlib.closing(sqlite3.connect(source)) as connection, connection:
                connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, n INTEGER, t TEXT)")
                connection.executemany("INSERT INTO t VALUES (:k, :n, :t)", rows)
            source = f"sqlite:///{source}?table=t"
    reader = create_reader(source, {"column_dtypes": {"n": "float64"}})
    metadata = reader.metadata()
    assert dict(metadata.column_dtypes) == {"k": "int64", "n": "float64", "t": "string"}
    columns = decode(everything(reader), table_of(metadata, is_prediction=True, path=""))
    assert np.array_equal(columns["n"], [5.0, np.nan], equal_nan=True)
    plain = create_reader(source)
    with pytest.raises(DataError, match="no value of the column n") as caught:
        decode(everything(plain), table_of(plain.metadata(), is_prediction=True, path=""))
    assert 'column_dtypes={"n": "float64"}' in caught.value.hint
    for wrong, what in (({"t": "float64"}, "column t is string"), ({"m": "float64"}, "has no column m")):
        with pytest.raises(DataError, match=what):
            create_reader(source, {"column_dtypes": wrong}).metadata()
    with pytest.raises(DataError, match="a type is float64"):
        create_reader(source, {"column_dtypes": {"n": "string"}})


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_ids_that_float32_rounds_are_named(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = f"id_{kind}"  # a column is named once in a process
    values = {ids: [16777217.0, None, 3.0], "amount": [16777217.5, 1.0, 2.0], "small": [1.0, None, 16777216.0]}
    source = tmp_path / f"rows.{kind}"
    {"parquet": pq.write_table, "csv": write_csv}[kind](pa.table(values), str(source))
    reader = create_reader(str(source))
    assert dict(reader.metadata().column_dtypes) == dict.fromkeys(values, "float64")
    everything(reader)
    named = [record.args[0] for record in caplog.records if record.name == "elasticdl.data"]
    assert named == [ids]


def test_categories_as_polars_writes_them_are_texts(tmp_path: Path) -> None:
    words = pa.array(["x", None, "x"])
    views = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.uint32()), pa.array(["y", "x"], pa.string_view()))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 3], pa.int32()), views)
    table = pa.table({"word": views, "words": lists, "plain": words})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    first, second, third = everything(create_reader(str(tmp_path / "a.arrow"), columns=("word", "plain")))
    texts = parse_examples([first, second, third], {"word": (), "plain": ()})
    assert texts["word"].tolist() == [b"x", b"", b"y"]
    assert texts["plain"].tolist() == [b"x", b"", b"x"]
    assert len(everything(create_reader(str(tmp_path / "a.arrow")))) == 3


def test_whole_streams_of_arrow_are_read_one_at_a_time_to_find_a_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Semaphore(1)
    found_together = []

    class Alone(arrow.ArrowFile):
        def __init__(self, path: str) -> None:
            found_together.append(not reading.acquire(blocking=False))
            super().__init__(path)
            reading.release()

    monkeypatch.setattr(arrow, "ArrowFile", Alone)
    for number in range(17):
        table = pa.table({"s": [1] * 10_000 if number == 16 else pa.nulls(10_000)})
        with pa.ipc.new_stream(str(tmp_path / f"{number:02}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    assert dict(create_reader(str(tmp_path)).metadata().column_dtypes)["s"] == "int64"
    assert found_together == [False] * 17


def test_the_file_whose_column_differs_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", n=[1], s=pa.nulls(1))
    parquet(tmp_path / "b.parquet", n=[1], s=[[[1]]])
    with pytest.raises(DataError, match=r"b\.parquet: column s is of type list<"):
        create_reader(str(tmp_path)).metadata()
    parquet(tmp_path / "a.parquet", n=[1])
    parquet(tmp_path / "b.parquet", n=[1], s=pa.nulls(1))
    with pytest.raises(DataError, match=r"column s of .*b\.parquet is not that of .*a\.parquet: string, not missing"):
        create_reader(str(tmp_path)).shards()


def test_two_columns_of_one_name_and_intervals_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has several columns a"):
        create_reader(str(tmp_path / "a.parquet")).shards()
    table = pa.table({"a": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"b\.arrow: column a"):
        everything(create_reader(str(tmp_path / "b.arrow")))


def test_archives_and_data_sets_of_different_columns_are_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    np.savez(tmp_path / "b.npz", x=np.arange(3) / 2)
    with pytest.raises(DataError, match=r"The column x of .*b\.npz is not that of .*a\.npz"):
        create_reader(str(tmp_path / "*.npz")).shards()
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2), int))
    with pytest.raises(DataError, match=r"b\.npz is not that of .*a\.npz: int64 \[2\], not int64\."):
        create_reader(str(tmp_path / "*.npz")).shards()
    for name, values in (("c", [1]), ("d", ["one"])):
        datasets.Dataset.from_dict({"x": values}).save_to_disk(str(tmp_path / name))
    with pytest.raises(DataError, match=r"The column x of .*d is not that of .*c"):
        create_reader(f"{tmp_path}/c,{tmp_path}/d").shards()


def test_numbers_that_no_int64_holds_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([1, 2**63 - 1], np.uint64), y=np.array([1, 2**63], np.uint64))
    assert len(everything(create_reader(str(tmp_path / "a.npz"), columns=["x"]))) == 2
    with pytest.raises(DataError, match=r"a\.npz: the array y holds 9223372036854775808"):
        everything(create_reader(str(tmp_path / "a.npz")))


def test_a_path_may_hold_a_comma(tmp_path: Path) -> None:
    assert len(everything(create_reader(parquet(tmp_path / "a,b.parquet", a=[1, 2])))) == 2


def test_arrays_of_different_lengths_and_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(DataError, match="x 3, y 4"):
        create_reader(str(tmp_path / "a.npz")).shards()
    assert len(everything(create_reader(str(tmp_path / "a.npz"), columns=["x"]))) == 3
    np.savez(tmp_path / "b.npz", x=np.array([{}, {}], object))
    with pytest.raises(DataError, match=r"b\.npz, byte 0: x\.npy cannot be read") as caught:
        create_reader(str(tmp_path / "b.npz")).shards()
    assert "pickles" in caught.value.hint


def test_arrays_keep_their_shape(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    np.savez(tmp_path / "a.npz", image=np.asfortranarray(images), label=np.arange(3))
    reader = create_reader(str(tmp_path / "a.npz"))
    assert dict(reader.metadata().column_shapes) == {"image": (2, 4)}
    found = parse_examples(everything(reader), {"image": (2, 4), "label": ()})
    assert found["image"].tolist() == images.tolist()


def test_a_split_of_a_saved_data_set_is_named(tmp_path: Path) -> None:
    split = {name: datasets.Dataset.from_dict({"a": list(range(count))}) for name, count in (("x", 2), ("y", 3))}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match="several splits") as caught:
        create_reader(str(tmp_path / "both")).shards()
    assert "split=x" in caught.value.hint
    assert len(everything(create_reader(str(tmp_path / "both"), {"split": "y"}))) == 3


def test_a_folder_of_images_without_classes_has_no_labels(tmp_path: Path) -> None:
    written = typed.write_images(tmp_path, {"all": 3})
    reader = create_reader(str(tmp_path / "all"), columns=["image", "path"])
    found = parse_examples(everything(reader), {"image": (), "path": ()})
    assert {path.decode(): image for path, image in zip(found["path"], found["image"], strict=True)} == {
        path.removeprefix("all/"): data for path, data in written.items()
    }
    assert create_reader(str(tmp_path / "all")).metadata().column_names == ("image",)


@pytest.mark.parametrize("size", ["large", [1], [0, 5], [4, 4, 2]])
def test_a_wrong_size_of_images_is_refused(tmp_path: Path, size: object) -> None:
    typed.write_images(tmp_path, {"a": 1})
    with pytest.raises(DataError, match="image_size is"):
        create_reader(str(tmp_path), {"image_size": size})


def test_types_of_csv_columns_are_guessed_and_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"n,f,g,t,e,id\n1,2,1e3,x,,1\n-3,,nan,1_0,,{2**63}\n")
    path = str(tmp_path / "a.csv")
    dtypes = {"n": "int64", "f": "float64", "g": "float64", "t": "string", "e": "string", "id": "string"}
    assert dict(create_reader(path).metadata().column_dtypes) == dtypes
    said = create_reader(path, {"column_dtypes": {"n": "float64"}})
    assert dict(said.metadata().column_dtypes)["n"] == "float64"
    with pytest.raises(DataError, match="no column x, which column_dtypes names"):
        create_reader(path, {"column_dtypes": {"x": "int64"}}).metadata()
    with pytest.raises(DataError, match="column_dtypes is"):
        create_reader(path, {"column_dtypes": {"n": "int32"}})


def test_a_checksum_of_tfrecord_that_is_wrong_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    typed.write_tfrecord(path, [b"first", b"second", b"third"])
    data = bytearray(path.read_bytes())
    data[21 + 12] ^= 1  # the first byte of the second record
    path.write_bytes(data)
    reader = create_reader(str(path))
    (shard,) = reader.shards()
    with pytest.raises(DataError, match="byte 21: the checksum of the record"):
        reader.read(shard)


def test_records_below_and_above_the_size_of_a_part_are_read_whole(tmp_path: Path) -> None:
    sizes = [10, PART_BYTES - 60, 5, 2 * PART_BYTES, 0, *[1 << 20] * 9]
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    path = tmp_path / "a.tfrecord"
    typed.write_tfrecord(path, payloads)
    reader = create_reader(str(path))
    (shard,) = reader.shards()
    for start in range(len(sizes)):
        assert list(reader.read(Shard(shard.name, start, shard.end))) == payloads[start:]
    end = path.stat().st_size - 10
    os.truncate(path, end)
    with pytest.raises(DataError, match=f"byte {end}: the file has become shorter"):
        reader.read(Shard(shard.name, 0, shard.end))


@pytest.mark.full
def test_records_of_more_than_the_system_reads_at_once_are_read(tmp_path: Path) -> None:
    size = 2**30 + 1
    typed.write_tfrecord(tmp_path / "a.tfrecord", [bytes(size)] * 2)
    found = everything(create_reader(str(tmp_path / "a.tfrecord")))
    assert [len(record) for record in found] == [size, size]


def test_tensorflows_own_files_are_read(tmp_path: Path) -> None:
    import tensorflow as tf

    path = str(tmp_path / "train.tfrecord-00000-of-00001")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(10):
            writer.write(b"x" * i)
    assert everything(create_reader(path)) == [b"x" * i for i in range(10)]


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(DataError, match="Parquet files need the package no_such_package") as caught:
        need("no_such_package", "Parquet files", "pyarrow")
    assert "pip install 'pyarrow'" in caught.value.hint
