"""Training by a statement: a look at the table, the model's description, a snapshot of the rows, and a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elasticdl_client.choices import JobType
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import check as check_value
from elasticdl_client.flags import flag_of, parse
from elasticdl_client.job_spec import flag_fields
from elasticdl_client.secret_values import hide
from elasticdl_client.sql import estimators, jobs, snapshot
from elasticdl_client.sql.columns import ColumnFeatures, as_they_are, clause_of, inferred, inputs_of, resolved, written
from elasticdl_client.sql.database import SnapshotReader, find_name
from elasticdl_client.sql.estimators import Label, Task
from elasticdl_client.sql.jobs import JobFlags
from elasticdl_client.sql.models import StoredModel, outcome_of
from elasticdl_client.sql.parser import parse_select
from elasticdl_client.sql.runtime import RowStore, Session
from elasticdl_client.sql.snapshot import LABEL, Field
from elasticdl_client.sql.statement import Attribute, Name, Query, StatementError, Train, suggestion
from elasticdl_client.sql.statistics import TYPES, statistics_of, unusable_type

_SAMPLE = 100_000  # rows that statistics are of
_SMALL = 2_000  # rows of a table that is trained on in small minibatches
_MINIBATCHES = 2_000  # that a short form trains, within the following numbers of epochs
_LEAST_EPOCHS, _MOST_EPOCHS = 3, 100
_ZOO = "train.model_zoo"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The training that a statement asks for.

    Attributes:
        schema: the columns of the SELECT, with their types in the statistics.
        clause: the COLUMN clauses that stand for the columns.
        statement: the explicit one.
        num_rows: Number of rows of the SELECT.
    """

    schema: Mapping[str, str]
    label: Label
    columns: ColumnFeatures
    clause: str
    estimator: str
    params: Mapping[str, Any]
    statement: str
    num_rows: int

    @property
    def fields(self) -> list[Field]:
        """The columns of the model's inputs in the files."""
        return snapshot.input_fields(inputs_of(self.columns.features))

    @property
    def label_field(self) -> Field:
        """The column of the label in the files."""
        return Field(LABEL, self.label.column, "number" if self.label.task is Task.REGRESSION else "class")


def check(statement: Train, dialect: str, flags: JobFlags) -> None:
    """Check what needs no database: the estimator and the keys of WITH.

    Args:
        dialect: sqlglot's name of the database's SQL.
        flags: Flags of the command line.

    Raises:
        StatementError: one is wrong.
    """
    if statement.estimator is not None:
        estimators.check_estimator(statement.estimator)
        estimators.params_of(statement.estimator.text, statement.attributes)
    for key, attribute in statement.attributes.items():
        prefix, _, name = key.partition(".")
        if key == _ZOO and statement.estimator is not None and estimators.is_own(statement.estimator.text):
            _check_zoo(attribute)
        elif prefix == "train":
            _check_flag(name, attribute)
            if name in flags.given:
                raise StatementError(
                    f"{name} is given twice: here and as --{name}.", "Give it once.", attribute.key.place
                )
        elif key == "validation.select":
            _validation(statement, dialect)
        elif prefix != "model":
            hint = "Keys are model.NAME, train.NAME and validation.select."
            raise StatementError(f"There is no key {key!r}.", hint, attribute.key.place)


def run(session: Session, statement: Train) -> StoredModel | None:
    """Train a model; None if nothing is to be written.

    Raises:
        ElasticDLError: it cannot be trained.
    """
    database = session.database
    validation = _validation(statement, database.dialect)
    model = session.models.next(statement.model.name)
    with session.scratch() as scratch, session.runtime.rows(database, scratch, model) as store:
        with database.snapshot() as reader:
            plan = _plan(reader, statement, database.dialect)
            _say(session, plan)
            if validation is not None:
                _check_validation(reader.columns(validation), plan, validation)
            model.found.update(_description(session, statement, plan))
            flags = _flags(session, statement, plan, model, store, scratch)
            if session.is_dry_run:
                session.show(JobType.TRAIN, flags)
                return None
            session.runtime.check(jobs.spec_of(JobType.TRAIN, flags))  # before a row is read
            fields = [*plan.fields, plan.label_field]
            _write(reader, statement.query, list(plan.schema), fields, plan, partial(store.write, "train"))
            if validation is not None:
                names = reader.columns(validation)
                _write(reader, validation, names, _renamed(fields, names), plan, partial(store.write, "validation"))
        # Only now: SQLite lets no other connection, such as that of --models_table, write while one reads.
        model = session.models.add(statement.model.name, model.found)
        store.keep(model)
        spec = jobs.spec_of(JobType.TRAIN, _flags(session, statement, plan, model, store, scratch))
        model.found.update(job=spec.job_name, namespace=spec.namespace, context=spec.context)
        session.models.update(model)
        session.show(JobType.TRAIN, _flags(session, statement, plan, model, store, scratch))
        status = session.runtime.run(spec)
        model.found.update(outcome_of(status))
        session.models.record(model)
        store.remove()
    session.say(f"The model {model.title} is trained: {model.exported}")
    return model


