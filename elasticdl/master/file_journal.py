"""The journal and the status as files, for the one master that holds the lock next to them."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elasticdl.master.journal import JournalWriteError, Outage, Outages, Superseded, decode, encode
from elasticdl.storage.durable import sync_directory
from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobStatus

logger = logging.getLogger("elasticdl.master")


class FileJournal:
    """`Journal` in ``<job_dir>/journal.json`` and ``status.json``."""

    def __init__(self, job_dir: Path) -> None:
        """Takes the lock, which the kernel frees when the process ends in any way.

        Raises:
            Superseded: another master runs this job.
            JobError: the directory cannot be written.
        """
        self._path = job_dir / "journal.json"
        self._temporary = job_dir / "journal.json.new"
        self._on_disk = b""  # as far as this process has written it
        self._status = StatusFile(job_dir)
        self._outages = Outages()
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
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise JobError(f"the journal {self._path} cannot be read: {error.strerror}") from error
        return decode(data, str(self._path), "remove the file")

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        try:
            self._write(encode(snapshot))
        finally:
            if status is not None:  # after the snapshot: a status must not show what a crash could take back
                self.write_status(status)

    def _write(self, data: bytes) -> None:
        if data == self._on_disk:
            return
        try:
            replace_file(self._path, self._temporary, data)
        except OSError as error:
            self._outages.failed(f"{error.strerror} ({self._path})")
            raise JournalWriteError(
                f"the journal {self._path} cannot be written: {error.strerror}",
                "the job waits; free space or make the directory writable again",
            ) from error
        self._outages.written()
        self._on_disk = data

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        """A disk is fast: it is done at once."""
        try:
            self.save(snapshot, status)
        except JournalWriteError as error:
            logger.warning("%s", error)

    def read_status(self) -> JobStatus | None:
        return self._status.read()

    def write_status(self, status: JobStatus) -> None:
        self._status.write(status)

    def take_outages(self) -> list[Outage]:
        return self._outages.take()

    def close(self) -> None:
        """Frees the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StatusFile:
    """``<job_dir>/status.json``."""

    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "status.json"
        self._temporary = job_dir / "status.json.new"
        self._complained = False

    def write(self, status: JobStatus) -> None:
        """Write it now, whole or not at all.  A failure is logged once; the job continues."""
        try:
            self._temporary.write_text(status.to_json() + "\n")
            self._temporary.replace(self._path)
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            if not self._complained:
                logger.warning("The status %s cannot be written: %s", self._path, error.strerror)
            self._complained = True
        else:
            self._complained = False

    def read(self) -> JobStatus | None:
        """Return the last status that was written; None if there is no readable one."""
        try:
            return JobStatus.from_json(self._path.read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None


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
