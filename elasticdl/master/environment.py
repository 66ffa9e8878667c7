"""The port `RuntimeEnvironment`: the runtime of a master, with all differences between the runtimes.

Adapters: local_environment.py and kubernetes/environment.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from elasticdl.cluster.cluster import Cluster
from elasticdl.master.journal import Journal
from elasticdl.master.pod_specs import PodSpecs
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec


@dataclass(frozen=True, slots=True)
class UserRequest:
    """The requests of the user for a running job.

    Attributes:
        num_workers: Requested number or range of workers, as text; empty if none was requested.
        is_stop: The job is to stop, and to continue once it is resumed.
    """

    num_workers: str = ""
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint that a master listens on.

    Attributes:
        port: 0 means any free port, the same in each generation.
        token: The job's token, required in every call.
    """

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class JobRun:
    """One submission or one `elasticdl resume` of a job, with all its masters.

    Attributes:
        name: Name of this run, since clocks cannot distinguish runs within a second; empty if unknown.
        submitted_at: When the job was submitted, in seconds since the Unix epoch by this machine's clock; 0 if unknown.
        resumed_at: When this run was requested, likewise.
    """

    name: str = ""
    submitted_at: float = 0.0
    resumed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """The abilities of a runtime, and how a master behaves in it.

    Attributes:
        num_pod_threads: Number of pods created and deleted concurrently.
        patience_s: Seconds that cluster and journal may be unreachable as a generation begins or writes the job's end.
        sigterm_ends_job: SIGTERM ends the job, not only this generation of its master.
        read_api_calls: Returns the numbers of answers of the Kubernetes API by HTTP method and status; thread-safe.
    """

    num_pod_threads: int
    patience_s: float
    sigterm_ends_job: bool
    read_api_calls: Callable[[], Mapping[tuple[str, str], int]] = dict


class RuntimeEnvironment(Protocol):
    """The runtime of a master: seven verbs, and the master's collaborators."""

    @property
    def spec(self) -> JobSpec: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def journal(self) -> Journal:
        """Journal that this generation alone holds."""
        ...

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def run(self) -> JobRun: ...

    @property
    def traits(self) -> RuntimeTraits: ...

    def pod_specs(self, port: int) -> PodSpecs:
        """Return the specifications for pods that reach this master at a port."""
        ...

    def publish(self, history: Callable[[], EventHistory]) -> None:
        """Show the job's events in the usual place of this runtime, from now on until `close`."""
        ...

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        """Yield the present requests of the user, if there are any, then each change, until `stop` is set."""
        ...

    def is_transient(self, error: ElasticDLError) -> bool:
        """Return whether the next generation may succeed, so that the job continues."""
        ...

    def end(self, exit_code: int, ended_at: float, stop: threading.Event) -> None:
        """Prevent further generations: the job has ended and its status is written.

        Args:
            ended_at: End of the job in seconds since the Unix epoch, maybe in an earlier generation.
            stop: Set when this generation is terminating; the call may wait until the job is to be deleted.
        """
        ...

    def pause(self) -> None:
        """Prevent further generations until the job is resumed: it is stopped and its state is written."""
        ...

    def close(self) -> None:
        """Release the job for another master."""
        ...
