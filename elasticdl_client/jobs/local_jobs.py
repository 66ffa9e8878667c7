"""The jobs of this machine: directories with a lock, a specification and a status.

A job runs while a process holds its lock.  The agent manages the pods of a job; this module reads files, and signals
the client of a job to end it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elasticdl_client import worker_range
from elasticdl_client.chaos.faults import FaultInjector
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.job_dir import (
    DELETED,
    JobDir,
    holders,
    home,
    read_journal,
    read_whole_spec,
    registered,
    roots_of,
    signal_process,
    wait_for_end,
)
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs import log_files
from elasticdl_client.jobs.store import JobInfo, LogLine, LogRequest, Phase, phase_of
from elasticdl_client.progress import with_running_pods
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.worker_range import WorkerRange

_END_TIMEOUT_S = 30.0  # for a client to end its job; then it is killed, and the agent with it
_KILL_TIMEOUT_S = 10.0


class LocalJobs:
    """The `JobStore` of this machine.

    Args:
        job_dir: Only the job in this directory; None: those in ~/.elasticdl/jobs and in directories registered by
            --job_dir.
    """

    def __init__(self, job_dir: Path | None = None) -> None:
        self._job_dir = Path(os.path.abspath(job_dir.expanduser())) if job_dir is not None else None

    def list(self) -> list[JobInfo]:
        """See `JobStore`."""
        jobs: list[JobInfo | None] = []
        if self._job_dir is not None:
            jobs.append(_read(self._job_dir))
        for directory in _directories() if self._job_dir is None else ():
            with suppress(JobError):  # one unreadable directory must not hide the others
                jobs.append(_read(directory))
        return sorted((job for job in jobs if job is not None), key=lambda job: (job.created_at, job.name))

    def find(self, name: str) -> JobInfo | None:
        """See `JobStore`.

        Raises:
            FlagError: Two directories have a job of this name.
        """
        found = [job for job in self.list() if job.name == name]
        if len(found) > 1:
            listed = " and ".join(job.directory for job in found)
            raise FlagError(f'There are {len(found)} jobs "{name}": in {listed}.', "Say which with --job_dir.")
        return found[0] if found else None

    def logs(self, job: JobInfo, request: LogRequest) -> Iterator[LogLine]:
        """See `JobStore`."""
        return log_files.lines(job, request)

    def journal(self, job: JobInfo) -> JobJournal:
        """See `JobStore`."""
        return read_journal(Path(job.directory))

    def may(self, job: JobInfo, verb: str) -> bool:
        """See `JobStore`; write permission for the job's directory allows all verbs."""
        directory = Path(job.directory)
        return os.access(directory, os.W_OK | os.X_OK) and (verb != "resume" or (directory / "journal.json").exists())

    def delete(self, job: JobInfo, wait_s: float | None) -> None:
        """See `JobStore`; always waits for the end of the job, which takes seconds.

        Raises:
            JobError: A process of the job does not end, or the directory cannot be removed.
        """
        directory = Path(job.directory)
        with suppress(OSError):  # a full disk or another owner: try to delete all the same
            (directory / DELETED).touch()
        _end(job, directory)
        job_dir = JobDir.take(directory)
        try:
            _remove(directory)
        except OSError as error:
            raise JobError(
                f"The directory {directory} of job {job.name} cannot be removed: {error.strerror}."
            ) from error
        finally:
            os.close(job_dir.lock_fd)

    def scale(self, job: JobInfo, num_workers: WorkerRange, current: int | None = None) -> int:
        """See `JobStore`."""
        path = Path(job.directory) / worker_range.FILE
        if job.spec is None:
            raise JobError(f"The specification of job {job.name} in {job.directory} cannot be read.")
        before = worker_range.wanted(path.read_text() if path.exists() else "", job.spec, job.status)
        worker_range.check_current(job.name, before, current)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            new.write_text(str(num_workers))
            new.replace(path)  # atomic: its master reads the old number or the new one
        except OSError as error:
            raise JobError(f"{path} cannot be written: {error.strerror}.") from error
        return before

    def faults(self, job: JobInfo) -> FaultInjector:
        """See `JobStore`."""
        from elasticdl_client import local

        local.require_runtime()
        from elasticdl_client.chaos.local_faults import LocalFaults

        return LocalFaults(Path(job.directory), job.spec.checkpoint_dir if job.spec is not None else "")

    def tensorboard(self, job: JobInfo, port: int) -> int:
        """See `JobStore`.

        Raises:
            JobError: the job writes no event files, or TensorBoard is not installed.
        """
        from elasticdl_client.jobs import tensorboard

        return tensorboard.show_local(job, port)

    def stop(self, job: JobInfo, wait_s: float | None) -> bool:
        """See `JobStore`; does what the first Ctrl-C does."""
        processes = holders(Path(job.directory))
        for process in roots_of(processes):
            signal_process(process, signal.SIGINT)
        return wait_for_end(processes, wait_s or 0.0)

    def resume(self, job: JobInfo) -> int:
        """See `JobStore`; the job runs in the foreground, as before.

        Raises:
            ElasticDLError: The specification is damaged, or the job cannot be started.
        """
        from elasticdl_client import local

        directory = Path(job.directory)
        spec = read_whole_spec(directory)
        if not is_remote(spec.job_dir):
            spec = dataclasses.replace(spec, job_dir=str(directory))  # the directory may have been moved
        if not (directory / "journal.json").exists():
            raise JobError(
                f"Job {job.name} was cut off before it had begun: there is no journal in {directory}.",
                "Start it again with the command that started it.",
            )
        job_dir = JobDir.take(directory)
        (directory / DELETED).unlink(missing_ok=True)
        return local.go_on(spec, job_dir)


