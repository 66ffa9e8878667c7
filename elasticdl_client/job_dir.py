"""The directory of a local job: its owner, its content, and the files of an earlier run.

Layout: ``spec.json`` without what is secret in it, ``secret_flags.json`` with that, ``token``, the job's certificate
if it has one, ``agent.json`` (the agent's socket), ``status.json`` and ``journal.json`` (written by the master),
``num_workers`` (by `elasticdl scale`), ``deleted`` (by `elasticdl delete`), ``logs/POD.log``, ``checkpoints/``;
``previous/`` holds the run before. Only the user can enter it. A directory that --job_dir names has a link in
``~/.elasticdl/elsewhere``, by which the job commands find it.

`holders`: the processes that hold the directory, its client and its agent, known by the lock file they have open.

A job runs as long as there are any.  Reads /proc and signals; where there is no /proc there are no local jobs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.certificates import make_certificate
from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.storage_kinds import is_remote

DELETED = "deleted"  # the file in a directory that is about to be removed
_KEPT = ("lock", "previous")


def home() -> Path:
    """Return the parent of the jobs' directories; --job_dir names another directory on this machine."""
    return Path.home() / ".elasticdl" / "jobs"


def path_of(spec: JobSpec) -> Path:
    """Return a job's directory on this machine."""
    is_here = spec.job_dir and not is_remote(spec.job_dir)
    chosen = Path(spec.job_dir).expanduser() if is_here else home() / spec.job_name
    return Path(os.path.abspath(chosen))


def is_elsewhere(path: Path) -> bool:
    """Return whether a directory is one that --job_dir has named."""
    return path.parent != Path(os.path.abspath(home()))


def register(path: Path) -> None:
    """Let the job commands find a directory that is elsewhere; links to directories that are gone are removed.

    Raises:
        OSError: the link cannot be written.
    """
    links = _links()
    links.mkdir(parents=True, exist_ok=True)
    for link in links.iterdir():
        try:
            link.stat()
        except (FileNotFoundError, NotADirectoryError):
            link.unlink(missing_ok=True)
        except OSError:  # EACCES, ESTALE, ENOTCONN: the directory may be back later
            continue
    with suppress(FileExistsError):
        (links / hashlib.sha256(os.fsencode(path)).hexdigest()[:16]).symlink_to(path)


def registered() -> list[Path]:
    """Return the directories elsewhere in which jobs were started."""
    links = _links()
    return sorted(Path(os.readlink(link)) for link in links.iterdir() if link.is_symlink()) if links.is_dir() else []


def _links() -> Path:
    return Path.home() / ".elasticdl" / "elsewhere"


def read_whole_spec(directory: Path) -> JobSpec:
    """Return the job of a directory, with its secrets.

    Raises:
        OSError: there is none.
        FlagError: it is damaged.
    """
    spec = JobSpec.from_json((directory / "spec.json").read_text())
    try:
        secret_flags = (directory / names.SECRET_FLAGS_KEY).read_text()
    except FileNotFoundError:  # of a job that was begun by a version without it
        return spec
    return spec.with_secrets(json.loads(secret_flags))


def read_journal(directory: Path) -> JobJournal:
    """Return the journal of a directory's job, as far as its master has written it.

    Raises:
        JobError: the journal cannot be read.
    """
    journal = directory / "journal.json"
    try:
        return JobJournal.read(journal.read_bytes())
    except FileNotFoundError:
        return JobJournal()
    except (OSError, ValueError) as error:
        raise JobError(f"The events of the job in {journal} cannot be read: {error}.") from error


