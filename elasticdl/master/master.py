"""Master: runs one generation of a job's master, from its environment to its exit code.

It owns the order of steps at start and end: journal, generation on disk, core, server, pods; and the reverse.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from elasticdl.master import checkpoints, messages
from elasticdl.master.checkpoints import PsCalls
from elasticdl.master.core.commands import EndJob
from elasticdl.master.core.events import ScaleRefused, ScaleRequested
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import DataKind
from elasticdl.master.effects import Crashed, Effects
from elasticdl.master.environment import RuntimeEnvironment, UserRequest
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import JournalWriteError, ResumedElsewhere, Superseded, save_patiently
from elasticdl.master.pod_specs import to_job_status
from elasticdl.master.servicer import MasterServicer
from elasticdl.master.settings import check_fixed_flags, data_kinds, describe, fixed_flags, settings_of
from elasticdl.master.shell import Shell, end_of_log
from elasticdl.master.tensorboard import watcher
from elasticdl.master.tracking import Watchers, check_packages, trackers
from elasticdl.protocol import Role, Shard
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.addresses import free_ports
from elasticdl.rpc.handshake import check_encryption
from elasticdl.rpc.servers import serve
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import PARTS, check_writable, path_of, remove_matching
from elasticdl_client import last_checkpoint, worker_range
from elasticdl_client.choices import DistributionStrategy, JobType, Runtime
from elasticdl_client.data_sources import is_table
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EXIT_SUPERSEDED, JobPhase, JobStatus
from elasticdl_client.model_source import reads_data_itself
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.trained_model import ModelKind, check_beginning, check_unused, look_at
from elasticdl_client.zoo_modules import framework_of

if TYPE_CHECKING:
    from elasticdl.master.metrics_server import MetricsServer

EXIT_TERMINATED = 143  # of a generation that was terminated and leaves the job to the next
_PORT_RETRY_S = 10.0
_STOP_GRACE_S = 1.0
_MAX_SCALED_WORKERS = 1000  # of a job that began with fewer; beyond that, calls wait for one another

logger = logging.getLogger("elasticdl.master")


class Master:
    """One generation of the master of a job.

    Raises:
        Superseded: Another master runs it.
        ElasticDLError: It cannot be run.
    """

    def __init__(self, environment: RuntimeEnvironment) -> None:
        self._spec = environment.spec
        self._environment = environment
        self._settings = settings_of(environment.spec)
        self._journal = environment.journal
        self._shell: Shell | None = None
        self._metrics: MetricsServer | None = None
        self._stopped_by = ""
        self._is_checkpoint_requested = False  # before the shell existed
        self._is_pausing = False  # the job stops, until it is resumed
        self._shell_lock = threading.Lock()
        self._stop = threading.Event()
        self._find_files: Callable[[str], list[str]] | None = None  # reuses the lists of the preparation

    def request_stop(self, by: str) -> None:
        """End the job in order, or only this generation if another one follows; thread-safe."""
        with self._shell_lock:
            self._stopped_by = by
            self._stop.set()
            if self._shell is not None:
                self._stop_shell(self._shell)

    def request_checkpoint(self) -> None:
        """Request a checkpoint as soon as one can be written; thread-safe."""
        with self._shell_lock:
            if self._shell is not None:
                self._shell.request_checkpoint()
            self._is_checkpoint_requested = self._shell is None

    def _stop_shell(self, shell: Shell) -> None:
        if self._environment.traits.sigterm_ends_job:
            shell.request_stop(f"the job was ended by {self._stopped_by}")
        else:
            shell.request_leave()

    @property
    def stopped(self) -> threading.Event:
        """Event that `request_stop` sets."""
        return self._stop

    @property
    def _is_leaving(self) -> bool:
        return self._stop.is_set() and not self._environment.traits.sigterm_ends_job

    def run(self) -> int:
        """Run the job to its end; return the exit code."""
        saved = self._journal.load()
        if saved is not None and saved.get("ended") is not None:
            return self._end_again(saved)
        try:
            return self._run(saved)
        except ElasticDLError as error:
            if self._is_leaving and (isinstance(error, JournalWriteError) or self._environment.is_transient(error)):
                return self._left()
            raise
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def _prepare(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Check the job; return the shell's part of the journal for this generation."""
        if self._spec.encrypt:
            check_encryption()  # all pods have the same image
        check_packages(self._spec)
        state = _next_state(self._environment, saved, self._journal.read_status())
        if saved is None:
            state |= _initial_model(self._spec, self._settings)
            state["partition_dtypes"] = self._partition_dtypes()
        self._spec = _with_partition_dtypes(self._spec, state.get("partition_dtypes", {}))
        chosen: dict[str, Any] = {"checkpoint_dir_for_init": state["initial_checkpoint"]}
        if self._spec.job_type is not JobType.TRAIN:
            self._spec = dataclasses.replace(self._spec, **chosen)  # workers load it, too: all get the same
            chosen["model_version"] = state["initial_version"]
        self._settings = dataclasses.replace(self._settings, **chosen)
        return state

    def _partition_dtypes(self) -> dict[str, str]:
        """See `elasticdl.data.sources`: otherwise each worker would derive them from the files present at its start."""
        spec = self._spec
        if not spec.job_command and reads_data_itself(spec, Path(spec.model_zoo or ".")):
            return {}
        from elasticdl.data.sources import FoundFiles, partition_dtypes  # only for jobs with such data

        found = FoundFiles()
        self._find_files = found.take
        return partition_dtypes(spec, found.find)

    def _run(self, saved: dict[str, Any] | None) -> int:
        state = self._prepare(saved)
        generation: int = state["generation"]
        if self._spec.metrics_port:
            self._metrics = self._serve_metrics(is_patient=saved is not None)
        for line in describe(self._spec):
            logger.info("%s", line)
        job = self._make_job(state, "" if saved is None else saved.get("run", ""))
        # Before the first answer, so that two masters never have the same generation.
        first = {**state, "core": job.snapshot()}
        patience_s = self._environment.traits.patience_s
        begin_s = patience_s if saved is None else float("inf")  # a running job waits for a disk
        save_patiently(self._journal, first, None, begin_s, self._stop)
        inbox = Inbox()
        effects = self._make_effects(inbox, generation, state["port"])
        watching = Watchers(
            [
                watcher(self._spec.tensorboard_log_dir, generation, job.status().model_version),
                *trackers(self._spec, f"{self._spec.job_name}-{state['run_id']}"),
            ]
        )
        shell = Shell(job, effects, self._journal, state, patience_s, watching)
        self._environment.publish(lambda: shell.history)
        servicer = self._servicer(inbox, generation, shell)
        server = self._serve(servicer, generation, state["port"])
        with self._shell_lock:
            self._shell = shell
            if self._is_checkpoint_requested:
                shell.request_checkpoint()
            if self._stopped_by:
                self._stop_shell(shell)
        self._list_data(effects, saved)
        has_ended = threading.Event()
        follower = threading.Thread(target=self._follow_user, args=(inbox, shell, has_ended), name="user", daemon=True)
        follower.start()
        try:
            outcome = shell.run()
        finally:
            has_ended.set()
            inbox.close()
            watching.close()
            servicer.close_streams()
            server.stop(0.0 if self._is_leaving else _STOP_GRACE_S).wait()
        if outcome is None:
            return self._pause(effects) if self._is_pausing else self._left()
        effects.close()
        return self._end(shell, outcome)

    def _end(self, shell: Shell, outcome: EndJob) -> int:
        message = outcome.message
        last_words = end_of_log(self._environment.cluster, outcome.pod)
        if last_words:
            message = f"{message}\n--- the end of the log of {outcome.pod}\n{last_words}"
        message = hide(message)  # output of the pod itself, not redacted by our logs
        end = _ended(shell.status(), outcome.exit_code, message)
        shell.write_end(end)
        log = logger.info if outcome.exit_code == 0 else logger.error
        log("The job has ended with exit code %d%s", outcome.exit_code, f": {message}" if message else "")
        self._post_end(end, shell.snapshot())
        self._environment.end(outcome.exit_code, end.updated_at, self._stop)
        return outcome.exit_code

    def _left(self) -> int:
        logger.info("The master was ended by %s; the job continues with the next one", self._stopped_by)
        return EXIT_TERMINATED

    def _end_again(self, saved: dict[str, Any]) -> int:
        """Report the end again in a generation that was started after the job's end."""
        exit_code, message, ended_at = int(saved["ended"][0]), str(saved["ended"][1]), float(saved["ended"][2])
        status = self._journal.read_status() or JobStatus(self._spec.job_name)
        if (
            status.exit_code is None and "core" in saved
        ):  # the generation that ended the job could not write its last one
            status = self._last_status(saved, status)
        end = dataclasses.replace(_ended(status, exit_code, message), updated_at=ended_at)
        self._journal.write_status(end)
        logger.info("The job has ended before with exit code %d%s", exit_code, f": {message}" if message else "")
        self._post_end(end, saved)
        self._environment.end(exit_code, ended_at, self._stop)
        return exit_code

    def _last_status(self, saved: Mapping[str, Any], older: JobStatus) -> JobStatus:
        """Return the status of a snapshot if it has newer counts than the written status, else the latter."""
        now = time.monotonic()
        job = Job.restore(self._settings, saved["core"], saved["generation"] + 1, now, time.time() - now)
        found = to_job_status(job.status(), saved["started_at"], older.pods, older.lost_pods)
        return older if found.coverage == older.coverage else dataclasses.replace(found, generation=saved["generation"])

    def _post_end(self, end: JobStatus, snapshot: Mapping[str, Any]) -> None:
        """Post the job's end to --on_end, once for all generations of the master."""
        if snapshot.get("end_posted") or not _post_end(self._environment, end, self._stop):
            return
        try:
            self._journal.save({**snapshot, "end_posted": True})
        except (JournalWriteError, Superseded) as error:  # another generation would post it again
            logger.warning("%s", error)

    def _make_job(self, state: dict[str, Any], earlier_run: str) -> Job:
        """Make the core of a new job, or restore it from the journal.

        Args:
            state: The shell's part of the journal, with the core's, which is removed from it.
            earlier_run: Run of the previous generation; empty if there is none, or its version did not record it.
        """
        snapshot = state.pop("core", None)
        now = time.monotonic()
        unix_offset = time.time() - now
        if snapshot is None:
            if self._settings.checkpoint_dir:
                place = path_of(self._settings.checkpoint_dir)
                checkpoints.check_unused(place, self._settings.strategy, self._spec.job_name)
            return Job(self._settings, state["generation"], now, unix_offset, state["submitted_at"])
        logger.info("Generation %d of the master takes over from the journal", state["generation"])
        written = snapshot["checkpoints"]
        written["newest"] = checkpoints.still_there(written["newest"])
        is_resumed = state["run"] != earlier_run if state["run"] and earlier_run else None
        resumed_at = self._environment.run.resumed_at
        return Job.restore(self._settings, snapshot, state["generation"], now, unix_offset, resumed_at, is_resumed)

    def _make_effects(self, inbox: Inbox, generation: int, port: int) -> Effects:
        environment = self._environment
        ps_calls = PsCalls(environment.endpoint.token, generation)
        return Effects(
            self._spec,
            environment.cluster,
            environment.pod_specs(port),
            ps_calls,
            inbox,
            environment.traits.num_pod_threads,
            self._find_files,
        )

    def _follow_user(self, inbox: Inbox, shell: Shell, has_ended: threading.Event) -> None:
        """Carry out the user's requests while the job runs; runs in a thread of its own."""
        known = UserRequest()
        try:
            for request in self._environment.requests(has_ended):
                if request.num_workers and request.num_workers != known.num_workers:
                    inbox.post(self._scaled(request.num_workers))
                if request.is_stop:
                    self._save_and_leave(shell, has_ended)
                    return
                known = request
        except Exception as error:  # noqa: BLE001  a bug: the loop ends the master with it
            inbox.post(Crashed(error))

    def _scaled(self, num_workers: str) -> ScaleRequested | ScaleRefused:
        try:
            wanted = worker_range.parse_request(num_workers, self._spec)
        except FlagError as error:
            return ScaleRefused(f"{error.what} {error.hint}")
        return ScaleRequested(wanted.least, 0 if wanted.is_fixed else wanted.most)

    def _save_and_leave(self, shell: Shell, has_ended: threading.Event) -> None:
        """End this generation of the master for a job that is to stop, after a checkpoint if one can be written."""
        logger.info("The job is to stop: `elasticdl resume %s` continues it", self._spec.job_name)
        read_status = self._journal.read_status

        @functools.cache  # called at each poll, but one checkpoint is enough
        def ask() -> bool:
            shell.request_checkpoint()
            return True

        if last_checkpoint.can_be_written(self._spec, read_status()):
            version = last_checkpoint.write(self._spec, read_status, lambda: shell.history, ask, has_ended.is_set)
            logger.info("%s", f"Checkpoint {version} is written" if version else "There is no new checkpoint")
        self._is_pausing = True
        shell.request_pause()

    def _pause(self, effects: Effects) -> int:
        """Delete all other pods at once: their work since the checkpoint will be repeated."""
        effects.close()
        cluster = self._environment.cluster
        for pod in cluster.list():
            if pod.role is not Role.MASTER:
                cluster.delete(pod.name, 0.0)
        logger.info("The job has stopped, and all its pods are deleted but this one")
        self._environment.pause()
        return EXIT_TERMINATED

    def _servicer(self, inbox: Inbox, generation: int, shell: Shell) -> MasterServicer:
        return MasterServicer(
            inbox,
            generation,
            self._spec.public().to_json(),
            lambda report: shell.keep_model_layout(messages.model_layout(report)),
        )

    def _serve(self, servicer: MasterServicer, generation: int, port: int) -> grpc.Server:
        def register(server: grpc.Server) -> None:
            pb_grpc.add_MasterServicer_to_server(servicer, server)

        num_polls = 2 if self._settings.has_groups else 1  # long polls of a worker, besides its stream and other calls
        num_workers = max(self._settings.num_workers, _MAX_SCALED_WORKERS)  # threads are created on demand
        num_workers *= self._settings.processes_per_worker
        max_threads = (num_polls + 2) * num_workers + 2 * self._settings.num_ps + 16
        deadline = time.monotonic() + (_PORT_RETRY_S if generation > 1 else 0.0)
        endpoint = self._environment.endpoint
        while True:
            try:
                server, bound = serve(register, endpoint.host, port, endpoint.token, max_threads)
            except JobError as error:
                # Pods know this port from the previous generation; a process that has taken it may release it.
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s", error.what)
                threading.Event().wait(0.5)
            else:
                logger.info("The port of the master server is: %d", bound)
                return server

    def _serve_metrics(self, *, is_patient: bool) -> MetricsServer:
        """Serve metrics until this process ends, so that the last values are seen, too.

        Args:
            is_patient: Pods train already, so a taken port must not end the job.

        Raises:
            JobError: The port cannot be used, or an image was built without the package for the format.
        """
        try:
            from elasticdl.master.metrics import JobCollector
            from elasticdl.master.metrics_server import MetricsServer
        except ImportError as error:
            raise JobError(
                f"--metrics_port: the master has no package prometheus-client ({error})",
                "build the image again with this version, or leave --metrics_port out",
            ) from error

        environment = self._environment
        collector = JobCollector(environment.spec, self._journal.read_status, environment.traits.read_api_calls)
        return MetricsServer(environment.endpoint.host, environment.spec.metrics_port, collector, is_patient=is_patient)

    def _list_data(self, effects: Effects, saved: Mapping[str, Any] | None) -> None:
        """Begin to list the data that the master can list, and to verify what an earlier generation has listed."""
        if self._spec.job_command:  # listed when a script requests them
            return
        if reads_data_itself(self._spec, Path(self._spec.model_zoo or ".")):
            return
        known = (saved or {}).get("core", {}).get("data", {}).get("shards", {})
        for kind in data_kinds(self._spec):
            if kind in known:
                effects.verify_shards(DataKind(kind), [Shard(*shard) for shard in known[kind]])
            else:
                effects.list_shards(kind)


