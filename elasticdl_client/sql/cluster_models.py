"""The models that a cluster has trained: rows of the table of models alone, since the files are where pods write.

This module never opens a file of a model.
"""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticdl_client.errors import ElasticDLError
from elasticdl_client.jobs.job import JobInfo, Phase
from elasticdl_client.sql.cluster import TABLES
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.models import EXPORT, ModelRegistry, PodPlace, StoredModel, now, outcome_of
from elasticdl_client.sql.models_table import CLUSTER, TRAINED, TRAINING, ModelRow, ModelsTable, row_of
from elasticdl_client.sql.statement import ModelName


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
            location: of new models in pods, or in storage.
            table: of all models.
            database: that has the table, and those of the rows of trainings.
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
            if self._models.add(_row(made, TRAINING)):
                return made

    def update(self, model: StoredModel) -> None:
        """See `ModelRegistry`."""
        self._models.replace(_row(model, TRAINING))

    def record(self, model: StoredModel) -> None:
        """See `ModelRegistry`; the rows of the training are not needed any more."""
        model.found.pop(TABLES, None)
        self._models.replace(_row(model, TRAINED))

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


def _row(model: StoredModel, state: str) -> dict[str, Any]:
    return row_of(model.name, model.version, state, model.found, model.exported)
