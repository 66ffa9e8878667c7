"""`elasticdl sql`: arguments to statements, each checked before the first is run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from elasticdl_client.choices import JobType
from elasticdl_client.sql import evaluate, predict, registry, train
from elasticdl_client.sql.arguments import VARIABLE, split
from elasticdl_client.sql.database import Database, check_url, dialect_of
from elasticdl_client.sql.jobs import JobFlags
from elasticdl_client.sql.models import ModelRegistry
from elasticdl_client.sql.parser import parse
from elasticdl_client.sql.session import Session
from elasticdl_client.sql.statement import DescribeModel, DropModel, Evaluate, Predict, ShowModels, Statement, Train

_MODELS = "~/.elasticdl/models"


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run statements; return the exit code.

    Raises:
        ElasticDLError: one is wrong, or has failed.
    """
    given = split(arguments)
    is_given = "datasource" in given.own
    url = given.own.get("datasource", environment.get(VARIABLE, ""))
    if url:
        check_url(url, on_command_line=is_given)
    os.environ.pop(VARIABLE, None)  # the processes of jobs need none
    dialect = dialect_of(url)
    statements = parse(given.source, dialect)
    flags = JobFlags(given.of_jobs, {name: text for name, text in environment.items() if name != VARIABLE})
    flags.check({job for statement in statements for job in _JOBS.get(type(statement), ())})
    for statement in statements:
        if isinstance(statement, Train):
            train.check(statement, dialect, flags)
    session = Session(
        partial(Database, url) if url else None,
        ModelRegistry(Path(given.own.get("models_dir") or environment.get("ELASTICDL_MODELS_DIR") or _MODELS)),
        flags,
        is_dry_run="dry_run" in given.own,
        is_overwriting="overwrite" in given.own,
    )
    for statement in statements:
        _run(session, statement)
    return 0


_JOBS: dict[type[Statement], tuple[JobType, ...]] = {
    Train: (JobType.TRAIN,),
    Predict: (JobType.PREDICT,),
    Evaluate: (JobType.EVALUATE,),
}


def _run(session: Session, statement: Statement) -> None:
    match statement:
        case Train():
            train.run(session, statement)
        case Predict():
            predict.run(session, statement)
        case Evaluate():
            evaluate.run(session, statement)
        case ShowModels():
            registry.show(session)
        case DescribeModel():
            registry.describe(session, statement)
        case DropModel():
            registry.drop(session, statement)
