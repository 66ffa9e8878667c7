"""SQL tables: real PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mariadb
import numpy as np
import postgres
import psycopg
import pytest
import typed_sources as typed

from elasticdl.data.factory import create_reader
from elasticdl.data.sql import OutputTable
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError

COLUMNS = ["f", "n", "t"]


@pytest.fixture(scope="module", params=[postgres, mariadb], ids=["postgresql", "mariadb"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.param.server() as url:
        yield url


def connected(url: str) -> Any:
    return mariadb.connect(url) if url.startswith("mysql") else psycopg.connect(url)


def filled(url: str, name: str, key: str, keys: list[object]) -> str:
    charset = " character set utf8mb4" if url.startswith("mysql") else ""
    with connected(url) as connection, connection.cursor() as cursor:
        cursor.execute(f"create table {name} (id {key}, f double precision, n bigint, t text, b boolean){charset}")
        rows = [(one, row["f"], row["n"], row["t"], None) for one, row in zip(keys, typed.rows(len(keys)), strict=True)]
        cursor.executemany(f"insert into {name} values (%s, %s, %s, %s, %s)", rows[::-1])
    return f"{url}&table={name}"


def test_any_ranges_of_a_table_are_its_rows_in_the_order_of_the_key(database: str) -> None:
    url = filled(database, "numbered", "bigint primary key", [5 * i - 900 for i in range(700)])
    reader = create_reader(url, columns=COLUMNS)
    (shard,) = reader.shards()
    assert (shard.start, shard.end) == (0, 700)
    whole = typed.records(typed.rows(700))
    for cuts in ([0, 700], [0, 1, 255, 256, 257, 512, 699, 700], [0, 300, 300, 700]):
        fresh = create_reader(url, columns=COLUMNS)
        pieces = [fresh.read(Shard(shard.name, start, end)) for start, end in itertools.pairwise(cuts)]
        assert [record for piece in pieces for record in piece] == whole


def test_a_key_may_be_any_unique_column_of_text(database: str) -> None:
    url = filled(database, "named", "varchar(20) unique not null", [f"key {i:05d}" for i in range(600)])
    reader = create_reader(url + "&key=id", columns=COLUMNS)
    (shard,) = reader.shards()
    assert list(reader.read(Shard(shard.name, 250, 520))) == typed.records(typed.rows(600))[250:520]


def test_metadata_have_the_types_of_the_table(database: str) -> None:
    url = filled(database, "typed", "bigint primary key", list(range(3)))
    metadata = create_reader(url, label_column="n").metadata()
    types = {"id": "int64", "f": "float64", "n": "int64", "t": "string", "b": "int64"}
    assert dict(metadata.column_dtypes) == types
    assert metadata.label_column == "n"


def test_a_table_that_changes_while_it_is_read_is_an_error(database: str) -> None:
    url = filled(database, "changing", "bigint primary key", [2 * i for i in range(600)])
    reader = create_reader(url, columns=COLUMNS)
    (shard,) = reader.shards()
    with connected(database) as connection, connection.cursor() as cursor:
        cursor.execute("insert into changing values (301, 0, 0, '', null)")
    assert len(reader.read(Shard(shard.name, 300, 600))) == 300
    with pytest.raises(DataError, match=r"257 rows, there were 256") as caught:
        reader.read(Shard(shard.name, 100, 200))
    assert "copy" in caught.value.hint


def test_a_password_is_in_no_name_and_no_error(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if database.startswith("mysql"):
        mariadb.execute(database, "create user reader identified by 'swordfish'", "grant all on *.* to reader")
    url = re.sub(r"//\w+@", "//reader:swordfish@", filled(database, "secret", "bigint primary key", [1, 2]))
    (shard,) = create_reader(url).shards()
    assert "swordfish" not in shard.name
    with pytest.raises(DataError, match="no table nothing") as caught:
        create_reader(url.replace("table=secret", "table=nothing"))
    assert "swordfish" not in str(caught.value)
    assert "secret" in caught.value.hint
    if database.startswith("mysql"):
        with pytest.raises(DataError, match="Access denied") as caught:
            create_reader(url.replace("swordfish", "sharkfish"))
        assert "sharkfish" not in str(caught.value)
        monkeypatch.setenv("MYSQL_PWD", "swordfish")
        assert create_reader(url.replace(":swordfish", "")).shards()


@pytest.mark.parametrize("database", [mariadb], ids=["mariadb"], indirect=True)
def test_types_of_mariadb_are_numbers_and_texts(database: str) -> None:
    mariadb.execute(
        database,
        "create table kinds (id bigint unsigned primary key, d decimal(20, 2), i tinyint(1), t1 blob,"
        " t2 datetime, t3 enum('x', 'y'), t4 set('p', 'q'), big bigint unsigned, bits bit(3))",
        "insert into kinds values (1, 12.50, 1, x'00ff', '2020-02-03 04:05:06', 'y', 'q,p', 7, 1),"
        " (18446744073709551615, null, null, null, null, null, null, 18446744073709551615, 0)",
    )
    columns = ["d", "i", "t1", "t2", "t3", "t4"]
    reader = create_reader(f"{database}&table=kinds", columns=columns)
    types = dict(zip(columns, ["float64", "int64", *["string"] * 4], strict=True))
    assert dict(reader.metadata().column_dtypes) == types
    (shard,) = reader.shards()
    made = {"d": 12.5, "i": 1, "t1": b"\x00\xff", "t2": "2020-02-03 04:05:06", "t3": "y", "t4": "p,q"}
    assert next(iter(reader.read(shard))) == typed.records([made])[0]
    with pytest.raises(DataError, match="bits is of type BIT"):
        create_reader(f"{database}&table=kinds", columns=["bits"])
    with pytest.raises(DataError, match=r"column big of type BIGINT.* too large"):
        create_reader(f"{database}&table=kinds", columns=["big"]).read(shard)


@pytest.mark.parametrize("source", ["postgresql://reader@/d?host={}", "mysql://reader@/d?unix_socket={}/s"])
def test_a_server_that_does_not_answer_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match=source.partition("?")[0]):
        create_reader(source.format(tmp_path) + "&table=t")


@contextlib.contextmanager
def away_for_a_moment(path: Path) -> Iterator[None]:
    """Let a database refuse everything at first, as one that starts again does."""
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("begin exclusive")
    timer = threading.Timer(0.3, holder.rollback)
    timer.start()
    yield
    timer.join()
    holder.close()


def test_a_database_that_starts_again_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    typed.write_sqlite(path, typed.rows(4), key="integer primary key")
    reader = create_reader(f"sqlite:///{path}?table=t&timeout=0")
    with away_for_a_moment(path):
        assert reader.shards()[0].end == 4
    table = OutputTable(f"sqlite:///{path}?table=outputs&timeout=0", "id")
    table.replace({"id": np.arange(2)})
    with away_for_a_moment(path):
        table.replace({"id": np.arange(1, 3)})
    table.check_num_rows(3)


def test_wrong_tables_columns_and_keys_are_named(tmp_path: Path) -> None:
    typed.write_sqlite(tmp_path / "d.db", typed.rows(4), key="integer")
    url = f"sqlite:///{tmp_path}/d.db"
    for wrong, said in [
        (url, "names no table"),
        (f"{url}?table=u", "there is no table u"),
        (f"{url}?table=t", "no primary key"),
        (f"{url}?table=t&key=x", "no column x"),
        (f"sqlite:///{tmp_path}/none.db?table=t", "does not exist"),
        ("oracle://u@h/d?table=t", "oracle:// is not a data source"),
    ]:
        with pytest.raises(DataError, match=said) as caught:
            create_reader(wrong)
        assert caught.value.hint
    with pytest.raises(DataError, match="no column y, which --columns names"):
        create_reader(f"{url}?table=t&key=id", columns=["y"])


def test_a_key_that_is_not_unique_is_refused(tmp_path: Path) -> None:
    typed.write_sqlite(tmp_path / "d.db", typed.rows(4), key="integer")
    with sqlite3.connect(tmp_path / "d.db") as database:
        database.execute("update t set id = 1")
    database.close()
    with pytest.raises(DataError, match="key id is not unique: 4 rows have 1 values"):
        create_reader(f"sqlite:///{tmp_path}/d.db?table=t&key=id").shards()


def test_rows_that_sqlite_has_put_into_its_log_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    writer = sqlite3.connect(path)
    writer.execute("pragma journal_mode = wal")
    writer.execute("create table t (id integer primary key)")
    url = f"sqlite:///{path}?table=t"
    for count in (1, 2):
        writer.execute("insert into t default values")
        writer.commit()
        (shard,) = create_reader(url).shards()
        assert shard.end == len(create_reader(url).read(shard)) == count
    writer.close()


def test_values_that_are_not_of_their_columns_type_are_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "d.db") as database:
        database.execute("create table t (id integer primary key, day datetime, n integer)")
        database.execute("insert into t values (1, '01/02/2020', 1.5)")
    database.close()
    url = f"sqlite:///{tmp_path}/d.db?table=t"
    with pytest.raises(DataError, match="Invalid isoformat string: '01/02/2020'") as raised:
        create_reader(url, columns=["day"]).read(Shard(url, 0, 1))
    assert "--columns" in raised.value.hint
    with pytest.raises(DataError, match=r"column n of type INTEGER: 1\.5 is no whole number"):
        create_reader(url, columns=["n"]).read(Shard(url, 0, 1))


def test_several_tables_are_several_shards(tmp_path: Path) -> None:
    for number in range(2):
        typed.write_sqlite(tmp_path / f"{number}.db", typed.rows(300, number))
    urls = [f"sqlite:///{tmp_path}/{number}.db?table=t" for number in range(2)]
    reader = create_reader(",".join(urls), columns=COLUMNS)
    assert [len(shard) for shard in reader.shards()] == [300, 300]
    assert list(reader.read(Shard(urls[1], 10, 12))) == typed.records(typed.rows(300, 1))[10:12]
