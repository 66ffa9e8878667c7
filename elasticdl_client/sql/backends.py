"""Differences between databases: drivers, read-only transactions, DDL, and error messages.

A backend has no connection of its own: it is given SQLAlchemy's.

PostgreSQL gives rows as tables of Arrow, and takes them, by COPY: about four times as fast as rows of Python values.

Only SELECTs whose columns are of types that CSV and Arrow hold without loss are read so; other ones are read as rows.
Results have few types, so they are written in COPY's binary format, without formatting numbers as text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.sql.statement import Query, StatementError
from elasticdl_client.sql.tokens import load
from elasticdl_client.sql.tokens import load as load_package

EXAMPLES = "Name a database: sqlite:///PATH, postgresql://USER@HOST/DATABASE, mysql://USER@HOST/DATABASE."
_LOCK_TIMEOUT_S = 60  # of SQLite: another statement may read all of a table meanwhile
_ENGINE = """
    SELECT t.table_type, t.engine, e.transactions, v.view_definition FROM information_schema.tables t
    LEFT JOIN information_schema.engines e USING (engine)
    LEFT JOIN information_schema.views v ON v.table_schema = t.table_schema AND v.table_name = t.table_name
    WHERE t.table_schema = COALESCE(NULLIF(%s, ''), DATABASE()) AND t.table_name = %s
