"""The statistics of a SELECT's columns: `elasticdl analyze` on a sample, in this process.

The runtime package has it, which is imported when a statement trains, never before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.local import require_runtime
from elasticdl_client.sql.statement import Query, StatementError

_UNUSABLE = (bytes, bytearray, memoryview, list, dict, tuple)
TYPES = "numbers, texts, true and false, dates and times"
"""The types that models accept, for messages."""


def statistics_of(names: Sequence[str], rows: Sequence[Sequence[Any]], query: Query) -> dict[str, Any]:
    """Return the statistics of each column; of one whose type no model takes only the `type`, without a `count`.

    Raises:
        StatementError: a column holds values of several types.
    """
    require_runtime()
    from elasticdl.analysis.analysis import statistics_of_rows

    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    wrong = {name: kind for name, values in columns.items() if (kind := _unusable(values))}
    try:
        taken = {name: values for name, values in columns.items() if name not in wrong}
        found: dict[str, Any] = statistics_of_rows(taken)["columns"]
    except DataError as error:
        raise StatementError(error.what, error.hint, query.place) from error
    return {name: {"type": wrong[name], "count": 0} if name in wrong else found[name] for name in names}


def unusable_type(column: Mapping[str, Any]) -> str:
    """Return the type of a column that no model takes, by its statistics; empty: models take it."""
    return "" if "distinct_count" in column else str(column["type"])


def _unusable(values: Sequence[Any]) -> str:
    return next((type(one).__name__ for one in values if isinstance(one, _UNUSABLE)), "")
