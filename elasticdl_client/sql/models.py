"""The registry of models: a directory NAME/VERSION for each, with `model.json` and the exported model.

A version is trained as soon as its export is there, however its job has come to its end.  A table of the database may
mirror the directory, and has the models of other machines, too.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_status import JobStatus
from elasticdl_client.sql.models_table import TRAINED, TRAINING, ModelRow, ModelsTable, row_of
from elasticdl_client.sql.statement import ModelName, StatementError, suggestion

EXPORT = "export"
DATA = "data"
DESCRIPTION = "model.json"


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Where a model is that a cluster has trained.

    Attributes:
        path: Its directory in pods, or in storage.
        is_trained: by what the table says.
    """

    path: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A version of a model.

    Attributes:
        directory: Directory of its files on this machine.
        found: Content of `model.json`.
        row: Row of the table, if the files are on another machine; None: they are on this one.
        place: Directory of its files, if they are in pods or storage.
    """

    name: str
    version: int
    directory: Path
    found: dict[str, Any]
    row: ModelRow | None = None
    place: PodPlace | None = None

    @property
    def title(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def description(self) -> Path:
        return self.directory / DESCRIPTION

    @property
    def export(self) -> Path:
        return self.directory / EXPORT

    @property
    def exported(self) -> str:
        """Where the SavedModel is, as jobs receive it."""
        return f"{self.place.path}/{EXPORT}" if self.place is not None else str(self.export)

    @property
    def is_trained(self) -> bool:
        if self.place is not None:
            return self.place.is_trained
        if self.row is not None:
            return self.row.state == TRAINED
        return self.export.is_dir()  # a job renames it there when it is whole

    @property
    def state(self) -> str:
        where = f" on {self.row.host}" if self.row is not None else ""
        return f"{'trained' if self.is_trained else 'not trained'}{where}"

    def write(self) -> None:
        """Write `model.json`, whole or not at all."""
        new = self.directory / f".{DESCRIPTION}.new"
        new.write_text(json.dumps(self.found, indent=1, allow_nan=False) + "\n")
        os.replace(new, self.description)


class ModelRegistry:
    """The models in a directory, and those of a table.

    Attributes:
        root: Directory of all models.
        scratch: where statements have their directories.
        where: they are, for messages.
    """

    def __init__(self, root: Path, table: ModelsTable | None = None) -> None:
        """
        Args:
            root: Directory of all models.
            table: Table with a copy of their descriptions.

        Raises:
            FlagError: no job can be given paths in it.
        """
        self.root = Path(os.path.abspath(root.expanduser()))
        self.scratch = self.root
        self.where = str(self.root)
        self._table = table
        if ";" in str(self.root):
            raise FlagError(f"--models_dir={self.root} has a semicolon in it.", "Name another directory.")

    def next(self, name: str) -> StoredModel:
        """Return the next version of a model as it would be; nothing is made."""
        version = max((version for _, version in self._known(name)), default=0) + 1
        return StoredModel(name, version, self.root / name / str(version), {})

    def add(self, name: str, found: dict[str, Any]) -> StoredModel:
        """Make the next version of a model, which is not trained yet.

        Raises:
            DataError: the directory or the table cannot be written.
        """
        while True:
            wanted = self.next(name)
            directory, version = wanted.directory, wanted.version
            about = {"name": name, "version": version, "created": now()}
            about |= {"trained_by": getpass.getuser(), "host": socket.gethostname()}
            made = StoredModel(name, version, directory, about | found)
            if self._table is not None and not self._table.add(_row(made, TRAINING)):
                continue  # another client was faster
            try:
                directory.mkdir(parents=True, mode=0o700)
            except FileExistsError:  # a statement beside this one was faster
                self._forget(name, [version])
                continue
            except OSError as error:
                self._forget(name, [version])
                raise DataError(
                    f"The model cannot be written to {directory}: {error.strerror}.", "Name another --models_dir."
                ) from error
            made.write()
            return made

    def update(self, model: StoredModel) -> None:
        """Write what is known by now about a model that is being trained."""
        model.write()

    def record(self, model: StoredModel) -> None:
        """Write what is known about a model that is trained: to its directory, and to the table.

        Raises:
            DataError: the table cannot be written.
        """
        model.write()
        if self._table is not None:
            self._table.replace(_row(model, TRAINED))

    def mirror(self) -> None:
        """Bring the rows of models up to date whose jobs were resumed: nothing else says that they are trained."""
        for (name, version), row in self._known().items():
            if self._table is not None and row is not None and row.state != TRAINED:
                model = self._read(name, version, row)
                if model.row is None and model.is_trained:
                    self._table.mark_trained(name, version)

    def find(self, wanted: ModelName) -> StoredModel:
        """Return a model that is trained: the version that is named, or the newest.

        Raises:
            StatementError: there is none.
        """
        known = self._known(wanted.name)
        versions = [version for _, version in known]
        if not versions:
            names = [one.name for one in self.all()]
            hint = suggestion(wanted.name, names) if names else "SHOW MODELS lists them; there is none yet."
            raise StatementError(f"There is no model {wanted.name!r} in {self.where}.", hint, wanted.place)
        if wanted.version:
            if wanted.version not in versions:
                listed = ", ".join(f"{wanted.name}@{version}" for version in versions)
                raise StatementError(
                    f"The model {wanted.name!r} has no version {wanted.version}.", f"There are: {listed}.", wanted.place
                )
            versions = [wanted.version]
        for version in reversed(versions):
            found = self._read(wanted.name, version, known[wanted.name, version])
            if found.is_trained and found.row is not None:
                raise _elsewhere(found, wanted)
            if found.is_trained:
                return found
        raise StatementError(
            f"{wanted.name}@{versions[-1]} is not trained: its job has not come to its end.",
            f"Resume its job, or run the statement again. DESCRIBE {wanted.name}@{versions[-1]} names the job.",
            wanted.place,
        )

    def look_up(self, wanted: ModelName) -> StoredModel:
        """Return a model, trained or not.

        Raises:
            StatementError: there is none.
        """
        known = self._known(wanted.name)
        version = wanted.version or max((version for _, version in known), default=0)
        if (wanted.name, version) not in known:
            return self.find(wanted)  # which says so
        return self._read(wanted.name, version, known[wanted.name, version])

    def all(self) -> Iterator[StoredModel]:
        """Yield every version of every model, by name and version."""
        for (name, version), row in self._known().items():
            yield self._read(name, version, row)

    def drop(self, wanted: ModelName) -> list[StoredModel]:
        """Remove a version of a model, or all if none is named, and return them; files of other machines stay.

        Raises:
            StatementError: there is none.
        """
        self.look_up(wanted)
        known = self._known(wanted.name)
        dropped = [
            self._read(name, version, row) for (name, version), row in known.items() if wanted.version in (0, version)
        ]
        rows = [version for (_, version), row in known.items() if row is not None and wanted.version in (0, version)]
        self._forget(wanted.name, rows)
        for model in dropped:
            if model.row is None:
                shutil.rmtree(model.directory)
        if (self.root / wanted.name).is_dir() and not any((self.root / wanted.name).iterdir()):
            (self.root / wanted.name).rmdir()
        return dropped

    def _known(self, name: str = "") -> dict[tuple[str, int], ModelRow | None]:
        """Return the versions of a model, or of all, in order, each with its row in the table if it has one."""
        directories = self.root.iterdir() if self.root.is_dir() else ()
        names = [name] if name else [path.name for path in directories if path.is_dir()]
        found: dict[tuple[str, int], ModelRow | None] = {
            (one, version): None for one in names for version in self._versions(one)
        }
        rows = self._table.rows(name) if self._table is not None else []
        found.update({(row.name, row.version): row for row in rows})
        return dict(sorted(found.items()))

    def _forget(self, name: str, versions: Sequence[int]) -> None:
        if self._table is not None and versions:
            self._table.remove(name, versions)

    def _versions(self, name: str) -> list[int]:
        directory = self.root / name
        if not name.isidentifier() or not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())

    def _read(self, name: str, version: int, row: ModelRow | None) -> StoredModel:
        directory = self.root / name / str(version)
        if row is not None and not directory.is_dir():
            directory = Path(row.export).parent
            is_here = row.host == socket.gethostname() and directory.is_dir()
            return StoredModel(name, version, directory, dict(row.description), None if is_here else row)
        try:
            found = json.loads((directory / DESCRIPTION).read_text())
        except FileNotFoundError:  # of a statement that is cut off, or has just begun
            found = {}
        except (OSError, ValueError) as error:
            raise DataError(f"{directory / DESCRIPTION} cannot be read: {error}.", "Remove the directory.") from error
        if row is not None and found and (row.host, row.created) != (found.get("host"), found.get("created")):
            raise DataError(
                f"{name}@{version} is two models: one is in {directory}, another one of the table on {row.host}.",
                "Name another --models_dir, or another --models_table.",
            )
        return StoredModel(name, version, directory, found)


def outcome_of(status: JobStatus | None) -> dict[str, Any]:
    """Return the metrics of a job's last evaluation, and the sums of its ledger over all epochs."""
    if status is None:
        return {"metrics": {}, "ledger": {}}
    metrics = {name: value for name, value in status.metrics.items() if math.isfinite(value)}
    return {"metrics": metrics, "ledger": {"epochs": status.epoch, **status.records}}


def _row(model: StoredModel, state: str) -> dict[str, Any]:
    return row_of(model.name, model.version, state, model.found, str(model.export))


def _elsewhere(model: StoredModel, wanted: ModelName) -> StatementError:
    """Return the error that a model's files are not on this machine."""
    assert model.row is not None
    return StatementError(
        f"{model.title} is on another machine: {model.row.host}:{model.row.export}.",
        "Run the statement there, or name a version of this machine; SHOW MODELS lists them.",
        wanted.place,
    )


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
