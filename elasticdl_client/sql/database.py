"""A database that `elasticdl sql` reads from and writes to: PostgreSQL or SQLite, through SQLAlchemy.

What a statement reads is read in one transaction that only reads and sees the database as it was at its start.  No
text of a user becomes SQL but the SELECT itself and quoted names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.flags import nearest
from elasticdl_client.secret_values import hide
from elasticdl_client.sql.arguments import VARIABLE
from elasticdl_client.sql.places import Place, StatementError
from elasticdl_client.sql.statement import Name, Query
from elasticdl_client.sql.tokens import load

_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_DIALECTS = {"postgresql": "postgres", "sqlite": "sqlite"}
_EXAMPLES = "Name a database: sqlite:///PATH, postgresql://USER@HOST/DATABASE."
_CHUNK = 10_000
_LOCK_TIMEOUT_S = 60  # of SQLite: another statement may read all of a table meanwhile
_WRAPPED = "SELECT {} FROM (\n{}\n) AS elasticdl_query"


def check_url(url: str, on_command_line: bool) -> None:
    """Check the URL of --datasource before anything is connected.

    Raises:
        FlagError: it is of no database that is supported, or shows a password in the list of processes.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in ("sqlite", *_DRIVERS):
        raise FlagError(f"--datasource={hide(url)} is not a database that `elasticdl sql` supports.", _EXAMPLES)
    authority = rest.split("/")[0].split("?")[0]
    has_password = ":" in authority.rpartition("@")[0] or re.search(r"[?&]password=", url, re.IGNORECASE)
    if on_command_line and has_password:
        raise FlagError(
            "--datasource holds a password, which every user of this machine sees in the list of processes.",
            f"Put the URL into the variable {VARIABLE}, or the password into ~/.pgpass or PGPASSWORD.",
        )


def dialect_of(url: str) -> str:
    """Return sqlglot's name of the SQL of a database whose URL is checked."""
    return "sqlite" if url.startswith("sqlite") else "postgres"


