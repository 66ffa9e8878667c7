"""The surroundings of statements: the runtime of their jobs, and the state that those of one command share.

A runtime has the jobs' input of rows and their output; here it is this machine, in cluster.py Kubernetes.  The state is
the database, the registry of models, and flags.

`create` makes tables that results are written to: never one that exists, unless --overwrite says so, and never half a
table.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from elasticdl_client.choices import JobType
from elasticdl_client.data_sources import ROW
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_dir import JobDir, path_of
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.local import require_runtime
from elasticdl_client.sql import jobs, snapshot
from elasticdl_client.sql.arguments import VARIABLE
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags, command_of
from elasticdl_client.sql.models import DATA, DESCRIPTION, ModelRegistry, StoredModel
from elasticdl_client.sql.snapshot import Field
from elasticdl_client.sql.statement import Name, StatementError, suggestion
from elasticdl_client.sql.tokens import load

Outputs = tuple[Sequence[int], Sequence[Any]]
"""Numbers of rows, and a model's output for each: a number, or a list of them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that runs where jobs do.

    Attributes:
        command: Its command line, for messages.
        check: raises an ElasticDLError if it cannot be started.
        run: runs it to its end; raises an ElasticDLError if it fails.
    """

    command: str
    check: Callable[[], None]
    run: Callable[[], object]


class RowStore(Protocol):
    """The rows of one statement's job, and its predictions."""

    def source(self, part: str) -> str:
        """Return what the job reads a part of the rows from."""
        ...

    def write(
        self,
        part: str,
        rows: Iterable[Any],
        columns: Sequence[str],
        fields: Sequence[Field],
        classes: Sequence[Any] = (),
        seed: int | None = None,
    ) -> int:
        """Write a part, whole or not at all; how many rows it has.  The arguments are those of `snapshot.write`."""
        ...

    def keep(self, model: StoredModel) -> None:
        """Let the rows outlive the statement: the job of a model that is trained may be resumed."""
        ...

    def remove(self) -> None:
        """Remove the rows."""
        ...

    def output_flags(self) -> dict[str, object]:
        """Return the flags that say where predictions go."""
        ...

    def outputs(self) -> Iterator[Outputs]:
        """Yield the predictions, some of them at once."""
        ...

    def result(self) -> str:
        """Return where a program writes its result."""
        ...

    def results(self) -> list[tuple[str, float, float]]:
        """Return the result of a program, in its order."""
        ...


