"""The job stores that a command line selects, and the message if one cannot be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticdl_client.choices import Runtime
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.jobs.local_jobs import LocalJobs
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo, JobStore
from elasticdl_client.kubernetes import api
from elasticdl_client.kubernetes.api_client import READ_TIMEOUT_S

_FIRST_ANSWER_S = 2.0  # for a cluster that was not requested: users of local jobs should not wait for it


@dataclass(slots=True)
class JobStores:
    """The job stores by runtime, and their description for messages.

    A cluster that was not requested by --runtime, a namespace or a context may be unreachable, or not configured.

    Attributes:
        stores: The stores that can be reached.
        needs_cluster: The cluster was requested, so its errors are the command's.
        unreachable: Why the cluster could not be reached; may be empty.
    """

    stores: dict[Runtime, JobStore]
    words: dict[Runtime, str]
    needs_cluster: bool
    unreachable: str = field(default="")

    @classmethod
    def of(cls, options: Options) -> JobStores:
        """Return the stores that a command line selects.

        Raises:
            ElasticDLError: It selects a cluster, and none is configured.
        """
        for_cluster = options.runtime == Runtime.KUBERNETES or bool(options.namespace)
        places = cls({}, {}, for_cluster or options.all_namespaces or bool(options.context))
        if options.runtime != Runtime.LOCAL and not options.job_dir:
            try:
                if places.needs_cluster or api.is_configured():
                    places._add_cluster(options)
            except ElasticDLError as error:
                places._without_cluster(error)
        if not for_cluster:
            directory = Path(options.job_dir) if options.job_dir else None
            places.stores[Runtime.LOCAL] = LocalJobs(directory)
            places.words[Runtime.LOCAL] = f"in {directory}" if directory else "on this machine"
        return places

    @property
    def where(self) -> str:
        """Where jobs were looked for: a text for messages that follows a name."""
        return " or ".join(self.words.values())

    def list(self) -> Sequence[JobInfo]:
        """Return the jobs of all stores.

        Raises:
            ElasticDLError: A requested store cannot be reached, or refuses.
        """
        return self._ask(lambda store: store.list())

    def list_again(self) -> Sequence[JobInfo]:
        """Return the jobs of all stores that have answered before; one that does not answer now is an error.

        Raises:
            ElasticDLError: see `list`.
        """
        jobs = self.list()
        self.needs_cluster = Runtime.KUBERNETES in self.stores
        return jobs

    def find(self, name: str) -> JobInfo:
        """Return the job of a name.

        Raises:
            FlagError: There are two.
            JobError: There is none.
            ElasticDLError: A requested store cannot be reached, or refuses.
        """

        def ask(store: JobStore) -> tuple[JobInfo, ...]:
            job = store.find(name)
            return (job,) if job is not None else ()

        found = self._ask(ask)
        if len(found) > 1:
            raise FlagError(
                f'There are two jobs "{name}": one {found[0].where}, one {found[1].where}.',
                "Say which with --runtime=kubernetes or --runtime=local.",
            )
        if not found:
            hint = "`elasticdl list` shows all jobs; --namespace and --job_dir look elsewhere."
            raise JobError(f'job "{name}" not found {self.where}.', self.unreachable or hint)
        return found[0]

    def store(self, job: JobInfo) -> JobStore:
        """Return the store in which a job was found."""
        return self.stores[job.runtime]

    def _ask(self, ask: Callable[[JobStore], Iterable[JobInfo]]) -> Sequence[JobInfo]:
        found: Sequence[JobInfo] = ()
        for runtime, store in tuple(self.stores.items()):
            try:
                found = [*found, *ask(store)]
            except ElasticDLError as error:
                if runtime is Runtime.LOCAL:
                    raise
                self._without_cluster(error)
        return found

    def _add_cluster(self, options: Options) -> None:
        from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs

        context = options.context or options.defaults.get("context", "")
        patience_s = READ_TIMEOUT_S if self.needs_cluster else _FIRST_ANSWER_S
        connection = api.connect(options.force_use_kube_config_file, context, patience_s)
        namespace = options.namespace or options.defaults.get("namespace") or connection.namespace
        namespace = "" if options.all_namespaces else namespace
        self.stores[Runtime.KUBERNETES] = KubernetesJobs(connection, namespace, context)
        self.words[Runtime.KUBERNETES] = f"in {namespace} namespace" if namespace else "in any namespace"

    def _without_cluster(self, error: ElasticDLError) -> None:
        if self.needs_cluster:
            raise error
        self.unreachable = error.what
        self.stores.pop(Runtime.KUBERNETES, None)
        self.words.pop(Runtime.KUBERNETES, None)
