"""The statistics of a SELECT's columns: `elasticdl analyze` on a sample, in this process.

The runtime package has it, which is imported when a statement trains, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.local import require_runtime
from elasticdl_client.sql.places import StatementError
from elasticdl_client.sql.statement import Query

_TYPES = "numbers, texts, true and false, dates and times"


def statistics_of(names: Sequence[str], rows: Sequence[Sequence[Any]], query: Query) -> dict[str, Any]:
    """Return the statistics of each column.

    Raises:
        StatementError: a column is of a type that no model takes, or of several.
    """
    require_runtime()
    from elasticdl.analysis.rows import statistics_of_rows

    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    for name, values in columns.items():
        wrong = next(
            (one for one in values if isinstance(one, bytes | bytearray | memoryview | list | dict | tuple)), None
        )
        if wrong is not None:
            raise StatementError(
                f"The column {name!r} is of a type that no model takes: {type(wrong).__name__}.",
                f"Leave it out, or convert it in the SELECT. Models take {_TYPES}.",
                query.place,
            )
    try:
        found: dict[str, Any] = statistics_of_rows(columns)["columns"]
    except DataError as error:
        raise StatementError(error.what, error.hint, query.place) from error
    return {name: found[name] for name in names}
