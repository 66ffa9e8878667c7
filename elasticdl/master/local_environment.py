"""The master on the local runtime: pods are children of the agent, all other state is in files of the job's directory.

Environment: ``ELASTICDL_JOB_DIR``, ``ELASTICDL_TOKEN_FILE``, ``ELASTICDL_AGENT_SOCKET``, ``MASTER_PORT`` (0: any free
one) and ``ELASTICDL_RESUMED_AT`` (seconds since the Unix epoch).

`FileJournal` and `StatusFile`: files of the one master that holds the lock beside them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elasticdl.cluster.cluster import Cluster
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.master.environment import Endpoint, JobRun, RuntimeTraits, UserRequest
from elasticdl.master.journal import Journal, JournalWriteError, Outage, Outages, Superseded, decode, encode
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.master.storage_journal import StorageJournal, place_of
from elasticdl.model_def import framework_of
from elasticdl.rpc.addresses import free_ports, written
from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE, read_token, whole_spec
from elasticdl.storage.paths import sync_directory
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.worker_range import FILE as NUM_WORKERS_FILE

STORAGE_PATIENCE_S = 300.0
_LOOK_S = 0.5  # between two reads of a file that only the user writes
LOOPBACK = "127.0.0.1"
# The agent does one thing at a time.  A disk answers at once; storage may be unreachable.
_TRAITS = RuntimeTraits(num_pod_threads=1, patience_s=0.0, sigterm_ends_job=True)
_UNKNOWN_RUN = JobRun()
_THREADS_VARIABLES = {FrameworkName.TENSORFLOW: "TF_NUM_INTRAOP_THREADS", FrameworkName.TORCH: "OMP_NUM_THREADS"}


@dataclass(frozen=True, slots=True)
class LocalEnvironment:
    """`RuntimeEnvironment` of a job's directory.

    Attributes:
        token_file: File with the job's token, readable by its pods, too.
    """

    spec: JobSpec
    cluster: Cluster
    journal: Journal
    endpoint: Endpoint
    token_file: str
    run: JobRun = _UNKNOWN_RUN
    traits: RuntimeTraits = _TRAITS

    def pod_specs(self, port: int) -> PodSpecs:
        env = {TOKEN_FILE_VARIABLE: self.token_file, **shares_of_machine(self.spec, os.environ)}
        tf_addresses = self._tf_addresses() if self.spec.job_command and self.spec.need_tf_config else None
        ps_env = {"PS_HOST": self.endpoint.host}
        address = written(self.endpoint.host, port)
        return PodSpecs(self.spec, sys.executable, address, env, ps_env, tf_addresses=tf_addresses)

    def _tf_addresses(self) -> dict[str, list[str]]:
        """Return the addresses of TensorFlow's servers and workers: chosen once for all restarts of master and pods."""

        def choose() -> str:
            sizes = {"ps": self.spec.num_ps_pods, "worker": self.spec.num_workers}
            host = self.endpoint.host
            ports = iter(free_ports(host, sum(sizes.values())))
            return json.dumps({role: [written(host, next(ports)) for _ in range(n)] for role, n in sizes.items()})

        return dict(json.loads(chosen_once(Path(self.token_file).parent / "tf_addresses.json", choose)))

    def publish(self, history: Callable[[], EventHistory]) -> None:
        """Do nothing: the client of a local job shows the events itself."""

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        path, known = Path(self.token_file).parent / NUM_WORKERS_FILE, ""
        while not stop.is_set():
            with suppress(OSError):
                text = path.read_text(errors="replace")
                if text and text != known:
                    known = text
                    yield UserRequest(text)
            stop.wait(_LOOK_S)

    def is_transient(self, error: ElasticDLError) -> bool:
        return is_remote(self.spec.job_dir) and isinstance(error, JournalWriteError)

    def end(self, exit_code: int, ended_at: float, stop: threading.Event) -> None:
        """Do nothing: the client reads the status and ends the agent."""

    def pause(self) -> None:
        """Do nothing: the client ends the agent."""

    def close(self) -> None:
        self.journal.close()