@dataclass(frozen=True, slots=True)
class JobDir:
    """A directory that this process has locked; the lock is `lock_fd`'s and goes with its last holder."""

    path: Path
    lock_fd: int

    @classmethod
    def take(cls, path: Path) -> JobDir:
        """Create and lock the directory.

        Raises:
            JobError: a job in it still runs, it is not a job's directory, or it cannot be read, written or locked.
        """
        try:
            if path.is_dir() and any(path.iterdir()) and not (path / "lock").exists():
                raise JobError(f"{path} is not empty and not a job's directory.", "Name another --job_dir.")
            path.mkdir(parents=True, exist_ok=True)
            if path.stat().st_uid == os.geteuid():
                path.chmod(0o700)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JobError(
                f"The job's directory {path} cannot be made: {error.strerror}.", "Name another --job_dir."
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            raise _not_locked(path, error) from error
        return cls(path, lock_fd)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def prepare(self, spec: JobSpec) -> bool:
        """Move an earlier run's files away and write those that the pods need; return whether there was an earlier run.

        Raises:
            JobError: the directory cannot be written.
        """
        try:
            earlier = self._set_aside()
            self.logs.mkdir()
            self._write("spec.json", spec.public().to_json() + "\n")
            self._write(names.SECRET_FLAGS_KEY, json.dumps(spec.secrets()) + "\n")
            self._write(names.TOKEN_KEY, secrets.token_hex(32))
            for name, text in (make_certificate() if spec.uses_tls else {}).items():
                self._write(name, text)
        except OSError as error:
            raise JobError(
                f"The job's directory {self.path} cannot be written: {error.strerror}.", "Name another --job_dir."
            ) from error
        return earlier

    def _write(self, name: str, text: str) -> None:
        """Write a new file that only the user can read."""
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)

    def _set_aside(self) -> bool:
        entries = [entry for entry in self.path.iterdir() if entry.name not in _KEPT]
        if not entries:
            return False
        previous = self.path / "previous"
        if previous.exists():
            shutil.rmtree(previous)
        previous.mkdir()
        for entry in entries:
            entry.rename(previous / entry.name)
        return True

    def events(self) -> EventHistory:
        """Return the events of the job; see `read_journal`."""
        return read_journal(self.path).history

    def status(self) -> JobStatus | None:
        """Return the last status that the master wrote; None before the first, or if it cannot be read.

        The master renews it: a job can be resumed without.
        """
        try:
            return JobStatus.from_json((self.path / "status.json").read_text())
        except (OSError, ValueError, TypeError):
            return None


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _not_locked(path: Path, error: OSError) -> JobError:
    if isinstance(error, BlockingIOError):
        return JobError(
            f"A job of this name still runs; its directory is {path}.",
            "Wait for its end, end it with Ctrl-C where it was started, or choose another --job_name.",
        )
    return JobError(  # ENOLCK, EOPNOTSUPP, ENOSYS
        f"The file system of the job's directory {path} has no locks: {error.strerror}.",
        "Name a --job_dir on another file system.",
    )


_PROC = Path("/proc")
_LOOK_S = 0.05  # at processes that are to end; not every Python and kernel has os.pidfd_open
_TAIL_LINES = 15


def holders(job_dir: Path) -> list[int]:
    """Return the processes of this user that have the directory's lock open."""
    try:
        lock = os.stat(job_dir / "lock")
    except OSError:
        return []
    found = []
    for process in _PROC.iterdir() if _PROC.is_dir() else ():
        if process.name.isdecimal() and int(process.name) != os.getpid() and _has_open(process, lock):
            found.append(int(process.name))
    return sorted(found)


def _has_open(process: Path, lock: os.stat_result) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False
    for descriptor in descriptors:
        with suppress(OSError):
            if os.readlink(descriptor).endswith("/lock") and os.path.samestat(os.stat(descriptor), lock):
                return True
    return False


def roots_of(processes: Iterable[int]) -> list[int]:
    """Return the processes that none of the others has started: the client, or the agent if the client has ended."""
    found = set(processes)
    return sorted(process for process in found if _parent(process) not in found)


def _parent(process: int) -> int:
    fields = _stat(process)
    return int(fields[1]) if fields else 0


def signal_process(process: int, number: signal.Signals) -> None:
    """Signal a process, which may have ended; continue a stopped one so that it handles the signal."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
        os.kill(process, signal.SIGCONT)


def wait_for_end(processes: Iterable[int], timeout_s: float) -> bool:
    """Wait for the end of processes; return whether all have ended in time."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    running = [process for process in processes if _runs(process)]
    while running and time.monotonic() < deadline:
        pause.wait(_LOOK_S)
        running = [process for process in running if _runs(process)]
    return not running


def _runs(process: int) -> bool:
    """Return whether a process exists and is no zombie; threads that outlive its first one still hold the lock."""
    fields = _stat(process)
    return bool(fields) and (fields[0] not in "ZX" or int(fields[17]) > 1)  # the number of threads, see proc(5)


def _stat(process: int) -> list[str]:
    """Return fields of /proc/PID/stat, from the state on; none if there is no such process."""
    try:
        return (_PROC / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