def _directories() -> list[Path]:
    own = sorted(home().iterdir()) if home().is_dir() else []
    return own + registered()


def _read(directory: Path) -> JobInfo | None:
    """Return the job of a directory; None if it holds none.

    Raises:
        JobError: The directory cannot be read.
    """
    path = directory / "spec.json"
    try:
        created_at = path.stat().st_mtime
        text = path.read_text()
        name = str(json.loads(text)["job_name"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError):
        name, text = directory.name, ""
        try:
            created_at = directory.stat().st_mtime
        except OSError as error:  # EACCES, ESTALE, ENOTCONN
            raise JobError(
                f"The job's directory {directory} cannot be read: {error.strerror}.",
                "Check that its file server answers, and your permissions.",
            ) from error
    status, note = _status(directory, name)
    runs = bool(holders(directory))
    if not runs and status.exit_code is None:  # it may have ended after the status was read
        status, note = _status(directory, name)
    if not runs:
        over = tuple(pod for pod in status.pods if pod.phase in ("Succeeded", "Failed"))
        status = dataclasses.replace(status, pods=over, workers_alive=0, ps_alive=0)
    else:
        status = with_running_pods(status)
    phase = phase_of(status, runs=runs)
    has_begun = (directory / "journal.json").exists()
    if phase is Phase.STOPPED and not note:
        note = "It was cut off before its end, and nothing of it runs."
        note = note if has_begun else f"It was cut off before it had begun: {directory}/logs may say why."
    return JobInfo(
        name,
        Runtime.LOCAL,
        phase,
        status,
        note,
        directory=str(directory),
        created_at=created_at,
        spec=_spec(text),
        has_begun=has_begun,
    )


def _spec(text: str) -> JobSpec | None:
    try:
        return JobSpec.from_json(text)
    except FlagError:
        return None


def _status(directory: Path, name: str) -> tuple[JobStatus, str]:
    path = directory / "status.json"
    try:
        return JobStatus.from_json(path.read_text()), ""
    except FileNotFoundError:
        return JobStatus(name), ""
    except (OSError, ValueError, TypeError) as error:
        return JobStatus(name), f"Its status {path} cannot be read: {error}."


def _end(job: JobInfo, directory: Path) -> None:
    processes = holders(directory)
    for process in roots_of(processes):
        signal_process(process, signal.SIGTERM)
    if wait_for_end(processes, _END_TIMEOUT_S):
        return
    for process in processes:  # the kernel ends the pods when the agent dies
        signal_process(process, signal.SIGKILL)
    if not wait_for_end(processes, _KILL_TIMEOUT_S):
        listed = ", ".join(map(str, processes))
        raise JobError(f"Job {job.name} does not end; its client and agent are the processes {listed}.")


def _remove(directory: Path) -> None:
    """Remove a job's directory, except its results, such as an exported model, and the lock."""
    kept = _outputs_in(directory)
    for entry in directory.iterdir():
        if entry.name == "lock" or entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not kept:
        (directory / "lock").unlink()
        directory.rmdir()


def _outputs_in(directory: Path) -> set[str]:
    """Return the entries of a directory that hold the job's exported model, predictions or metrics."""
    try:
        spec = JobSpec.from_json((directory / "spec.json").read_text())
    except (OSError, ElasticDLError):
        return set()
    outputs = [spec.output, spec.metrics_output]
    if spec.job_type is not JobType.ANALYZE:  # the predictions of `analyze` are intermediate files
        outputs.append(spec.prediction_outputs)
    paths = (Path(os.path.abspath(Path(output).expanduser())) for output in outputs if output)
    inside = (path for path in paths if path != directory and path.is_relative_to(directory) and path.exists())
    return {path.relative_to(directory).parts[0] for path in inside}