def shares_of_machine(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give each process of a job its share of this machine's cores, unless the user sets them.

    The frameworks' threads wait for each other by spinning: one thread per core in each of several pods makes a step
    take twice as long.
    """
    known = _THREADS_VARIABLES
    own = known.get(framework_of(spec)) if spec.model_def else None
    wanted = [own] if own else list(known.values())
    num_cores = len(os.sched_getaffinity(0))
    num_processes = max(spec.num_workers, spec.max_workers) * spec.num_processes_per_worker
    share = str(max(1, num_cores // (num_processes + spec.num_ps_pods)))
    return {name: share for name in wanted if name not in environment and name not in spec.envs_dict()}


def open_environment() -> LocalEnvironment:
    """Return the environment that the process's variables describe.

    Raises:
        Superseded: Another master owns the job.
        ElasticDLError: The environment cannot be used; the status says so, if there is a directory for it.
    """
    job_dir, job_name = Path(_environment("ELASTICDL_JOB_DIR")), ""
    try:
        spec = read_spec(job_dir)
        job_name = spec.job_name
        is_stored, token = is_remote(spec.job_dir), read_token()
        port = port_of(os.environ.get("MASTER_PORT", "") or "0")
        journal = FileJournal(job_dir)
        return LocalEnvironment(
            spec=spec,
            cluster=ProcessCluster(_environment("ELASTICDL_AGENT_SOCKET")),
            endpoint=Endpoint(LOOPBACK, port or (port_here(job_dir) if is_stored else 0), token),
            token_file=os.environ[TOKEN_FILE_VARIABLE],
            traits=dataclasses.replace(_TRAITS, patience_s=STORAGE_PATIENCE_S) if is_stored else _TRAITS,
            journal=StorageJournal(spec.job_dir, place_of(token), journal) if is_stored else journal,
            run=JobRun(
                os.environ.get("ELASTICDL_RESUMED_AT", ""),
                submitted_at=(job_dir / "spec.json").stat().st_mtime,  # the client writes it once
                resumed_at=_time(os.environ.get("ELASTICDL_RESUMED_AT", "") or "0"),
            ),
        )
    except Superseded:
        raise
    except ElasticDLError as error:
        status = JobStatus(job_name, phase=JobPhase.FAILED, message=str(error), exit_code=1)
        StatusFile(job_dir).write(status)
        raise


def read_spec(job_dir: Path) -> JobSpec:
    """Return the job of a directory.

    Raises:
        JobError: There is none.
        FlagError: It is damaged.
    """
    path = job_dir / "spec.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise JobError(f"the job's specification {path} cannot be read: {error.strerror}") from error
    spec = whole_spec(text, job_dir)
    if spec.training_data and not spec.checkpoint_dir:
        spec = dataclasses.replace(spec, checkpoint_dir=str(job_dir / "checkpoints"))
    if spec.max_bad_records and not spec.bad_records_dir:
        spec = dataclasses.replace(spec, bad_records_dir=str(job_dir / "bad_records"))
    return spec


def port_of(text: str) -> int:
    """Return a port of an environment variable.

    Raises:
        JobError: The text is no port.
    """
    if not text.isdecimal() or int(text) > 65535:
        raise JobError(f"MASTER_PORT={text} is not a port")
    return int(text)


def port_here(job_dir: Path) -> int:
    """Return the port of all masters of the job on this machine; the journal may have another machine's.

    Raises:
        JobError: See `chosen_once`.
    """
    return port_of(chosen_once(job_dir / "master_port", lambda: str(free_ports(LOOPBACK, 1)[0])))


def chosen_once(path: Path, choose: Callable[[], str]) -> str:
    """Return the text of a file; the first call writes a chosen text.

    Raises:
        JobError: The file cannot be written.
    """
    if not path.exists() or not path.stat().st_size:  # in earlier versions a full disk left an empty file
        data = choose().encode()
        try:
            replace_file(path, path.with_suffix(".new"), data)
        except OSError as error:
            what = f"{path} cannot be written: {error.strerror}"
            raise JobError(what, "free space or make the directory writable") from error
    return path.read_text()


def _time(text: str) -> float:
    """Return seconds since the Unix epoch, from an environment variable.

    Raises:
        JobError: The text is no time.
    """
    try:
        return float(text)
    except ValueError:
        raise JobError(f"ELASTICDL_RESUMED_AT={text} is not a time") from None


def _environment(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise JobError(f"{name} is not set", "masters are started by `elasticdl train`, not by hand")
    return value


logger = logging.getLogger("elasticdl.master")


class FileJournal:
    """`Journal` in ``<job_dir>/journal.json`` and ``status.json``."""

    def __init__(self, job_dir: Path) -> None:
        """Take the lock, which the kernel releases when the process ends.

        Raises:
            Superseded: Another master runs this job.
            JobError: The directory cannot be written.
        """
        self._path = job_dir / "journal.json"
        self._temporary = job_dir / "journal.json.new"
        self._on_disk = b""  # the snapshot, if this process has written it
        self._status = StatusFile(job_dir)
        self._outages = Outages()
        self._complaint = ""  # the last logged failure of `save_later`, until it succeeds
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
        with suppress(OSError):  # on a full disk; it is only for the message above
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
        self._write(encode(snapshot))
        if status is not None:  # after the snapshot: a status must not show something that a crash could undo
            self.write_status(status)

    def _write(self, data: bytes) -> None:
        if data == self._on_disk:
            return
        self._on_disk = b""  # a failed attempt may have had an effect
        try:
            replace_file(self._path, self._temporary, data)
        except OSError as error:
            self._outages.failed(f"{error.strerror} ({self._path})")
            raise JournalWriteError(
                f"the journal {self._path} cannot be written: {error.strerror}",
                "the job waits; free space or make the directory writable again",
            ) from error
        self._outages.written()
        self._on_disk, self._complaint = data, ""

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        """Save at once: a disk is fast."""
        try:
            self.save(snapshot, status)
        except JournalWriteError as error:
            if error.what != self._complaint:
                logger.warning("%s", error)
            self._complaint = error.what

    def read_status(self) -> JobStatus | None:
        return self._status.read()

    def write_status(self, status: JobStatus) -> None:
        self._status.write(status)

    def check_owner(self) -> None:
        """Do nothing: no other master has the lock while this process lives."""

    def take_outages(self) -> list[Outage]:
        return self._outages.take()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StatusFile:
    """``<job_dir>/status.json``."""

    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / "status.json"
        self._temporary = job_dir / "status.json.new"
        self._complained = False

    def write(self, status: JobStatus) -> None:
        """Write a status now, atomically and such that it survives a crash.  A failure is logged once."""
        try:
            replace_file(self._path, self._temporary, (status.to_json() + "\n").encode())
        except OSError as error:
            if not self._complained:
                logger.warning("The status %s cannot be written: %s", self._path, error.strerror)
            self._complained = True
        else:
            self._complained = False

    def read(self) -> JobStatus | None:
        """Return the last written status; None if none is readable."""
        try:
            return JobStatus.from_json(self._path.read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None


def replace_file(path: Path, temporary: Path, data: bytes) -> None:
    """Replace a file such that any crash leaves either the old or the new content, complete.

    Raises:
        OSError: Not replaced; the temporary file is removed so that it does not fill the disk.
    """
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)
