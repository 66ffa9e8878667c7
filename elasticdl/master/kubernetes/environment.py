"""The master on Kubernetes: a pod among the job's pods, whose objects the client has made.

Environment: ``ELASTICDL_NAMESPACE``, ``ELASTICDL_JOB_NAME``, ``ELASTICDL_TOKEN_FILE`` and ``MASTER_PORT``.  Before
anything is begun the master's rights are checked, and the job's ConfigMap becomes the owner of its other objects, so
that deleting it deletes all.  While it runs, annotations of the ConfigMap say how many workers the user wants, and
whether the job is to stop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl.cluster.kubernetes.api import ApiCalls, ApiServer, Closed, Object, Query
from elasticdl.master.environment import UserRequest
from elasticdl.master.journal import JournalWriteError, Superseded
from elasticdl.master.kubernetes.event_publisher import EventPublisher, Owner
from elasticdl.master.kubernetes.expiry import Expiry
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl.master.kubernetes.own_pod import OwnPod
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.rpc import addresses
from elasticdl.rpc.job_secret import read_secret_flags, read_token, whole_spec
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.access import described, missing_of_user
from elasticdl_client.kubernetes.api import ClusterError, Connection, connect
from elasticdl_client.kubernetes.commands import grant
from elasticdl_client.kubernetes.pods import pod_manifest
from elasticdl_client.kubernetes.rbac import EXPIRY_RIGHTS, MASTER_RIGHTS

PATIENCE_S = 300.0
_MAX_PAUSE_S = 5.0
_LABELS = {
    JobPhase.PENDING: "Pending",
    JobPhase.RUNNING: "Running",
    JobPhase.SUCCEEDED: "Finished",
    JobPhase.FAILED: "Failed",
}
_PS_ENV = {"PS_PORT": str(names.PS_PORT), "PS_ADVERTISED_HOST": "$(MY_POD_IP)"}

_STRATEGIC = "application/strategic-merge-patch+json"  # owner references are merged by their uid
_PATHS = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
}
_STREAM_S = 60  # after it the server ends a stream, and the object is read again; one that is silent longer is broken
_SILENCE_S = 3.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0

Found = TypeVar("Found")
logger = logging.getLogger("elasticdl.master")


class KubernetesEnvironment:
    """`RuntimeEnvironment` of a job in a namespace; see the port for the attributes."""

    num_pod_threads = 16
    patience_s = PATIENCE_S
    sigterm_ends_job = False

    def __init__(self, connection: Connection, namespace: str, job_name: str, port: int) -> None:
        """Takes the job over; what the API does not answer is asked again for `PATIENCE_S`.

        Raises:
            Superseded: the job was deleted, or this pod has a successor.
            ElasticDLError: the job cannot be run here.
        """
        self.host = addresses.any_host()
        self.port = port
        self.token = read_token()
        self._connection = connection
        self._calls = ApiCalls()
        self._calls.count(connection.client)
        self._namespace = namespace
        self._publisher: EventPublisher | None = None
        self._own_pod = OwnPod(connection, namespace, job_name)
        try:
            self._take(job_name)
        except Superseded:
            raise
        except ElasticDLError as error:
            if not self.is_transient(error):
                self._own_pod.label(_LABELS[JobPhase.FAILED])
                self._own_pod.end()
            raise

    def _take(self, job_name: str) -> None:
        job, server_now = _patiently(lambda: self._read_job(job_name))
        now = time.time()
        ahead = now - server_now  # of the API server's clock, which has no fractions of a second in what it tells
        owner_uid: str = job.metadata.uid
        self._owner_uid = owner_uid
        self.spec = whole_spec(job.data[names.SPEC_KEY])
        account = self.spec.service_account
        self._expiry = Expiry(self._connection, self._namespace, job_name, owner_uid, account)
        _patiently(self._check_rights)
        is_owned = _patiently(lambda: self._own_pod.look(owner_uid))
        self.submitted_at = min(now, job.metadata.creation_timestamp.timestamp() + ahead)
        self.resumed_at = min(now, self._own_pod.created_at + ahead)
        if not is_owned:
            _patiently(lambda: set_owners(self._connection, self.spec, self._namespace, owner_uid))
        self.journal = _patiently(
            lambda: ConfigMapJournal(self._connection, self._namespace, job_name, self._say_phase)
        )

        has_secret_envs = read_secret_flags() is not None

        def manifest(pod: PodSpec) -> dict[str, Any]:
            max_memory = self.cluster.max_memory() if pod.memory_factor > 1 else None
            return pod_manifest(self.spec, pod, owner_uid, max_memory, has_secret_envs)

        client = self._connection.client
        self.cluster = KubernetesCluster(self._namespace, job_name, manifest, client, self._calls)
        self._requests = RequestWatch(client, self._namespace, job_name, self._calls)

    def _check_rights(self) -> None:
        check_rights(self._connection, self._namespace, self.spec.service_account, self.spec.expires)

    def api_calls(self) -> Mapping[tuple[str, str], int]:
        return self._calls.counts()

    def pod_specs(self, port: int) -> PodSpecs:
        address = names.master_address(self.spec.job_name, self._namespace)
        return PodSpecs(self.spec, "python", address, ps_env=_PS_ENV)

    def publish(self, history: Callable[[], EventHistory]) -> None:
        owner = Owner(self._namespace, self.spec.job_name, self._owner_uid)
        self._publisher = EventPublisher(self._connection, owner, history, self.cluster.uid_of)

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        return self._requests.requests(stop)

    def is_transient(self, error: ElasticDLError) -> bool:
        return isinstance(error, JournalWriteError) or (isinstance(error, ClusterError) and error.unreachable)

    def end(self, exit_code: int, ended_at: float, stop: threading.Event) -> None:
        """A job with a time to live is deleted after it; else a pod that failed is told to the kubelet to be over."""
        self._close_publisher()
        if self.spec.expires and self._expiry.wait(ended_at, self.spec.ttl_after_finished, stop):
            return
        if exit_code != 0:
            self._own_pod.end()

    def pause(self) -> None:
        """The pod stays, with its log, as one that has failed: `elasticdl resume` makes another one."""
        self._close_publisher()
        self._own_pod.label(names.STOPPED)
        self._own_pod.end()

    def close(self) -> None:
        self._close_publisher()
        self._requests.close()
        self.journal.close()

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _say_phase(self, phase: JobPhase) -> None:
        self._own_pod.label(_LABELS[phase])

    def _read_job(self, job_name: str) -> tuple[Any, float]:
        """Return the job's ConfigMap, and the time by the API server's clock; without that, by this machine's."""
        name = names.job_object(job_name)
        try:
            with self._connection.doing(f"read ConfigMap {name} of namespace {self._namespace}"):
                core = self._connection.core
                job, _, headers = core.read_namespaced_config_map_with_http_info(name, self._namespace)
        except ClusterError as error:
            if error.status == 404:
                raise Superseded(
                    f"the job was deleted: there is no ConfigMap {name} in namespace {self._namespace}"
                ) from error
            if error.status == 403:
                raise JobError(error.what, "`elasticdl rbac --print` shows what the service account needs") from error
            raise
        if names.SPEC_KEY not in (job.data or {}):
            raise JobError(f"the job's ConfigMap {name} holds no {names.SPEC_KEY}", "submit the job again")
        date = headers.get("Date", "")
        return job, parsedate_to_datetime(date).timestamp() if date else time.time()


