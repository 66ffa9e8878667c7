"""Statements on Kubernetes: workers read their rows from tables of the database, and write predictions to one.

The client writes the rows of a SELECT, converted, to a table whose key numbers them: a snapshot that workers read by
ranges.  Pods get the database's password from the job's Secret.  Nothing else of this machine is needed by a job.

`ClusterModels`: rows of the table of models alone, since the files of what a cluster has trained are where pods write.

This module never opens a file of a model.
"""

from __future__ import annotations

import getpass
import json
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.data_sources import ROW
from elasticdl_client.errors import ElasticDLError, FlagError, JobFailed
from elasticdl_client.flags import Group
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.kubernetes import names
from elasticdl_client.params import parse_envs
from elasticdl_client.sql import snapshot
from elasticdl_client.sql.cluster_checks import check_place
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags, command_of, name_of, spec_of
from elasticdl_client.sql.models import DESCRIPTION, EXPORT, ModelRegistry, PodPlace, StoredModel, now, outcome_of
from elasticdl_client.sql.models_table import CLUSTER, TRAINED, TRAINING, ModelRow, ModelsTable, row_of
from elasticdl_client.sql.runtime import Outputs, Program, RowStore, several_outputs
from elasticdl_client.sql.snapshot import Field
from elasticdl_client.sql.statement import ModelName, Place, Query

TABLES = "tables"
"""The key of a model's description that names the tables of its rows."""

_INTERRUPTED = 130
_MODULE = "sql_model"
_CODE = """\"\"\"The model of a statement of `elasticdl sql`.\"\"\"

from elasticdl.tabular.estimators import binary_metrics, classes_metrics, custom_model, regression_metrics

__all__ = ["binary_metrics", "classes_metrics", "custom_model", "regression_metrics"]
"""


