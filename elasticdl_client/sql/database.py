"""A database that `elasticdl sql` reads from and writes to, through SQLAlchemy; backends.py has how the kinds differ.

A statement reads in one read-only transaction, which sees the database as it was at its start.  No
text of a user becomes SQL but the SELECT itself and quoted names.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.flags import nearest
from elasticdl_client.secret_values import hide
from elasticdl_client.sql.arguments import VARIABLE
from elasticdl_client.sql.backends import EXAMPLES, PostgreSQL, backend_of
from elasticdl_client.sql.cluster_checks import PASSWORD_FILES
from elasticdl_client.sql.statement import Name, Place, Query, StatementError
from elasticdl_client.sql.tokens import load, quoted_name

_CHUNK = 10_000
_NUMBERED = re.compile(r":\d+$")
_WRAPPED = "SELECT {} FROM (\n{}\n) AS elasticdl_query"


def check_url(url: str, on_command_line: bool) -> None:
    """Check the URL of --datasource before anything is connected.

    Raises:
        FlagError: it is of no database that is supported, or shows a password in the list of processes.
    """
    backend = backend_of(url)
    if backend is None:
        raise FlagError(f"--datasource={hide(url)} is not a database that `elasticdl sql` supports.", EXAMPLES)
    authority = url.partition("://")[2].split("/")[0].split("?")[0]
    has_password = ":" in authority.rpartition("@")[0] or re.search(r"[?&]passw(or)?d=", url, re.IGNORECASE)
    if on_command_line and has_password:
        raise FlagError(
            "--datasource holds a password, which every user of this machine sees in the list of processes.",
            f"Put the URL into the variable {VARIABLE}, or the password into {backend.password_places}.",
        )


def dialect_of(url: str) -> str:
    """Return sqlglot's name of the SQL of a database whose URL is checked; without a URL that of PostgreSQL."""
    backend = backend_of(url)
    return backend.dialect if backend else PostgreSQL.dialect


@dataclass(frozen=True, slots=True)
class PodAccess:
    """How pods reach a database.

    Attributes:
        url: URL without a password.
        variable: Environment variable that holds the password.
        password: The password; empty if the database requires none.
    """

    url: str
    variable: str
    password: str = field(repr=False)