"""
_UNKNOWN_NAMES = (  # of MySQL and MariaDB
    re.compile(r"Table '(?:.*\.)?([^'.]+)' doesn't exist"),
    re.compile(r"Unknown column '([^']+)'"),
    re.compile(r"Unknown database '([^']+)'"),
    re.compile(r"FUNCTION (?:\S*\.)?(\S+) does not exist"),
)
_NEAR = re.compile(r" near '(.*)' at line (\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DatabaseRefusal:
    """Why a database refuses what was sent to it.

    Attributes:
        hint: The database's hint; empty: none.
        offset: Position of the error in the SQL; None: unknown.
        name: the wrong name, where no offset is known; empty: not known.
    """

    message: str
    hint: str = ""
    offset: int | None = None
    name: str = ""


class Backend:
    """A kind of database: the common parts, as the SQL standard has them.

    Attributes:
        dialect: sqlglot's name of its SQL.
        drivers: SQLAlchemy's name of the driver by the scheme of a URL.
        package: Package of the driver; empty: it is part of Python.
        password_places: where a password can be that is not in the URL.
        password_variable: Environment variable from which the driver in pods reads the password.
        random: a random number for each row.
        table_options: Options at the end of CREATE TABLE.
        has_transactional_ddl: a table that a transaction creates is gone when it is rolled back.
        staging: options of CREATE for a table of rows that a job reads and that can be made again.
        orders_rows_by_key: a table is kept in the order of its primary key, which so belongs to it from the start.
    """

    dialect: str
    drivers: Mapping[str, str]
    package = ""
    password_places = ""
    password_variable = ""
    random = "random()"
    table_options = ""
    has_transactional_ddl = True
    staging = "TABLE"
    orders_rows_by_key = True

    def check(self, url: Any) -> None:
        """Check a URL before anything is connected.

        Raises:
            DataError: it names no database.
        """

    def connect_arguments(self) -> dict[str, Any]:
        """Return further arguments of the driver."""
        return {}

    def begin_snapshot(self, connection: Any) -> Any:
        """Begin a transaction that only reads, from the database as it is now; return its connection."""
        raise NotImplementedError

    def check_snapshot(self, connection: Any, query: Query) -> None:
        """Check that a transaction keeps the state of the tables that a SELECT reads.

        Raises:
            StatementError: a table has no such transactions.
        """

    def tables(self, connection: Any, select: str, as_numbers: Collection[str]) -> Iterator[Any] | None:
        """Return the rows of a SELECT as tables of Arrow, in its order; None: they can be read as rows alone.

        Args:
            as_numbers: the names of columns of which only the number matters, not its decimal places.
        """
        return None

    def load(self, connection: Any, target: Any, table: Any) -> None:
        """Add the rows of a table of Arrow to a table, NaN as NULL.

        Args:
            target: SQLAlchemy's table.
        """
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        values = ([None if one != one else one for one in values] for values in columns.values())
        connection.execute(target.insert(), [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)])

    def login(self, connection: Any) -> tuple[str, str]:
        """Return the user and the password by which a connection was made, wherever the driver has found them.

        Args:
            connection: Connection of the driver.
        """
        return "", ""

    def abandon(self, cursor: Any) -> None:
        """Leave the rest of what a SELECT has found unread; its connection is closed next."""

    @contextmanager
    def writing(self, connection: Any) -> Iterator[Any]:
        """Yield the connection of a transaction that is committed at the end."""
        yield connection
        connection.commit()

    def type_of(self, kind: str) -> str:
        """Return what is called so here: a type of the SQL standard, or TEXT of any length."""
        return kind

    def distinct(self, name: str) -> str:
        """Return what has as many values as differ in a column, whose name is quoted."""
        return name

    def values(self, name: str, source: str) -> str:
        """Return the SELECT of a column's values, each once and in order, NULL left out.

        Args:
            name: Name of the column, quoted.
            source: the text after FROM.
        """
        return f"SELECT DISTINCT {name} FROM {source} WHERE {name} IS NOT NULL ORDER BY 1"

    def refusal(self, cause: BaseException, sql: str) -> DatabaseRefusal:
        """Return what the error of a driver says.

        Args:
            sql: The SQL that was sent; empty: unknown.
        """
        raise NotImplementedError


class PostgreSQL(Backend):
    """PostgreSQL, through psycopg."""

    dialect = "postgres"
    drivers: Mapping[str, str] = dict.fromkeys(("postgresql", "postgres", "postgresql+psycopg"), "postgresql+psycopg")
    package = "psycopg"
    password_places = "~/.pgpass or PGPASSWORD"
    password_variable = "PGPASSWORD"
    staging = "UNLOGGED TABLE"
    orders_rows_by_key = False

    def begin_snapshot(self, connection: Any) -> Any:
        return connection.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True, no_parameters=True
        )

    def tables(self, connection: Any, select: str, as_numbers: Collection[str]) -> Iterator[Any] | None:
        driver = connection.connection.driver_connection
        with driver.cursor() as cursor:
            cursor.execute(f"SELECT * FROM (\n{select}\n) AS elasticdl_query LIMIT 0")
            types = types_of(cursor.description, as_numbers)
        return arrow_tables(driver, select, types) if types is not None else None

    def load(self, connection: Any, target: Any, table: Any) -> None:
        load_by_copy(connection.connection.driver_connection, target.name, table)

    def login(self, connection: Any) -> tuple[str, str]:
        return connection.info.user, connection.info.password

    def refusal(self, cause: BaseException, sql: str) -> DatabaseRefusal:
        diagnosis = getattr(cause, "diag", None)
        position = getattr(diagnosis, "statement_position", None)
        return DatabaseRefusal(
            _first_line(getattr(diagnosis, "message_primary", None) or cause),
            getattr(diagnosis, "message_hint", None) or "",
            int(position) - 1 if position else None,
        )


class MySQL(Backend):
    """MySQL and MariaDB, through PyMySQL: DDL commits, only some engines have snapshots, texts are compared loosely."""

    dialect = "mysql"
    drivers: Mapping[str, str] = {
        "mysql": "mysql+pymysql",
        "mysql+pymysql": "mysql+pymysql",
        "mariadb": "mariadb+pymysql",
        "mariadb+pymysql": "mariadb+pymysql",
    }
    package = "pymysql"
    password_places = "a file of options that only you can read: ?read_default_file=PATH"
    password_variable = "MYSQL_PWD"
    random = "rand()"
    table_options = " ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    has_transactional_ddl = False

    def check(self, url: Any) -> None:
        if not url.database:
            raise DataError("The URL of --datasource names no database.", EXAMPLES)

    def connect_arguments(self) -> dict[str, Any]:
        # The modes under which the server would read names and texts otherwise than sqlglot.
        mode = "@@sql_mode"
        for one in ("ANSI_QUOTES", "NO_BACKSLASH_ESCAPES"):
            mode = f"REPLACE({mode}, '{one}', '')"
        return {"init_command": f"SET SESSION sql_mode = {mode}"}

    def begin_snapshot(self, connection: Any) -> Any:
        connection = connection.execution_options(isolation_level="REPEATABLE READ", no_parameters=True)
        connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        return connection

    def check_snapshot(self, connection: Any, query: Query) -> None:
        waiting, seen = _tables_of(query.text), set[tuple[str, str]]()
        while waiting:
            schema, name = table = waiting.pop()
            if table in seen:
                continue
            seen.add(table)
            row = connection.exec_driver_sql(_ENGINE, table, execution_options={"no_parameters": False}).first()
            kind, engine, has_transactions, definition = row if row is not None else ("", "", "YES", "")
            if definition:
                waiting += [(one[0] or schema, one[1]) for one in _tables_of(str(definition))]
            elif kind == "VIEW":
                raise StatementError(
                    f"The definition of the view {name} is hidden: whether its tables have transactions is not known.",
                    f"GRANT SHOW VIEW ON {name}, or SELECT from its tables.",
                    query.place,
                )
            elif has_transactions != "YES":
                raise StatementError(
                    f"The table {name} is of the engine {engine}, which has no transactions: it would be read with "
                    "what is written meanwhile.",
                    f"ALTER TABLE {name} ENGINE=InnoDB, or SELECT from a copy.",
                    query.place,
                )

    def login(self, connection: Any) -> tuple[str, str]:
        user = connection.user
        return user.decode() if isinstance(user, bytes) else str(user), connection.password.decode("latin1")

    def abandon(self, cursor: Any) -> None:
        if cursor is not None:
            cursor._result.unbuffered_active = False  # PyMySQL would read all of it before it closes the cursor

    @contextmanager
    def writing(self, connection: Any) -> Iterator[Any]:
        # Under a higher level CREATE TABLE … SELECT would lock the rows that it reads.
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        yield connection
        connection.commit()

    def type_of(self, kind: str) -> str:
        return "LONGTEXT" if kind == "TEXT" else kind  # TEXT ends at 64 KiB

    def distinct(self, name: str) -> str:
        return f"CAST({name} AS BINARY)"

    def values(self, name: str, source: str) -> str:
        exact = self.distinct(name)  # 'a' = 'A' in most collations
        return f"SELECT min({name}) FROM {source} WHERE {name} IS NOT NULL GROUP BY {exact} ORDER BY 1, {exact}"

    def refusal(self, cause: BaseException, sql: str) -> DatabaseRefusal:
        message = str(cause.args[-1] if cause.args else cause)
        near = _NEAR.search(message)
        if near is None:
            found = next((match[1] for pattern in _UNKNOWN_NAMES if (match := pattern.search(message))), "")
            hint = "Name one of them otherwise: … AS name." if message.startswith("Duplicate column") else ""
            return DatabaseRefusal(_first_line(message), hint, name=found)
        line_start = sum(len(line) for line in sql.splitlines(keepends=True)[: int(near[2]) - 1])
        offset = sql.find(near[1], line_start) if near[1] else -1
        return DatabaseRefusal(_first_line(message[: near.start()]), offset=offset if offset >= 0 else None)


class SQLite(Backend):
    """SQLite, by Python's own module."""

    dialect = "sqlite"
    drivers: Mapping[str, str] = {"sqlite": "sqlite"}

    def check(self, url: Any) -> None:
        if not Path(url.database or "").is_file():
            raise DataError(f"The database {url.database or '(none)'} does not exist.", EXAMPLES)

    def connect_arguments(self) -> dict[str, Any]:
        return {"timeout": _LOCK_TIMEOUT_S}

    def begin_snapshot(self, connection: Any) -> Any:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT", no_parameters=True)
        connection.exec_driver_sql("PRAGMA query_only = ON")
        connection.exec_driver_sql("BEGIN")
        return connection

    @contextmanager
    def writing(self, connection: Any) -> Iterator[Any]:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")

    def refusal(self, cause: BaseException, sql: str) -> DatabaseRefusal:
        message = _first_line(cause)
        near = re.match(r'near "([^"]+)"', message)
        name = message.rpartition(": ")[2].strip() if ": " in message else ""
        return DatabaseRefusal(message, name=near[1] if near else name)