class StagedRows:
    """Rows in tables of the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._token = secrets.token_hex(4)
        self._written: list[str] = []
        self._is_kept = False

    def source(self, part: str) -> str:
        """See `RowStore`."""
        return f"{self._url(part)}&key={ROW}"

    def write(
        self,
        part: str,
        rows: Iterable[Any],
        columns: Sequence[str],
        fields: Sequence[Field],
        classes: Sequence[Any] = (),
        seed: int | None = None,
    ) -> int:
        """See `RowStore`; rows that have no number get one, in their order."""
        table, num_rows, backend = self._table(part), 0, self._database.backend
        has_key = backend.orders_rows_by_key
        types = {field.name: _TYPES[field.form] for field in fields} | {ROW: "BIGINT"}
        self._written.append(table)
        with self._database.transaction() as writer, ThreadPoolExecutor(1) as loader:
            writer.create([table], types, [ROW] if has_key else [], backend.staging)
            loading: Future[None] | None = None
            for converted in snapshot.converted(rows, columns, fields, classes, seed):
                if loading is not None:
                    loading.result()
                loading = loader.submit(writer.load, [table], snapshot.numbered(converted, num_rows + 1))
                num_rows += converted.num_rows
            if loading is not None:
                loading.result()
            if not has_key:  # made at once, an index takes less time than with each row
                writer.add_key(table, ROW)
        return num_rows

    def keep(self, model: StoredModel) -> None:
        """See `RowStore`."""
        model.found[TABLES] = list(self._written)
        self._is_kept = True

    def remove(self) -> None:
        """See `RowStore`."""
        self._database.drop([*self._written, self._table("outputs")])

    def close(self) -> None:
        """Remove the rows that are not kept; without any, nothing is written to the database."""
        if self._written and not self._is_kept:
            self.remove()

    def output_flags(self) -> dict[str, object]:
        """See `RowStore`."""
        return {"prediction_outputs": self._url("outputs")}

    def outputs(self) -> Iterator[Outputs]:
        """See `RowStore`."""
        text = f"SELECT * FROM {self._database.quoted(self._table('outputs'))}"
        query = Query(text, Place(text, 0, len(text)))
        with self._database.snapshot() as reader:
            columns = reader.columns(query)
            values = [name for name in columns if name != ROW]
            if not all(re.fullmatch(r"prediction(_\d+)?", name) for name in values):
                raise several_outputs(values)
            values.sort(key=lambda name: int(name.partition("_")[2] or 0))
            for part in reader.rows(query):
                by_name = _by_name(part, columns)
                listed = [by_name[name] for name in values]
                yield by_name[ROW], listed[0] if len(listed) == 1 else [list(row) for row in zip(*listed, strict=True)]

    def result(self) -> str:
        """See `RowStore`."""
        return f"{self._url('outputs')}&key={ROW}"

    def results(self) -> list[tuple[str, float, float]]:
        """See `RowStore`."""
        name, row = self._database.quoted(self._table("outputs")), self._database.quoted(ROW)
        text = f"SELECT column_name, importance, deviation FROM {name} ORDER BY {row}"
        with self._database.snapshot() as reader:
            found = reader.all(Query(text, Place(text, 0, len(text))))
        return [(str(one[0]), float(one[1]), float(one[2])) for one in found]

    def _url(self, part: str) -> str:
        url = self._database.pod_access().url
        return f"{url}{'&' if '?' in url else '?'}table={quote(self._table(part))}"

    def _table(self, part: str) -> str:
        return f"elasticdl_{part}_{self._token}"


class KubernetesRuntime:
    """Runs jobs on Kubernetes; see `SqlRuntime`."""

    def __init__(self, database: Callable[[], Database]) -> None:
        """
        Args:
            database: of --datasource.
        """
        self._database = database

    def flags(self, given: Mapping[str, object]) -> dict[str, object]:
        """See `SqlRuntime`: the password goes by --envs, whose values are kept in the job's Secret.

        Raises:
            FlagError: pods cannot write, or the password cannot be passed on.
        """
        volume = str(given.get("volume", ""))
        for name in ("output", "checkpoint_dir_for_init"):
            if given.get(name):
                check_place(str(given[name]), volume)
        access = self._database().pod_access()
        envs = str(given.get("envs", ""))
        if access.password:
            envs = _with_password(envs, access.variable, access.password)
        return {"runtime": Runtime.KUBERNETES.value, **({"envs": envs} if envs else {})}

    def suffix(self, model: StoredModel, scratch: Path) -> str:
        """See `SqlRuntime`: a job of a model that was dropped may still be there."""
        return f"{model.version}{scratch.name.replace('.', '-')}"

    def model_flags(self, model: StoredModel, scratch: Path) -> dict[str, object]:
        """See `SqlRuntime`: the code and the description travel with the job."""
        own = dict(model.found.get("model_flags") or {})
        if own:
            return {"code": own.pop("model_zoo"), **own}
        return {
            "code": str(self._code(model, scratch)),
            "model_def": f"{_MODULE}.custom_model",
            "model_params": f"description={names.ZOO_DIRECTORY}/{DESCRIPTION}",
        }

    def _code(self, model: StoredModel, scratch: Path) -> Path:
        """Return a directory with the module and the description of a model."""
        code = scratch / "code"
        scratch.mkdir(mode=0o700, exist_ok=True)
        code.mkdir(exist_ok=True)
        (code / f"{_MODULE}.py").write_text(_CODE)
        (code / DESCRIPTION).write_text(json.dumps(model.found))
        return code

    @contextmanager
    def rows(self, database: Database, scratch: Path, kept: StoredModel | None = None) -> Iterator[RowStore]:
        """See `SqlRuntime`."""
        with closing(StagedRows(database)) as store:
            yield store

    def program(self, model: StoredModel, arguments: Sequence[str], given: JobFlags, scratch: Path) -> Program:
        """See `SqlRuntime`: a job of one worker that runs a command.

        Raises:
            FlagError: the model is on no volume of the job.
        """
        of_cluster = given.of_group(Group.KUBERNETES)
        check_place(model.exported, str(of_cluster.get("volume", "")))
        code = self._code(model, scratch)
        described = f"--description={names.ZOO_DIRECTORY}/{DESCRIPTION}"
        flags = {
            "job_name": name_of("explain", model.name, scratch.name),
            **of_cluster,
            "code": str(code),
            "num_workers": 1,
            "job_command": shlex.join(["python", *arguments, f"--export={model.exported}", described]),
        }
        of_runtime = self.flags(flags)
        flags = {**of_runtime, **flags, **of_runtime}
        spec = spec_of(JobType.TRAIN, flags)
        return Program(command_of(JobType.TRAIN, flags), partial(self.check, spec), partial(self.run, spec))

    def check(self, spec: JobSpec) -> None:
        """See `SqlRuntime`: asks the cluster."""
        from elasticdl_client.kubernetes import submit

        submit.check_submission(spec)

    def run(self, spec: JobSpec) -> JobStatus | None:
        """See `SqlRuntime`; after Ctrl-C a training continues, and any other job is deleted."""
        from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs
        from elasticdl_client.kubernetes import api, follow, submit

        sys.stdout.flush()
        connection, spec = submit.submit(spec, lambda text: print(f"note: {text}", file=sys.stderr))
        store = KubernetesJobs(connection, spec.namespace, spec.context)
        code = follow.wait(connection, spec)
        job = store.find(spec.job_name)
        if code == _INTERRUPTED:
            if (spec.job_type is not JobType.TRAIN or spec.job_command) and job is not None:
                store.delete(job, wait_s=None)
                print(f"The job {spec.job_name} is deleted: its rows go with the statement.", file=sys.stderr)
            raise KeyboardInterrupt
        if code:
            raise JobFailed(
                f"The job {spec.job_name} of the statement has failed.",
                f"`{api.elasticdl_command('explain', spec)}` says why.",
                code,
                "",
            )
        return job.status if job is not None else None


_TYPES = {"number": "DOUBLE PRECISION", "text": "TEXT", "class": "BIGINT", "row": "BIGINT"}


def _by_name(part: Any, columns: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values of each column of rows: of a table of Arrow, or of a list."""
    if isinstance(part, list):
        return dict(zip(columns, zip(*part, strict=True), strict=True))
    return {name: part.column(name).to_pylist() for name in columns}


