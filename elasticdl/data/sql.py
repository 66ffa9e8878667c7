"""Read SQL tables by record number: `sqlite:///path?table=t`, `postgresql://user@host/db?table=t`, `mysql://…`.

Rows are ordered by a unique key.  The index contains every 256th key and is built by one statement; a range is selected
by the keys around it, not by counting rows from the start of the table.  A changed number of rows in a block is an
error: a table must not change while a job reads it.  All access uses SQLAlchemy.

`OutputTable`: a table to which a job writes its outputs, rows by key, in transactions that may be repeated.  A
transaction deletes the rows of its keys before it inserts them, so that a repeated task leaves each row once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.files import Arrays, cached
from elasticdl.data.reader import PartsReader
from elasticdl.data.sources import need
from elasticdl.data.table_encoder import ColumnType, Numbers, Selection, TableColumn, Texts, describe, encode_table
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.secret_values import hide

_BLOCK = 256
_PAUSES_S = tuple(min(0.05 * 2**attempt, 10.0) for attempt in range(9))  # 23 s in all; restarts take seconds
_OF_TABLE = ("table", "schema", "key")  # ours in the query of a URL; all other options are the database's
_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_PACKAGES = {  # driver → what needs it, requirement for pip
    "psycopg": ("PostgreSQL tables", "psycopg[binary]"),
    "pymysql": ("tables of MySQL and MariaDB", "pymysql[rsa]"),
}


class SqlTable:
    """The rows of one table."""

    def __init__(self, url: str, key: str, selection: Selection) -> None:
        """Connect and read the table's columns.

        Args:
            url: URL with `table=` in its query; also `key=`, unless the primary key is one column; `schema=` is
                optional.
            key: Key column from --data_reader_params; empty: from the URL, or the primary key.
            selection: Selected columns.

        Raises:
            DataError: The table or a column does not exist, or the table has no key.
        """
        self.where = hide(url)
        sql, parsed, query = parse(url)
        name, schema = str(query.pop("table", "")), query.pop("schema", None)
        key = key or str(query.pop("key", ""))
        if not name:
            raise DataError(f"{self.where} names no table.", "Write it after the URL: ?table=NAME.")
        _check_file(parsed)
        self._sql, self._engine = sql, sql.create_engine(parsed, pool_pre_ping=True)
        self._file = parsed.database if parsed.get_backend_name() == "sqlite" else None
        try:
            self._table = sql.Table(name, sql.MetaData(), schema=schema, autoload_with=self._engine)
        except sql.exc.NoSuchTableError as error:
            tables = ", ".join(sql.inspect(self._engine).get_table_names(schema=schema)[:10]) or "none"
            raise DataError(f"{self.where}: there is no table {name}.", f"There are: {tables}.") from error
        except sql.exc.SQLAlchemyError as error:
            raise self._failed(error) from error
        self._key = self._find_key(key)
        self._is_exact = selection.is_exact
        types = {name: self._type(name) for name in selection.of(self._table.columns.keys(), self.where)}
        self.types = selection.typed(types, self.where)
        self._index: Arrays | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._found()["count"])

    def read(self, start: int, end: int) -> list[bytes]:
        first, last = start // _BLOCK, (end - 1) // _BLOCK
        begin = start - first * _BLOCK
        rows = self._blocks(first, last)[begin : begin + end - start]
        columns = {name: self._column(name, [row[number] for row in rows]) for number, name in enumerate(self.types)}
        return encode_table(columns, len(rows), self._is_exact)

    def _blocks(self, first: int, last: int) -> list[Any]:
        """Return the rows of consecutive blocks."""
        keys, count = self._found()["keys"], len(self)
        statement = self._sql.select(*(self._table.c[name] for name in self.types)).order_by(self._key)
        statement = statement.where(self._key >= keys[first].item())
        if last + 1 < len(keys):
            statement = statement.where(self._key < keys[last + 1].item())
        rows = self._run(statement)
        expected = min((last + 1) * _BLOCK, count) - first * _BLOCK
        if len(rows) != expected:
            begin = keys[first].item()
            raise DataError(
                f"{self.where}: from the key {begin!r} on there are {len(rows)} rows, there were {expected}.",
                "The table changed after the job had counted it: train on a copy of it.",
            )
        return rows

    def _found(self) -> Arrays:
        with self._lock:
            if self._index is None:
                if self._file and os.path.isfile(self._file):
                    kind = f"sql {self._table.fullname} {self._key.name}"
                    self._index = cached(self._file, kind, self._build, _stamp(self._file))
                else:
                    self._index = self._build()
            return self._index

    def _build(self) -> Arrays:
        """Return every 256th key, and the number of rows."""
        sql, key = self._sql, self._key
        numbered = sql.select(key.label("k"), sql.func.row_number().over(order_by=key).label("n")).subquery()
        statement = sql.select(numbered.c.k).where((numbered.c.n - 1) % _BLOCK == 0).order_by(numbered.c.k)
        keys = [row[0] for row in self._run(statement)]
        ((count, distinct),) = self._run(sql.select(sql.func.count(), sql.func.count(key.distinct())))
        if distinct != count:
            raise DataError(
                f"{self.where}: the key {key.name} is not unique: {count} rows have {distinct} values, or none.",
                "Name a column of unique values: ?key=NAME.",
            )
        if not all(isinstance(one, int | str) for one in keys):
            raise DataError(
                f"{self.where}: the key {key.name} is of type {key.type}.", "A key must be an integer or a text."
            )
        return {"keys": np.array(keys), "count": np.array(count)}

    def _run(self, statement: Any) -> list[Any]:
        """Return the rows of a statement; retry for some seconds if the database does not respond."""
        try:
            for pause_s in _PAUSES_S:
                with contextlib.suppress(self._sql.exc.OperationalError):
                    return self._rows(statement)
                time.sleep(pause_s)
            return self._rows(statement)
        except (ValueError, TypeError) as error:  # SQLite accepts any value in a column of times
            raise DataError(
                f"{self.where}: a date or time cannot be read: {error}.",
                "Name the columns to read with --columns, or read a view that converts it: CAST(x AS TEXT).",
            ) from error
        except self._sql.exc.SQLAlchemyError as error:
            raise self._failed(error) from error

    def _rows(self, statement: Any) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(statement))

    def _find_key(self, wanted: str) -> Any:
        columns = self._table.columns
        if wanted:
            if wanted not in columns:
                raise DataError(f"{self.where} has no column {wanted}.", f"It has: {', '.join(columns.keys())}.")
            return columns[wanted]
        primary = list(self._table.primary_key.columns)
        if len(primary) != 1:
            what = "no primary key" if not primary else "a primary key of several columns"
            raise DataError(f"{self.where} has {what}.", "Name a column of unique values: ?key=NAME.")
        return primary[0]

    def _type(self, name: str) -> ColumnType:
        kinds, kind = self._sql.types, self._table.c[name].type
        if isinstance(kind, kinds.Boolean | kinds.Integer):
            return ColumnType("int64")
        if isinstance(kind, kinds.Numeric | kinds.Float):
            return ColumnType("float64")
        if isinstance(kind, kinds.String | kinds.LargeBinary | kinds.Uuid | kinds.DateTime | kinds.Date | kinds.Time):
            return ColumnType("string")
        raise DataError(
            f"{self.where}: column {name} is of type {kind}, which no record can hold.",
            "Name the columns to read with --columns, or read a view that converts it.",
        )

    def _column(self, name: str, values: list[Any]) -> TableColumn:
        kind = self.types[name].dtype
        try:
            if kind == "float64":
                return Numbers(np.array([np.nan if value is None else float(value) for value in values], np.float64))
            if kind == "int64":
                missing = np.array([value is None for value in values], np.bool_)
                numbers = np.array([0 if value is None else _whole(value) for value in values], np.int64)
                return Numbers(numbers, missing if missing.any() else None)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{self.where}: column {name} of type {self._table.c[name].type}: {error}.",
                "Name the columns to read with --columns, or read a view that converts it.",
            ) from error
        return Texts([_bytes(value) for value in values])

    def _failed(self, error: Any) -> DataError:
        cause = getattr(error, "orig", None) or error
        arguments: tuple[Any, ...] = getattr(cause, "args", ())
        message = arguments[1] if len(arguments) == 2 and isinstance(arguments[0], int) else cause  # PyMySQL
        return DataError(
            f"{self.where}: {str(message).strip().splitlines()[0]}.", "Check the URL, its table and rights."
        )


def sql_reader(urls: Sequence[str], key: str, selection: Selection, seed: int) -> PartsReader:
    """Return the `Reader` over tables: each table is a shard, named by its URL without the password."""
    by_name = {hide(url): url for url in urls}
    first = SqlTable(urls[0], key, selection)

    def open_table(name: str) -> SqlTable:
        table = first if by_name[name] == urls[0] else SqlTable(by_name[name], key, selection)
        if table.types != first.types:
            raise DataError(
                f"The columns of {table.where} are not those of {first.where}.",
                "All tables of a data source must have the same columns of the same types.",
            )
        return table

    names = list(by_name)
    return PartsReader(
        ",".join(names), names, open_table, lambda: describe(first.types, selection, seed), check=None, identify=None
    )


def parse(url: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the module SQLAlchemy, its URL of the database, and the options `table`, `schema` and `key` of the URL.

    Args:
        url: URL of a database; a password that is not in the URL is taken from PGPASSWORD or MYSQL_PWD.

    Raises:
        DataError: The URL is not that of a database, or a package is missing.
    """
    sql = need("sqlalchemy", "SQL tables", "sqlalchemy")
    try:
        parsed = sql.engine.make_url(url)
    except sql.exc.ArgumentError as error:
        raise DataError(f"{hide(url)} is not the URL of a database.") from error
    driver = _DRIVERS.get(parsed.drivername, parsed.drivername)
    package = driver.partition("+")[2]
    if package in _PACKAGES:
        need(package, *_PACKAGES[package])
    if package == "pymysql" and parsed.password is None:  # libpq reads PGPASSWORD itself
        parsed = parsed.set(password=os.environ.get("MYSQL_PWD"))
    query = {name: parsed.query[name] for name in _OF_TABLE if name in parsed.query}
    return sql, parsed.difference_update_query(_OF_TABLE).set(drivername=driver), query


