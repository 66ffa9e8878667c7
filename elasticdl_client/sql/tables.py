"""Tables that results are written to: never one that exists, unless --overwrite says so, and never half a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from elasticdl_client.sql.database import Writer
from elasticdl_client.sql.places import StatementError, suggestion
from elasticdl_client.sql.session import Session
from elasticdl_client.sql.statement import Name


def check_target(session: Session, table: Sequence[Name]) -> None:
    """Check that a table can be written.

    Raises:
        StatementError: it exists, or its schema does not.
    """
    names = [name.text for name in table]
    schemas = session.database.schemas() if len(names) > 1 else []
    if len(names) > 1 and names[0] not in schemas:
        raise StatementError(f"There is no schema {names[0]!r}.", suggestion(names[0], schemas), table[0].place)
    if session.database.has_table(names) and not session.is_overwriting:
        raise StatementError(
            f"The table {'.'.join(names)} exists.",
            "Name another one, or give --overwrite to replace it.",
            table[-1].place,
        )


@contextmanager
def created(session: Session, table: Sequence[Name], columns: Mapping[str, str]) -> Iterator[Writer]:
    """Yield what fills a new table, in the transaction that makes it.

    Args:
        columns: their types by name.

    Raises:
        DataError: the database refuses it.
    """
    database = session.database
    name = database.quoted(*(one.text for one in table))
    with database.transaction() as writer:
        writer.run(f"DROP TABLE IF EXISTS {name}" if session.is_overwriting else "SELECT 1")
        listed = ", ".join(f"{database.quoted(column)} {kind}" for column, kind in columns.items())
        writer.run(f"CREATE TABLE {name} ({listed})")
        yield writer
