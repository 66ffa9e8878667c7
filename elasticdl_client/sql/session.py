"""State that the statements of one command share: the database, the registry of models, and flags.

`create` makes tables that results are written to: never one that exists, unless --overwrite says so, and never half a
table.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticdl_client.choices import JobType
from elasticdl_client.errors import FlagError
from elasticdl_client.sql.arguments import VARIABLE
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags, command_of
from elasticdl_client.sql.models import ModelRegistry
from elasticdl_client.sql.runtime import SqlRuntime, ThisMachine
from elasticdl_client.sql.statement import Name, StatementError, suggestion


@dataclass(slots=True)
class Session:
    """The surroundings of a statement.

    Attributes:
        connect: makes the database; None: --datasource is not given.
        is_dry_run: commands are printed, and nothing is written.
        is_overwriting: tables of results that exist are replaced.
        say: takes what the user should know.
        runtime: where the jobs run.
    """

    connect: Callable[[], Database] | None
    models: ModelRegistry
    flags: JobFlags
    is_dry_run: bool
    is_overwriting: bool
    say: Callable[[str], None] = print
    runtime: SqlRuntime = field(default_factory=ThisMachine)
    _database: Database | None = None

    @property
    def database(self) -> Database:
        """The database, opened when it is first used.

        Raises:
            FlagError: none is given.
        """
        if self._database is None:
            if self.connect is None:
                raise FlagError("--datasource is missing.", f"Give --datasource=URL, or the variable {VARIABLE}.")
            self._database = self.connect()
        return self._database

    def known_names(self) -> list[str]:
        """Return the names of the database's tables and columns; none where it cannot be read."""
        return self.database.known_names() if self.connect is not None else []

    def flags_of(self, flags: Mapping[str, object]) -> dict[str, object]:
        """Return the flags of a job with those of the runtime, which come first and last: none replaces them."""
        of_runtime = self.runtime.flags(flags)
        return {**of_runtime, **flags, **of_runtime}

    def show(self, job_type: JobType, flags: Mapping[str, object]) -> None:
        """Print the command that stands for a job."""
        self.say(command_of(job_type, flags))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield the path of a directory, not made yet, that is removed at the end."""
        path = self.models.scratch / f".{secrets.token_hex(4)}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def check_target(session: Session, table: Sequence[Name]) -> None:
    """Check that a table can be written.

    Raises:
        StatementError: it exists, or its schema does not.
    """
    names = [name.text for name in table]
    schemas = session.database.schemas() if len(names) > 1 else []
    if len(names) > 1 and names[0] not in schemas:
        raise StatementError(f"There is no schema {names[0]!r}.", suggestion(names[0], schemas), table[0].place)
    if session.database.has_table(names):
        shown = ".".join(names)
        if session.database.is_view(names):
            raise StatementError(f"{shown} is a view.", "Name a table.", table[-1].place)
        if not session.is_overwriting:
            raise StatementError(
                f"The table {shown} exists.",
                "Name another one, or give --overwrite to replace it.",
                table[-1].place,
            )


def create(session: Session, table: Sequence[Name], columns: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Create a table with rows, whole or not at all.

    Args:
        columns: their types by name.

    Raises:
        DataError: the database refuses it.
    """
    with session.database.new_table([one.text for one in table], session.is_overwriting) as (writer, name):
        writer.create(name, columns)
        writer.insert(name, list(columns), rows)
