"""The journal: what only the master knows, kept so that its next life knows it.

Owns the port `Journal` and its file adapter.  It never looks inside a snapshot: what is in it is the business of
`master/core`.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from elasticdl_client.errors import JobError

FORMAT = 1


class Superseded(JobError):
    """Another master owns the job now; this one must end at once and write nothing more."""


class JournalWriteError(JobError):
    """A snapshot could not be written; the one before it is still whole.  Saving again may succeed."""


class Journal(Protocol):
    """Two verbs.  A snapshot is a dict that JSON can hold."""

    def load(self) -> dict[str, Any] | None:
        """The newest snapshot, or None for a job that never had one.

        Raises:
            JobError: there is one, but it is damaged: the job must not start afresh behind the user's back.
        """
        ...

    def save(self, snapshot: dict[str, Any]) -> None:
        """Replaces the snapshot; when it returns, the new one survives a crash of the machine.

        Raises:
            JournalWriteError: not written; the one before it is still whole.
            Superseded: another master has written.
        """
        ...


class FileJournal:
    """`Journal` in ``<job_dir>/journal.json``, for the one master that holds the lock next to it."""

    def __init__(self, job_dir: Path) -> None:
        """Takes the lock, which the kernel frees when the process ends in any way.

        Raises:
            Superseded: another master runs this job.
            JobError: the directory cannot be written.
        """
        self._path = job_dir / "journal.json"
        self._temporary = job_dir / "journal.json.new"
        self._on_disk = b""  # as far as this process has written it
        try:
            self._lock = os.open(job_dir / "journal.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JobError(f"the job directory {job_dir} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise Superseded(
                f"another master (process {holder or 'unknown'}) runs the job in {job_dir}",
                "wait for it to end, or choose another --job_name or --job_dir",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def load(self) -> dict[str, Any] | None:
        try:
            document = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(f"the journal {self._path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise self._damaged(f"it is not JSON ({error})") from error
        if not isinstance(document, dict) or not isinstance(document.get("snapshot"), dict):
            raise self._damaged("it holds no snapshot")
        if document.get("format") != FORMAT:
            raise self._damaged(f"its format is {document.get('format')!r}, this version reads {FORMAT}")
        snapshot: dict[str, Any] = document["snapshot"]
        return snapshot

    def save(self, snapshot: dict[str, Any]) -> None:
        data = json.dumps({"format": FORMAT, "snapshot": snapshot}, separators=(",", ":")).encode()
        if data == self._on_disk:
            return
        try:
            replace_file(self._path, self._temporary, data)
        except OSError as error:
            raise JournalWriteError(
                f"the journal {self._path} cannot be written: {error.strerror}",
                "the job waits; free space or make the directory writable again",
            ) from error
        self._on_disk = data

    def close(self) -> None:
        """Frees the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _damaged(self, why: str) -> JobError:
        return JobError(
            f"the journal {self._path} is damaged: {why}",
            "remove the file to train from the beginning; what it knew of pods, failures and evaluations is then lost",
        )


def replace_file(path: Path, temporary: Path, data: bytes) -> None:
    """Puts `data` in place of `path` such that any crash leaves either the old or the new content, whole.

    Raises:
        OSError: not replaced; the temporary file is removed so that it does not fill the disk.
    """
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames and creations inside a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