def _check_file(parsed: Any) -> None:
    if parsed.get_backend_name() == "sqlite" and not os.path.isfile(parsed.database or ""):
        raise DataError(
            f"The database {parsed.database or '(none)'} does not exist.",
            "sqlite:///data.db names a file of the working directory, sqlite:////data/data.db an absolute one.",
        )


def _stamp(path: str) -> list[list[int]]:
    """Return a value that changes with an SQLite database: sizes and times of the file, and of its log if it exists."""
    found = []
    for name in (path, f"{path}-wal"):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name)
            found.append([status.st_size, status.st_mtime_ns])
    return found


def _whole(value: Any) -> int:
    """Return a value as an integer; raise for a fraction: SQLite accepts any value in an integer column."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is no whole number")
    return int(value)


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, set):  # MySQL's type SET
        return ",".join(sorted(value)).encode()
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else str(value).encode()


Columns = Mapping[str, npt.NDArray[Any]]
_NAME_A_KEY = "The first of --prediction_columns is the table's key: name one with another value in each record."
_LONGEST_KEY = 255  # characters; MySQL requires a length for text keys


class OutputTable:
    """A table for outputs; it is created with the first rows."""

    def __init__(self, url: str, key: str) -> None:
        """
        Args:
            url: URL with `table=` in its query; `schema=` is optional.
            key: Name of the primary key column.

        Raises:
            DataError: A package for the URL is not installed, or the URL names no table.
        """
        self._where = hide(url)
        self._sql, parsed, query = parse(url)
        engine = _engine(self._sql, parsed)
        # At a higher level MySQL locks gaps between keys: deadlocks with a worker that inserts rows in such a gap.
        is_sqlite = engine.dialect.name == "sqlite"
        self._engine = engine if is_sqlite else engine.execution_options(isolation_level="READ COMMITTED")
        self._has_nan = engine.dialect.name not in ("mysql", "mariadb")
        self._name, self._schema = _table_of(query, self._where)
        self._key = key
        self._table: Any = None

    def replace(self, columns: Columns) -> None:
        """Write rows in one transaction; they replace rows with the same keys.

        Args:
            columns: Columns of equal length.  With several values per row, each becomes a column NAME_0, NAME_1 ….  NaN
                becomes NULL in MySQL and MariaDB, because they have no NaN.

        Raises:
            DataError: The database refuses the rows.
        """
        columns = dict(part for name, values in columns.items() for part in _flat(name, values))
        sql = self._sql
        values = [self._values(name, columns[name]) for name in columns]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        rows.sort(key=lambda row: row[self._key])  # workers lock the same rows in one order
        try:
            table = self._table = self._table if self._table is not None else self._made(columns)
            for pause_s in _PAUSES_S:
                try:
                    return self._write(table, rows)
                except sql.exc.IntegrityError:  # another worker has just written the same rows: try again
                    continue
                except sql.exc.OperationalError:  # a deadlock with such a worker, or the database restarts
                    time.sleep(pause_s)
            self._write(table, rows)
        except sql.exc.SQLAlchemyError as error:
            refused = _refused(self._where, error)
            is_repeated = len({row[self._key] for row in rows}) < len(rows)
            raise (DataError(refused.what, _NAME_A_KEY) if is_repeated else refused) from error

    def _write(self, table: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        of_key = table.c[self._key] == self._sql.bindparam("elasticdl_key")
        with self._engine.begin() as connection:
            connection.execute(table.delete().where(of_key), [{"elasticdl_key": row[self._key]} for row in rows])
            connection.execute(table.insert(), rows)

    def check_num_rows(self, least: int) -> None:
        """Check at the end of a job that each record has a row.

        Args:
            least: Minimum number of rows: the job's number of records.

        Raises:
            DataError: Records with the same key have overwritten each other, or the database refuses the query.
        """
        sql = self._sql
        count = sql.select(sql.func.count()).select_from(sql.table(self._name, schema=self._schema))
        try:
            with self._engine.connect() as connection:
                is_there = sql.inspect(connection).has_table(self._name, schema=self._schema)
                num_rows = connection.scalar(count) if is_there else 0
        except sql.exc.SQLAlchemyError as error:
            raise _refused(self._where, error) from error
        if num_rows < least:
            what = f"{self._where}: {num_rows:,} rows for {least:,} records: several have the same {self._key}."
            raise DataError(what, _NAME_A_KEY)

    def _made(self, columns: Columns) -> Any:
        """Return the table; create it if it does not exist.

        Raises:
            DataError: The table exists with other columns.
        """
        sql = self._sql
        made = sql.Table(
            self._name,
            sql.MetaData(),
            *(self._column(name, values) for name, values in columns.items()),
            schema=self._schema,
            mysql_engine="InnoDB",
            mysql_charset="utf8mb4",
            mysql_collate="utf8mb4_bin",
        )
        with self._engine.connect() as connection:
            is_there = sql.inspect(connection).has_table(self._name, schema=self._schema)
        if not is_there:
            try:
                with self._engine.begin() as connection:
                    made.create(connection)
            except sql.exc.SQLAlchemyError:
                with self._engine.connect() as connection:
                    if not sql.inspect(connection).has_table(self._name, schema=self._schema):
                        raise  # else another worker was faster
        with self._engine.connect() as connection:
            found = [one["name"] for one in sql.inspect(connection).get_columns(self._name, schema=self._schema)]
        if set(found) != set(columns):
            raise DataError(
                f"{self._where}: the table has the columns {', '.join(found)}, the predictions {', '.join(columns)}.",
                "Name a table that is not there yet.",
            )
        return made

    def _values(self, name: str, values: npt.NDArray[Any]) -> list[Any]:
        if values.dtype.kind == "f" and values.dtype.itemsize < 8:
            values = values.astype(str).astype(np.float64)  # a float32 0.1 is 0.1, not 0.10000000149011612
        found: list[Any] = values.tolist()
        if values.dtype.kind in "OS":
            found = [one.decode(errors="backslashreplace") if isinstance(one, bytes) else one for one in found]
        if self._has_nan or name == self._key:
            return found
        return [value if value == value else None for value in found]  # only NaN differs from itself

    def _column(self, name: str, values: npt.NDArray[Any]) -> Any:
        sql, is_key = self._sql, name == self._key
        kinds: Mapping[str, Any] = {"f": sql.Double(), "b": sql.Boolean(), "i": sql.BigInteger(), "u": sql.BigInteger()}
        kind = kinds.get(values.dtype.kind, sql.String(_LONGEST_KEY) if is_key else sql.Text())
        return sql.Column(name, kind, primary_key=is_key, autoincrement=False)


def check_unused_table(url: str) -> None:
    """Check that the table of --prediction_outputs has no rows: rows of two jobs would be mixed up.

    Raises:
        FlagError: The table has rows.
        DataError: The database cannot be read.
    """
    where = hide(url)
    sql, parsed, query = parse(url)
    engine = _engine(sql, parsed)
    name, schema = _table_of(query, where)
    try:
        with engine.connect() as connection:
            if not sql.inspect(connection).has_table(name, schema=schema):
                return
            found = connection.execute(sql.select(sql.literal(1)).select_from(sql.table(name, schema=schema)).limit(1))
            if found.first() is None:
                return
    except sql.exc.SQLAlchemyError as error:
        raise _refused(where, error) from error
    raise FlagError(
        f"--prediction_outputs={where} has rows: those of two jobs would be mixed up.",
        "Name a table that is empty or not there yet.",
    )


def _engine(sql: Any, url: Any) -> Any:
    """Return an engine that keeps no connection between tasks: the workers could exceed the server's limit."""
    return sql.create_engine(url, poolclass=sql.pool.NullPool)


def _table_of(query: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    """Return the name and the schema of the table in a URL.

    Raises:
        DataError: The URL names no table.
    """
    if not query.get("table"):
        raise DataError(f"{where} names no table.", "Write it after the URL: ?table=NAME.")
    return str(query["table"]), query.get("schema")


def _refused(where: str, error: Any) -> DataError:
    lines: Sequence[str] = str(getattr(error, "orig", None) or error).strip().splitlines()
    return DataError(
        f"{where}: {hide(lines[0] if lines else type(error).__name__)}.", "Check the URL, and the rights of its user."
    )


def _flat(name: str, values: npt.NDArray[Any]) -> list[tuple[str, npt.NDArray[Any]]]:
    """Return a column under its name, or as one column per value if rows have several values, as in CSV files."""
    if values.ndim == 1:
        return [(name, values)]
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    return [(f"{name}_{number}", flat[:, number]) for number in range(flat.shape[1])]
