"""`elasticdl sql`: arguments to statements, each checked before the first is run; without any, the shell.

`SHOW MODELS`, `DESCRIBE model` and `DROP MODEL model` are answered here, every other statement by a module of its own.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError, FlagError
from elasticdl_client.flag_sources import infer_runtime, runtime_of_flags
from elasticdl_client.flags import Group
from elasticdl_client.local import require_runtime
from elasticdl_client.sql import explain, predict, train
from elasticdl_client.sql.arguments import MODELS_TABLE, USAGE, VARIABLE, SqlArguments, split
from elasticdl_client.sql.cluster import ClusterModels, KubernetesRuntime
from elasticdl_client.sql.cluster_checks import check_place, check_reachable
from elasticdl_client.sql.database import Database, check_url, dialect_of
from elasticdl_client.sql.explain import ModelImportances
from elasticdl_client.sql.jobs import JobFlags, command_of, name_of
from elasticdl_client.sql.models import ModelRegistry, StoredModel
from elasticdl_client.sql.models_table import ModelsTable
from elasticdl_client.sql.parser import parse
from elasticdl_client.sql.predict import ModelMetrics
from elasticdl_client.sql.runtime import Session
from elasticdl_client.sql.statement import (
    DescribeModel,
    DropModel,
    Evaluate,
    Explain,
    Predict,
    ShowModels,
    Statement,
    Train,
)
from elasticdl_client.sql.tokens import load
from elasticdl_client.storage_kinds import check_installed, is_remote

Result = ModelMetrics | ModelImportances
_MODELS = "~/.elasticdl/models"


def run(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run statements, or the shell if none is given; return the exit code.

    Raises:
        ElasticDLError: one is wrong, or has failed.
    """
    given, session, dialect = prepare(arguments, environment)
    if given.source is not None:
        execute(session, dialect, given.source)
        return 0
    if not sys.stdin.isatty():
        raise FlagError("There is no statement, and the input is no terminal.", f"Usage: {USAGE}")
    load("prompt_toolkit")
    from elasticdl_client.sql import shell

    session.flags.check(set(_JOBS.values()))
    return shell.run(session, partial(execute, session, dialect), dialect)


