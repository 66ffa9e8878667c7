"""The master on Kubernetes: a pod among the job's pods; the client has created the job's other objects.

Environment: ``ELASTICDL_NAMESPACE``, ``ELASTICDL_JOB_NAME``, ``ELASTICDL_TOKEN_FILE`` and ``MASTER_PORT``.  First the
master's rights are checked, and the job's ConfigMap becomes the owner of its other objects, so that deleting it deletes
all.  While the job runs, annotations of the ConfigMap contain the user's requests: the number of workers, and whether
the job is to stop.

`OwnPod`: the label and the end of the pod that the master runs in.  A failure to set the label is only a warning.

`Expiry`: after --ttl_after_finished seconds the master of an ended job deletes all its objects.

It deletes the ConfigMap that owns the rest, and leaves the rest to the cluster's garbage collector: all pods, the
Services, the Secret and the NetworkPolicy go first, the ConfigMap goes last.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl.cluster.kubernetes.api import ApiCalls, ApiServer, Closed, Object, Query, StreamPauses
from elasticdl.master.environment import Endpoint, JobRun, RuntimeTraits, UserRequest
from elasticdl.master.journal import Journal, JournalDeleted, JournalWriteError, Superseded
from elasticdl.master.kubernetes.event_publisher import EventPublisher, Owner
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.master.storage_journal import StorageJournal, place_of
from elasticdl.rpc import addresses
from elasticdl.rpc.job_secret import read_secret_flags, read_token, whole_spec
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection, connect, grant
from elasticdl_client.kubernetes.api_client import ApiClient, kind_path, object_path
from elasticdl_client.kubernetes.pods import pod_manifest
from elasticdl_client.kubernetes.rbac import EXPIRY_RIGHTS, MASTER_RIGHTS, described, missing_of_user

PATIENCE_S = 300.0
_NUM_POD_THREADS = 16
_MAX_PAUSE_S = 5.0
_LABELS = {
    JobPhase.PENDING: "Pending",
    JobPhase.RUNNING: "Running",
    JobPhase.SUCCEEDED: "Finished",
    JobPhase.FAILED: "Failed",
}
_PS_ENV = {"PS_PORT": str(names.PS_PORT), "PS_ADVERTISED_HOST": "$(MY_POD_IP)"}

_STRATEGIC = "application/strategic-merge-patch+json"  # owner references are merged by their uid
_STREAM_S = 60  # then the server ends a stream, and the object is read again; a longer silence means a broken stream
_SILENCE_S = 3.0
_LASTING_S = 1.0  # after a stream that ends sooner, the delay of the next one grows
_FIRST_PAUSE_S = 0.5

Found = TypeVar("Found")
logger = logging.getLogger("elasticdl.master")


class KubernetesEnvironment:
    """`RuntimeEnvironment` of a job in a namespace; see the port for the attributes."""

    def __init__(self, connection: Connection, namespace: str, job_name: str, port: int) -> None:
        """Take the job over; calls that the API does not answer are repeated for `PATIENCE_S`.

        Raises:
            Superseded: The job was deleted, or its journal was, or this pod has a successor.
            ElasticDLError: The job cannot be run here; a job that has begun can continue once the error is fixed, after
                the next start of this pod's container.
        """
        self.endpoint = Endpoint(addresses.any_host(), port, read_token())
        self._connection = connection
        self._calls = ApiCalls()
        self.traits = RuntimeTraits(
            _NUM_POD_THREADS, PATIENCE_S, sigterm_ends_job=False, read_api_calls=self._calls.counts
        )
        connection.client.count_by(self._calls.count)
        self._namespace = namespace
        self._publisher: EventPublisher | None = None
        self._own_pod = OwnPod(connection, namespace, job_name)
        try:
            self._take(job_name)
        except JournalDeleted:  # another start, or another master, would not find it either
            self._own_pod.label(_LABELS[JobPhase.FAILED])
            self._own_pod.end()
            raise
        except Superseded:
            raise
        except ElasticDLError as error:
            if not self.is_transient(error) and not self._has_begun(job_name):  # otherwise the error can be fixed
                self._own_pod.label(_LABELS[JobPhase.FAILED])
                self._own_pod.end()
            raise

    def _take(self, job_name: str) -> None:
        job, server_now = _with_retries(lambda: self._read_job(job_name))
        now = time.time()
        ahead = now - server_now  # of the API server's clock, which reports whole seconds
        owner_uid: str = job["metadata"]["uid"]
        self._owner_uid = owner_uid
        self.spec = whole_spec(job["data"][names.SPEC_KEY])
        account = self.spec.service_account
        self._expiry = Expiry(self._connection, self._namespace, job_name, owner_uid, account)
        _with_retries(self._check_rights)
        is_owned = _with_retries(lambda: self._own_pod.load(owner_uid))
        submitted_at = min(now, _created_at(job) + ahead)
        self.run = JobRun(self._own_pod.uid, submitted_at, resumed_at=min(now, self._own_pod.created_at + ahead))
        if not is_owned:
            _with_retries(lambda: set_owners(self._connection, self.spec, self._namespace, owner_uid))
        shown = _with_retries(lambda: ConfigMapJournal(self._connection, self._namespace, job_name, self._label_phase))
        job_dir = self.spec.job_dir
        self.journal: Journal = StorageJournal(job_dir, place_of(self.endpoint.token), shown) if job_dir else shown

        has_secret_envs = read_secret_flags() is not None

        def manifest(pod: PodSpec) -> dict[str, Any]:
            max_memory = self.cluster.max_memory() if pod.memory_factor > 1 else None
            return pod_manifest(self.spec, pod, owner_uid, max_memory, has_secret_envs)

        client = self._connection.client
        self.cluster = KubernetesCluster(self._namespace, job_name, manifest, client, self._calls)
        self._requests = RequestWatch(client, self._namespace, job_name, self._calls)

    def _has_begun(self, job_name: str) -> bool:
        """Return whether an earlier generation has written a journal; True if that cannot be read."""
        name = names.state_object(job_name)
        try:
            with self._connection.doing(f"read ConfigMap {name} of namespace {self._namespace}"):
                found = self._connection.get(object_path("configmaps", name, self._namespace))
        except ClusterError as error:
            return error.status != 404
        return names.JOURNAL_KEY in (found.get("binaryData") or {})

    def _check_rights(self) -> None:
        check_rights(self._connection, self._namespace, self.spec.service_account, self.spec.expires)

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
        """Delete a job with a time to live after that time; otherwise tell the kubelet that a failed pod is over."""
        self._close_publisher()
        if self.spec.expires and self._expiry.wait(ended_at, self.spec.ttl_after_finished, stop):
            return
        if exit_code != 0:
            self._own_pod.end()

    def pause(self) -> None:
        """Keep the pod and its log, as a failed one: `elasticdl resume` creates another one."""
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

    def _label_phase(self, phase: JobPhase) -> None:
        self._own_pod.label(_LABELS[phase])

    def _read_job(self, job_name: str) -> tuple[Object, float]:
        """Return the job's ConfigMap, and the time by the API server's clock, or else by this machine's."""
        name = names.job_object(job_name)
        try:
            with self._connection.doing(f"read ConfigMap {name} of namespace {self._namespace}"):
                answer = self._connection.open(object_path("configmaps", name, self._namespace))
                job = json.loads(answer.data)
        except ClusterError as error:
            if error.status == 404:
                raise Superseded(
                    f"the job was deleted: there is no ConfigMap {name} in namespace {self._namespace}"
                ) from error
            if error.status == 403:
                raise JobError(error.what, "`elasticdl rbac --print` shows what the service account needs") from error
            raise
        if names.SPEC_KEY not in (job.get("data") or {}):
            raise JobError(f"the job's ConfigMap {name} holds no {names.SPEC_KEY}", "submit the job again")
        date = answer.headers.get("Date", "")
        return job, parsedate_to_datetime(date).timestamp() if date else time.time()


