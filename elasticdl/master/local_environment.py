"""The master on the local runtime: pods are children of the agent, everything else are files in the job's directory.

Environment: ``ELASTICDL_JOB_DIR``, ``ELASTICDL_TOKEN_FILE``, ``ELASTICDL_AGENT_SOCKET``, ``MASTER_PORT`` (0: a free
one) and ``ELASTICDL_RESUMED_AT`` (seconds since the Unix epoch).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticdl.cluster.cluster import Cluster
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.master.environment import UserRequest
from elasticdl.master.file_journal import FileJournal, StatusFile
from elasticdl.master.journal import Journal, Superseded
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.master.ports import free_ports
from elasticdl.model_def import framework_of
from elasticdl.rpc.addresses import written
from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE, read_token, whole_spec
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.scaling import FILE as NUM_WORKERS_FILE

_LOOK_S = 0.5  # at a file that only the user writes
_LOOPBACK = "127.0.0.1"
_THREADS_VARIABLES = {FrameworkName.TENSORFLOW: "TF_NUM_INTRAOP_THREADS", FrameworkName.TORCH: "OMP_NUM_THREADS"}


@dataclass(frozen=True, slots=True)
class LocalEnvironment:
    """`RuntimeEnvironment` of a directory.

    Attributes:
        token_file: of the job, readable by its pods too.
    """

    spec: JobSpec
    cluster: Cluster
    journal: Journal
    token: str
    token_file: str
    port: int = 0
    host: str = _LOOPBACK
    num_pod_threads: int = 1  # the agent does one thing at a time
    patience_s: float = 0.0
    sigterm_ends_job: bool = True
    submitted_at: float = 0.0
    resumed_at: float = 0.0

    def api_calls(self) -> Mapping[tuple[str, str], int]:
        return {}

    def pod_specs(self, port: int) -> PodSpecs:
        env = {TOKEN_FILE_VARIABLE: self.token_file, **shares_of_machine(self.spec, os.environ)}
        tf_addresses = self._tf_addresses() if self.spec.job_command and self.spec.need_tf_config else None
        ps_env = {"PS_HOST": self.host}
        return PodSpecs(self.spec, sys.executable, written(self.host, port), env, ps_env, tf_addresses=tf_addresses)

    def _tf_addresses(self) -> dict[str, list[str]]:
        """Of TensorFlow's own servers and workers: chosen once, for all lives of the job's master and pods."""
        path = Path(self.token_file).parent / "tf_addresses.json"
        if not path.exists():
            sizes = {"ps": self.spec.num_ps_pods, "worker": self.spec.num_workers}
            ports = iter(free_ports(self.host, sum(sizes.values())))
            found = {role: [written(self.host, next(ports)) for _ in range(size)] for role, size in sizes.items()}
            path.write_text(json.dumps(found))
        return dict(json.loads(path.read_text()))

    def publish(self, history: Callable[[], EventHistory]) -> None:
        """The client of a local job shows them itself."""

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
        return False

    def end(self, exit_code: int, ended_at: float, stop: threading.Event) -> None:
        """The client reads the status and ends the agent."""

    def pause(self) -> None:
        """The client ends the agent."""

    def close(self) -> None:
        self.journal.close()


def shares_of_machine(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that give each process of a job its share of this machine's cores, unless the user says otherwise.

    The frameworks' threads wait for each other by spinning: as many as there are cores, in each of several pods, take
    twice the time for the same step.
    """
    known = _THREADS_VARIABLES
    own = known.get(framework_of(spec)) if spec.model_def else None
    wanted = [own] if own else list(known.values())
    num_cores = len(os.sched_getaffinity(0))
    num_processes = max(spec.num_workers, spec.max_workers) * spec.num_processes_per_worker
    share = str(max(1, num_cores // (num_processes + spec.num_ps_pods)))
    return {name: share for name in wanted if name not in environment and name not in spec.envs_dict()}


def open_environment() -> LocalEnvironment:
    """The place that the environment names.

    Raises:
        Superseded: another master has it.
        ElasticDLError: it cannot be used; the status says so, if there is a directory for it.
    """
    job_dir, job_name = Path(_environment("ELASTICDL_JOB_DIR")), ""
    try:
        spec = read_spec(job_dir)
        job_name = spec.job_name
        return LocalEnvironment(
            spec=spec,
            cluster=ProcessCluster(_environment("ELASTICDL_AGENT_SOCKET")),
            token=read_token(),
            token_file=os.environ[TOKEN_FILE_VARIABLE],
            port=port_of(os.environ.get("MASTER_PORT", "") or "0"),
            journal=FileJournal(job_dir),
            submitted_at=(job_dir / "spec.json").stat().st_mtime,  # the client writes it once
            resumed_at=_time(os.environ.get("ELASTICDL_RESUMED_AT", "") or "0"),
        )
    except Superseded:
        raise
    except ElasticDLError as error:
        status = JobStatus(job_name, phase=JobPhase.FAILED, message=str(error), exit_code=1)
        StatusFile(job_dir).write(status)
        raise


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
    spec = whole_spec(text, job_dir)
    if spec.training_data and not spec.checkpoint_dir:
        spec = dataclasses.replace(spec, checkpoint_dir=str(job_dir / "checkpoints"))
    if spec.max_bad_records and not spec.bad_records_dir:
        spec = dataclasses.replace(spec, bad_records_dir=str(job_dir / "bad_records"))
    return spec


def port_of(text: str) -> int:
    """A port from the environment.

    Raises:
        JobError: it is none.
    """
    if not text.isdecimal() or int(text) > 65535:
        raise JobError(f"MASTER_PORT={text} is not a port")
    return int(text)


def _time(text: str) -> float:
    """Seconds since the Unix epoch, from the environment.

    Raises:
        JobError: it is none.
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
