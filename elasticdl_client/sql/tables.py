"""Tables that results are written to: never one that exists, unless --overwrite says so, and never half a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