BACKENDS = (PostgreSQL(), MySQL(), SQLite())


def backend_of(url: str) -> Backend | None:
    """Return the backend of a URL; None: none of ours."""
    scheme, mark, _ = url.partition("://")
    return next((one for one in BACKENDS if mark and scheme in one.drivers), None)


def _first_line(message: object) -> str:
    return (str(message).strip().splitlines() or [""])[0]


def _tables_of(sql: str) -> list[tuple[str, str]]:
    """Return the tables that a SELECT of MySQL names, each with its schema or an empty text."""
    tree, exp = load("sqlglot").parse_one(sql, dialect="mysql"), load("sqlglot.expressions")
    own = {one.alias for one in tree.find_all(exp.CTE)}
    return [(table.db, table.name) for table in tree.find_all(exp.Table) if table.db or table.name not in own]


_BOOLEANS, _WHOLE, _FLOATS, _TEXTS = (16,), (20, 21, 23), (700, 701), (19, 25, 1042, 1043)  # pg_type.oid
_NUMERIC = 1700
_EXACT_DIGITS = 15  # that a float64 holds
_CHUNK_BYTES = 4 << 20
_WRITTEN_BYTES = 1 << 20
_FORMATS = {"double": ">f8", "int64": ">i8"}  # of numbers in the binary format of COPY, by Arrow's type
_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)  # without flags and extensions
_END = b"\xff\xff"


