"""Master: wires one life of a job's master together, from the job's directory to its exit code.

It owns the order of things at start and end: lock, journal, generation on disk, core, server, pods; and the reverse.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from elasticdl.cluster.cluster import Cluster
from elasticdl.master import checkpoints, messages
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings, Strategy
from elasticdl.master.core.values import DataKind, Shard
from elasticdl.master.effects import Effects
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import FileJournal, Journal
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.master.ps_calls import PsCalls
from elasticdl.master.servicer import MasterServicer
from elasticdl.master.settings import data_kinds, describe, same_data, settings_of
from elasticdl.master.shell import Shell, end_of_log
from elasticdl.master.status import StatusFile, to_job_status
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.servers import serve
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.model_source import reads_data_itself

_PORT_RETRY_S = 10.0
_STOP_GRACE_S = 1.0
_PORTS = range(20_000, 30_000)  # below the ports that the system gives to outgoing connections

logger = logging.getLogger("elasticdl.master")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a master runs.

    Attributes:
        host: to listen on.
        port: 0: any free one, the same in each life.
        address: host by which pods reach it.
        token_file: of the job, readable by its pods too.
    """

    job_dir: Path
    cluster: Cluster
    host: str
    port: int
    address: str
    token: str
    token_file: str


def read_spec(job_dir: Path) -> JobSpec:
    """The job of a directory.

    Raises:
        JobError: there is none.
        FlagError: it is damaged.
    """
    path = job_dir / "spec.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise JobError(f"the job's specification {path} cannot be read: {error.strerror}") from error
    spec = JobSpec.from_json(text)
    if spec.runtime == "local" and spec.training_data and not spec.checkpoint_dir:
        spec = dataclasses.replace(spec, checkpoint_dir=str(job_dir / "checkpoints"))
    return spec