def open_environment() -> KubernetesEnvironment:
    """The place that the environment names.

    Raises:
        Superseded: another master has it, or the job was deleted.
        ElasticDLError: the job cannot be run here.
    """
    port = os.environ.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and int(port) <= 65535):
        raise JobError(f"MASTER_PORT={port} is not a port")
    return KubernetesEnvironment(
        connect(),
        os.environ["ELASTICDL_NAMESPACE"],
        os.environ["ELASTICDL_JOB_NAME"],
        int(port or names.MASTER_PORT),
    )


def _patiently(action: Callable[[], Found]) -> Found:
    """Does something with the API, again and again while that does not answer.

    Raises:
        ElasticDLError: it refuses, or has not answered for `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    pause_s, said = 0.5, ""
    while True:
        try:
            return action()
        except ClusterError as error:
            if not error.unreachable or time.monotonic() > deadline:
                raise
            if error.what != said:
                logger.warning("%s", error.what)
            said = error.what
        threading.Event().wait(pause_s)
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def check_rights(connection: Connection, namespace: str, service_account: str, expires: bool) -> None:
    """Checks all rights of a master.

    Args:
        expires: it deletes its job some time after the end.

    Raises:
        JobError: naming every verb that is missing.
        ClusterError: the API does not answer.
    """
    try:
        missing = missing_of_user(connection, namespace, (*MASTER_RIGHTS, *(EXPIRY_RIGHTS if expires else ())))
    except ClusterError as error:
        if error.unreachable:
            raise
        logger.warning("The rights of the master cannot be checked: %s", error.what)
        return
    if missing:
        raise JobError(
            f"the service account {service_account} of namespace {namespace} lacks rights that the master needs: "
            f"{described(missing)}",
            f"{grant(namespace, service_account)}  (`elasticdl rbac --print` shows them)",
        )


def set_owners(connection: Connection, spec: JobSpec, namespace: str, owner_uid: str) -> None:
    """Adds the owner to everything of the job, the master's pod last: what has been done is then known from that.

    The client does so when it submits a job; objects that came by `kubectl apply` have no owner yet.

    Raises:
        ClusterError: the API does not answer, or refuses; an object that is missing is a warning.
    """
    job = names.job_object(spec.job_name)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": owner_uid}
    for kind, name in _objects(spec):
        try:
            with connection.doing(f"make the job the owner of {kind} {name}"):
                path = f"{_PATHS[kind].format(namespace=namespace)}/{name}"
                connection.patch(path, {"metadata": {"ownerReferences": [owner]}}, _STRATEGIC)
        except ClusterError as error:
            if error.status != 404:
                raise
            logger.warning("%s %s of the job does not exist", kind, name)
    logger.info("ConfigMap %s owns all objects of the job now", job)


def _objects(spec: JobSpec) -> Iterator[tuple[str, str]]:
    job = spec.job_name
    yield "ConfigMap", names.state_object(job)
    yield "Secret", names.token_object(job)
    yield "Service", names.master_service(job)
    if spec.need_tf_config:
        for role, size in (("ps", spec.num_ps_pods), ("worker", spec.num_workers)):
            for number in range(size):
                yield "Service", names.pod_name(job, role, number)
    yield "NetworkPolicy", names.job_object(job)
    yield "Pod", names.pod_name(job, "master", 0)


class RequestWatch:
    """The requests of the user in the annotations of one ConfigMap.

    Args:
        api_client: a `kubernetes.client.ApiClient`; its configuration is used.
        namespace: of the job.
        job_name: whose ConfigMap exists.
        calls: counts the calls.
    """

    def __init__(self, api_client: Any, namespace: str, job_name: str, calls: ApiCalls) -> None:
        self._api = ApiServer(api_client, namespace, calls)
        self._name = names.job_object(job_name)
        self._trouble = ""

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        """Yield the present requests and each change, until `stop` is set or the watch is closed; never fail."""
        known, pause_s = UserRequest(), 0.0
        while not stop.wait(pause_s):
            try:
                for found in self._watch():
                    self._all_well()
                    annotations = found["metadata"].get("annotations") or {}
                    is_stop = bool(annotations.get(names.STOP_ANNOTATION))
                    request = UserRequest(annotations.get(names.NUM_WORKERS_ANNOTATION, ""), is_stop)
                    if request != known:
                        yield request
                    known, pause_s = request, 0.0
            except Closed:
                return
            except ElasticDLError as error:
                self._say_trouble(error.what)
                pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Ends the watch."""
        self._api.close()

    def _watch(self) -> Iterator[Object]:
        """The object as it is, then as it changes, until the stream ends.

        Without a resource version a watch begins with the object as it is.  With the object's own it is refused as too
        old, again and again, once other objects of its kind have changed often enough since.
        """
        query: Query = {"watch": 1, "fieldSelector": f"metadata.name={self._name}", "timeoutSeconds": _STREAM_S}
        with self._api.stream(self._api.namespaced("configmaps"), query, _STREAM_S + _SILENCE_S) as lines:
            for line in lines:
                if line["type"] in ("ERROR", "DELETED"):
                    raise ElasticDLError(f"The watch of ConfigMap {self._name} was ended.")
                yield line["object"]

    def _say_trouble(self, what: str) -> None:
        if what != self._trouble:
            logger.warning("The requests of the user cannot be read for the moment: %s", what)
            self._trouble = what

    def _all_well(self) -> None:
        if self._trouble:
            logger.info("The requests of the user can be read again")
            self._trouble = ""
