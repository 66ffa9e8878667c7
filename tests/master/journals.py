"""The adapters of the port `Journal`, as its contract test sees them."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Protocol

from elasticdl.master.journal import Journal
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl.master.local_environment import FileJournal
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