class SqlRuntime(Protocol):
    """Where the jobs of statements run."""

    def flags(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the flags that all jobs there have.

        Args:
            given: by the user.
        """
        ...

    def suffix(self, model: StoredModel, scratch: Path) -> str:
        """Return the end of the name of the job that trains a model."""
        ...

    def model_flags(self, model: StoredModel, scratch: Path) -> dict[str, object]:
        """Return the flags that name the model of a description."""
        ...

    def rows(
        self, database: Database, scratch: Path, kept: StoredModel | None = None
    ) -> AbstractContextManager[RowStore]:
        """Yield what holds rows; those that are not kept are gone at the end.

        Args:
            scratch: directory of the statement.
            kept: the model that they will be kept for.
        """
        ...

    def program(self, model: StoredModel, arguments: Sequence[str], given: JobFlags, scratch: Path) -> Program:
        """Return what runs a module of the runtime package with an exported model.

        Args:
            arguments: of `python`, but for the model.
            given: by the user.

        Raises:
            ElasticDLError: the model cannot be reached from there.
        """
        ...

    def check(self, spec: JobSpec) -> None:
        """Check that a job can be started, before a row is written for it.

        Raises:
            ElasticDLError: it cannot.
        """
        ...

    def run(self, spec: JobSpec) -> JobStatus | None:
        """Run a job to its end; its last status, if it can be read.

        Raises:
            JobFailed: it has failed.
            ElasticDLError: it cannot be started.
        """
        ...


class FileRows:
    """Rows in Parquet files of this machine."""

    def __init__(self, directory: Path, kept_at: Path) -> None:
        """
        Args:
            directory: that does not exist yet.
            kept_at: where it is when the job runs.
        """
        self._directory = directory
        self._kept_at = kept_at
        self._predictions = directory.with_name("predictions")

    def source(self, part: str) -> str:
        """See `RowStore`."""
        return str(self._kept_at / part)

    def write(
        self,
        part: str,
        rows: Iterable[Any],
        columns: Sequence[str],
        fields: Sequence[Field],
        classes: Sequence[Any] = (),
        seed: int | None = None,
    ) -> int:
        """See `RowStore`."""
        self._directory.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return snapshot.write(rows, columns, fields, self._directory / part, classes, seed)

    def keep(self, model: StoredModel) -> None:
        """See `RowStore`."""
        self._kept_at = model.directory / DATA
        os.replace(self._directory, self._kept_at)
        self._directory = self._kept_at

    def remove(self) -> None:
        """See `RowStore`."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def output_flags(self) -> dict[str, object]:
        """See `RowStore`."""
        return {"prediction_outputs": str(self._predictions), "prediction_format": "parquet"}

    def outputs(self) -> Iterator[Outputs]:
        """See `RowStore`."""
        for part in sorted(self._predictions.glob("part-*.parquet")):
            table = load("pyarrow.parquet").read_table(part)
            if "prediction" not in table.column_names:
                raise several_outputs([name for name in table.column_names if name != ROW])
            yield table.column(ROW).to_pylist(), table.column("prediction").to_pylist()

    def result(self) -> str:
        """See `RowStore`."""
        return str(self._directory.with_name("result.json"))

    def results(self) -> list[tuple[str, float, float]]:
        """See `RowStore`."""
        found = json.loads(Path(self.result()).read_text())
        return [(one["column"], one["importance"], one["deviation"]) for one in found]


class ThisMachine:
    """Runs jobs by the local runtime; see `SqlRuntime`."""

    def flags(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `SqlRuntime`."""
        return {"runtime": "local"}

    def suffix(self, model: StoredModel, scratch: Path) -> str:
        """See `SqlRuntime`."""
        return str(model.version)

    def model_flags(self, model: StoredModel, scratch: Path) -> dict[str, object]:
        """See `SqlRuntime`."""
        return model.found.get("model_flags") or jobs.of_model(model.directory / DESCRIPTION)

    @contextmanager
    def rows(self, database: Database, scratch: Path, kept: StoredModel | None = None) -> Iterator[RowStore]:
        """See `SqlRuntime`; the scratch directory goes with the statement."""
        yield FileRows(scratch / DATA, kept.directory / DATA if kept is not None else scratch / DATA)

    def program(self, model: StoredModel, arguments: Sequence[str], given: JobFlags, scratch: Path) -> Program:
        """See `SqlRuntime`: a process of its own, since this one never imports TensorFlow."""
        require_runtime()
        command = [*arguments, f"--export={model.export}", f"--description={model.description}"]
        return Program(shlex.join(["python", *command]), lambda: None, partial(_run_here, command, model))

    def check(self, spec: JobSpec) -> None:
        """See `SqlRuntime`: a local job's requirements are checked with its rows, at its start."""

    def run(self, spec: JobSpec) -> JobStatus | None:
        """See `SqlRuntime`."""
        jobs.run(spec)
        return JobDir(path_of(spec), -1).status()


def _run_here(command: Sequence[str], model: StoredModel) -> None:
    sys.stdout.flush()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip()
        if "Traceback (most recent call last)" in said:
            print(said, file=sys.stderr, flush=True)
        reason = said.splitlines()[-1] if said else f"its process ended with {done.returncode}"
        raise DataError(f"{model.title} cannot be explained: {reason}", "TO EXPLAIN takes models of one output.")


def several_outputs(names: Sequence[str]) -> DataError:
    """Return the error of a model that gives more than one output."""
    return DataError(f"The model gives several outputs: {', '.join(names)}.", "TO PREDICT takes models of one output.")


@dataclass(slots=True)
class Session:
    """The surroundings of a statement.

    Attributes:
        connect: makes the database; None: --datasource is not given.
        is_dry_run: commands are printed, and nothing is written.
        is_overwriting: tables of results that exist are replaced.
        say: takes what the user should know.
        runtime: where the jobs run.
    """

    connect: Callable[[], Database] | None
    models: ModelRegistry
    flags: JobFlags
    is_dry_run: bool
    is_overwriting: bool
    say: Callable[[str], None] = print
    runtime: SqlRuntime = field(default_factory=ThisMachine)
    _database: Database | None = None

    @property
    def database(self) -> Database:
        """The database, opened when it is first used.

        Raises:
            FlagError: none is given.
        """
        if self._database is None:
            if self.connect is None:
                raise FlagError("--datasource is missing.", f"Give --datasource=URL, or the variable {VARIABLE}.")
            self._database = self.connect()
        return self._database

    def known_names(self) -> list[str]:
        """Return the names of the database's tables and columns; none where it cannot be read."""
        return self.database.known_names() if self.connect is not None else []

    def flags_of(self, flags: Mapping[str, object]) -> dict[str, object]:
        """Return the flags of a job with those of the runtime, which come first and last: none replaces them."""
        of_runtime = self.runtime.flags(flags)
        return {**of_runtime, **flags, **of_runtime}

    def show(self, job_type: JobType, flags: Mapping[str, object]) -> None:
        """Print the command that stands for a job."""
        self.say(command_of(job_type, flags))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield the path of a directory, not made yet, that is removed at the end."""
        path = self.models.scratch / f".{secrets.token_hex(4)}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def check_target(session: Session, table: Sequence[Name]) -> None:
    """Check that a table can be written.

    Raises:
        StatementError: it exists, or its schema does not.
    """
    names = [name.text for name in table]
    schemas = session.database.schemas() if len(names) > 1 else []
    if len(names) > 1 and names[0] not in schemas:
        raise StatementError(f"There is no schema {names[0]!r}.", suggestion(names[0], schemas), table[0].place)
    if session.database.has_table(names):
        shown = ".".join(names)
        if session.database.is_view(names):
            raise StatementError(f"{shown} is a view.", "Name a table.", table[-1].place)
        if not session.is_overwriting:
            raise StatementError(
                f"The table {shown} exists.",
                "Name another one, or give --overwrite to replace it.",
                table[-1].place,
            )


def create(session: Session, table: Sequence[Name], columns: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Create a table with rows, whole or not at all.

    Args:
        columns: their types by name.

    Raises:
        DataError: the database refuses it.
    """
    with session.database.new_table([one.text for one in table], session.is_overwriting) as (writer, name):
        writer.create(name, columns)
        writer.insert(name, list(columns), rows)
