"""`SHOW MODELS`, `DESCRIBE model` and `DROP MODEL model`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.flags import Group
from elasticdl_client.local import require_runtime
from elasticdl_client.sql.jobs import JobFlags, command_of, name_of
from elasticdl_client.sql.models import StoredModel
from elasticdl_client.sql.session import Session
from elasticdl_client.sql.statement import DescribeModel, DropModel
from elasticdl_client.storage_kinds import check_installed, is_remote

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
            session.say(f"{key + ':':<12} {text}")


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
        place: of its files.
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
