"""`TO EVALUATE`: the metrics of a model on the rows of a SELECT, printed, and as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from elasticdl_client.choices import JobType
from elasticdl_client.errors import DataError
from elasticdl_client.sql import jobs, snapshot
from elasticdl_client.sql.estimators import METRICS, is_own
from elasticdl_client.sql.inputs import fields_of, task_of
from elasticdl_client.sql.models import StoredModel
from elasticdl_client.sql.places import StatementError, suggestion
from elasticdl_client.sql.session import Session
from elasticdl_client.sql.snapshot import LABEL
from elasticdl_client.sql.statement import Evaluate
from elasticdl_client.sql.tables import check_target, create

_COLUMNS = {"model": "TEXT", "metric": "TEXT", "value": "DOUBLE PRECISION"}


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics of a model by name."""

    head: ClassVar = ("model", "metric", "value")
    model: StoredModel
    metrics: Mapping[str, float]

    @property
    def rows(self) -> list[tuple[str | float, ...]]:
        """The same as rows of a table."""
        return [(self.model.title, name, value) for name, value in self.metrics.items()]


def run(session: Session, statement: Evaluate) -> ModelMetrics | None:
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