def _with_password(envs: str, variable: str, password: str) -> str:
    """Return --envs with the password of the database.

    Raises:
        FlagError: the user gives the variable, or the password would not arrive as it is.
    """
    wanted = parse_envs(envs)
    if variable in wanted:
        raise FlagError(
            f"--envs names {variable}, which gets the password of --datasource.", f"Leave {variable} out of --envs."
        )
    joined = f"{envs},{variable}={password}" if envs else f"{variable}={password}"
    is_reference = re.search(r"\$\([A-Za-z_][A-Za-z0-9_.-]*\)", password)
    if is_reference or parse_envs(joined) != wanted | {variable: password}:
        raise FlagError(
            "The password of the database cannot be passed to pods: they would read a part of it as another variable.",
            "Give the database's user a password without '$(NAME)' and ',NAME=' in it.",
        )
    return joined


def job_of(found: Mapping[str, Any]) -> JobInfo | None:
    """Return the job that trains a model; None if it is not there, or the cluster does not say.

    Args:
        found: the model's description.
    """
    from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs
    from elasticdl_client.kubernetes import api

    context = str(found.get("context", ""))
    try:
        connection = api.connect(context=context)
        namespace = str(found.get("namespace", "")) or connection.namespace
        return KubernetesJobs(connection, namespace, context).find(str(found.get("job", "")))
    except ElasticDLError:
        return None


class ClusterModels(ModelRegistry):
    """The models of a table whose files pods have."""

    def __init__(
        self,
        location: str,
        table: ModelsTable,
        database: Callable[[], Database],
        find_job: Callable[[Mapping[str, Any]], JobInfo | None] = job_of,
    ) -> None:
        """
        Args:
            location: Directory of new models in pods, or in storage.
            table: The table of all models.
            database: Returns the database with that table and with the tables of training rows.
            find_job: finds the job that trains a model of a description.
        """
        self.root = self.scratch = Path(tempfile.gettempdir())
        self.where = f"the table {table.name}"
        self._location = location.rstrip("/")
        self._models = table
        self._table = table
        self._database = database
        self._find_job = find_job

    def next(self, name: str) -> StoredModel:
        """See `ModelRegistry`."""
        version = max((version for _, version in self._known(name)), default=0) + 1
        return self._stored(name, version, {}, f"{self._location}/{name}/{version}", is_trained=False)

    def add(self, name: str, found: dict[str, Any]) -> StoredModel:
        """See `ModelRegistry`."""
        while True:
            made = self.next(name)
            about = {"name": name, "version": made.version, "created": now()}
            made.found.update(about | found | {"trained_by": getpass.getuser(), "host": CLUSTER})
            if self._models.add(_model_row(made, TRAINING)):
                return made

    def update(self, model: StoredModel) -> None:
        """See `ModelRegistry`."""
        self._models.replace(_model_row(model, TRAINING))

    def record(self, model: StoredModel) -> None:
        """See `ModelRegistry`; the rows of the training are not needed any more."""
        model.found.pop(TABLES, None)
        self._models.replace(_model_row(model, TRAINED))

    def mirror(self) -> None:
        """Record models whose jobs have come to their end without a client, and remove the rows of their trainings."""
        for (name, version), row in self._known().items():
            if row is not None and row.host == CLUSTER and row.state != TRAINED:
                self._finish(self._read(name, version, row))

    def find(self, wanted: ModelName) -> StoredModel:
        """See `ModelRegistry`."""
        self.mirror()
        return super().find(wanted)

    def drop(self, wanted: ModelName) -> list[StoredModel]:
        """See `ModelRegistry`; the files of pods are not touched."""
        self.look_up(wanted)
        dropped = [
            self._read(name, version, row)
            for (name, version), row in self._known(wanted.name).items()
            if wanted.version in (0, version)
        ]
        self._forget(wanted.name, [model.version for model in dropped])
        for model in dropped:
            self._database().drop(model.found.get(TABLES, []))
        return dropped

    def _finish(self, model: StoredModel) -> None:
        job = self._find_job(model.found)
        if job is None or job.phase is not Phase.SUCCEEDED:
            return
        tables = list(model.found.get(TABLES, []))
        model.found.update(outcome_of(job.status))
        self.record(model)
        self._database().drop(tables)

    def _versions(self, name: str) -> list[int]:
        return []

    def _read(self, name: str, version: int, row: ModelRow | None) -> StoredModel:
        assert row is not None
        if row.host != CLUSTER:
            return StoredModel(name, version, Path(row.export).parent, dict(row.description), row)
        place = row.export.removesuffix(f"/{EXPORT}")
        return self._stored(name, version, dict(row.description), place, row.state == TRAINED)

    def _stored(self, name: str, version: int, found: dict[str, Any], place: str, is_trained: bool) -> StoredModel:
        return StoredModel(name, version, self.root, found, place=PodPlace(place, is_trained))


def _model_row(model: StoredModel, state: str) -> dict[str, Any]:
    return row_of(model.name, model.version, state, model.found, model.exported)
