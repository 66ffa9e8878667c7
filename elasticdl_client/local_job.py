"""A local job once its agent runs: its master is made, and followed until the job has ended.

With chaos/local_faults.py the only module of the client that imports the runtime; local.py imports it when a job
starts.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase, PodSpec, RestartPolicy
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.protocol import Role
from elasticdl_client.choices import MasterRestartPolicy
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_dir import JobDir, tail
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import WAITS_FOR_STORAGE, Ended, JobPhase, JobStatus
from elasticdl_client.progress import Display
from elasticdl_client.script_output import LogFiles, ScriptOutput, Shown

_ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)
_LOOK_S = 0.5
_LAST_WORDS_S = 5.0  # a master that has written the job's end gets so long to end itself
_STATUS_AGE_S = 3.0  # a master writes its status every second, unless it has no space for it
_LITTLE_SPACE = 64 << 10  # bytes, beside the journal, of which two are on the disk while it is written
_MAX_IDLE_RESTARTS = 5  # generations of the master in a row in which no record was committed


def master_name(spec: JobSpec) -> str:
    """Return the name of the master's pod."""
    return f"elasticdl-{spec.job_name}-master"


def master_log(spec: JobSpec, job_dir: JobDir) -> Path:
    """Return the path of the master's log."""
    return job_dir.logs / f"{master_name(spec)}.log"


def start_master(spec: JobSpec, job_dir: JobDir, socket: str, command: Sequence[str]) -> ProcessCluster:
    """Create the master's pod; return the cluster of the job.

    Raises:
        ElasticDLError: the agent refuses it, or is gone.
    """
    cluster = ProcessCluster(socket)
    on_failure = spec.restart_policy is MasterRestartPolicy.ON_FAILURE
    cluster.create(
        PodSpec(
            name=master_name(spec),
            role=Role.MASTER,
            index=0,
            command=tuple(command),
            env={
                "ELASTICDL_JOB_DIR": str(job_dir.path),
                "ELASTICDL_TOKEN_FILE": str(job_dir.path / "token"),
                "ELASTICDL_POD_NAME": master_name(spec),
                "ELASTICDL_AGENT_SOCKET": socket,
                "MASTER_PORT": str(spec.master_port),
                "ELASTICDL_RESUMED_AT": repr(time.time()),
            },
            labels={
                "app": "elasticdl",
                "elasticdl-job-name": spec.job_name,
                "elasticdl-replica-type": "master",
                "elasticdl-replica-index": "0",
            },
            restart_policy=RestartPolicy.ON_FAILURE if on_failure else RestartPolicy.NEVER,
        )
    )
    return cluster


def find_master(spec: JobSpec, socket: str) -> int | None:
    """Return the process of the job's master; 0: it is started again; None: it has ended, or the agent has."""
    try:
        with closing(ProcessCluster(socket)) as cluster:
            pods = cluster.list()
    except ElasticDLError:
        return None
    master = next((pod for pod in pods if pod.name == master_name(spec)), None)
    return None if master is None or master.phase in _ENDED else master.pid


