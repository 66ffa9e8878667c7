"""CSV and text files: the rows found are those of Python's csv module, at the right offsets."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.data.table_decoder import decode, table_of
from elasticdl.data.text import TextRules, rows_from, split_rows
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError


def records_of(path: Path, **params: object) -> list[bytes]:
    reader = create_reader(str(path), params)
    return [record for shard in reader.shards() for record in reader.read(shard)]


def open_csv(tmp_path: Path, content: bytes, **params: object) -> Reader:
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    return create_reader(str(path), params)


CELL = st.lists(st.sampled_from(["a", "b", '"', "\n", "\r\n", ",", ";", " ", "é"]), max_size=6).map("".join)


@given(
    rows=st.lists(st.lists(CELL, min_size=2, max_size=4), min_size=1, max_size=20),
    line_end=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from(",;"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    last_line_ends=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_csv_module_writes_comes_back_row_by_row(
    tmp_path: Path, rows: list[list[str]], line_end: str, delimiter: str, quoting: int, last_line_ends: bool
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=line_end, quoting=quoting).writerows(rows)  # type: ignore[arg-type]
    content = text.getvalue() if last_line_ends else text.getvalue().removesuffix(line_end)
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode())
    records = records_of(path, header=False, delimiter=delimiter)
    parsed = [next(csv.reader(io.StringIO(r.decode(), newline=""), delimiter=delimiter)) for r in records]
    assert parsed == rows


@given(content=st.text(alphabet=st.sampled_from('ab" ,\n'), max_size=40))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_quotes_out_of_place_are_read_as_the_csv_module_reads_them(tmp_path: Path, content: str) -> None:
    *expected, last = [row for row in csv.reader(io.StringIO(f"{content}\nend", newline="")) if row]
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode())
    if last != ["end"] or not expected:
        with pytest.raises(DataError, match="has no records" if last == ["end"] else "never closed"):
            records_of(path, header=False)
        return
    records = records_of(path, header=False)
    assert [next(csv.reader(io.StringIO(r.decode(), newline=""))) for r in records] == expected


def test_the_header_is_no_record_and_names_the_columns(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b'id,"name, ""full""\nor not"\r\n1,a\r\n2,b')
    assert reader.metadata().column_names == ("id", 'name, "full"\nor not')
    (shard,) = reader.shards()
    assert reader.read(shard) == [b"1,a", b"2,b"]


def test_without_a_header_the_first_row_is_a_record(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b"1,a\n2,b\n", header=False)
    assert reader.metadata().column_names == ()
    assert [len(shard) for shard in reader.shards()] == [2]


def test_a_byte_order_mark_is_no_data(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b"\xef\xbb\xbfid,name\n1,a\n")
    assert reader.metadata().column_names == ("id", "name")
    assert records_of(tmp_path, header=False) == [b"id,name", b"1,a"]


def test_blank_lines_are_no_csv_rows_but_are_lines_of_text(tmp_path: Path) -> None:
    content = b"a\n\n\r\nb\n"
    assert open_csv(tmp_path, content, header=False).shards()[0].end == 2
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    assert records_of(path) == [b"a", b"", b"", b"b"]


def test_a_field_may_be_as_long_as_a_document(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b'a,b\n1,"' + b"x" * 200_000 + b'"\n')
    assert dict(reader.metadata().column_dtypes) == {"a": "int64", "b": "string"}


@pytest.mark.parametrize("header", ["a,b, a", 'a,"a"', "a,b,Unnamed: 3,"])
def test_a_name_of_several_columns_is_refused(tmp_path: Path, header: str) -> None:
    with pytest.raises(DataError, match=r"The header of .*data\.csv names 2 columns (a|Unnamed: 3)\."):
        open_csv(tmp_path, f"{header}\n1,2,3\n".encode()).metadata()


def test_columns_without_a_name_are_told_apart(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b",a,b,,\n0,1,2,,\n1,3,4,,\n")
    metadata = reader.metadata()
    assert metadata.column_names == ("Unnamed: 0", "a", "b", "Unnamed: 3", "Unnamed: 4")
    found = decode(reader.read(reader.shards()[0]), table_of(metadata, True, "m.py"))
    assert (np.asarray(found["a"]).tolist(), np.asarray(found["b"]).tolist()) == ([1, 3], [2, 4])


def test_files_of_one_source_must_share_their_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,x\n1,2\n")
    with pytest.raises(DataError, match=r"The header of .*b\.csv differs from that of .*a\.csv"):
        create_reader(str(tmp_path)).metadata()


def test_an_empty_csv_file_says_that_its_header_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.csv has no header row"):
        open_csv(tmp_path, b"").shards()


def test_an_empty_csv_file_among_others_has_no_shard(tmp_path: Path) -> None:
    for name, content in (("a", ""), ("b", "x,y\n1,2\n"), ("c", "x,y\n"), ("d", "\n")):
        (tmp_path / f"{name}.csv").write_text(content)
    reader = create_reader(str(tmp_path))
    assert [shard.name for shard in reader.shards()] == [str(tmp_path / "b.csv")]
    assert reader.metadata().column_names == ("x", "y")


def test_a_blank_first_line_of_text_is_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\nx\ny\n")
    reader = create_reader(str(tmp_path), {"header": True})
    assert [shard.end for shard in reader.shards()] == [2]
    assert reader.metadata().column_names == ()


def test_a_csv_file_of_a_header_alone_has_no_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no records"):
        open_csv(tmp_path, b"a,b\n").shards()


def test_rows_that_end_with_cr_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_bytes(b"x,y\r1,2\r3,4\r")
    with pytest.raises(DataError, match="end with CR alone"):
        create_reader(str(tmp_path)).shards()


def test_types_are_those_of_the_first_rows_of_all_files(tmp_path: Path) -> None:
    for name, rows in (("a", ""), ("b", "1,2\n"), ("c", "0.5,02134\n"), ("d", "x,3\n" * 2000)):
        (tmp_path / f"{name}.csv").write_text(f"n,code\n{rows}")
    assert dict(create_reader(str(tmp_path)).metadata().column_dtypes) == {"n": "string", "code": "string"}
    (tmp_path / "d.csv").unlink()
    assert dict(create_reader(str(tmp_path)).metadata().column_dtypes) == {"n": "float64", "code": "string"}


@pytest.mark.parametrize("text", ["NA", "NULL", "null", "N/A", "None", "<NA>"])
def test_texts_that_stand_for_missing_numbers_are_named(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pandas reads them as missing; here they are texts, and make texts of the numbers beside them."""
    reader = open_csv(tmp_path, f"age,state\n1,{text}\n{text},NY\n{text},CA\n".encode())
    assert dict(reader.metadata().column_dtypes) == {"age": "string", "state": "string"}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "elasticdl.data.text"]
    assert f"The column age holds {text!r} beside numbers" in said