class Database:
    """A database.

    Attributes:
        where: its URL without a password.
        dialect: sqlglot's name of its SQL.
    """

    def __init__(self, url: str) -> None:
        """
        Args:
            url: of --datasource.

        Raises:
            DataError: a package is missing, it is no URL, or the file does not exist.
        """
        self._sql = sql = load("sqlalchemy")
        self.where, self.dialect = hide(url), dialect_of(url)
        try:
            parsed = sql.engine.make_url(url)
        except sql.exc.ArgumentError as error:
            raise DataError(f"{self.where} is not the URL of a database.", _EXAMPLES) from error
        self._is_sqlite = self.dialect == "sqlite"
        if self._is_sqlite and not os.path.isfile(parsed.database or ""):
            raise DataError(f"The database {parsed.database or '(none)'} does not exist.", _EXAMPLES)
        if not self._is_sqlite:
            load("psycopg")
            parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
        waits = {"timeout": _LOCK_TIMEOUT_S} if self._is_sqlite else {}
        self._engine = sql.create_engine(parsed, poolclass=sql.pool.NullPool, connect_args=waits)

    def quoted(self, *names: str) -> str:
        """Return a name, or a table with its schema, as SQL."""
        quote = self._engine.dialect.identifier_preparer.quote_identifier
        return ".".join(quote(name) for name in names)

    @contextmanager
    def snapshot(self) -> Iterator[SnapshotReader]:
        """Yield what reads in one transaction, which sees no later change and changes nothing.

        Raises:
            DataError: the database cannot be reached.
        """
        with self._connected() as connection:
            if self._is_sqlite:
                connection = connection.execution_options(isolation_level="AUTOCOMMIT", no_parameters=True)
                connection.exec_driver_sql("PRAGMA query_only = ON")
                connection.exec_driver_sql("BEGIN")
            else:
                connection = connection.execution_options(
                    isolation_level="REPEATABLE READ", postgresql_readonly=True, no_parameters=True
                )
            yield SnapshotReader(self, connection)
            connection.rollback()

    @contextmanager
    def transaction(self) -> Iterator[Writer]:
        """Yield what writes in one transaction, which is committed at the end.

        Raises:
            DataError: the database cannot be reached, or refuses something.
        """
        with self._connected() as connection:
            if self._is_sqlite:
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield Writer(self, connection)
            except BaseException:
                if self._is_sqlite:
                    connection.exec_driver_sql("ROLLBACK")
                raise
            if self._is_sqlite:
                connection.exec_driver_sql("COMMIT")
            else:
                connection.commit()

    def has_table(self, table: Sequence[str]) -> bool:
        """Return whether a table or view of this name exists."""
        with self._connected() as connection:
            inspector = self._sql.inspect(connection)
            schema = table[0] if len(table) > 1 else None
            return bool(inspector.has_table(table[-1], schema=schema))

    def schemas(self) -> list[str]:
        """Return the names of the schemas."""
        with self._connected() as connection:
            return list(self._sql.inspect(connection).get_schema_names())

    def failed(self, error: Exception, query: Query | None = None, offset: int = 0) -> DataError | StatementError:
        """Return the error of the database as one of ours, at its place in the SELECT where that is known.

        Args:
            query: that was run.
            offset: of its text in the SQL that was sent.
        """
        cause = getattr(error, "orig", None) or error
        diagnosis = getattr(cause, "diag", None)
        message = str(getattr(diagnosis, "message_primary", None) or cause).strip().splitlines()[0]
        if query is None:
            return DataError(
                f"{self.where}: {hide(message)}.", "Check the URL, the rights of its user, and its tables."
            )
        position = getattr(diagnosis, "statement_position", None)
        place = _token_at(query.place, int(position) - 1 - offset) if position else _named(query.place, message)
        near = nearest(place.text.split(".")[-1].strip('"'), self.known_names()) if place is not query.place else ""
        hint = getattr(diagnosis, "message_hint", None) or "Run the SELECT in the database's own shell."
        return StatementError(
            f"The database refuses the SELECT: {message}.", f"Did you mean '{near}'?" if near else hint, place
        )

    def check(self) -> None:
        """Connect and disconnect.

        Raises:
            DataError: the database cannot be reached.
        """
        with self._connected():
            pass

    def known_names(self) -> list[str]:
        """Return the names of tables and their columns; none if they cannot be read."""
        try:
            with self._connected() as connection:
                inspector = self._sql.inspect(connection)
                tables = [*inspector.get_table_names(), *inspector.get_view_names()]
                return tables + [one["name"] for table in tables[:200] for one in inspector.get_columns(table)]
        except (self._sql.exc.SQLAlchemyError, DataError):
            return []

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            connection = self._engine.connect()
        except self._sql.exc.SQLAlchemyError as error:
            raise self.failed(error) from error
        with connection:
            try:
                yield connection
            except self._sql.exc.SQLAlchemyError as error:
                raise self.failed(error) from error


