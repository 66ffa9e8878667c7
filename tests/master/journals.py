"""The adapters of the port `Journal`, as its contract test sees them."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Protocol

from elasticdl.master.journal import Journal
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl.master.local_environment import FileJournal
from elasticdl.master.storage_journal import StorageJournal
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl_client.kubernetes import names
from tests.cluster.real_cluster import Namespace

JOB = "digits"


class Journals(Protocol):
    """A job, and the lives of its master."""

    def open(self) -> Journal:
        """A life takes the job over."""
        ...

    def damage(self, data: bytes) -> None:
        """Puts bytes in place of the journal."""
        ...

    def close(self) -> None: ...


class FileJournals:
    """In a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> FileJournal:
        return FileJournal(self._directory)

    def damage(self, data: bytes) -> None:
        (self._directory / "journal.json").write_bytes(data)

    def close(self) -> None:
        pass


class StorageJournals:
    """In storage, and on disk what people read."""

    def __init__(self, job_dir: str, directory: Path, place: str = "a" * 16) -> None:
        self.job_dir = job_dir
        self.place = place
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def open(self) -> StorageJournal:
        return StorageJournal(self.job_dir, self.place, FileJournal(self.directory))

    def damage(self, data: bytes) -> None:
        self.put(zlib.compress(data))

    def put(self, packed: bytes) -> None:
        """Puts something that need not be packed in place of the newest snapshot, or a first one."""
        names = sorted(name for name in self.names() if "." in name)
        name = names[-1] if names else f"00000001-{self.place}-00000000.00000001"
        storage_of(self.job_dir).publish(f"{self.job_dir}/journal/{name}", packed)

    def names(self) -> list[str]:
        """Return the names of the journal's objects, in order."""
        return [status.url.rpartition("/")[2] for status in storage_of(self.job_dir).list(f"{self.job_dir}/journal")]

    def close(self) -> None:
        pass


class ConfigMapJournals:
    """In a namespace of its own."""

    def __init__(self) -> None:
        self.namespace = Namespace()
        self.name = names.state_object(JOB)
        self.namespace.core.create_namespaced_config_map(self.namespace.name, {"metadata": {"name": self.name}})

    def open(self) -> ConfigMapJournal:
        return ConfigMapJournal(self.namespace.connection, self.namespace.name, JOB)

    def damage(self, data: bytes) -> None:
        self.put(zlib.compress(data))

    def put(self, packed: bytes) -> None:
        """Puts something that need not be packed in place of the journal."""
        text = base64.b64encode(packed).decode()
        self.patch({"binaryData": {names.JOURNAL_KEY: text}})

    def patch(self, body: dict[str, object]) -> None:
        """Another client changes the object."""
        path = f"/api/v1/namespaces/{self.namespace.name}/configmaps/{self.name}"
        self.namespace.connection.patch(path, body, "application/merge-patch+json")

    def close(self) -> None:
        self.namespace.delete()