class Database:
    """A database.

    Attributes:
        where: its URL without a password.
        dialect: sqlglot's name of its SQL.
        backend: its kind.
        errors: that SQLAlchemy and its driver raise.
    """

    def __init__(self, url: str) -> None:
        """
        Args:
            url: Value of --datasource.

        Raises:
            DataError: a package is missing, it is no URL, or the file does not exist.
        """
        self._sql = sql = load("sqlalchemy")
        self.where = hide(url)
        backend = backend_of(url)
        try:
            parsed = sql.engine.make_url(url)
        except sql.exc.ArgumentError as error:
            raise DataError(f"{self.where} is not the URL of a database.", EXAMPLES) from error
        if backend is None:
            raise DataError(f"{self.where} is of a kind that is not supported.", EXAMPLES)
        backend.check(parsed)
        if backend.package:
            load(backend.package)
        self.backend, self.dialect = backend, backend.dialect
        self._url = parsed
        self._pod_access: PodAccess | None = None
        self._engine = engine = sql.create_engine(
            parsed.set(drivername=backend.drivers[parsed.drivername]),
            poolclass=sql.pool.NullPool,
            connect_args=backend.connect_arguments(),
        )
        self.errors: tuple[type[Exception], ...] = (sql.exc.SQLAlchemyError, engine.dialect.dbapi.Error)

    def quoted(self, *names: str) -> str:
        """Return a name, or a table with its schema, as SQL."""
        return ".".join(quoted_name(name, self.dialect) for name in names)

    @contextmanager
    def snapshot(self) -> Iterator[SnapshotReader]:
        """Yield what reads in one transaction, which sees no later change and changes nothing.

        Raises:
            DataError: the database cannot be reached.
        """
        with self._connected() as connection:
            connection = self.backend.begin_snapshot(connection)
            with closing(SnapshotReader(self, connection)) as reader:
                yield reader
            connection.rollback()

    @contextmanager
    def transaction(self) -> Iterator[Writer]:
        """Yield what writes in one transaction, which is committed at the end; on MySQL also by each CREATE and DROP.

        Raises:
            DataError: the database cannot be reached, or refuses something.
        """
        with self._connected() as connection, self.backend.writing(connection) as writing:
            yield Writer(self, writing)

    @contextmanager
    def new_table(self, table: Sequence[str], is_overwriting: bool) -> Iterator[tuple[Writer, list[str]]]:
        """Yield what makes a table, and the name to give it: at the end it is there under its own name, or not at all.

        Args:
            is_overwriting: it takes the place of a table of this name.

        Raises:
            DataError: the database refuses something.
        """
        if self.backend.has_transactional_ddl:
            with self.transaction() as writer:
                if is_overwriting:
                    writer.run(f"DROP TABLE IF EXISTS {self.quoted(*table)}")
                yield writer, list(table)
            return
        token = secrets.token_hex(4)
        new, old = [*table[:-1], f"elasticdl_new_{token}"], [*table[:-1], f"elasticdl_old_{token}"]
        try:
            with self.transaction() as writer:
                yield writer, new
            renamed = f"{self.quoted(*new)} TO {self.quoted(*table)}"
            if is_overwriting and self.has_table(table):
                renamed = f"{self.quoted(*table)} TO {self.quoted(*old)}, {renamed}"
            with self.transaction() as writer:
                writer.run(f"RENAME TABLE {renamed}")  # at once, or not at all
        finally:
            with self.transaction() as writer:
                writer.run(f"DROP TABLE IF EXISTS {self.quoted(*new)}, {self.quoted(*old)}")

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

    def is_view(self, table: Sequence[str]) -> bool:
        """Return whether a view of this name exists."""
        with self._connected() as connection:
            schema = table[0] if len(table) > 1 else None
            return table[-1] in self._sql.inspect(connection).get_view_names(schema=schema)

    def failed(self, error: Exception, query: Query | None = None, sql: str = "") -> DataError | StatementError:
        """Return the error of the database as one of ours, at its place in the SELECT where that is known.

        Args:
            query: The query that was run.
            sql: The SQL that was sent, which contains the query.
        """
        refusal = self.backend.refusal(getattr(error, "orig", None) or error, sql)
        if query is None:
            return DataError(
                f"{self.where}: {hide(refusal.message)}.", "Check the URL, the rights of its user, and its tables."
            )
        if refusal.offset is not None and query.text in sql:
            place = _token_at(query.place, refusal.offset - sql.find(query.text))
        else:
            place = _named(query.place, refusal.name)
        wrong = place.text.split(".")[-1].strip('"`') if place is not query.place else ""
        near = nearest(wrong, self.known_names()) if wrong else ""
        hint = refusal.hint or "Run the SELECT in the database's own shell."
        return StatementError(
            f"The database refuses the SELECT: {refusal.message}.",
            f"Did you mean '{near}'?" if near not in ("", wrong) else hint,
            place,
        )

    def drop(self, tables: Sequence[str]) -> None:
        """Remove tables, of which some may not be there.

        Raises:
            DataError: the database refuses it.
        """
        with self.transaction() as writer:
            for table in tables:
                writer.run(f"DROP TABLE IF EXISTS {self.quoted(table)}")

    def pod_access(self) -> PodAccess:
        """Return how pods reach the database.

        Raises:
            DataError: the database cannot be reached from here.
        """
        if self._pod_access is None:
            with self._connected() as connection:
                user, password = self.backend.login(connection.connection.driver_connection)
            url = self._url.set(username=user, drivername=self._url.drivername.partition("+")[0])
            query = [name for name in url.query if name in PASSWORD_FILES or name.lower() in ("password", "passwd")]
            text = url._replace(password=None).difference_update_query(query).render_as_string()
            self._pod_access = PodAccess(text, self.backend.password_variable, password)
        return self._pod_access

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
    """Reads in one transaction.

    Attributes:
        dialect: sqlglot's name of the database's SQL.
    """

    def __init__(self, database: Database, connection: Any) -> None:
        self.dialect = database.dialect
        self._database = database
        self._connection = connection
        self._parts: Generator[Any, None, None] | None = None

    def close(self) -> None:
        """End what reads rows: until then it has the connection, however its consumer has ended."""
        if self._parts is not None:
            self._parts.close()

    def columns(self, query: Query) -> list[str]:
        """Return the names of a SELECT's columns; the database checks it and reads no row.

        Raises:
            StatementError: the database refuses the SELECT, two columns have one name, or a table has no snapshots.
        """
        self._database.backend.check_snapshot(self._connection, query)
        names = [str(name) for name in self._run(_WRAPPED.format("*", query.text) + " LIMIT 0", query).keys()]  # noqa: SIM118 (it is no mapping: this iterates over rows)
        folded = [name.lower() for name in names]
        for name in names:
            is_numbered = self.dialect == "sqlite"  # it calls the second of two columns `name:1`
            first = _NUMBERED.sub("", name) if is_numbered else name
            if names.count(name) > 1 or (first != name and first.lower() in folded):
                raise StatementError(
                    f"Two columns of the SELECT are called {first!r}.",
                    "Name one of them otherwise: … AS name.",
                    query.place,
                )
        return names

    def count(self, query: Query, column: str) -> tuple[int, int, int]:
        """Return how many rows a SELECT has, how many have a value in a column, and how many values differ."""
        name = self._database.quoted(column)
        found = f"count(*), count({name}), count(DISTINCT {self._database.backend.distinct(name)})"
        rows, values, distinct = self._run(_WRAPPED.format(found, query.text), query).one()
        return int(rows), int(values), int(distinct)

    def values(self, query: Query, column: str) -> list[Any]:
        """Return the values of a column, each once and in order, NULL left out."""
        name = self._database.quoted(column)
        sql = self._database.backend.values(name, f"(\n{query.text}\n) AS elasticdl_query")
        return [row[0] for row in self._run(sql, query)]

    def sample(self, query: Query, size: int) -> list[Sequence[Any]]:
        """Return some rows of a SELECT by chance."""
        order = f" ORDER BY {self._database.backend.random} LIMIT {size:d}"
        return list(self._run(_WRAPPED.format("*", query.text) + order, query))

    def first(self, query: Query, size: int) -> list[Sequence[Any]]:
        """Return some rows of a SELECT, the first that the database finds."""
        return list(self._run(_WRAPPED.format("*", query.text) + f" LIMIT {size:d}", query))

    def all(self, query: Query) -> list[Sequence[Any]]:
        """Return the rows of a SELECT that has few."""
        return list(self._run(query.text, query))

    def rows(self, query: Query, as_numbers: Collection[str] = ()) -> Iterator[Any]:
        """Yield the rows of a SELECT in its order, some thousand at once: a table of Arrow, or a list of rows.

        Args:
            as_numbers: the names of columns of which only the number matters, not its decimal places.

        Raises:
            StatementError: the database refuses the SELECT.
        """
        self.close()
        self._parts = self._read(query, as_numbers)
        return self._parts

    def _read(self, query: Query, as_numbers: Collection[str]) -> Generator[Any, None, None]:
        try:
            tables = self._database.backend.tables(self._connection, query.text, as_numbers)
            yield from self._streamed(query) if tables is None else tables
        except self._database.errors as error:
            raise self._database.failed(error, query) from error

    def _streamed(self, query: Query) -> Iterator[list[Sequence[Any]]]:
        result = self._run(query.text, query, stream_results=True, yield_per=_CHUNK)
        try:
            yield from result.partitions(_CHUNK)
        except BaseException:  # GeneratorExit, too: the consumer has failed
            self._database.backend.abandon(result.cursor)
            self._connection.invalidate()
            raise

    def _run(self, sql: str, query: Query, **options: Any) -> Any:
        try:
            return self._connection.exec_driver_sql(sql, execution_options={"no_parameters": True, **options})
        except self._database._sql.exc.SQLAlchemyError as error:
            raise self._database.failed(error, query, sql) from error


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
            raise self._database.failed(error, query, sql) from error

    def create(
        self, table: Sequence[str], columns: Mapping[str, str], key: Sequence[str] = (), kind: str = "TABLE"
    ) -> None:
        """Create a table.

        Args:
            columns: their types by name.
            key: the columns of the primary key, if there is one.
            kind: of table; see `Backend.staging`.

        Raises:
            DataError: the database refuses it.
        """
        database = self._database
        listed = [f"{database.quoted(name)} {database.backend.type_of(kind)}" for name, kind in columns.items()]
        if key:
            listed.append(f"PRIMARY KEY ({', '.join(map(database.quoted, key))})")
        self.run(f"CREATE {kind} {database.quoted(*table)} ({', '.join(listed)}){database.backend.table_options}")

    def add_key(self, table: str, column: str) -> None:
        """Make a column the primary key of a table.

        Raises:
            DataError: the database refuses it.
        """
        self.run(f"ALTER TABLE {self._database.quoted(table)} ADD PRIMARY KEY ({self._database.quoted(column)})")

    def load(self, table: Sequence[str], rows: Any) -> None:
        """Add the rows of a table of Arrow to a table, whose columns have the same names.

        Raises:
            DataError: the database refuses them.
        """
        sql = self._database._sql
        target = sql.table(table[-1], *(sql.column(name) for name in rows.column_names))
        try:
            self._database.backend.load(self._connection, target, rows)
        except self._database.errors as error:
            raise self._database.failed(error) from error

    def count(self, table: str) -> int:
        """Return how many rows a table has, whose name is quoted."""
        return int(self._connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())

    def insert(self, table: Sequence[str], columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
        """Add rows to a table.

        Args:
            columns: Columns of the table.
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
    found = re.compile(r'"[^"]*"|`[^`]*`|[\w.]+|.', re.DOTALL).match(place.source, place.start + offset)
    return Place(place.source, place.start + offset, found.end()) if found else place


def _named(place: Place, name: str) -> Place:
    """Return the first place of a name or a symbol in a SELECT; all of it if it is not there."""
    pattern = rf"(?<!\w){re.escape(name)}(?!\w)" if re.fullmatch(r"[\w.]+", name) else re.escape(name)
    found = re.search(pattern, place.text) if name else None
    return Place(place.source, place.start + found.start(), place.start + found.end()) if found else place