def _with_partition_dtypes(spec: JobSpec, dtypes: Mapping[str, str]) -> JobSpec:
    if not dtypes:
        return spec
    from elasticdl.data.sources import with_partition_dtypes

    return with_partition_dtypes(spec, dtypes)


def _ended(status: JobStatus, exit_code: int, message: str) -> JobStatus:
    phase = JobPhase.FAILED if exit_code else JobPhase.SUCCEEDED
    return dataclasses.replace(status, phase=phase, message=message, exit_code=exit_code)


def fail(environment: RuntimeEnvironment, error: ElasticDLError, stop: threading.Event) -> None:
    """End a job that cannot be run, unless the next generation may run it.

    Args:
        stop: See `RuntimeEnvironment.end`.
    """
    if environment.is_transient(error):
        return
    before = environment.journal.read_status()
    is_new = before is None or before.exit_code is None
    ended_at = before.updated_at if before is not None and not is_new else time.time()  # of an earlier generation
    end = _change_status(environment, phase=JobPhase.FAILED, message=str(error), exit_code=1, updated_at=ended_at)
    if is_new:
        _post_end(environment, end, stop)
    environment.end(1, ended_at, stop)


def end_here(environment: RuntimeEnvironment, error: ResumedElsewhere, stop: threading.Event) -> None:
    """End the local rest of a job that was resumed elsewhere: its pods, and its status in this place.

    Args:
        stop: See `RuntimeEnvironment.end`.
    """
    try:
        for pod in environment.cluster.list():
            if pod.role is not Role.MASTER:
                environment.cluster.delete(pod.name)
    except ElasticDLError as failure:
        logger.warning("%s", failure.what)
    ended_at = time.time()
    _change_status(
        environment, phase=JobPhase.FAILED, message=str(error), exit_code=EXIT_SUPERSEDED, updated_at=ended_at
    )
    environment.end(EXIT_SUPERSEDED, ended_at, stop)