class SnapshotReader:
    """Reads in one transaction."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._database = database
        self._connection = connection

    def columns(self, query: Query) -> list[str]:
        """Return the names of a SELECT's columns; the database checks it and reads no row.

        Raises:
            StatementError: the database refuses the SELECT, or two columns have one name.
        """
        names = [str(name) for name in self._run(_WRAPPED.format("*", query.text) + " LIMIT 0", query).keys()]  # noqa: SIM118 (it is no mapping: this iterates over rows)
        for name in names:
            if names.count(name) > 1:
                raise StatementError(
                    f"Two columns of the SELECT are called {name!r}.",
                    "Name one of them otherwise: … AS name.",
                    query.place,
                )
        return names

    def count(self, query: Query, column: str) -> tuple[int, int, int]:
        """Return how many rows a SELECT has, how many have a value in a column, and how many values differ."""
        name = self._database.quoted(column)
        found = f"count(*), count({name}), count(DISTINCT {name})"
        rows, values, distinct = self._run(_WRAPPED.format(found, query.text), query).one()
        return int(rows), int(values), int(distinct)

    def values(self, query: Query, column: str) -> list[Any]:
        """Return the values of a column, each once and in order, NULL left out."""
        name = self._database.quoted(column)
        sql = _WRAPPED.format(f"DISTINCT {name}", query.text) + f" WHERE {name} IS NOT NULL ORDER BY 1"
        return [row[0] for row in self._run(sql, query)]

    def sample(self, query: Query, size: int) -> list[Sequence[Any]]:
        """Return some rows of a SELECT by chance."""
        return list(self._run(_WRAPPED.format("*", query.text) + f" ORDER BY random() LIMIT {size:d}", query))

    def first(self, query: Query, size: int) -> list[Sequence[Any]]:
        """Return some rows of a SELECT, the first that the database finds."""
        return list(self._run(_WRAPPED.format("*", query.text) + f" LIMIT {size:d}", query))

    def rows(self, query: Query) -> Iterator[list[Sequence[Any]]]:
        """Yield the rows of a SELECT, some thousand at once, in its order."""
        result = self._run(query.text, query, stream_results=True, yield_per=_CHUNK)
        try:
            yield from result.partitions(_CHUNK)
        except self._database._sql.exc.SQLAlchemyError as error:
            raise self._database.failed(error, query) from error

    def _run(self, sql: str, query: Query, **options: Any) -> Any:
        try:
            return self._connection.exec_driver_sql(sql, execution_options={"no_parameters": True, **options})
        except self._database._sql.exc.SQLAlchemyError as error:
            raise self._database.failed(error, query, sql.find(query.text)) from error


class Writer:
    """Writes in one transaction."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._database = database
        self._connection = connection

    def run(self, sql: str, query: Query | None = None) -> int:
        """Run SQL of ours, which may hold a SELECT of the user's; how many rows it has changed.

        Raises:
            DataError: the database refuses it.
            StatementError: it refuses the SELECT.
        """
        try:
            result = self._connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
            return int(result.rowcount)
        except self._database._sql.exc.SQLAlchemyError as error:
            raise self._database.failed(error, query, sql.find(query.text) if query else 0) from error

    def count(self, table: str) -> int:
        """Return how many rows a table has, whose name is quoted."""
        return int(self._connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())

    def insert(self, table: Sequence[str], columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
        """Add rows to a table.

        Args:
            columns: of the table.
            rows: the values of each column.
        """
        sql = self._database._sql
        target = sql.table(
            table[-1], *(sql.column(name) for name in columns), schema=table[0] if len(table) > 1 else None
        )
        if rows:
            self._connection.execute(target.insert(), rows)


def find_name(names: Sequence[str], wanted: Name) -> str:
    """Return the column that a name means: the same, or if it is not quoted one in another case; empty: none."""
    if wanted.text in names:
        return wanted.text
    alike = [name for name in names if name.lower() == wanted.text.lower()] if not wanted.is_quoted else []
    return alike[0] if len(alike) == 1 else ""


def _token_at(place: Place, offset: int) -> Place:
    """Return the word that begins at an offset of a SELECT; all of it if the offset lies outside."""
    if not 0 <= offset < place.end - place.start:
        return place
    found = re.compile(r'"[^"]*"|[\w.]+|.', re.DOTALL).match(place.source, place.start + offset)
    return Place(place.source, place.start + offset, found.end()) if found else place


def _named(place: Place, message: str) -> Place:
    """Return the first place of what SQLite's message names; all of the SELECT if it names nothing."""
    name = message.rpartition(": ")[2].strip() if ": " in message else ""
    near = re.match(r'near "([^"]+)"', message)
    name = near[1] if near else name
    pattern = rf"(?<!\w){re.escape(name)}(?!\w)" if re.fullmatch(r"[\w.]+", name) else re.escape(name)
    found = re.search(pattern, place.text) if name else None
    return Place(place.source, place.start + found.start(), place.start + found.end()) if found else place
