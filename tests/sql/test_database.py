"""Reads and writes of statements on real databases: snapshots, errors at their place, no injection."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pymysql.connections import Connection

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.sql import snapshot
from elasticdl_client.sql.database import Database, SnapshotReader, check_url
from elasticdl_client.sql.estimators import Task
from elasticdl_client.sql.jobs import JobFlags
from elasticdl_client.sql.models import ModelRegistry
from elasticdl_client.sql.parser import parse, parse_select
from elasticdl_client.sql.predict import _Staging, _value
from elasticdl_client.sql.runtime import Session, check_target
from elasticdl_client.sql.snapshot import Field, input_fields
from elasticdl_client.sql.statement import Name, Place, Predict, Query, StatementError
from elasticdl_client.sql.tokens import quoted_name
from tests.data import mariadb

EVIL = "x\"'; DROP TABLE staff; --"
FILL = "SELECT i, i % 50, CASE WHEN i % 5 = 0 THEN NULL ELSE 'a%s :x' END FROM n"
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 25000)"
NUMBERS_OF_MARIADB = "WITH n(i) AS (SELECT seq FROM seq_1_to_25000)"


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with a table staff of 25,000 rows, and one with a name that wants to be SQL."""
    quoted = quoted_name(EVIL, "mysql" if request.param == "mariadb" else "postgres")
    statements = [
        "CREATE TABLE staff (id INTEGER PRIMARY KEY, age INTEGER, town TEXT)",
        f"INSERT INTO staff {NUMBERS_OF_MARIADB if request.param == 'mariadb' else NUMBERS} {FILL}",
        f"CREATE TABLE {quoted} ({quoted} TEXT)",
        f"INSERT INTO {quoted} VALUES ('{EVIL.replace(chr(39), 2 * chr(39))}')",
    ]
    if request.param == "sqlite":
        path = tmp_path / "staff.db"
        with sqlite3.connect(path) as database:
            for statement in statements:
                database.execute(statement)
        database.close()
        return f"sqlite:///{path}"
    if request.param == "mariadb":
        found: str = request.getfixturevalue("mariadb_server")
        mariadb.execute(found, *statements)
        return found
    server: str = request.getfixturevalue("server")
    with psycopg.connect(server) as connection:
        for statement in statements:
            connection.execute(statement)
    return server