def _plan(reader: SnapshotReader, statement: Train, dialect: str) -> TrainingPlan:
    query = statement.query
    names = reader.columns(query)
    label = find_name(names, statement.label)
    if not label:
        hint = suggestion(statement.label.text, names)
        raise StatementError(f"The SELECT has no column {statement.label.text!r}.", hint, statement.label.place)
    num_rows, num_labels, num_distinct = reader.count(query, label)
    if num_rows == 0:
        raise StatementError("The SELECT has no row.", "Check its WHERE.", query.place)
    if num_labels < num_rows:
        raise StatementError(
            f"The label {label!r} is NULL in {num_rows - num_labels:,} of {num_rows:,} rows.",
            f"Leave them out: WHERE {written(label, dialect)} IS NOT NULL.",
            statement.label.place,
        )
    values = reader.values(query, label) if num_distinct <= estimators.num_values_wanted() else []
    statistics = statistics_of(names, reader.sample(query, _SAMPLE), query)
    place = statement.label.place
    if unusable_type(statistics[label]):
        raise StatementError(
            f"The label {label!r} is of a type that no model takes: {unusable_type(statistics[label])}.",
            f"Convert it in the SELECT. Labels are {TYPES}.",
            place,
        )
    if statistics[label]["type"] != "string" and statistics[label]["missing"]:
        raise StatementError(
            f"The label {label!r} is not finite in some rows: NaN, or infinite.", "Leave them out by WHERE.", place
        )
    found = estimators.label_of(label, statistics[label], values, num_distinct, statement.estimator, place)
    default = "DNNRegressor" if found.task is Task.REGRESSION else "DNNClassifier"
    estimator = statement.estimator.text if statement.estimator else default
    params = estimators.params_of(estimator, statement.attributes)
    columns = _columns(statement, statistics, label)
    if not columns.features:
        why = " ".join(f"{written(name, dialect)}: {reason}." for name, reason in columns.left_out.items())
        hint = f"Name columns by COLUMN, or more in the SELECT. {why}".rstrip()
        raise StatementError("No column is left for the model.", hint, query.place)
    estimators.check_fits(estimator, found, columns.features, params, query.place)
    clause = clause_of(columns.features, dialect)
    ending = f"LABEL {written(label, dialect)} INTO {statement.model.name}"
    attributes = ", ".join(f"{key} = {one.value.place.text}" for key, one in statement.attributes.items())
    options = f"WITH {attributes} " if attributes else ""
    explicit = f"{query.text} TO TRAIN {estimator} {options}{clause} {ending}"
    schema = {name: statistics[name]["type"] for name in names}
    return TrainingPlan(schema, found, columns, clause, estimator, params, explicit, num_rows)


def _columns(statement: Train, statistics: Mapping[str, Any], label: str) -> ColumnFeatures:
    if statement.estimator is not None and estimators.is_own(statement.estimator.text):
        return as_they_are(statement.columns, statistics, label)
    return resolved(statement.columns, statistics, label) if statement.columns else inferred(statistics, label)


def _say(session: Session, plan: TrainingPlan) -> None:
    for name, reason in plan.columns.left_out.items():
        session.say(f"The column {name} is left out: {reason}.")
    session.say(f"{plan.estimator} for {plan.num_rows:,} rows: {plan.label.reason}.")
    session.say(plan.clause)


def _description(session: Session, statement: Train, plan: TrainingPlan) -> dict[str, Any]:
    return {
        "statement": hide(statement.text),
        "explicit": hide(plan.statement),
        "datasource": session.database.where,
        "schema": dict(plan.schema),
        "rows": plan.num_rows,
        "estimator": plan.estimator,
        "task": plan.label.task.value,
        "label": plan.label.column,
        "classes": list(plan.label.classes),
        "num_classes": len(plan.label.classes),
        "mean": plan.label.mean,
        "deviation": plan.label.deviation,
        "params": dict(plan.params),
        "inputs": [{"name": one.name, "column": one.column, "form": one.form} for one in plan.fields],
        "features": list(plan.columns.features),
        "metrics": {},
        "model_flags": _own_model(statement, plan),
    }


