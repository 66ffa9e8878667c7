"""JSON Lines of all kinds: types that follow from all rows, and what is refused, by file, byte and record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elasticdl.data.example import parse_examples
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError


def reader_of(directory: Path, *files: str) -> Reader:
    for number, text in enumerate(files):
        (directory / f"{number}.jsonl").write_text(text)
    return create_reader(str(directory))


def records(reader: Reader) -> list[bytes]:
    return [record for shard in reader.shards() for record in reader.read(shard)]


def test_a_type_is_that_of_all_rows_of_all_files(tmp_path: Path) -> None:
    whole = "".join(json.dumps({"a": i, "t": "2020-01-01"}) + "\n" for i in range(2000))
    reader = reader_of(
        tmp_path, whole + '{"a": 0.5, "only": true}\n', '{"a": null, "t": "no date", "deep": {"x": [1]}}'
    )
    assert dict(reader.metadata().column_dtypes) == {
        "a": "float64",
        "t": "string",
        "only": "int64",
        "deep.x": "int64",
    }
    found = parse_examples(records(reader), {"a": (), "t": ()})
    assert found["a"][:3].tolist() == [0, 1, 2]
    assert found["a"][2000] == 0.5
    assert np.isnan(found["a"][2001])
    assert found["t"][[0, 2000, 2001]].tolist() == [b"2020-01-01", b"", b"no date"]


def test_blank_lines_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_record(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, '\ufeff{"a": 1}\r\n\r\n  \n{"a": 2}\n\n')
    assert parse_examples(records(reader), {"a": ()})["a"].tolist() == [1, 2]


def test_files_are_found_by_the_names_that_spark_and_duckdb_give_them(tmp_path: Path) -> None:
    (tmp_path / "part-00000-1f3a-c000.json").write_text('{"a": 1}\n')
    (tmp_path / "_SUCCESS").touch()
    assert create_reader(str(tmp_path)).metadata().column_names == ("a",)


def test_rows_longer_than_a_block_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticdl.data.jsonl._BLOCK_BYTES", 50)
    texts = ["x" * (7 * i % 160) for i in range(600)]
    reader = reader_of(tmp_path, "".join(json.dumps({"t": text}) + "\n" for text in texts))
    assert [text.decode() for text in parse_examples(records(reader), {"t": ()})["t"].tolist()] == texts


def test_only_the_columns_that_are_named_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": {"c": 2, "d": [[1], [2, 3]]}, "y": 0}\n')
    reader = create_reader(str(tmp_path), columns=["b.c"], label_column="y")
    assert reader.metadata().column_names == ("b.c", "y")
    assert parse_examples(records(reader), {"b.c": ()})["b.c"].tolist() == [2]
    with pytest.raises(DataError, match=r"column b\.d is of type"):
        create_reader(str(tmp_path)).metadata()


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"a": 1}\n\n{"a": }\n', "byte 10, record 1", "Invalid value"),
        ('{"a": 1}\n[2]\n', "byte 9, record 1", "from object to array"),
        ('{"a": 1}\n{"a": "x"}\n', "byte 9, record 1", "from number to string"),
        ('{"a": 1}\n{"a": 1}{"a": 2}\n', "byte 9, record 1", "two objects are on one line"),
        ('{"a": 1, "a": 2}\n', "byte 0, record 0", "specified twice"),
        ('{"a": 1}\n{"a": 9223372036854775808}\n', "byte 9, record 1", "9223372036854775808 is beyond"),
        ('[{"a": 1},\n {"a": 2}]\n', "byte 0, record 0", "one array"),
        ('{\n  "a": 1\n}\n', "byte 0, record 0", "on several lines"),
        ('{"a": "cut o', "byte 0, record 0", "closing quotation mark"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(DataError) as caught:
        reader_of(tmp_path, text).shards()
    assert f"{tmp_path / '0.jsonl'}, {where}" in caught.value.what
    assert what in caught.value.what


def test_long_whole_numbers_within_64_bits_are_exact(tmp_path: Path) -> None:
    numbers = [2**63 - 1, -(2**63), 2**53 + 1]
    reader = reader_of(tmp_path, "".join(json.dumps({"id": n, "t": "9" * 30}) + "\n" for n in numbers))
    assert parse_examples(records(reader), {"id": ()})["id"].tolist() == numbers


def test_columns_of_two_types_in_two_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1\.jsonl.*Field a has incompatible types") as caught:
        reader_of(tmp_path, '{"a": 1}\n', '{"a": "x"}\n').shards()
    assert caught.value.hint


def test_a_column_without_any_value_holds_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = reader_of(tmp_path, '{"a": null, "b": 1}\n')
    assert dict(reader.metadata().column_dtypes) == {"a": "string", "b": "int64"}
    assert "column a has no value" in caplog.text
    assert parse_examples(records(reader), {"a": ()})["a"].tolist() == [b""]


@pytest.mark.parametrize("content", ['{"a": 1}\n', '{"a": 10}\n{"b": 20}\n{"a": 30}\n'], ids=["shorter", "longer"])
def test_a_file_that_changes_after_it_was_indexed_is_an_error(tmp_path: Path, content: str) -> None:
    reader = reader_of(tmp_path, '{"a": 1}\n{"a": 2}\n')
    (shard,) = reader.shards()
    (tmp_path / "0.jsonl").write_text(content)
    with pytest.raises(DataError, match="has changed since the job began: it had"):
        reader.read(shard)
    with pytest.raises(DataError, match="changed while the job reads it"):  # no identity was counted
        reader.read(Shard(shard.name, 0, 1))