def executed(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement from outside, as another program would."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0.1) as database:
            rows = database.execute(statement).fetchall()
        database.close()
        return rows
    if url.startswith("mysql"):
        return list(mariadb.execute(url, statement))
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def rows_of(reader: SnapshotReader, found: Query) -> list[tuple[Any, ...]]:
    parts = [part.to_pylist() if isinstance(part, pa.Table) else part for part in reader.rows(found)]
    return [tuple(row.values() if isinstance(row, dict) else row) for part in parts for row in part]


def query(url: str, text: str) -> Query:
    return parse_select(text, Database(url).dialect)


def test_a_select_is_read_as_it_is_written(url: str) -> None:
    found = query(url, "SELECT town, count(*) AS n, '%s :x' AS z FROM staff GROUP BY town ORDER BY 2 -- all")
    with Database(url).snapshot() as reader:
        assert reader.columns(found) == ["town", "n", "z"]
        assert reader.count(found, "town") == (2, 1, 1)
        assert reader.values(found, "n") == [5000, 20000]
        assert rows_of(reader, found) == [
            (None, 5000, "%s :x"),
            ("a%s :x", 20000, "%s :x"),
        ]
        assert len(reader.sample(query(url, "SELECT * FROM staff"), 100)) == 100


def test_a_snapshot_does_not_see_what_is_written_meanwhile(url: str) -> None:
    found = query(url, "SELECT id FROM staff")
    with Database(url).snapshot() as reader:
        assert reader.count(found, "id")[0] == 25_000
        with contextlib.suppress(sqlite3.OperationalError):  # "database is locked": SQLite keeps the writer out
            executed(url, "DELETE FROM staff")
        assert reader.count(found, "id")[0] == 25_000
        assert sum(map(len, reader.rows(found))) == 25_000


def test_a_snapshot_changes_nothing(url: str) -> None:
    with pytest.raises(StatementError, match=r"(?i)read[- ]?only"):
        with Database(url).snapshot() as reader:
            reader._run("DELETE FROM staff", query(url, "SELECT 1 AS x"))
    assert executed(url, "SELECT count(*) FROM staff") == [(25_000,)]


@pytest.mark.parametrize(
    ("text", "marked", "hint"),
    [
        ("SELECT * FROM stff", "stff", "'staff'"),
        ("SELECT agee FROM staff", "agee", "'age'"),
        ("SELECT ,age FROM staff", ",", ""),
        ("SELECT frob(age) FROM staff", "frob", ""),
    ],
)
def test_what_the_database_refuses_is_pointed_at(url: str, text: str, marked: str, hint: str) -> None:
    with pytest.raises(StatementError) as caught:
        with Database(url).snapshot() as reader:
            reader.columns(query(url, text))
    if marked == "," and url.startswith("mysql"):
        marked = "age"  # MariaDB points behind it
    assert caught.value.place.text == marked
    assert hint in caught.value.hint


def test_names_and_values_stay_names_and_values(url: str) -> None:
    database = Database(url)
    quoted = database.quoted(EVIL)
    found = query(url, f"SELECT * FROM {quoted}")
    with database.snapshot() as reader:
        assert reader.columns(found) == [EVIL]
        assert reader.count(found, EVIL) == (1, 1, 1)
        assert reader.values(found, EVIL) == [EVIL]
    with database.transaction() as writer:
        writer.run(f"CREATE TABLE {database.quoted(EVIL + '2')} ({database.quoted('id')} INTEGER, {quoted} TEXT)")
        writer.insert([EVIL + "2"], ["id", EVIL], [{"id": 1, EVIL: EVIL}])
    assert executed(url, f"SELECT * FROM {database.quoted(EVIL + '2')}") == [(1, EVIL)]
    assert executed(url, "SELECT count(*) FROM staff") == [(25_000,)]


def test_a_transaction_that_fails_leaves_nothing(url: str) -> None:
    database = Database(url)
    before = database.known_names()
    for is_overwriting in (False, True):
        with contextlib.suppress(KeyboardInterrupt), database.new_table(["half"], is_overwriting) as (writer, table):
            writer.create(table, {"a": "INTEGER"})
            writer.insert(table, ["a"], [{"a": 1}])
            raise KeyboardInterrupt
        assert database.known_names() == before


def test_a_new_table_replaces_another_one_at_once(url: str) -> None:
    database = Database(url)
    for value in (1, 2):
        with database.new_table(["found"], is_overwriting=True) as (writer, table):
            writer.create(table, {"a": "INTEGER", "ü%": "TEXT"})
            writer.insert(table, ["a", "ü%"], [{"a": value, "ü%": "żółć"}])
        assert executed(url, "SELECT * FROM found") == [(value, "żółć")]
    with pytest.raises(DataError), database.new_table(["found"], is_overwriting=False) as (writer, table):
        writer.create(table, {"a": "INTEGER"})
    assert executed(url, "SELECT a FROM found") == [(2,)]
    assert [name for name in database.known_names() if name.startswith("elasticdl")] == []


def test_predictions_become_a_table_when_each_row_has_one(url: str, tmp_path: Path) -> None:
    models = ModelRegistry(tmp_path)
    models.add("m", {"task": Task.BINARY.value, "classes": ["low", "high"]}).export.mkdir()
    session = Session(lambda: Database(url), models, JobFlags((), {}), is_dry_run=False, is_overwriting=True)
    (statement,) = parse(
        "SELECT age, town FROM staff WHERE id <= 3 ORDER BY id TO PREDICT guess.pay USING m", session.database.dialect
    )
    assert isinstance(statement, Predict)
    before = session.database.known_names()
    with _Staging(session, statement, ["age", "town"]).made() as staging:
        staging.add([{"elasticdl_row": row, "elasticdl_value": "low"} for row in (1, 2)])
        with pytest.raises(DataError, match="2 of 3 rows"):
            staging.finish(3)
    assert session.database.known_names() == before
    for value in ("low", "hïgh 🙂"):
        with _Staging(session, statement, ["age", "town"]).made() as staging:
            with session.database.snapshot() as reader:
                rows = rows_of(reader, staging.query())
            staging.add([{"elasticdl_row": row[2], "elasticdl_value": value} for row in rows])
            staging.finish(3)
        found = executed(url, "SELECT age, town, pay FROM guess")
        assert sorted(found) == [(age, "a%s :x", value) for age in (1, 2, 3)]
    assert sorted(session.database.known_names()) == sorted([*before, "guess", "age", "town", "pay"])


@pytest.mark.parametrize("target", ["Guess.Pay", "GUESS.PAY", "{0}Guess{0}.{0}Pay{0}"])
def test_a_table_of_predictions_is_found_by_its_name_in_the_statement(url: str, target: str, tmp_path: Path) -> None:
    models = ModelRegistry(tmp_path)
    models.add("m", {"task": Task.BINARY.value, "classes": ["low", "high"]}).export.mkdir()
    session = Session(lambda: Database(url), models, JobFlags((), {}), is_dry_run=False, is_overwriting=False)
    dialect = session.database.dialect
    written = target.format("`" if dialect == "mysql" else '"')
    (statement,) = parse(f"SELECT age FROM staff WHERE id = 1 TO PREDICT {written} USING m", dialect)
    assert isinstance(statement, Predict)
    check_target(session, statement.table)
    with _Staging(session, statement, ["age"]).made() as staging:
        staging.add([{"elasticdl_row": 1, "elasticdl_value": "low"}])
        staging.finish(1)
    table, column = written.split(".")
    assert executed(url, f"SELECT {column} FROM {table}") == [("low",)]
    with pytest.raises(StatementError, match="exists"):
        check_target(session, statement.table)


@pytest.mark.parametrize(
    ("output", "classes"), [(math.nan, ["low", "high"]), ([0.2, math.nan, 0.1], [1, 2, 3]), (math.nan, []), (None, [])]
)
def test_a_prediction_that_is_no_number_is_null(output: float | list[float | None] | None, classes: list[Any]) -> None:
    assert _value(output, classes) is None


def test_a_table_of_results_is_checked_before_anything_is_computed(url: str, tmp_path: Path) -> None:
    schema = {"sqlite": "main", "mysql": "staff"}.get(url.partition(":")[0], "public")
    executed(url, "CREATE VIEW aged AS SELECT age FROM staff")
    models, flags = ModelRegistry(tmp_path), JobFlags((), {})
    session = Session(lambda: Database(url), models, flags, is_dry_run=False, is_overwriting=False)
    place = Place("x", 0, 1)
    for names, said in (
        (["staff"], "exists"),
        ([schema, "staff"], "exists"),
        (["nowhere", "t"], "no schema 'nowhere'"),
        (["aged"], "is a view"),
    ):
        with pytest.raises(StatementError, match=said):
            check_target(session, [Name(name, place) for name in names])
    check_target(session, [Name(schema, place), Name("new", place)])
    session.is_overwriting = True
    check_target(session, [Name("staff", place)])


def test_rows_become_files_in_the_forms_of_a_models_inputs(url: str, tmp_path: Path) -> None:
    fields = [
        *input_fields([("age", "number"), ("age", "text"), ("town", "text")]),
        Field("elasticdl_label", "y", "class"),
    ]
    assert [field.name for field in fields] == ["age", "age_text", "town", "elasticdl_label"]
    found = query(url, "SELECT *, CASE WHEN age < 25 THEN 'low' ELSE 'high' END AS y FROM staff ORDER BY id")
    with Database(url).snapshot() as reader:
        names = reader.columns(found)
        assert snapshot.write(reader.rows(found), names, fields, tmp_path / "rows", ["high", "low"]) == 25_000
    table = pq.read_table(tmp_path / "rows")
    assert table.num_rows == 25_000
    assert [table.column(name)[4].as_py() for name in table.column_names] == [5.0, "5", "", 1]
    assert table.column("town")[5].as_py() == "a%s :x"


@pytest.mark.parametrize(
    "url", ["postgresql://reader:swordfish@/d?host={}", "mysql://reader:swordfish@/d?unix_socket={}/s"]
)
def test_a_password_is_in_no_error(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path)
    with pytest.raises(DataError) as caught:
        Database(url).has_table(["t"])
    assert "swordfish" not in str(caught.value)
    with pytest.raises(FlagError, match="password") as refused:
        check_url(url, on_command_line=True)
    assert "swordfish" not in str(refused.value)
    check_url(url, on_command_line=False)


@pytest.mark.parametrize("url", ["oracle://u@h/d", "staff.db", "", "http://x", "sqlite+x:///a"])
def test_other_databases_are_refused_by_name(url: str) -> None:
    with pytest.raises(FlagError, match="--datasource="):
        check_url(url, on_command_line=True)


def test_rows_are_permuted_by_a_seed_within_a_file_and_missing_numbers_are_nan(tmp_path: Path) -> None:
    rows = [[(i, None if i == 7 else i / 2) for i in range(1000)]]
    fields = [Field("elasticdl_row", "i", "row"), Field("x", "x", "number")]
    for number, seed in enumerate((3, 3, None)):
        snapshot.write(rows, ["i", "x"], fields, tmp_path / str(number), seed=seed)
    one, same, in_order = (pq.read_table(tmp_path / str(n)).to_pydict() for n in range(3))
    assert one["elasticdl_row"] == same["elasticdl_row"] != in_order["elasticdl_row"] == list(range(1000))
    assert sorted(one["elasticdl_row"]) == list(range(1000))
    assert math.isnan(in_order["x"][7])


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [("number", "abc", "where the model takes numbers"), ("class", "c", "no class"), ("class", None, "NULL")],
)
def test_a_value_of_another_form_names_its_column(tmp_path: Path, form: str, value: object, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        snapshot.write([[(value,)]], ["x"], [Field("x", "x", form)], tmp_path / "rows", ["a", "b"])
    assert "column x" in caught.value.what or "label x" in caught.value.what
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_label_of_numbers_that_is_not_finite_is_refused(tmp_path: Path, value: float | None) -> None:
    rows = [[(1.0, 2.0), (2.0, value)]]
    with pytest.raises(DataError, match="The label y is NULL, NaN or infinite"):
        snapshot.write(rows, ["x", "y"], [Field(snapshot.LABEL, "y", "number")], tmp_path / "rows")


def test_texts_of_mariadb_that_differ_in_case_are_different_labels(mariadb_server: str) -> None:
    mariadb.execute(
        mariadb_server,
        "CREATE TABLE t (y VARCHAR(9) CHARACTER SET latin1, n BIGINT UNSIGNED)",
        "INSERT INTO t VALUES ('no', 10), ('No', 9), ('no', 9), ('\u00fc', 18446744073709551615), (NULL, NULL)",
    )
    found = query(mariadb_server, "SELECT * FROM t")
    with Database(mariadb_server).snapshot() as reader:
        assert reader.count(found, "y") == (5, 4, 3)
        assert reader.values(found, "y") == ["No", "no", "\u00fc"]
        assert reader.values(found, "n") == [9, 10, 2**64 - 1]
        with pytest.raises(StatementError, match="Duplicate column name") as caught:
            reader.columns(query(mariadb_server, "SELECT n, y, n FROM t"))
    assert "AS name" in caught.value.hint


OF_A_CTE = "WITH t AS (SELECT 1 AS a) SELECT * FROM t, old"


@pytest.mark.parametrize("text", ["SELECT * FROM old", "SELECT * FROM seen", OF_A_CTE])
def test_a_table_of_mariadb_without_transactions_is_refused(mariadb_server: str, text: str) -> None:
    mariadb.execute(
        mariadb_server,
        "CREATE TABLE old (b INTEGER) ENGINE=MyISAM",
        "CREATE TABLE t (a INTEGER) ENGINE=MyISAM",
        "CREATE VIEW inner_seen AS SELECT b FROM old",
        "CREATE VIEW seen AS SELECT b FROM inner_seen",
    )
    with pytest.raises(StatementError, match="table old is of the engine MyISAM"):
        with Database(mariadb_server).snapshot() as reader:
            reader.columns(query(mariadb_server, text))


def test_rows_of_mariadb_that_nothing_wants_any_more_stay_on_the_server(
    mariadb_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packets = []
    read = Connection._read_packet
    monkeypatch.setattr(Connection, "_read_packet", lambda *given: packets.append(1) or read(*given))
    found = query(mariadb_server, "SELECT a.seq FROM seq_1_to_1000 AS a, seq_1_to_1000 AS b")
    with Database(mariadb_server).snapshot() as reader:
        assert len(next(reader.rows(found))) == 10_000
    assert 10_000 < len(packets) < 20_000


def test_two_columns_of_one_name_are_refused_as_one_would_be_a_feature_that_is_the_label(url: str) -> None:
    dialect = Database(url).dialect
    join = parse_select("SELECT * FROM staff AS a JOIN staff AS b ON a.id = b.id", dialect)
    with pytest.raises(StatementError), Database(url).snapshot() as reader:
        reader.columns(join)
    named = parse_select("SELECT a.*, b.town AS other FROM staff AS a JOIN staff AS b ON a.id = b.id", dialect)
    with Database(url).snapshot() as reader:
        assert reader.columns(named) == ["id", "age", "town", "other"]
    if dialect != "sqlite":  # the others number no names
        numbered = parse_select(f"SELECT id AS h, age AS {Database(url).quoted('h:1')} FROM staff", dialect)
        with Database(url).snapshot() as reader:
            assert reader.columns(numbered) == ["h", "h:1"]