class Master:
    """One life of the master of a job.

    Raises:
        Superseded: another master runs it.
        ElasticDLError: it cannot be run.
    """

    def __init__(self, spec: JobSpec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._settings = settings_of(spec)
        _check_initial_checkpoint(self._settings)
        self._journal = FileJournal(place.job_dir)
        self._status_file = StatusFile(place.job_dir)
        self._shell: Shell | None = None
        self._stop_reason = ""
        self._stop_lock = threading.RLock()  # a signal may come while it is held by the same thread

    def request_stop(self, reason: str) -> None:
        """Ends the job in order; may be called from a signal handler at any time."""
        with self._stop_lock:
            self._stop_reason = reason
            if self._shell is not None:
                self._shell.request_stop(reason)

    def run(self) -> int:
        """Runs the job to its end; the exit code."""
        saved = self._journal.load()
        state = _next_state(self._spec, self._place, saved)
        generation: int = state["generation"]
        for line in describe(self._spec):
            logger.info("%s", line)
        job = self._make_job(state)
        _write_generation(self._journal, state, job)
        inbox = Inbox()
        effects = self._make_effects(inbox, generation, state["port"])
        shell = Shell(
            job,
            inbox,
            effects,
            self._journal,
            self._status_file,
            self._place.cluster,
            state,
            lambda: to_job_status(self._spec.job_name, state["started_at"], job.status()),
        )
        server = self._serve(inbox, generation, shell, state["port"])
        with self._stop_lock:
            self._shell = shell
            if self._stop_reason:
                shell.request_stop(self._stop_reason)
        self._list_data(effects, saved)
        try:
            outcome = shell.run()
        finally:
            inbox.close()
            server.stop(_STOP_GRACE_S).wait()
        effects.close()
        message = outcome.message
        last_words = end_of_log(self._place.cluster, outcome.pod)
        if last_words:
            message = f"{message}\n--- the end of the log of {outcome.pod}\n{last_words}"
        status = to_job_status(self._spec.job_name, state["started_at"], job.status())
        self._status_file.write(dataclasses.replace(status, message=message, exit_code=outcome.exit_code))
        log = logger.info if outcome.exit_code == 0 else logger.error
        log("The job has ended with exit code %d%s", outcome.exit_code, f": {message}" if message else "")
        return outcome.exit_code

    def close(self) -> None:
        """Frees the job for another master."""
        self._journal.close()

    def _make_job(self, state: dict[str, Any]) -> Job:
        snapshot = state.pop("core", None)
        now = time.monotonic()
        if snapshot is None:
            return Job(self._settings, state["generation"], now)
        logger.info("Life %d of the master takes over from the journal", state["generation"])
        return Job.restore(self._settings, snapshot, state["generation"], now)

    def _make_effects(self, inbox: Inbox, generation: int, port: int) -> Effects:
        place = self._place
        pod_specs = PodSpecs(self._spec, f"{place.address}:{port}", place.token_file)
        return Effects(self._spec, place.cluster, pod_specs, PsCalls(place.token, generation), inbox)

    def _serve(self, inbox: Inbox, generation: int, shell: Shell, port: int) -> grpc.Server:
        servicer = MasterServicer(
            inbox,
            generation,
            self._spec.to_json(),
            lambda report: shell.keep_model_layout(messages.model_layout(report)),
        )

        def register(server: grpc.Server) -> None:
            pb_grpc.add_MasterServicer_to_server(servicer, server)

        max_threads = 2 * (self._settings.num_workers + self._settings.num_ps) + 16
        deadline = time.monotonic() + (_PORT_RETRY_S if generation > 1 else 0.0)
        while True:
            try:
                server, bound = serve(register, self._place.host, port, self._place.token, max_threads)
            except JobError as error:
                # Pods know this port from the life before; whatever has taken it may let it go.
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s", error.what)
                threading.Event().wait(0.5)
            else:
                logger.info("The port of the master server is: %d", bound)
                return server

    def _list_data(self, effects: Effects, saved: Mapping[str, Any] | None) -> None:
        """Begins to list what the master can list itself, and to check what an earlier life has listed."""
        if reads_data_itself(self._spec, Path(self._spec.model_zoo or ".")):
            return
        known = (saved or {}).get("core", {}).get("data", {}).get("shards", {})
        for kind in data_kinds(self._spec):
            if kind in known:
                effects.verify_shards(DataKind(kind), [Shard(*shard) for shard in known[kind]])
            else:
                effects.list_shards(kind)


def fail_status(job_dir: Path, job_name: str, message: str) -> None:
    """Says in the status that the job cannot be run."""
    file = StatusFile(job_dir)
    before = file.read() or JobStatus(job_name)
    file.write(dataclasses.replace(before, phase=JobPhase.FAILED, message=message, exit_code=1))


def crash_status(job_dir: Path, job_name: str, log: str) -> None:
    """Says in the status that this life of the master met a bug; the next one may fare better."""
    file = StatusFile(job_dir)
    before = file.read() or JobStatus(job_name)
    file.write(dataclasses.replace(before, message=f"internal error, see {log}"))


def _check_initial_checkpoint(settings: JobSettings) -> None:
    if settings.checkpoint_dir_for_init and settings.strategy is Strategy.PARAMETER_SERVER:
        checkpoints.read(Path(settings.checkpoint_dir_for_init))


def _next_state(spec: JobSpec, place: Place, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the shell keeps in the journal, for the life that begins."""
    if saved is None:
        return {
            "job_name": spec.job_name,
            "data": same_data(spec),
            "generation": 1,
            "port": place.port or _free_port(place.host),
            "started_at": time.time(),
            "model": None,
        }
    for name, now in (("job_name", spec.job_name), ("data", same_data(spec))):
        if saved[name] != now:
            raise JobError(
                f"the journal in {place.job_dir} was written for another job: {saved[name]}, not {now}",
                "a job goes on with the flags that it began with; start a new one in another --job_dir",
            )
    return {**saved, "generation": saved["generation"] + 1, "port": place.port or saved["port"]}


def _write_generation(journal: Journal, state: Mapping[str, Any], job: Job) -> None:
    """Before anybody is answered, so that no two lives ever have the same generation."""
    journal.save({**state, "core": job.snapshot()})


def _free_port(host: str) -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise JobError(f"no free port between {_PORTS.start} and {_PORTS.stop}", "give one with --master_port")
