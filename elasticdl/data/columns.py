"""Which columns of a typed source its records have, and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticdl.data.reader import Metadata
from elasticdl_client.errors import DataError


@dataclass(frozen=True, slots=True)
class ColumnType:
    """Of a column: "int64", "float64", "string" or "image"; the shape of one record's values, (-1,) if it varies."""

    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's choice of columns.

    Attributes:
        features: of --columns; empty: all.
        label: of --label_column; may be empty.
    """

    features: tuple[str, ...] = ()
    label: str = ""

    def of(self, available: Sequence[str], where: str) -> list[str]:
        """The columns to read, in their order there.  A label that is not there is left out: predictions need none.

        Args:
            where: the source, for messages.

        Raises:
            DataError: a column is not there.
        """
        wanted = [*self.features] if self.features else list(available)
        missing = next((name for name in wanted if name not in available), None)
        if missing is not None:
            raise DataError(
                f"{where} has no column {missing}, which --columns names.", f"It has: {', '.join(available)}."
            )
        return [name for name in available if name in wanted or name == self.label]


def check_same(types: Mapping[str, object], path: str, expected: Mapping[str, object], first: str) -> None:
    """Checks the columns of one part of a source against those of the first.

    Raises:
        DataError: a column is missing, new or of another type.
    """
    different = next((name for name in [*types, *expected] if types.get(name) != expected.get(name)), None)
    if different is not None:
        raise DataError(
            f"The column {different} of {path} is not that of {first}.",
            "All files of a data source must have the same columns of the same types.",
        )


def describe(types: Mapping[str, ColumnType], selection: Selection, seed: int, delimiter: str = "") -> Metadata:
    """The metadata of a source with these columns."""
    return Metadata(
        column_names=tuple(types),
        column_dtypes=tuple((name, kind.dtype) for name, kind in types.items() if kind.dtype),
        seed=seed,
        column_shapes=tuple((name, kind.shape) for name, kind in types.items() if kind.shape),
        label_column=selection.label if selection.label in types else "",
        features=selection.features,
        delimiter=delimiter,
    )
