"""The rows of a SELECT for a model that is trained: the columns that it must have, checked before a row is used."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from elasticdl_client.sql.columns import written
from elasticdl_client.sql.database import SnapshotReader, find_name
from elasticdl_client.sql.estimators import Task
from elasticdl_client.sql.models import StoredModel
from elasticdl_client.sql.snapshot import LABEL, Field
from elasticdl_client.sql.statement import Name, Query, StatementError, suggestion

_LOOKED_AT = 1_000  # rows whose types are compared


def task_of(model: StoredModel) -> Task:
    """Return what a model says about a row."""
    return Task(model.found["task"])


def fields_of(
    model: StoredModel, reader: SnapshotReader, query: Query, with_label: bool
) -> tuple[list[str], list[Field]]:
    """Return the columns of a SELECT, and the fields of a model's inputs in it.

    Args:
        with_label: the label must be there, too.

    Raises:
        StatementError: a column is missing, or holds texts where the model takes numbers.
    """
    names = reader.columns(query)
    wanted = [Field(one["name"], one["column"], one["form"]) for one in model.found["inputs"]]
    if with_label:
        form = "number" if task_of(model) is Task.REGRESSION else "class"
        wanted.append(Field(LABEL, model.found["label"], form))
    fields = [Field(one.name, _column(model, names, one, query), one.form) for one in wanted]
    _check_types(model, reader, names, fields, query)
    return names, fields


def _column(model: StoredModel, names: Sequence[str], field: Field, query: Query) -> str:
    found = find_name(names, Name(field.column, query.place))
    if not found:
        what = "label" if field.name == LABEL else "column"
        raise StatementError(
            f"The SELECT lacks the {what} {field.column!r}, which {model.title} was trained on.",
            suggestion(field.column, names),
            query.place,
        )
    return found


def _check_types(
    model: StoredModel, reader: SnapshotReader, names: Sequence[str], fields: Sequence[Field], query: Query
) -> None:
    rows = reader.first(query, _LOOKED_AT)
    for field in fields:
        at = names.index(field.column)
        wrong = next((row[at] for row in rows if not isinstance(row[at], int | float | Decimal | None)), None)
        if field.form == "number" and wrong is not None:
            name = written(field.column, reader.dialect)
            raise StatementError(
                f"The column {field.column!r} holds {str(wrong)[:50]!r}; {model.title} takes numbers there.",
                f"Convert it in the SELECT: CAST({name} AS DECIMAL(20, 6)) AS {name}.",
                query.place,
            )
