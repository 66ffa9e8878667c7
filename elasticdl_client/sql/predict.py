"""The use of a trained model: `TO PREDICT table.column` and `TO EVALUATE`, on the rows of a SELECT.

The columns that the model must have are checked before a row is used, for `TO EXPLAIN`, too.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from elasticdl_client.choices import JobType
from elasticdl_client.data_sources import ROW
from elasticdl_client.errors import DataError
from elasticdl_client.sql import jobs, snapshot
from elasticdl_client.sql.columns import written
from elasticdl_client.sql.database import SnapshotReader, find_name
from elasticdl_client.sql.estimators import METRICS, Task, is_own
from elasticdl_client.sql.models import StoredModel
from elasticdl_client.sql.runtime import Session, check_target, create
from elasticdl_client.sql.snapshot import LABEL, Field
from elasticdl_client.sql.statement import Evaluate, Name, Predict, Query, StatementError, suggestion

_VALUE = "elasticdl_value"


def run(session: Session, statement: Predict) -> int:
    """Write the table; how many rows it has, 0 in a dry run.

    Raises:
        ElasticDLError: it cannot be written.
    """
    model = session.models.find(statement.model)
    check_target(session, statement.table)
    with session.database.snapshot() as reader:
        names, fields = fields_of(model, reader, statement.query, with_label=False)
        _check_column(names, statement.column)
    with session.scratch() as scratch, session.runtime.rows(session.database, scratch) as store:
        flags = session.flags_of(
            {
                **session.runtime.model_flags(model, scratch),
                **jobs.with_trained(JobType.PREDICT, model, session.flags, scratch.name),
                "prediction_data": store.source("inputs"),
                "prediction_columns": ROW,
                **store.output_flags(),
            }
        )
        spec = jobs.spec_of(JobType.PREDICT, flags)
        if session.is_dry_run:
            session.show(JobType.PREDICT, flags)
            return 0
        session.runtime.check(spec)
        with _Staging(session, statement, names).made() as staging:
            query = staging.query()
            with session.database.snapshot() as reader:
                all_fields = [*fields, Field(ROW, ROW, "row")]
                rows = reader.rows(query, snapshot.only_numbers(all_fields))
                num_rows = store.write("inputs", rows, [*names, ROW], all_fields)
            if num_rows:
                session.show(JobType.PREDICT, flags)
                session.runtime.run(spec)
                for numbers, outputs in store.outputs():
                    staging.add(_predictions(numbers, outputs, model))
            staging.finish(num_rows)
    session.say(f"{num_rows:,} rows with predictions of {model.title} are in {staging.shown}.")
    return num_rows


class _Staging:
    """The tables that a prediction needs on its way: of numbered rows, and of predictions."""

    def __init__(self, session: Session, statement: Predict, names: Sequence[str]) -> None:
        self._session = session
        self._statement = statement
        self._names = names
        token = secrets.token_hex(4)
        schema = [name.text for name in statement.table[:-1]]
        self._rows = [*schema, f"elasticdl_rows_{token}"]
        self._values = [*schema, f"elasticdl_predictions_{token}"]
        self._target = [*schema, statement.table[-1].text]
        self.shown = ".".join(self._target)

    @contextmanager
    def made(self) -> Iterator[_Staging]:
        """Make both tables, and remove them at the end.

        Raises:
            DataError: the database refuses it.
        """
        database = self._session.database
        model = self._session.models.find(self._statement.model)
        rows, values = database.quoted(*self._rows), database.quoted(*self._values)
        row = database.quoted(ROW)
        columns = {ROW: "BIGINT", _VALUE: _type(model)}
        try:
            with database.transaction() as writer:
                writer.run(
                    f"CREATE TABLE {rows} AS SELECT elasticdl_query.*, row_number() OVER () AS {row} "
                    f"FROM (\n{self._statement.query.text}\n) AS elasticdl_query",
                    self._statement.query,
                )
                writer.create(self._values, columns, [ROW])
            yield self
        finally:
            with database.transaction() as writer:
                writer.run(f"DROP TABLE IF EXISTS {rows}")
                writer.run(f"DROP TABLE IF EXISTS {values}")

    def query(self) -> Query:
        """Return the SELECT of the numbered rows, in their order."""
        database = self._session.database
        text = f"SELECT * FROM {database.quoted(*self._rows)} ORDER BY {database.quoted(ROW)}"
        return Query(text, self._statement.query.place)

    def add(self, predictions: list[dict[str, Any]]) -> None:
        """Add the predictions of a task, in a transaction."""
        with self._session.database.transaction() as writer:
            writer.insert(self._values, [ROW, _VALUE], predictions)

    def finish(self, num_rows: int) -> None:
        """Make the table of the result, whole or not at all.

        Raises:
            DataError: a row has no prediction.
        """
        database = self._session.database
        rows, values = database.quoted(*self._rows), database.quoted(*self._values)
        row, column = database.quoted(ROW), database.quoted(self._statement.column.text)
        listed = ", ".join(f"r.{database.quoted(name)}" for name in self._names)
        with database.new_table(self._target, self._session.is_overwriting) as (writer, table):
            target = database.quoted(*table)
            writer.run(
                f"CREATE TABLE {target} AS SELECT {listed}, v.{database.quoted(_VALUE)} AS {column} "
                f"FROM {rows} AS r JOIN {values} AS v ON v.{row} = r.{row} ORDER BY r.{row}"
            )
            found = writer.count(target)
            if found != num_rows:
                raise DataError(
                    f"{found:,} of {num_rows:,} rows have a prediction.",
                    "The job's directory has its log; report this.",
                )


def _check_column(names: Sequence[str], column: Name) -> None:
    if find_name(names, column):
        raise StatementError(
            f"The SELECT has a column {column.text!r} of its own.",
            "Name the column of predictions otherwise.",
            column.place,
        )


def _type(model: StoredModel) -> str:
    """Return the SQL type of predictions: that of the label's values."""
    if task_of(model) is Task.REGRESSION:
        return "DOUBLE PRECISION"
    kinds = {type(value) for value in model.found["classes"]}
    for kind, name in ((bool, "BOOLEAN"), (int, "BIGINT")):
        if kinds == {kind}:
            return name
    return "DOUBLE PRECISION" if kinds <= {int, float} else "TEXT"


