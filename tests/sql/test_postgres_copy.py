"""Rows that come by COPY are those that come as Python values."""

from __future__ import annotations

import math
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticdl_client.errors import DataError
from elasticdl_client.sql import snapshot
from elasticdl_client.sql.database import Database, SnapshotReader
from elasticdl_client.sql.parser import parse_select
from elasticdl_client.sql.snapshot import Field, input_fields, only_numbers
from elasticdl_client.sql.statement import Query, StatementError

VALUES = {  # a type, and values of it
    "boolean": "true, false, NULL",
    "smallint": "-7, NULL, 7",
    "bigint": f"{2**63 - 1}, {-(2**63)}, NULL, 0",
    "real": "0.1, 'NaN', 'Infinity', NULL, 16777217",
    "double precision": "0.1, -0.0, 'NaN', '-Infinity', 1e300, 5e-324, NULL, 123456789012345680000, 3",
    "numeric(12, 3)": "0.1, 12.500, NULL, 7, 'NaN', -123456789.125",
    "text": """'', NULL, ' ', 'a,b', 'say "so"', E'two\\nlines', E'\\\\.', E'\\\\N', '"', '""', 'NULL', 'NaN'"""
    """, 'żółć 🙂', E'\\r\\n'""",
    "varchar(9)": "'x', NULL, ''",
    "char(5)": "'ab', NULL",
}


def written(
    reader: SnapshotReader, query: Query, fields: list[Field], directory: Path, as_rows: bool = False
) -> pa.Table:
    names = reader.columns(query)
    parts = reader._streamed(query) if as_rows else reader.rows(query, only_numbers(fields))
    classes = sorted(reader.values(query, names[0]), key=str) if any(one.form == "class" for one in fields) else []
    snapshot.write(parts, names, fields, directory, [snapshot.natural(one) for one in classes], seed=5)
    return pq.read_table(directory)


@pytest.mark.parametrize("kind", VALUES)
def test_each_type_is_read_as_by_rows(server: str, tmp_path: Path, kind: str) -> None:
    literals = VALUES[kind]
    with psycopg.connect(server) as connection:
        rows = f"SELECT x::{kind} AS x FROM unnest(ARRAY[{literals}]::{kind}[]) AS x"
        connection.execute(f"CREATE TABLE t AS {rows}")  # type: ignore[arg-type]
    query = parse_select('SELECT x, x AS "odd""; %s :x" FROM t -- to the line\'s end', "postgres")
    forms = ["text"] if kind.startswith(("text", "var", "char")) else ["text", "number"]
    fields = input_fields([("x", form) for form in forms] + [('odd"; %s :x', forms[-1])])
    with Database(server).snapshot() as reader:
        assert all(isinstance(part, pa.Table) for part in reader.rows(query))
        copied = written(reader, query, fields, tmp_path / "copied")
        by_rows = written(reader, query, fields, tmp_path / "rows", as_rows=True)
        assert copied.schema == by_rows.schema
        assert repr(copied.to_pydict()) == repr(by_rows.to_pydict())  # in which NaN is itself, and -0.0 is not 0.0
        classes = parse_select("SELECT x FROM t WHERE x IS NOT NULL AND x::text <> 'NaN'", "postgres")
        label = [Field("y", "x", "class")]
        assert written(reader, classes, label, tmp_path / "y").equals(
            written(reader, classes, label, tmp_path / "y rows", as_rows=True)
        )


def test_rows_of_one_column_without_a_value_are_rows(server: str, tmp_path: Path) -> None:
    query = parse_select("SELECT NULLIF(i % 3, 0)::text AS x FROM generate_series(1, 9) AS i", "postgres")
    with Database(server).snapshot() as reader:
        table = written(reader, query, [Field("x", "x", "text")], tmp_path / "rows")
    assert sorted(table.column("x").to_pylist()) == [""] * 3 + ["1"] * 3 + ["2"] * 3


