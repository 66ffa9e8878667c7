"""A table of a database that a job writes its outputs to: rows by key, in transactions that may be repeated.

A transaction removes the rows of its keys before it adds them, so a task that is done twice leaves each row once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.sql import parse
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.secret_values import hide

Columns = Mapping[str, npt.NDArray[Any]]
_ATTEMPTS = 10  # with each lost deadlock another worker has written the same rows; a job has few that repeat a task
_LONGEST_KEY = 255  # characters; MySQL has no key of texts of any length


class OutputTable:
    """A table, which is made with its first rows."""

    def __init__(self, url: str, key: str) -> None:
        """
        Args:
            url: with `table=` in its query, and maybe `schema=`.
            key: the column that is its primary key.

        Raises:
            DataError: what the URL needs is not installed, or it names no table.
        """
        self._where = hide(url)
        self._sql, parsed, query = parse(url)
        engine = _engine(self._sql, parsed)
        # A higher level would lock gaps between keys on MySQL, which deadlocks with a worker that adds rows in them.
        is_sqlite = engine.dialect.name == "sqlite"
        self._engine = engine if is_sqlite else engine.execution_options(isolation_level="READ COMMITTED")
        self._name, self._schema = _table_of(query, self._where)
        self._key = key
        self._table: Any = None

    def replace(self, columns: Columns) -> None:
        """Write rows in one transaction, in the place of those with the same keys.

        Args:
            columns: of equal length; of several values a row each becomes a column, NAME_0 and so on.

        Raises:
            DataError: the database refuses them.
        """
        columns = dict(part for name, values in columns.items() for part in _flat(name, values))
        sql = self._sql
        values = [columns[name].tolist() for name in columns]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        rows.sort(key=lambda row: row[self._key])  # workers lock the same rows in one order
        try:
            table = self._table = self._table if self._table is not None else self._made(columns)
            for attempt in range(_ATTEMPTS):
                try:
                    with self._engine.begin() as connection:
                        of_key = table.c[self._key] == sql.bindparam("elasticdl_key")
                        keys = [{"elasticdl_key": row[self._key]} for row in rows]
                        connection.execute(table.delete().where(of_key), keys)
                        connection.execute(table.insert(), rows)
                    return
                except (sql.exc.IntegrityError, sql.exc.OperationalError):
                    # Another worker writes the same rows: it has committed by now, or there was a deadlock with it.
                    if attempt == _ATTEMPTS - 1:
                        raise
        except sql.exc.SQLAlchemyError as error:
            raise _refused(self._where, error) from error

    def _made(self, columns: Columns) -> Any:
        """Return the table, which is made if there is none.

        Raises:
            DataError: there is one with other columns.
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

    def _column(self, name: str, values: npt.NDArray[Any]) -> Any:
        sql, is_key = self._sql, name == self._key
        kinds: Mapping[str, Any] = {"f": sql.Double(), "b": sql.Boolean(), "i": sql.BigInteger(), "u": sql.BigInteger()}
        kind = kinds.get(values.dtype.kind, sql.String(_LONGEST_KEY) if is_key else sql.Text())
        return sql.Column(name, kind, primary_key=is_key, autoincrement=False)


def check_unused_table(url: str) -> None:
    """Check that the table of --prediction_outputs has no rows: those of two jobs would be mixed up.

    Raises:
        FlagError: it has.
        DataError: the database cannot be read.
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
    """Return an engine that keeps no connection between two tasks: a job may have more workers than a server takes."""
    return sql.create_engine(url, poolclass=sql.pool.NullPool)


def _table_of(query: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    """Return the name and the schema of the table of a URL.

    Raises:
        DataError: it names none.
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
    """Return a column of its name, or one for each of several values a sample, as in CSV files."""
    if values.ndim == 1:
        return [(name, values)]
    flat = values.reshape(len(values), int(np.prod(values.shape[1:])))
    return [(f"{name}_{number}", flat[:, number]) for number in range(flat.shape[1])]