def test_quotes_behind_an_escape_character_are_refused_by_name(tmp_path: Path) -> None:
    """As pandas writes them with escapechar: the csv module would take the backslash for a part of the text."""
    reader = open_csv(tmp_path, b'text,y\n"an \\"end\\"",1\n', label_col="y")
    (shard,) = reader.shards()
    with pytest.raises(DataError, match="is not CSV") as caught:
        decode(reader.read(shard), table_of(reader.metadata(), False, "module"))
    assert "escapechar" in caught.value.hint


@given(
    rows=st.lists(st.lists(st.text('ab\\",; \n\u00e9', max_size=6), min_size=3, max_size=3), min_size=1, max_size=20),
    delimiter=st.sampled_from(",;"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONE]),
    doubles_quotes=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_rows_with_an_escape_character_are_refused_or_keep_their_backslashes_alone(
    rows: list[list[str]], delimiter: str, quoting: int, doubles_quotes: bool
) -> None:
    if quoting == csv.QUOTE_NONE:  # which escapes line ends: there they end the rows
        rows = [[text.replace("\n", "") for text in row] for row in rows]
    text = io.StringIO(newline="")
    writer = csv.writer(
        text, delimiter=delimiter, lineterminator="\n", quoting=quoting, doublequote=doubles_quotes, escapechar="\\"
    )
    writer.writerows(rows)
    rules = TextRules(quoted=True, has_header=False, delimiter=delimiter.encode())
    try:
        content = text.getvalue().encode()
        found = split_rows([row for _, row in rows_from(io.BytesIO(content), 0, rules, "data.csv")], delimiter)
    except DataError:
        return
    if any(len(row) != 3 for row in found):
        return  # `wrong_row`
    assert _without_runs(found) == _without_runs(rows)