def crash(environment: RuntimeEnvironment, log: str) -> None:
    """Write to the status that this generation of the master has met a bug; the next one may succeed."""
    _change_status(environment, message=f"internal error, see {log}", updated_at=time.time())


def _change_status(environment: RuntimeEnvironment, **changes: Any) -> JobStatus:
    before = environment.journal.read_status() or JobStatus(environment.spec.job_name)
    status = dataclasses.replace(before, **changes)
    try:
        environment.journal.write_status(status)
    except Superseded as error:
        logger.error("%s", error)
    return status


def _post_end(environment: RuntimeEnvironment, end: JobStatus, stop: threading.Event) -> bool:
    """Post the end of a job with --on_end; for a local job the client does that.

    Returns:
        Whether no other generation needs to.
    """
    spec = environment.spec
    if not spec.on_end or spec.runtime is not Runtime.KUBERNETES:
        return False
    from elasticdl_client import end_hook  # imports HTTP modules, which few jobs need

    delivery = end_hook.post(spec, end, stop)
    if delivery is not None:
        logger.log(logging.INFO if delivery.is_done else logging.WARNING, "%s", delivery.text)
    return delivery is not None


def _initial_model(spec: JobSpec, settings: JobSettings) -> dict[str, Any]:
    """Choose the initial model of the job, once: the next generation of the master might find a newer one."""
    files = {"metrics_output", "output"} if spec.job_type is JobType.ANALYZE else {"metrics_output"}
    for flag in ("output", "checkpoint_dir", "bad_records_dir", "tensorboard_log_dir", "metrics_output"):
        if place := getattr(spec, flag):
            check_writable(path_of(place).parent if flag in files else path_of(place), flag)
    if spec.job_type is JobType.TRAIN:
        return {"initial_checkpoint": _initial_checkpoint(settings)}
    if spec.job_type is JobType.ANALYZE:
        remove_matching(path_of(spec.prediction_outputs), PARTS)  # of an earlier job that did not end
        return {"initial_checkpoint": "", "initial_version": 0}
    if is_remote(spec.prediction_outputs):
        _check_unused_storage(spec.prediction_outputs)
    elif is_table(spec.prediction_outputs):
        from elasticdl.data.sql import check_unused_table  # imports NumPy, only for jobs that need it

        check_unused_table(spec.prediction_outputs)
    elif spec.prediction_outputs:
        check_unused(Path(spec.prediction_outputs))
    found = look_at(path_of(spec.checkpoint_dir_for_init))
    found.check_strategy(spec.distribution_strategy)
    found.check_framework(framework_of(spec))
    logger.info("The model is %s: %s, version %d", found.kind, found.path, found.version)
    path = checkpoints.initial(found.path) if found.kind is ModelKind.SERVERS else found.path
    return {"initial_checkpoint": str(path), "initial_version": found.version}