def test_a_row_may_be_longer_than_a_chunk(server: str) -> None:
    query = parse_select("SELECT i, repeat('x', i * 3000000) AS x FROM generate_series(0, 3) AS i", "postgres")
    with Database(server).snapshot() as reader:
        parts = list(reader.rows(query))
    assert [len(text) for part in parts for text in part.column("x").to_pylist()] == [i * 3_000_000 for i in range(4)]


@pytest.mark.parametrize(
    ("expression", "as_numbers"),
    [
        ("now()", ()),
        ("ARRAY[1]", ()),
        ("12345678901234567890::numeric(30, 0)", ()),
        ("1.5::numeric", ()),
        ("1.5::numeric", ("x",)),
    ],
)
def test_types_that_lose_nothing_come_by_copy_and_others_as_rows(
    server: str, expression: str, as_numbers: tuple[str, ...]
) -> None:
    query = parse_select(f"SELECT {expression} AS x", "postgres")
    with Database(server).snapshot() as reader:
        (part,) = reader.rows(query, as_numbers)
    assert isinstance(part, pa.Table) == bool(as_numbers)


def test_a_copy_sees_the_snapshot_and_may_be_left(server: str) -> None:
    with psycopg.connect(server) as connection:
        connection.execute("CREATE TABLE t AS SELECT i, repeat('x', 100) AS x FROM generate_series(1, 200000) AS i")
    query = parse_select("SELECT * FROM t", "postgres")
    with Database(server).snapshot() as reader:
        assert reader.columns(query) == ["i", "x"]
        with psycopg.connect(server) as connection:
            connection.execute("DELETE FROM t")
        assert sum(part.num_rows for part in reader.rows(query)) == 200_000
        first = next(iter(reader.rows(query)))
        assert 0 < first.num_rows < 100_000


def test_an_error_of_a_row_names_the_select(server: str) -> None:
    query = parse_select("SELECT 1 / (i - 5) AS x FROM generate_series(1, 9) AS i", "postgres")
    with pytest.raises(StatementError, match="division by zero") as caught, Database(server).snapshot() as reader:
        list(reader.rows(query))
    assert caught.value.place.text == query.text


def test_texts_where_the_model_takes_numbers_are_named(server: str, tmp_path: Path) -> None:
    query = parse_select("SELECT NULLIF(x, '') AS x FROM (VALUES (''), ('abc')) AS v(x)", "postgres")
    with pytest.raises(DataError, match="column x holds 'abc'"), Database(server).snapshot() as reader:
        written(reader, query, [Field("x", "x", "number")], tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_what_is_written_is_read_again_bit_for_bit(server: str) -> None:
    """With columns of texts between those of numbers, and without any of one kind."""
    columns = {
        "n": pa.array([0.1, math.nan, -0.0, math.inf, 5e-324], pa.float64()),
        "t": pa.array(["", "a,b\n", '"', "\\N\t", "żółć 🙂"], pa.string()),
        "i": pa.array([2**63 - 1, -(2**63), 0, 1, -1], pa.int64()),
        "u": pa.array(["x" * 70_000, "", "y", " ", ""], pa.string()),
    }
    kinds = {"n": "DOUBLE PRECISION", "t": "TEXT", "i": "BIGINT", "u": "TEXT"}
    for names in ("ntiu", "t", "ni"):
        table = pa.table({name: columns[name] for name in names})
        parts = pa.concat_tables([table.slice(0, 2), table.slice(2)])  # chunks, and one that begins within its buffers
        with Database(server).transaction() as writer:
            writer.create([names], {name: kinds[name] for name in names})
            writer.load([names], parts.slice(1))
            writer.load([names], parts.slice(5))
        with psycopg.connect(server) as connection:
            found = connection.execute(f"SELECT * FROM {names}").fetchall()  # type: ignore[call-overload]
        assert repr(found) == repr(list(zip(*table.slice(1).to_pydict().values(), strict=True)))


def test_texts_are_written_to_a_database_of_another_encoding(server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS latin")
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    url = server.replace("/postgres?", "/latin?")
    with Database(url).transaction() as writer:
        writer.create(["t"], {"x": "TEXT"})
        writer.load(["t"], pa.table({"x": ["größe", "a"]}))
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT * FROM t").fetchall() == [("größe",), ("a",)]