def _without_runs(rows: list[list[str]]) -> list[list[str]]:
    """Return fields with one backslash for each run of them: such writers double each."""
    return [[re.sub(r"\\+", r"\\", field) for field in row] for row in rows]


@pytest.mark.parametrize("row", ['an \\"end\\",1', '1,an \\"end\\"', '"C:\\",a\\"', '\\",1'])
def test_escaped_quotes_in_a_field_without_quotes_are_refused(row: str) -> None:
    """As writers with doublequote=False make them."""
    with pytest.raises(DataError, match=r"A row is not CSV: .* without quotes around it") as caught:
        split_rows([row.encode()], ",")
    assert "escapechar" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ('"C:\\",1', ["C:\\", "1"]),
        ('"a\\""b",1', ['a\\"b', "1"]),
        ('6" \\ 4",1', ['6" \\ 4"', "1"]),
        ('C:\\,"C:\\"', ["C:\\", "C:\\"]),
        ('C:\\\\a,"C:\\\\"', ["C:\\\\a", "C:\\\\"]),  # each one counts
    ],
)
def test_backslashes_that_escape_no_quote_are_text(row: str, fields: list[str]) -> None:
    """As they are to the csv module and to pandas."""
    assert split_rows([row.encode()], ",") == [fields]
    assert next(csv.reader([row])) == fields
    of_pandas = pd.read_csv(io.StringIO(row), header=None, dtype=str)
    assert of_pandas.to_numpy().tolist() == [fields]


def test_an_escaped_delimiter_is_named_where_there_are_too_many_fields(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b"text,y\na\\,b,1\n", label_col="y")
    (shard,) = reader.shards()
    with pytest.raises(DataError, match="has 3 fields") as caught:
        decode(reader.read(shard), table_of(reader.metadata(), False, "module"))
    assert "escapechar" in caught.value.hint


def test_a_quote_that_is_never_closed_is_named_where_its_row_begins(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b'a,b\n1,2\n3,"open\n4,5\n')
    with pytest.raises(DataError, match=r"data\.csv, byte 8: .*never closed"):
        reader.shards()


def test_a_file_that_changes_after_it_was_indexed_is_refused(tmp_path: Path) -> None:
    reader = open_csv(tmp_path, b"a,b\n1,2\n")
    (shard,) = reader.shards()
    (tmp_path / "data.csv").write_bytes(b"a,b\nchanged,2\n")
    with pytest.raises(DataError, match="has changed since the job began: it had"):
        reader.read(shard)
    with pytest.raises(DataError, match="changed while the job reads it"):  # no identity was counted
        reader.read(Shard(shard.name, 0, 1))


def test_the_middle_of_a_file_is_read_without_what_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"".join(b"%d\n" % i for i in range(100_000)))
    reader = create_reader(str(path))
    assert reader.read(Shard(str(path), 77_777, 77_780)) == [b"77777", b"77778", b"77779"]


def test_the_census_has_the_rows_that_its_publisher_says(test_data: Path) -> None:
    reader = create_reader(str(test_data / "census"), {"header": False})
    assert [len(shard) for shard in reader.shards()] == [16_281, 32_561]
    name = str(test_data / "census" / "adult-train.csv")
    last = reader.read(Shard(name, 32_560, 32_561))[0]
    assert last.startswith(b"52, Self-emp-inc, 287927")
    assert last.endswith(b">50K")


def test_columns_of_criteo_come_from_its_header(test_data: Path) -> None:
    path = str(test_data / "criteo" / "criteo_sample.txt")
    reader = create_reader(path, {"reader_type": "csv"})
    assert reader.metadata().column_names[:2] == ("label", "I1")
    assert reader.shards() == [Shard(path, 0, 200)]
