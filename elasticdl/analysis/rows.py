"""Statistics of rows as a database driver gives them: Python values by column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from elasticdl.analysis.analysis import Analysis
from elasticdl.analysis.cells import Cells
from elasticdl_client.errors import DataError


def statistics_of_rows(
    columns: Mapping[str, Sequence[object]], num_buckets: int = 10, vocabulary_size: int = 100_000
) -> dict[str, Any]:
    """Return what `elasticdl analyze` would write about a table.

    Args:
        columns: the values of each column, as many of each; None: missing.
        num_buckets: that `boundaries` make.
        vocabulary_size: the most values in `vocab`.

    Raises:
        DataError: a package is missing, or a column holds numbers and texts.
    """
    analysis = Analysis()
    num_rows = len(next(iter(columns.values()), ()))
    analysis.add({name: _cells(name, values) for name, values in columns.items()}, num_rows)
    return analysis.statistics(num_buckets, vocabulary_size)


def _cells(name: str, values: Sequence[object]) -> Cells:
    cells = Cells(are_texts=True)
    wholes: list[int] = []
    numbers: list[float] = []
    for value in values:
        if value is None:
            cells.num_missing += 1
        elif isinstance(value, int):
            wholes.append(int(value))
        elif isinstance(value, float | Decimal):
            number = float(value)
            if math.isfinite(number):
                numbers.append(number)
            else:
                cells.num_missing += 1
        elif text := str(value).strip():
            cells.texts.append(text)
        else:
            cells.num_missing += 1
    if cells.texts and (wholes or numbers):
        shown = f"{(numbers or wholes)[0]!r} and {cells.texts[0][:50]!r}"
        raise DataError(
            f"The column {name} holds numbers and texts, such as {shown}.",
            f"Convert it in the SELECT: CAST({name} AS TEXT) AS {name}.",
        )
    try:
        if wholes and not numbers:
            cells.numbers.append(np.array(wholes, np.int64))
        elif numbers:
            cells.numbers.append(np.array([*wholes, *numbers], np.float64))
    except OverflowError as error:
        raise DataError(
            f"The column {name} holds whole numbers beyond 64 bits.", "Convert it in the SELECT."
        ) from error
    return cells
