"""Faults of a local job: signals to the processes of its pods, and a full disk for its checkpoints.

Besides local_job.py the one module of the client that imports the runtime: the agent knows the processes.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from elasticdl.cluster.cluster import Pod, PodPhase
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.storage.paths import path_of
from elasticdl.storage.versions import complete, number_of
from elasticdl_client.chaos.faults import Fault, FaultKind, Victim
from elasticdl_client.errors import FlagError, JobError

_LOOK_S = 0.01  # it takes the agent a few milliseconds
_FILL = ".elasticdl-chaos-fill"
_MAX_DISK_BYTES = 16 << 30
_CHUNK_BYTES = 64 << 20
_BLOCK_BYTES = 4096


class LocalFaults:
    """A fault injector (see `FaultInjector`).

    Args:
        job_dir: Directory of the job.
        checkpoint_dir: Checkpoint directory of the job; empty: it writes no checkpoints.
    """

    def __init__(self, job_dir: Path, checkpoint_dir: str = "") -> None:
        self._job_dir = job_dir
        self._checkpoint_dir = checkpoint_dir

    def check(self, faults: Sequence[Fault]) -> None:
        """See `FaultInjector`."""
        with self._agent() as agent:
            agent.list()
        if any(fault.kind is FaultKind.FILL_DISK for fault in faults):
            self._check_disk()

    def running(self, role: str) -> list[Victim]:
        """See `FaultInjector`."""
        with self._agent() as agent:
            pods = [pod for pod in agent.list() if pod.role == role and pod.phase is PodPhase.RUNNING and pod.pid]
        return [_victim(pod) for pod in sorted(pods, key=lambda pod: pod.index)]

    def inject(self, fault: Fault, victim: Victim | None) -> None:
        """See `FaultInjector`."""
        if fault.kind is FaultKind.FILL_DISK:
            self._fill_disk()
        elif victim is not None and fault.kind is FaultKind.STOP:
            _signal(victim, signal.SIGSTOP)
        elif victim is not None:
            self._kill(victim)

    def undo(self, fault: Fault, victim: Victim | None) -> None:
        """See `FaultInjector`."""
        if fault.kind is FaultKind.FILL_DISK:
            self._fill_path.unlink(missing_ok=True)
        elif victim is not None and fault.kind is FaultKind.STOP:
            _signal(victim, signal.SIGCONT)

    def newest_checkpoint(self) -> int:
        """See `FaultInjector`."""
        if not self._checkpoint_dir:
            return 0
        try:
            return max((number_of(path) for path in complete(path_of(self._checkpoint_dir))), default=0)
        except OSError as error:
            raise JobError(f"{self._checkpoint_dir} cannot be read: {error.strerror}.") from error

    @contextmanager
    def _agent(self) -> Iterator[ProcessCluster]:
        path = self._job_dir / "agent.json"
        try:
            socket = str(json.loads(path.read_text())["socket"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobError(f"The agent of the job cannot be found: {path} cannot be read ({error}).") from error
        with closing(ProcessCluster(socket)) as cluster:
            yield cluster

    def _kill(self, victim: Victim) -> None:
        """Kill a pod and wait until the agent has seen its end, so that it is not chosen again."""
        _signal(victim, signal.SIGKILL)
        pause = threading.Event()
        with self._agent() as agent:
            while any(_victim(pod) == victim for pod in agent.list()):
                pause.wait(_LOOK_S)

    # The disk -------------------------------------------------------------------------------------------------------

    @property
    def _fill_path(self) -> Path:
        return Path(self._checkpoint_dir) / _FILL

    def _check_disk(self) -> None:
        if not self._checkpoint_dir:
            raise FlagError("--fill_disk: the job has no --checkpoint_dir.", "Leave it out.")
        try:
            device = os.stat(self._checkpoint_dir).st_dev
            system = os.statvfs(self._checkpoint_dir)
        except OSError as error:
            raise FlagError(
                f"--fill_disk: the directory {self._checkpoint_dir} cannot be read: {error.strerror}.",
                "It must exist on this machine.",
            ) from error
        for other in ("/", Path.home(), tempfile.gettempdir(), self._job_dir):
            if os.stat(other).st_dev == device:
                raise FlagError(
                    f"--fill_disk would fill the file system of {other}, too, not only of {self._checkpoint_dir}.",
                    "Start the job with a --checkpoint_dir on a file system of its own, such as a tmpfs with a size.",
                )
        if system.f_blocks * system.f_frsize > _MAX_DISK_BYTES:
            raise FlagError(
                f"--fill_disk: the file system of {self._checkpoint_dir} is larger than {_MAX_DISK_BYTES >> 30} GiB.",
                "Start the job with a --checkpoint_dir on a smaller one, such as a tmpfs with a size.",
            )

    def _fill_disk(self) -> None:
        try:
            with self._fill_path.open("wb") as file:
                size, chunk = 0, _CHUNK_BYTES
                while chunk >= _BLOCK_BYTES:
                    try:
                        os.posix_fallocate(file.fileno(), size, chunk)
                    except OSError as error:
                        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                            raise
                        chunk //= 2
                    else:
                        size += chunk
        except OSError as error:
            raise JobError(f"{self._fill_path} cannot be written: {error.strerror}.") from error


def _victim(pod: Pod) -> Victim:
    subject = pod.role.value if pod.role.value == "master" else f"{pod.role.value}-{pod.index}"
    return Victim(subject, pod.name, pod.role.value, pod.index, f"{pod.uid}/{pod.restarts}", pod.pid)


def _signal(victim: Victim, number: signal.Signals) -> None:
    """To every process of the pod; it may have ended."""
    with suppress(ProcessLookupError):
        os.killpg(victim.pid, number)
