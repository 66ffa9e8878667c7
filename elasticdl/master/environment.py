"""The port `RuntimeEnvironment`: where a master runs, and all that differs between the runtimes.

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
    """The requests of the user for a job while it runs.

    Attributes:
        num_workers: how many workers there are to be, as text; empty: no number was asked for.
        is_stop: the job is to stop, and to continue once it is resumed.
    """

    num_workers: str = ""
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a master listens.

    Attributes:
        port: 0: any free one, the same in each generation.
        token: the job's, that every call must carry.
    """

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class JobRun:
    """The masters of one submission, or of one `elasticdl resume`.

    Attributes:
        name: of this run; clocks do not tell it from one that follows within a second.  Empty: not known.
        submitted_at: when the job was submitted, in seconds since the Unix epoch by this machine's clock; 0: unknown.
        resumed_at: when this run was asked for, likewise.
    """

    name: str = ""
    submitted_at: float = 0.0
    resumed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """What a runtime can do, and how a master behaves in it.

    Attributes:
        num_pod_threads: pods that are created and deleted at once.
        patience_s: how long cluster and journal may be away while a generation begins or writes the job's end.
        sigterm_ends_job: SIGTERM ends the job, not only this generation of its master.
        read_api_calls: return the answers of the Kubernetes API so far, by HTTP method and status; from any thread.
    """

    num_pod_threads: int
    patience_s: float
    sigterm_ends_job: bool
    read_api_calls: Callable[[], Mapping[tuple[str, str], int]] = dict


class RuntimeEnvironment(Protocol):
    """Seven verbs, and the master's collaborators."""

    @property
    def spec(self) -> JobSpec: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def journal(self) -> Journal:
        """Held by this generation alone."""
        ...

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def run(self) -> JobRun: ...

    @property
    def traits(self) -> RuntimeTraits: ...

    def pod_specs(self, port: int) -> PodSpecs:
        """For pods that reach this master at a port."""
        ...

    def publish(self, history: Callable[[], EventHistory]) -> None:
        """Shows the job's events where people of this runtime look for them, from now on until `close`."""
        ...

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        """The requests of the user: the present ones, if there are any, then each change, until `stop`."""
        ...

    def is_transient(self, error: ElasticDLError) -> bool:
        """Whether the next generation may do better, so that the job continues."""
        ...

    def end(self, exit_code: int, ended_at: float, stop: threading.Event) -> None:
        """The job has ended and its status is written: there must be no further generation.

        Args:
            ended_at: in seconds since the Unix epoch, maybe in an earlier generation.
            stop: set when this generation is terminating; it may wait until the job is to be deleted.
        """
        ...

    def pause(self) -> None:
        """The job is stopped and its state is written: no generation may follow before the job is resumed."""
        ...

    def close(self) -> None:
        """Frees the job for another master."""
        ...