def _check_unused_storage(url: str) -> None:
    if storage_of(url).list(url):
        raise FlagError(
            f"--prediction_outputs={url} is not empty: the files of two jobs would be mixed up.",
            "Name a directory that is empty or not there yet.",
        )


def _initial_checkpoint(settings: JobSettings) -> str:
    if not settings.checkpoint_dir_for_init:
        return ""
    path = path_of(settings.checkpoint_dir_for_init)
    if path.is_dir():
        check_beginning(path, settings.strategy)
    if settings.strategy is DistributionStrategy.PARAMETER_SERVER:
        return str(checkpoints.initial(path))
    return settings.checkpoint_dir_for_init


def _next_state(
    environment: RuntimeEnvironment, saved: Mapping[str, Any] | None, status: JobStatus | None
) -> dict[str, Any]:
    """Return the shell's part of the journal for the new generation.

    Args:
        environment: Environment of the job.
        saved: The journal; None if there is none.
        status: The last written status, which always follows a journal of the same generation.
    """
    spec, run, endpoint = environment.spec, environment.run, environment.endpoint
    if saved is None:
        now = time.time()
        return {
            "job_name": spec.job_name,
            "fixed_flags": fixed_flags(spec),
            "generation": 1,
            "port": endpoint.port or free_ports(endpoint.host, 1)[0],
            "started_at": now,
            "submitted_at": min(run.submitted_at or now, now),
            "model": None,
            "run_id": secrets.token_hex(6),
            "run": run.name,
        }
    check_fixed_flags(saved["fixed_flags"], spec)
    newest: int = max(saved["generation"], status.generation if status is not None else 0)
    if newest > saved["generation"]:
        logger.warning(
            "The journal is older than the job's status: it is of generation %d of the master, the status of %d. Was "
            "a copy of it put back? Lost pods, failures and evaluations since are not known; which records are in the "
            "model is known by its checkpoint",
            saved["generation"],
            newest,
        )
    return {
        **saved,
        "run_id": saved.get("run_id") or secrets.token_hex(6),  # a job of an older version has none
        "run": run.name,
        "generation": newest + 1,  # leases of earlier generations must be distinguishable
        "port": endpoint.port or saved["port"],
    }
