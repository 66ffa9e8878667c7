"""The registry of models: a directory NAME/VERSION for each, with `model.json` and the exported model.

A version is trained as soon as its export is there, however its job has come to its end.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.sql.places import StatementError, suggestion
from elasticdl_client.sql.statement import ModelName

EXPORT = "export"
DATA = "data"
DESCRIPTION = "model.json"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A version of a model.

    Attributes:
        directory: of its files.
        found: what `model.json` says.
    """

    name: str
    version: int
    directory: Path
    found: dict[str, Any]

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
    def is_trained(self) -> bool:
        return self.export.is_dir()  # a job renames it there when it is whole

    def write(self) -> None:
        """Write `model.json`, whole or not at all."""
        new = self.directory / f".{DESCRIPTION}.new"
        new.write_text(json.dumps(self.found, indent=1, allow_nan=False) + "\n")
        os.replace(new, self.description)


class ModelRegistry:
    """The models in a directory."""

    def __init__(self, root: Path) -> None:
        """
        Args:
            root: of all models.

        Raises:
            FlagError: no job can be given paths in it.
        """
        self.root = Path(os.path.abspath(root.expanduser()))
        if ";" in str(self.root):
            raise FlagError(f"--models_dir={self.root} has a semicolon in it.", "Name another directory.")

    def next(self, name: str) -> Path:
        """Return where the next version of a model would be; nothing is made."""
        return self.root / name / str(max(self._versions(name), default=0) + 1)

    def add(self, name: str, found: dict[str, Any]) -> StoredModel:
        """Make the next version of a model, which is not trained yet.

        Raises:
            DataError: the directory cannot be written.
        """
        while True:
            directory = self.next(name)
            try:
                directory.mkdir(parents=True, mode=0o700)
            except FileExistsError:  # a statement beside this one was faster
                continue
            except OSError as error:
                raise DataError(
                    f"The model cannot be written to {directory}: {error.strerror}.", "Name another --models_dir."
                ) from error
            about = {"name": name, "version": int(directory.name), "trained_by": getpass.getuser(), "created": _now()}
            made = StoredModel(name, int(directory.name), directory, about | found)
            made.write()
            return made

    def find(self, wanted: ModelName) -> StoredModel:
        """Return a model that is trained: the version that is named, or the newest.

        Raises:
            StatementError: there is none.
        """
        versions = self._versions(wanted.name)
        if not versions:
            names = [one.name for one in self.all()]
            hint = suggestion(wanted.name, names) if names else "SHOW MODELS lists them; there is none yet."
            raise StatementError(f"There is no model {wanted.name!r} in {self.root}.", hint, wanted.place)
        if wanted.version:
            if wanted.version not in versions:
                listed = ", ".join(f"{wanted.name}@{version}" for version in versions)
                raise StatementError(
                    f"The model {wanted.name!r} has no version {wanted.version}.", f"There are: {listed}.", wanted.place
                )
            versions = [wanted.version]
        for version in reversed(versions):
            found = self._read(wanted.name, version)
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
        versions = self._versions(wanted.name)
        if not versions or (wanted.version and wanted.version not in versions):
            return self.find(wanted)  # which says so
        return self._read(wanted.name, wanted.version or versions[-1])

    def all(self) -> Iterator[StoredModel]:
        """Yield every version of every model, by name and version."""
        names = sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []
        for name in names:
            for version in self._versions(name):
                yield self._read(name, version)

    def drop(self, wanted: ModelName) -> int:
        """Remove a version of a model, or all if none is named; how many were removed.

        Raises:
            StatementError: there is none.
        """
        self.look_up(wanted)
        versions = [wanted.version] if wanted.version else self._versions(wanted.name)
        for version in versions:
            shutil.rmtree(self.root / wanted.name / str(version))
        if not any((self.root / wanted.name).iterdir()):
            (self.root / wanted.name).rmdir()
        return len(versions)

    def _versions(self, name: str) -> list[int]:
        directory = self.root / name
        if not name.isidentifier() or not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())

    def _read(self, name: str, version: int) -> StoredModel:
        directory = self.root / name / str(version)
        try:
            found = json.loads((directory / DESCRIPTION).read_text())
        except FileNotFoundError:  # of a statement that is cut off, or has just begun
            found = {}
        except (OSError, ValueError) as error:
            raise DataError(f"{directory / DESCRIPTION} cannot be read: {error}.", "Remove the directory.") from error
        return StoredModel(name, version, directory, found)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