class LocalFollower:
    """Watches a job's master and status until one of them says that the job has ended."""

    def __init__(
        self,
        spec: JobSpec,
        job_dir: JobDir,
        cluster: ProcessCluster,
        display: Display,
        shown: Shown = Shown.GLANCE,
    ) -> None:
        self._spec = spec
        self._job_dir = job_dir
        self._cluster = cluster
        self._display = display
        self._events: queue.SimpleQueue[PodEvent | ElasticDLError] = queue.SimpleQueue()
        self._status: JobStatus | None = None
        self._status_read_at = time.monotonic()
        self._is_disk_full = False
        self._history: EventHistory | None = None
        self._journal = b""
        self._restarts = 0
        self._idle_restarts = 0
        self._deadline: float | None = None
        prefix = master_name(spec).removesuffix("master")
        self._script = ScriptOutput(
            LogFiles(job_dir.logs, prefix), prefix, max(spec.num_workers, spec.max_workers), shown
        )

    def follow(self) -> Ended:
        """Follow the job until it has ended.

        Raises:
            JobError: the agent is gone.
        """
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        try:
            while True:
                ended = self._look(self._next_event())
                if self._status is not None:
                    for line in self._script.lines(self._status, last=ended is not None):
                        self._display.say(line)
                if ended is not None:
                    return ended
        finally:
            self._cluster.close()

    def _watch(self) -> None:
        try:
            for event in self._cluster.watch():
                self._events.put(event)
        except ElasticDLError as error:
            self._events.put(error)

    def _next_event(self) -> PodEvent | None:
        try:
            event = self._events.get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if isinstance(event, ElasticDLError):
            raise JobError(
                "The local runtime's agent has ended, and the job with it.",
                f"Its log is {self._job_dir.logs / 'agent.log'}.",
            ) from event
        return event

    def _look(self, event: PodEvent | None) -> Ended | None:
        master = event.pod if event is not None and event.pod.role is Role.MASTER else None
        self._read_status()
        finished = self._status is not None and self._status.exit_code is not None
        if master is not None:
            if event is not None and event.type is EventType.DELETED:
                return Ended(1, "its master was deleted.", self._status)
            has_ended = master.phase in _ENDED
            if self._count_restarts(master):
                has_ended |= finished or self._idle_restarts >= _MAX_IDLE_RESTARTS
            if has_ended:
                return self._ended(master)
        if finished:
            self._deadline = self._deadline or time.monotonic() + _LAST_WORDS_S
            if time.monotonic() > self._deadline or (master is not None and master.message):
                return self._ended(None)
        return None

    def _read_status(self) -> None:
        status = self._job_dir.status()
        has_news = self._read_events()
        if status is not None and (has_news or status != self._status):
            if self._status is not None and status.records_done > self._status.records_done:
                self._idle_restarts = 0
            before, self._status = self._status, status
            self._status_read_at = time.monotonic()
            self._display.update(status, self._history)
            if _waits_for_storage(status) and not (before is not None and _waits_for_storage(before)):
                self._display.say(f"{status.message[0].upper()}{status.message[1:]}")
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        """Say that the job waits for space: its status cannot say so."""
        if time.monotonic() - self._status_read_at < _STATUS_AGE_S:
            self._is_disk_full = False
            return
        try:
            disk = os.statvfs(self._job_dir.path)
        except OSError:  # it was deleted, which its master's end will say
            return
        wanted = _LITTLE_SPACE + len(self._journal)
        was_full, self._is_disk_full = self._is_disk_full, disk.f_bavail * disk.f_frsize < wanted
        if self._is_disk_full and not was_full:
            self._display.say(
                f"No space is left on the disk of {self._job_dir.path}: the job waits until there is some."
            )

    def _read_events(self) -> bool:
        """Read the events if the journal has changed; return whether it has."""
        try:
            journal = (self._job_dir.path / "journal.json").read_bytes()
            if journal == self._journal:
                return False
            self._history = JobJournal.read(journal).history
        except (OSError, ValueError):  # the job is shown without them
            return False
        self._journal = journal
        return True

    def _count_restarts(self, master: Pod) -> bool:
        """Count and print new restarts of the master; return whether there is one."""
        if master.restarts <= self._restarts:
            return False
        self._idle_restarts += master.restarts - self._restarts
        self._restarts = master.restarts
        self._display.say(f"The master has ended; restart {master.restarts} follows.")
        return True

    def _ended(self, master: Pod | None) -> Ended:
        status = self._status
        if status is not None and status.exit_code is not None:
            failed = status.phase is JobPhase.FAILED
            return Ended(status.exit_code or int(failed), status.message, status)
        code = master.exit_code if master is not None and master.exit_code is not None else 1
        said = tail(master_log(self._spec, self._job_dir))
        reason = f"it ended {self._restarts} times" if self._restarts else "it ended"
        return Ended(code or 1, f"the master did not run to the job's end: {reason}; its last lines:\n{said}", status)


def _waits_for_storage(status: JobStatus) -> bool:
    return status.exit_code is None and status.message.startswith(WAITS_FOR_STORAGE)