def _predictions(numbers: Sequence[int], outputs: Sequence[Any], model: StoredModel) -> list[dict[str, Any]]:
    """Return the predictions for some rows as values of the label."""
    values = [_value(output, model.found["classes"]) for output in outputs]
    return [{ROW: row, _VALUE: value} for row, value in zip(numbers, values, strict=True)]


def _value(output: float | list[float | None] | None, classes: Sequence[Any]) -> Any:
    """Return what a model says of a row: a class by its probability or the largest of all, or a number.

    NaN is None, as it says nothing.
    """
    numbers = output if isinstance(output, list) else [output]
    known = [number for number in numbers if number is not None and not math.isnan(number)]
    if len(known) < len(numbers):
        return None
    if isinstance(output, list):
        if len(known) != len(classes):
            raise DataError(
                f"The model gives {len(known)} numbers a row, for {len(classes)} classes.",
                "A model of your own gives a number, a probability of the second class, or one of each class.",
            )
        return classes[max(range(len(known)), key=known.__getitem__)]
    return classes[int(known[0] > 0.5)] if classes else float(known[0])


_COLUMNS = {"model": "TEXT", "metric": "TEXT", "value": "DOUBLE PRECISION"}


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of a model by name."""

    head: ClassVar = ("model", "metric", "value")
    model: StoredModel
    metrics: Mapping[str, float]

    @property
    def rows(self) -> list[tuple[str | float, ...]]:
        """Return the same as rows of a table."""
        return [(self.model.title, name, value) for name, value in self.metrics.items()]


def run_evaluate(session: Session, statement: Evaluate) -> ModelMetrics | None:
    """Evaluate a model; None in a dry run.

    Raises:
        ElasticDLError: it cannot be evaluated.
    """
    database = session.database
    model = session.models.find(statement.model)
    wanted = _metrics(model, statement)
    if statement.table:
        check_target(session, statement.table)
    with session.scratch() as scratch, session.runtime.rows(database, scratch) as store:
        flags = session.flags_of(
            {
                **session.runtime.model_flags(model, scratch),
                **jobs.with_trained(JobType.EVALUATE, model, session.flags, scratch.name),
                "validation_data": store.source("inputs"),
                "label_column": LABEL,
                **jobs.metrics_flag(model.found["estimator"], task_of(model)),
            }
        )
        spec = jobs.spec_of(JobType.EVALUATE, flags)
        with database.snapshot() as reader:
            names, fields = fields_of(model, reader, statement.query, with_label=True)
            if session.is_dry_run:
                session.show(JobType.EVALUATE, flags)
                return None
            session.runtime.check(spec)
            rows = reader.rows(statement.query, snapshot.only_numbers(fields))
            num_rows = store.write("inputs", rows, names, fields, model.found["classes"])
        if not num_rows:
            raise StatementError("The SELECT has no row.", "Check its WHERE.", statement.query.place)
        session.show(JobType.EVALUATE, flags)
        status = session.runtime.run(spec)
        found = _checked(status.metrics if status is not None else {}, statement, wanted)
    if statement.table:
        rows_of_table = [{"model": model.title, "metric": one, "value": found[one]} for one in wanted]
        create(session, statement.table, _COLUMNS, rows_of_table)
    session.say(f"{model.title} on {num_rows:,} rows:")
    for name in wanted:
        session.say(f"  {name:<10} {found[name]:.6f}")
    return ModelMetrics(model, found)


def _metrics(model: StoredModel, statement: Evaluate) -> list[str]:
    if is_own(model.found["estimator"]):  # its module knows them, which runs in the job
        return list(dict.fromkeys(metric.text for metric in statement.metrics))
    known = METRICS[task_of(model)]
    for metric in statement.metrics:
        if metric.text.lower() not in known:
            hint = suggestion(metric.text.lower(), known)
            raise StatementError(f"{model.found['estimator']} has no metric {metric.text!r}.", hint, metric.place)
    return list(dict.fromkeys(metric.text.lower() for metric in statement.metrics))


def _checked(found: Mapping[str, float], statement: Evaluate, wanted: list[str]) -> dict[str, float]:
    """Return the metrics that are wanted.

    Raises:
        StatementError: the model has no such metric.
        DataError: one is not finite.
    """
    for name in wanted:
        if name not in found:
            place = next(metric.place for metric in statement.metrics if metric.text == name)
            raise StatementError(f"The model has no metric {name!r}.", suggestion(name, found), place)
    for name in wanted:
        if not math.isfinite(found[name]):
            raise DataError(
                f"The metric {name} is not finite on these rows.", "Evaluate rows of both classes, and not too few."
            )
    return {name: float(found[name]) for name in wanted}


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