def prepare(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[SqlArguments, Session, str]:
    """Return the parts of a command line, the surroundings of its statements, and the dialect of their SQL.

    Raises:
        FlagError: the command line is wrong.
    """
    given = split(arguments)
    url = given.own.get("datasource", environment.get(VARIABLE, ""))
    if url:
        check_url(url, on_command_line="datasource" in given.own)
    os.environ.pop(VARIABLE, None)  # the processes of jobs need none
    connect = partial(Database, url) if url else None
    flags = JobFlags(given.of_jobs, {name: text for name, text in environment.items() if name != VARIABLE})
    location = given.own.get("models_dir") or environment.get("ELASTICDL_MODELS_DIR", "")
    if "runtime" not in flags.gathered.values:
        flags = _with_runtime(flags, url, location)
    if flags.runtime is Runtime.KUBERNETES:
        return given, _on_cluster(given, environment, flags, url), dialect_of(url)
    if is_remote(location):
        raise FlagError(
            f"--models_dir={location} is storage, where only pods write models.",
            "Name a directory for --runtime=local, or give --runtime=kubernetes.",
        )
    named = given.own.get("models_table") or environment.get("ELASTICDL_MODELS_TABLE", "")
    if named and connect is None:
        raise FlagError(
            f"--models_table={named} is in the database of --datasource, which is missing.", "Give --datasource=URL."
        )
    table = ModelsTable(connect, named) if named and connect is not None else None
    session = Session(
        connect,
        ModelRegistry(Path(location or _MODELS), table),
        flags,
        is_dry_run="dry_run" in given.own,
        is_overwriting="overwrite" in given.own,
    )
    return given, session, dialect_of(url)


def _on_cluster(given: SqlArguments, environment: Mapping[str, str], flags: JobFlags, url: str) -> Session:
    """Return the surroundings of statements whose jobs run on Kubernetes.

    Raises:
        FlagError: pods cannot reach the database, or no place for models is named.
    """
    location = given.own.get("models_dir") or environment.get("ELASTICDL_MODELS_DIR", "")
    volume = str(flags.of(JobType.TRAIN).get("volume", ""))
    _check_for_pods(url, location)
    if volume or is_remote(location):  # statements that run no job need neither
        check_place(location, volume)
    connect = cache(partial(Database, url))
    named = given.own.get("models_table") or environment.get("ELASTICDL_MODELS_TABLE", "") or MODELS_TABLE
    return Session(
        connect,
        ClusterModels(location, ModelsTable(connect, named), connect),
        flags,
        is_dry_run="dry_run" in given.own,
        is_overwriting="overwrite" in given.own,
        runtime=KubernetesRuntime(connect),
    )


def _check_for_pods(url: str, location: str) -> None:
    """Check that pods can reach the database and have a place for models, as far as both say it.

    Raises:
        FlagError: they cannot, or one is not named.
    """
    if not url:
        raise FlagError("--datasource is missing.", f"Give --datasource=URL, or the variable {VARIABLE}.")
    check_reachable(url)
    if not location.startswith("/") and not is_remote(location):
        what = f"--models_dir={location} is no place that pods have" if location else "--models_dir is missing"
        raise FlagError(
            f"{what}: on Kubernetes models are where pods write them.",
            'Name a directory of a --volume, such as --volume="claim_name=models,mount_path=/models" with '
            "--models_dir=/models, or storage: --models_dir=s3://BUCKET/models.",
        )


def _with_runtime(flags: JobFlags, url: str, location: str) -> JobFlags:
    """Return the flags with the runtime that follows from them, and say which and why.

    A cluster that is configured is used where pods could do the work: not for a database of this machine, nor without
    a place for models.

    Raises:
        FlagError: an argument is none.
    """
    given = flags.gathered
    runtime, why = infer_runtime(JobType.TRAIN, given)
    if runtime is Runtime.KUBERNETES and runtime_of_flags(JobType.TRAIN, given) is None:
        try:
            _check_for_pods(url, location)
            check_place(location, str(given.values.get("volume", "")))
        except FlagError as error:
            runtime, why = Runtime.LOCAL, f"{error.what.rstrip('.')}, though {why}"
    other = Runtime.KUBERNETES if runtime is Runtime.LOCAL else Runtime.LOCAL
    print(f"note: --runtime={runtime}, since {why}; --runtime={other} overrides it.", file=sys.stderr)
    return replace(flags, inferred=runtime)


def execute(session: Session, dialect: str, source: str) -> list[Result]:
    """Check all statements of a text, then run them; return their results.

    Raises:
        ElasticDLError: one is wrong, or has failed.
    """
    statements = parse(source, dialect)
    session.flags.check({_JOBS[kind] for kind in map(type, statements) if kind in _JOBS})
    for statement in statements:
        if isinstance(statement, Train):
            train.check(statement, dialect, session.flags)
        elif isinstance(statement, Explain):
            explain.check(statement)
    return [found for statement in statements if (found := _run(session, statement)) is not None]


_JOBS: dict[type[Statement], JobType] = {
    Train: JobType.TRAIN,
    Predict: JobType.PREDICT,
    Evaluate: JobType.EVALUATE,
}


def _run(session: Session, statement: Statement) -> Result | None:
    match statement:
        case Train():
            model = train.run(session, statement)
            return ModelMetrics(model, model.found["metrics"]) if model is not None else None
        case Predict():
            predict.run(session, statement)
        case Evaluate():
            return predict.run_evaluate(session, statement)
        case Explain():
            return explain.run(session, statement)
        case ShowModels():
            show(session)
        case DescribeModel():
            describe(session, statement)
        case DropModel():
            drop(session, statement)
    return None


_HEAD = ("MODEL", "ESTIMATOR", "LABEL", "ROWS", "STATE", "METRICS", "CREATED")
_COUNTS = ("epochs", "committed", "repeated", "lost")  # of the ledger, shown if they are 0 as well
_ABOUT = (
    "estimator",
    "label",
    "classes",
    "rows",
    "datasource",
    "trained_by",
    "host",
    "created",
    "job",
    "statement",
    "explicit",
)


def show(session: Session) -> None:
    """Print all models, a line each."""
    if not session.is_dry_run:
        session.models.mirror()
    rows = [_HEAD]
    for model in session.models.all():
        found = model.found
        metrics = _metrics(found.get("metrics", {}))
        texts = (found.get("estimator", ""), found.get("label", ""), f"{found.get('rows', 0):,}", model.state, metrics)
        rows.append((model.title, *texts, found.get("created", "")))
    if len(rows) == 1:
        session.say(f"There is no model in {session.models.where}.")
        return
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    for row in rows:
        session.say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def describe(session: Session, statement: DescribeModel) -> None:
    """Print what is known about a model.

    Raises:
        StatementError: there is none.
    """
    model = session.models.look_up(statement.model)
    lines = {"model": model.title, "state": model.state}
    for key in _ABOUT:
        value = model.found.get(key)
        if value not in (None, "", []):
            lines[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    inputs = model.found.get("inputs", [])
    lines["columns"] = ", ".join(dict.fromkeys(f"{one['column']} ({one['form']})" for one in inputs))
    lines["schema"] = ", ".join(f"{name} {kind}" for name, kind in model.found.get("schema", {}).items())
    ledger = {name: count for name, count in model.found.get("ledger", {}).items() if count or name in _COUNTS}
    lines["ledger"] = ", ".join(f"{name} {count}" for name, count in ledger.items())
    lines["metrics"] = _metrics(model.found.get("metrics", {}))
    lines["export"] = model.exported if model.is_trained else ""
    for key, text in lines.items():
        if text:
            session.say(f"{key + ':':<12} " + f"\n{'':<13}".join(text.splitlines()))


def drop(session: Session, statement: DropModel) -> None:
    """Remove a model.

    Raises:
        StatementError: there is none.
    """
    wanted = statement.model
    if session.is_dry_run:
        model = session.models.look_up(wanted)
        removed = model.directory if wanted.version else model.directory.parent
        session.say(
            f"This would remove {removed if model.place is None else f'{wanted.name} from {session.models.where}'}."
        )
        return
    dropped = session.models.drop(wanted)
    named = f"@{wanted.version}" if wanted.version else f": {len(dropped)} version{'s' if len(dropped) > 1 else ''}"
    session.say(f"Removed {wanted.name}{named}.")
    for model in dropped:
        if model.place is not None:
            _delete_files(session, model, model.place.path)
        elif model.row is not None:
            session.say(f"The files of {model.title} stay on {model.row.host}: {model.directory}.")


def _delete_files(session: Session, model: StoredModel, place: str) -> None:
    """Delete what pods have written of a model, or say where it stays and how to delete it.

    Args:
        place: Directory of its files.
    """
    if not is_remote(place):
        command = command_of(JobType.TRAIN, _deleting(session.flags, model, place))
        session.say(f"The files of {model.title} stay on the volume of its pods: {place}. This job deletes them:")
        session.say(command)
        return
    try:
        check_installed(place)
        require_runtime()
        from elasticdl.storage.paths import path_of, remove_directory

        directory = path_of(place)
        if directory.is_dir():  # not of a model that was never trained
            remove_directory(directory)
    except ElasticDLError as error:
        session.say(f"The files of {model.title} stay in {place}: {error.what} Delete that directory.")


def _deleting(flags: JobFlags, model: StoredModel, place: str) -> dict[str, object]:
    """Return the flags of a job that deletes a directory of a volume."""
    return {
        "runtime": Runtime.KUBERNETES.value,
        "job_name": name_of("drop", model.name, str(model.version)),
        **flags.of_group(Group.KUBERNETES),
        "num_workers": 1,
        "job_command": shlex.join(["rm", "-rf", place]),
    }


def _metrics(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in found.items())