def _own_model(statement: Train, plan: TrainingPlan) -> dict[str, object]:
    """Return the flags of a model of the user's; none of ours."""
    if not estimators.is_own(plan.estimator):
        return {}
    zoo = statement.attributes.get(_ZOO)
    return jobs.of_own_model(plan.estimator, str(zoo.value.value) if zoo else ".", plan.params)


def _write(
    reader: SnapshotReader,
    query: Query,
    names: Sequence[str],
    fields: Sequence[Field],
    plan: TrainingPlan,
    write: Callable[..., int],
) -> None:
    rows = reader.rows(query, snapshot.only_numbers(fields))
    write(rows, names, fields, plan.label.classes, seed=0)


def _flags(
    session: Session, statement: Train, plan: TrainingPlan, model: StoredModel, store: RowStore, scratch: Path
) -> dict[str, object]:
    minibatch_size = 16 if plan.num_rows < _SMALL else 64
    epochs = math.ceil(_MINIBATCHES * minibatch_size / plan.num_rows)
    own: dict[str, object] = {
        "job_name": jobs.name_of("train", model.name, session.runtime.suffix(model, scratch)),
        "minibatch_size": minibatch_size,
        "num_epochs": min(_MOST_EPOCHS, max(_LEAST_EPOCHS, epochs)),
        "shuffle": True,
    }
    named = {
        key.partition(".")[2]: one
        for key, one in statement.attributes.items()
        if key.startswith("train.") and key != _ZOO
    }
    given = session.flags.of(JobType.TRAIN)
    own |= given | {name: attribute.value.value for name, attribute in named.items()}
    of_statement: dict[str, object] = {
        **session.runtime.model_flags(model, scratch),
        **jobs.metrics_flag(plan.estimator, plan.label.task),
        "training_data": store.source("train"),
        "columns": ",".join(field.name for field in plan.fields),
        "label_column": LABEL,
        "output": model.exported,
    }
    if "validation.select" in statement.attributes:
        of_statement["validation_data"] = store.source("validation")
    return session.flags_of(own | of_statement)


def _check_zoo(attribute: Attribute) -> None:
    value = attribute.value.value
    if not isinstance(value, str) or not Path(value).expanduser().is_dir():
        raise StatementError(f"{value!r} is no directory.", "Name the directory of your models.", attribute.value.place)


def _check_flag(name: str, attribute: Attribute) -> None:
    hidden = (*jobs.OF_STATEMENT, "runtime")
    known = {one: field for one, field in flag_fields(JobType.TRAIN).items() if one not in hidden}
    if name not in known:
        hint = suggestion(
            f"train.{name}",
            [f"train.{one}" for one in known],
            "train.NAME is a flag of `elasticdl train`, such as train.num_epochs.",
        )
        raise StatementError(f"There is no key 'train.{name}'.", hint, attribute.key.place)
    if isinstance(attribute.value.value, list):
        raise StatementError("A flag is not a list.", "Write a number or a 'text'.", attribute.value.place)
    field = known[name]
    found = flag_of(field)
    try:
        value = parse(name, attribute.value.value, field.default)
        if found is not None:
            check_value(name, value, field.default, found)
    except FlagError as error:
        raise StatementError(error.what, error.hint, attribute.value.place) from error


def _validation(statement: Train, dialect: str) -> Query | None:
    attribute = statement.attributes.get("validation.select")
    if attribute is None:
        return None
    if not isinstance(attribute.value.value, str):
        raise StatementError(
            "validation.select is a SELECT in quotes.", "Write validation.select = 'SELECT …'.", attribute.value.place
        )
    return parse_select(attribute.value.value, dialect)


def _check_validation(names: Sequence[str], plan: TrainingPlan, query: Query) -> None:
    for field in [*plan.fields, plan.label_field]:
        if not find_name(names, Name(field.column, query.place)):
            raise StatementError(
                f"The SELECT of validation.select has no column {field.column!r}.",
                suggestion(field.column, names),
                query.place,
            )


def _renamed(fields: Sequence[Field], names: Sequence[str]) -> list[Field]:
    """Return the same fields of a SELECT whose names may be in another case."""
    return [Field(one.name, _same(one.column, names), one.form) for one in fields]


def _same(column: str, names: Sequence[str]) -> str:
    return column if column in names else next(name for name in names if name.lower() == column.lower())