def open_environment() -> KubernetesEnvironment:
    """Return the environment that the process's variables describe.

    Raises:
        Superseded: Another master owns the job, or it was deleted.
        ElasticDLError: The job cannot be run here.
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


def _created_at(found: Object) -> float:
    """Return when an object was created, by the API server's clock, in seconds since the Unix epoch."""
    return datetime.fromisoformat(found["metadata"]["creationTimestamp"]).timestamp()


def _with_retries(action: Callable[[], Found]) -> Found:
    """Call the API, and repeat calls that it does not answer.

    Raises:
        ElasticDLError: The API refuses, or has not answered for `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    pause_s, logged = 0.5, ""
    while True:
        try:
            return action()
        except ClusterError as error:
            if not error.unreachable or time.monotonic() > deadline:
                raise
            if error.what != logged:
                logger.warning("%s", error.what)
            logged = error.what
        threading.Event().wait(pause_s)
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def check_rights(connection: Connection, namespace: str, service_account: str, expires: bool) -> None:
    """Check all rights of a master.

    Args:
        expires: Whether it deletes its job some time after the end.

    Raises:
        JobError: Rights are missing; the message names every verb.
        ClusterError: The API does not answer.
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
    """Add the owner to all objects of the job; the master's pod is last, as a mark that all is done.

    The client does so when it submits a job; objects created by `kubectl apply` have no owner yet.

    Raises:
        ClusterError: The API does not answer, or refuses; a missing object is only a warning.
    """
    job = names.job_object(spec.job_name)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": job, "uid": owner_uid}
    for kind, name in _objects(spec):
        try:
            with connection.doing(f"make the job the owner of {kind} {name}"):
                connection.patch(
                    kind_path(kind, name, namespace), {"metadata": {"ownerReferences": [owner]}}, _STRATEGIC
                )
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
        api_client: Client for the server.
        namespace: Namespace of the job.
        job_name: Name of the job; its ConfigMap must exist.
        calls: Counts the calls.
    """

    def __init__(self, api_client: ApiClient, namespace: str, job_name: str, calls: ApiCalls) -> None:
        self._api = ApiServer(api_client, namespace, calls)
        self._name = names.job_object(job_name)
        self._trouble = ""

    def requests(self, stop: threading.Event) -> Iterator[UserRequest]:
        """Yield the present requests and each change, until `stop` is set or the watch is closed; never fail."""
        known, pause_s, pauses = UserRequest(), 0.0, StreamPauses(_FIRST_PAUSE_S, _LASTING_S)
        while not stop.wait(pause_s):
            try:
                for found in self._watch():
                    pauses.opened()
                    self._all_well()
                    annotations = found["metadata"].get("annotations") or {}
                    is_stop = bool(annotations.get(names.STOP_ANNOTATION))
                    request = UserRequest(annotations.get(names.NUM_WORKERS_ANNOTATION, ""), is_stop)
                    if request != known:
                        yield request
                    known = request
            except Closed:
                return
            except ElasticDLError as error:
                self._say_trouble(error.what)
            pause_s = pauses.next_s()

    def close(self) -> None:
        """End the watch."""
        self._api.close()

    def _watch(self) -> Iterator[Object]:
        """Yield the object as it is, then at each change, until the stream ends.

        A watch without a resource version begins with the present object.  A watch with the object's own version is
        refused as too old, again and again, once other objects of its kind have changed often enough since.
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