def types_of(columns: Sequence[Any], as_numbers: Collection[str]) -> Mapping[str, Any] | None:
    """Return Arrow's type of each column; None: one needs Python's values.

    Args:
        columns: psycopg's description of a SELECT.
        as_numbers: the names of columns of which only the number matters, not its decimal places.
    """
    pyarrow = load_package("pyarrow")
    types: dict[str, Any] = {}
    for column in columns:
        is_short = column.precision is not None and column.precision <= _EXACT_DIGITS
        if column.type_code in _BOOLEANS:
            types[column.name] = pyarrow.bool_()
        elif column.type_code in _WHOLE:
            types[column.name] = pyarrow.int64()
        elif column.type_code in _FLOATS or (column.type_code == _NUMERIC and (is_short or column.name in as_numbers)):
            types[column.name] = pyarrow.float64()
        elif column.type_code in _TEXTS:
            types[column.name] = pyarrow.string()
        else:
            return None
    return types


def arrow_tables(connection: Any, select: str, types: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the rows of a SELECT as tables of Arrow, in its order.

    Args:
        connection: of psycopg, in the transaction to read in.
        types: of the columns.

    Raises:
        DataError: the database's texts are not UTF-8.
    """
    pyarrow, csv = load_package("pyarrow"), load_package("pyarrow.csv")
    parsing = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
    converting = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False,
        true_values=["t"], false_values=["f"],
    )  # fmt: skip
    statement = f"COPY (\n{select}\n) TO STDOUT (FORMAT csv, ENCODING 'UTF8')"
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for chunk in _chunks(copy):
            reading = csv.ReadOptions(column_names=list(types), block_size=len(chunk) + 1)
            try:
                yield csv.read_csv(pyarrow.BufferReader(chunk), reading, parsing, converting)
            except pyarrow.ArrowInvalid as error:
                raise DataError(
                    f"The rows of the SELECT cannot be read: {error}.", "Check the encoding of the database's texts."
                ) from error


def load_by_copy(connection: Any, name: str, table: Any) -> None:
    """Add the rows of a table of Arrow, which has no NULL, to a table.

    Args:
        connection: of psycopg, in the transaction to write in.
        name: Name of the table.
        table: of columns of the same names, whose types are those of `_FORMATS`, or texts; NaN stays NaN.
    """
    if not table.num_rows:
        return
    sql = load_package("psycopg.sql")
    is_text = load_package("pyarrow").types.is_string
    texts = [one.name for one in table.schema if is_text(one.type)]
    numbers = [one for one in table.column_names if one not in texts]
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(
        sql.Identifier(name), sql.SQL(", ").join(map(sql.Identifier, numbers + texts))
    )
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL client_encoding TO 'UTF8'")  # COPY's own ENCODING is for its other formats
        with cursor.copy(statement) as copy:
            copy.write(_BEGIN)
            rows = _rows(table, numbers, texts)
            for start in range(0, len(rows), _WRITTEN_BYTES):  # libpq keeps a copy of what it is given at once
                copy.write(rows[start : start + _WRITTEN_BYTES])
            copy.write(_END)


def _rows(table: Any, numbers: Sequence[str], texts: Sequence[str]) -> memoryview:
    """Return rows in the binary format of COPY: how many columns, then the length and the bytes of each."""
    numpy, compute = load_package("numpy"), load_package("pyarrow.compute")
    formats = [_FORMATS[str(table.schema.field(name).type)] for name in numbers]
    layout = [part for at, one in enumerate(formats) for part in ((f"length_{at}", ">i4"), (f"value_{at}", one))]
    fixed = numpy.empty(table.num_rows, [("columns", ">i2"), *layout])
    fixed["columns"] = len(numbers) + len(texts)
    for at, name in enumerate(numbers):
        fixed[f"length_{at}"] = 8
        fixed[f"value_{at}"] = table.column(name).to_numpy()
    parts = [_of_one_length(fixed)]
    for name in texts:
        values = table.column(name).combine_chunks().cast("large_binary")
        parts += [_of_one_length(compute.binary_length(values).to_numpy().astype(">i4")), values]
    joined = compute.binary_join_element_wise(*parts, load_package("pyarrow").scalar(b"", "large_binary"))
    _, ends, values = joined.buffers()
    size_bytes = int(numpy.frombuffer(ends, numpy.int64)[len(joined)])  # the buffer may be longer
    return memoryview(values)[:size_bytes]


def _of_one_length(values: Any) -> Any:
    """Return the bytes of an array of NumPy as an array of Arrow, one value each."""
    numpy, pyarrow = load_package("numpy"), load_package("pyarrow")
    ends = numpy.arange(len(values) + 1, dtype=numpy.int64) * values.itemsize
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(values)]
    return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(values), buffers)


def _chunks(copy: Any) -> Iterator[bytes]:
    """Yield whole rows, some megabytes at once: libpq gives one row at a time."""
    rows = io.BytesIO()
    for row in copy:
        rows.write(row)
        if rows.tell() >= _CHUNK_BYTES:
            yield rows.getvalue()
            rows = io.BytesIO()
    if rows.tell():
        yield rows.getvalue()
