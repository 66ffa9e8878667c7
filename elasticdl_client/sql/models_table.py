"""The table of models in a database (--models_table): a row of each version, for clients on several machines.

Its primary key gives each version to one client.  The files of a model stay where its client has written them; this
module never touches them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.statement import Place, Query
from elasticdl_client.sql.tokens import load

TRAINING, TRAINED = "training", "trained"
CLUSTER = "kubernetes"
"""The host of models whose files are where pods write."""
_COLUMNS = {
    "name": "VARCHAR(40) NOT NULL",
    "version": "INTEGER NOT NULL",
    "state": "TEXT",
    "estimator": "TEXT",
    "label": "TEXT",
    "statement": "TEXT",
    "input_schema": "TEXT",
    "num_rows": "BIGINT",
    "metrics": "TEXT",
    "epochs": "INTEGER",
    "committed": "BIGINT",
    "repeated": "BIGINT",
    "lost": "BIGINT",
    "trained_by": "TEXT",
    "host": "TEXT",
    "job": "TEXT",
    "created": "TEXT",
    "export": "TEXT",
    "description": "TEXT",
}


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A version of a model in the table.

    Attributes:
        state: `training` or `trained`.
        host: Host with its files.
        created: when the statement began, in UTC.
        export: where the SavedModel is on that host.
        description: its `model.json`.
    """

    name: str
    version: int
    state: str
    host: str
    created: str
    export: str
    description: Mapping[str, Any]


class ModelsTable:
    """The rows of models in a table, which is made when the first is added."""

    def __init__(self, connect: Callable[[], Database], name: str) -> None:
        """
        Args:
            connect: makes the database.
            name: Name of the table, or schema.table.

        Raises:
            FlagError: it is no name of a table.
        """
        self.name = name
        self._connect = connect
        self._names = name.split(".")
        self._database: Database | None = None
        if not all(self._names) or len(self._names) > 2:
            raise FlagError(
                f"--models_table={name} is no name of a table.", "Write --models_table, =table or =schema.table."
            )

    def rows(self, name: str = "") -> list[ModelRow]:
        """Return the rows of a model, or of all; none if there is no table yet.

        Raises:
            FlagError: the table is none of models.
        """
        database = self._opened()
        if not database.has_table(self._names):
            return []
        named = f" WHERE name = '{_checked(name)}'" if name else ""
        with database.snapshot() as reader:
            missing = _COLUMNS.keys() - set(reader.columns(_query(f"SELECT * FROM {self._table}")))
            if missing:
                raise FlagError(
                    f"--models_table={self.name}: this table is none of models; it lacks {', '.join(sorted(missing))}.",
                    "Name another one; it is made with the first model.",
                )
            wanted = "name, version, state, host, created, export, description"
            rows = reader.all(_query(f"SELECT {wanted} FROM {self._table}{named}"))
        return [ModelRow(row[0], int(row[1]), row[2], row[3], row[4], row[5], json.loads(row[6])) for row in rows]

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add the row of a new version; false if another client has this version.

        Raises:
            DataError: the database refuses it.
        """
        self._make()
        try:
            with self._opened().transaction() as writer:
                writer.insert(self._names, list(_COLUMNS), [dict(row)])
        except DataError as error:
            if isinstance(error.__cause__, load("sqlalchemy").exc.IntegrityError):
                return False
            raise
        return True

    def replace(self, row: Mapping[str, Any]) -> None:
        """Write the row of a version again, in one transaction.

        Raises:
            DataError: the database refuses it.
        """
        self._make()
        with self._opened().transaction() as writer:
            writer.run(f"DELETE FROM {self._table} WHERE {_condition(row['name'], [row['version']])}")
            writer.insert(self._names, list(_COLUMNS), [dict(row)])

    def mark_trained(self, name: str, version: int) -> None:
        """Say that a version is trained, and leave all else to the client that trains it.

        Raises:
            DataError: the database refuses it.
        """
        with self._opened().transaction() as writer:
            writer.run(f"UPDATE {self._table} SET state = '{TRAINED}' WHERE {_condition(name, [version])}")

    def remove(self, name: str, versions: Iterable[int]) -> None:
        """Remove the rows of some versions of a model, all or none.

        Raises:
            DataError: the database refuses it.
        """
        with self._opened().transaction() as writer:
            writer.run(f"DELETE FROM {self._table} WHERE {_condition(name, versions)}")

    def _make(self) -> None:
        database = self._opened()
        if database.has_table(self._names):
            return
        try:
            with database.transaction() as writer:
                writer.create(self._names, _COLUMNS, ["name", "version"])
        except DataError:
            if not database.has_table(self._names):  # another client has made it meanwhile
                raise

    @property
    def _table(self) -> str:
        return self._opened().quoted(*self._names)

    def _opened(self) -> Database:
        if self._database is None:
            self._database = self._connect()
        return self._database


def row_of(name: str, version: int, state: str, found: Mapping[str, Any], export: str) -> dict[str, Any]:
    """Return the row of a model.

    Args:
        found: its `model.json`.
        export: where its SavedModel is, or will be.
    """
    ledger = found.get("ledger", {})
    return {
        "name": name,
        "version": version,
        "state": state,
        **{key: found.get(key, "") for key in ("estimator", "label", "statement", "job", "created")},
        **{key: found.get(key, "") for key in ("trained_by", "host")},
        "input_schema": json.dumps(found.get("schema", {})),
        "num_rows": found.get("rows", 0),
        "metrics": json.dumps(found.get("metrics", {})),
        **{key: ledger.get(key) for key in ("epochs", "committed", "repeated", "lost")},
        "export": export,
        "description": json.dumps(found),
    }


def _checked(name: str) -> str:
    """Return the name of a model, which becomes SQL: the parser lets nothing but identifiers pass."""
    assert name.isidentifier()
    return name


def _condition(name: str, versions: Iterable[int]) -> str:
    return f"name = '{_checked(name)}' AND version IN ({', '.join(f'{version:d}' for version in versions)})"


def _query(sql: str) -> Query:
    return Query(sql, Place(sql, 0, len(sql)))