_TIMEOUT_S = (5.0, 5.0)
_KUBELET_S = 10.0  # for the kubelet to end the pod
_LOOK_S = 0.2
_MERGE = "application/merge-patch+json"


class OwnPod:
    """The master's pod, by its name and uid; thread-safe.

    `elasticdl resume` creates a pod of the same name while the process of a deleted one may still run: that process
    changes nothing of its successor.

    Attributes:
        created_at: Creation by the API server's clock, in seconds since the Unix epoch; 0 before `load`.
        uid: Uid of the pod; empty before `load`.
    """

    def __init__(self, connection: Connection, namespace: str, job_name: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._name = names.pod_name(job_name, "master", 0)
        self.created_at, self.uid = 0.0, ""

    def load(self, owner_uid: str) -> bool:
        """Read the pod; return whether its owner is the job's ConfigMap.

        Raises:
            Superseded: The pod of that name is not the one that this process runs in.
            ClusterError: It cannot be read.
        """
        pod = self._read()
        self.created_at, self.uid = _created_at(pod), str(pod["metadata"]["uid"])
        return any(owner["uid"] == owner_uid for owner in pod["metadata"].get("ownerReferences") or [])

    def label(self, status: str) -> None:
        """Set the label `status`."""
        self._patch({"metadata": {"labels": {names.STATUS_LABEL: status}}}, f"get the label {status}")

    def end(self) -> None:
        """End the pod for good: the kubelet does not start it again, and its phase becomes Failed.

        A container that exits with 1 would be restarted forever (restartPolicy OnFailure).  So the pod's deadline is
        set; until the kubelet has read it, this process must run: a restarted container would replace its log.
        """
        try:
            if self._read()["spec"].get("restartPolicy") == "Never":
                return
            self._patch({"spec": {"activeDeadlineSeconds": 1}}, "be ended")
            self._await_failed()
        except (ClusterError, Superseded) as error:
            logger.warning("Pod %s could not be ended: %s", self._name, error.what)

    def _await_failed(self) -> None:
        deadline = time.monotonic() + _KUBELET_S
        while time.monotonic() < deadline:
            pod = self._read()
            has_kubelet = bool(pod["spec"].get("nodeName"))
            if pod["status"].get("phase") == "Failed" or not has_kubelet:
                return
            threading.Event().wait(_LOOK_S)

    def _read(self) -> Object:
        """Read the pod.

        Raises:
            Superseded: The pod is gone, or the pod of that name is not the one that this process runs in.
            ClusterError: It cannot be read.
        """
        try:
            with self._connection.doing(f"read pod {self._name} of namespace {self._namespace}"):
                path = object_path("pods", self._name, self._namespace)
                pod: Object = self._connection.get(path, timeout_s=_TIMEOUT_S)
        except ClusterError as error:
            if error.status == 404:
                raise Superseded(f"pod {self._name} was deleted, and its master leaves with it") from error
            raise
        own, shown = os.environ.get("MY_POD_IP", ""), pod["status"].get("podIP") or ""
        if own and shown and own != shown:
            raise Superseded(f"pod {self._name} was made again and has the address {shown}; this one has {own}")
        uid = pod["metadata"]["uid"]
        if self.uid and self.uid != uid:
            raise Superseded(f"pod {self._name} was made again, with the uid {uid}; this one has {self.uid}")
        return pod

    def _patch(self, body: dict[str, Any], what: str) -> None:
        try:
            uid = self.uid or str(self._read()["metadata"]["uid"])
            body = {**body, "metadata": {**body.get("metadata", {}), "uid": uid}}  # the API refuses another pod's
            with self._connection.doing(f"change pod {self._name}"):
                path = object_path("pods", self._name, self._namespace)
                self._connection.patch(path, body, _MERGE, timeout_s=_TIMEOUT_S)
        except (ClusterError, Superseded) as error:
            logger.warning("Pod %s could not %s: %s", self._name, what, error.what)


_LONGEST_EXPIRY_PAUSE_S = 30.0
_COLLECTED_S = 120.0  # until the garbage collector ends this pod; otherwise its container would be restarted


class Expiry:
    """Deletes an ended job after its time to live."""

    def __init__(self, connection: Connection, namespace: str, job_name: str, owner_uid: str, account: str) -> None:
        """Prepare the deletion of a job.

        Args:
            owner_uid: Uid of the job's ConfigMap; a newer one of the same name is not deleted.
            account: The service account of the master, for messages.
        """
        self._connection = connection
        self._namespace = namespace
        self._name = names.job_object(job_name)
        self._uid = owner_uid
        self._account = account

    def wait(self, ended_at: float, ttl_s: float, stop: threading.Event) -> bool:
        """Delete the job after its time, and wait until this pod is terminating; return False if it may not be deleted.

        Args:
            ended_at: End of the job, in seconds since the Unix epoch.
            ttl_s: Seconds from the end to the deletion.
            stop: Set when this process is terminating: a next generation continues the wait.
        """
        left_s = max(0.0, ended_at + ttl_s - time.time())
        logger.info("The job and all its objects are deleted in %.0f s (--ttl_after_finished)", left_s)
        if stop.wait(left_s):
            return True
        if not self._delete(stop):
            return False
        stop.wait(_COLLECTED_S)
        return True

    def _delete(self, stop: threading.Event) -> bool:
        """Delete the owner, and repeat calls that the API server does not answer; return False if it refuses."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": self._uid}}
        pause_s = _FIRST_PAUSE_S
        while not stop.is_set():
            try:
                with self._connection.doing(f"delete ConfigMap {self._name} of namespace {self._namespace}"):
                    self._connection.delete(object_path("configmaps", self._name, self._namespace), body)
                return True
            except ClusterError as error:
                if error.status in (404, 409):  # it is gone, or another job has its name
                    return True
                if not error.unreachable and error.status < 500 and error.status != 429:
                    logger.warning("%s; %s lets it", error.what, grant(self._namespace, self._account))
                    return False
                logger.warning("%s; it is tried again in %.1f s", error.what, pause_s)
            stop.wait(pause_s)
            pause_s = min(_LONGEST_EXPIRY_PAUSE_S, 2 * pause_s)
        return True
