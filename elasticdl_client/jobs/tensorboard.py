"""`elasticdl tensorboard JOB`: shows the event files of a job.

For a local job, TensorBoard replaces this process.  For a job of a cluster, a pod with the job's image and volumes runs
it meanwhile.  The job's ConfigMap owns that pod, so it is deleted with the job; it is not counted among the job's
pods.  A local port is forwarded to it through the API server, with one connection for each connection of the
browser.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from elasticdl_client.choices import RUN_MODULE
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.jobs import cluster_objects
from elasticdl_client.jobs.cluster_objects import Object, delete_object, read_pod
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.api_client import object_path
from elasticdl_client.kubernetes.pods import Manifest, owned
from elasticdl_client.kubernetes.resources import QUEUE_LABEL, mount_of, parse_volumes
from elasticdl_client.storage_kinds import check_installed, is_remote

HOST = "127.0.0.1"
MODULE = "tensorboard.main"
COPY_MODULE = "elasticdl.storage.tensorboard_copy"


def log_dir_of(spec: JobSpec) -> str:
    """Return the directory of a job's event files.

    Raises:
        JobError: The job writes none.
    """
    if not spec.tensorboard_log_dir:
        raise JobError(
            f"Job {spec.job_name} writes no event files.",
            "Start it with --tensorboard_log_dir=DIRECTORY (local jobs that train: install tensorboard before); "
            "`elasticdl resume` cannot add it.",
        )
    return spec.tensorboard_log_dir


def command_of(directory: str, *arguments: str) -> list[str]:
    """Return the arguments of `python` that show a directory; one in storage is copied first."""
    if is_remote(directory):
        return [*RUN_MODULE, COPY_MODULE, directory, *arguments]
    return [*RUN_MODULE, MODULE, f"--logdir={directory}", *arguments]


def show_local(job: JobInfo, port: int) -> int:
    """Replace this process by TensorBoard, which prints its address and ends with Ctrl-C.

    Args:
        port: 0: the first free one from 6006 on.

    Raises:
        JobError: There is nothing to show, or TensorBoard is not installed.
    """
    try:
        spec = JobSpec.from_json((Path(job.directory) / "spec.json").read_text())
    except OSError as error:
        raise JobError(f"The specification of job {job.name} cannot be read: {error}.") from error
    directory = log_dir_of(spec)
    if is_remote(directory):
        check_installed(directory)
    if importlib.util.find_spec("tensorboard") is None:
        raise JobError(
            "TensorBoard is not installed here.",
            "pip install tensorboard",
        )
    print(f"The event files of job {job.name} are in {directory}", flush=True)
    arguments = [f"--host={HOST}", *([f"--port={port}"] if port else [])]
    os.execv(sys.executable, [sys.executable, *command_of(directory, *arguments)])


PORT = 6006
_START_S = 180.0
_DEADLINE_S = 24 * 3600  # after it the pod of a killed client ends by itself
_LOOK_S = 0.5
_READY = f"http://{HOST}:{PORT}"  # TensorBoard prints it when it accepts connections
_CHUNK_BYTES = 1 << 16


def pod_of(data: Mapping[str, str], spec: JobSpec, owner_uid: str) -> Manifest:
    """Return the pod: the master's manifest without its rights, labels and command.

    If the files are in storage it keeps the master's identity: service account, and labels of a pod template.

    Args:
        data: Data of the job's ConfigMap.

    Raises:
        JobError: The job writes no event files, or none to a volume.
    """
    directory = log_dir_of(spec)
    is_mounted = mount_of(directory, parse_volumes(spec.volume)) is not None
    if not (is_mounted or is_remote(directory) or spec.cluster_spec or spec.cluster_spec_json):
        raise JobError(
            f"--tensorboard_log_dir={directory} of job {spec.job_name} is on no mount of its --volume: the event files "
            "are inside of its master's pod.",
            "Name a directory on a volume next time.",
        )
    manifest: Manifest = copy.deepcopy(json.loads(data[names.MASTER_POD_KEY]))
    app = f"{names.job_object(spec.job_name)}-tensorboard"
    name = f"{app}-{secrets.token_hex(3)}"
    labels = _labels_of_template(manifest) if is_remote(directory) else {}
    manifest["metadata"] = {"name": name, "namespace": spec.namespace, "labels": {**labels, names.APP_LABEL: app}}
    pod = manifest["spec"]
    pod |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
    pod |= {"terminationGracePeriodSeconds": 1, "activeDeadlineSeconds": _DEADLINE_S}
    if not is_remote(directory):
        pod.pop("serviceAccountName", None)
    (container, *_) = pod["containers"]
    arguments = command_of(directory, f"--host={HOST}", f"--port={PORT}")
    container |= {"name": "tensorboard", "command": ["python", *arguments]}
    container.pop("args", None)
    return owned(manifest, spec.job_name, owner_uid)


def _labels_of_template(master: Manifest) -> dict[str, str]:
    """Return the labels of the master's pod that neither assign it to the job nor make it wait in a queue for quota."""
    labels: dict[str, str] = master["metadata"].get("labels") or {}
    ours = (names.APP_LABEL, names.STATUS_LABEL, QUEUE_LABEL)
    return {name: value for name, value in labels.items() if name not in ours and not name.startswith("elasticdl-")}


def show_of_cluster(connection: Connection, job: JobInfo, owner: Object, port: int) -> int:
    """Show the job's event files until Ctrl-C.

    Args:
        owner: The job's ConfigMap.
        port: Local port; 0: a free one.

    Raises:
        JobError: There is nothing to show, or TensorBoard does not start.
        ClusterError: the cluster does not answer, or refuses.
    """
    spec = JobSpec.from_json(owner["data"][names.SPEC_KEY])
    manifest = pod_of(owner["data"], spec, owner["metadata"]["uid"])
    name = manifest["metadata"]["name"]
    with _listener(port) as listener:
        with connection.doing(f"create the pod {name} in namespace {job.namespace}"):
            connection.create(object_path("pods", namespace=job.namespace), manifest)
        try:
            _wait_until_ready(connection, job.namespace, name)
            print(
                f"TensorBoard of job {job.name} at http://{HOST}:{listener.getsockname()[1]}/ (Ctrl-C ends it)",
                flush=True,
            )
            _serve(connection, job.namespace, name, listener)
        finally:
            delete_object(connection, "pod", job.namespace, name)
    return 0


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise JobError(
            f"--port={port} cannot be used: {error.strerror}.", "Leave it out to use a free port."
        ) from error


def _wait_until_ready(connection: Connection, namespace: str, name: str) -> None:
    """Wait until TensorBoard accepts connections."""
    deadline, told = time.monotonic() + _START_S, ""
    pause = threading.Event()
    while time.monotonic() < deadline:
        pod = read_pod(connection, namespace, name)
        status = cluster_objects.pod_status(pod) if pod is not None else None
        if status is None or status.phase in ("Succeeded", "Failed"):
            why = status.message if status is not None else "it was deleted"
            raise JobError(
                f"The pod {name} has ended: {why}. {_last_words(connection, namespace, name)}".rstrip(),
                "The job's image needs the package tensorboard.",
            )
        if status.phase == "Running" and _READY in _last_words(connection, namespace, name):
            return
        if status.message and status.message != told:
            print(f"note: {name}: {status.message}", file=sys.stderr)
            told = status.message
        pause.wait(_LOOK_S)
    raise JobError(f"The pod {name} does not start within {_START_S:.0f} s: {told or 'the reason is unknown'}.")


def _last_words(connection: Connection, namespace: str, name: str) -> str:
    try:
        with connection.doing(f"read the log of pod {name}"):
            response = connection.open(object_path("pods", name, namespace) + "/log", [("tailLines", 5)])
            text = response.data.decode(errors="replace")
    except ClusterError:
        return ""
    return " ".join(text.split())


def _end_quietly(args: threading.ExceptHookArgs) -> None:
    """Ignore the error with which the package's forwarding threads end when one side closes the connection."""
    is_theirs = args.thread is not None and args.thread.name.startswith("Kubernetes port forward")
    if not (is_theirs and issubclass(args.exc_type, OSError)):
        threading.__excepthook__(args)


def _serve(connection: Connection, namespace: str, name: str, listener: socket.socket) -> None:
    """Forward connections to the pod until the process is interrupted."""
    threading.excepthook = _end_quietly
    while True:
        local, _ = listener.accept()
        threading.Thread(target=_carry, args=(connection, namespace, name, local), daemon=True).start()


def _carry(connection: Connection, namespace: str, name: str, local: socket.socket) -> None:
    """Forward one connection until one side closes it."""
    with local:
        try:
            remote = _connect(connection, namespace, name)
        except ClusterError as error:
            print(f"warning: {error.what}", file=sys.stderr)
            return
        with closing(remote):
            pump(local, remote)


def pump(left: Any, right: Any) -> None:
    """Copy bytes both ways until one side closes the connection."""
    while True:
        readable, _, _ = select.select([left, right], [], [])
        for source in readable:
            try:
                data = source.recv(_CHUNK_BYTES)
                (right if source is left else left).sendall(data)
            except OSError:
                return
            if not data:
                return


def _connect(connection: Connection, namespace: str, name: str) -> Any:
    """Return a socket to TensorBoard's port in the pod.

    It uses a client of its own: the kubernetes package changes the client that opens such a stream.
    """
    from kubernetes.client import ApiClient, CoreV1Api
    from kubernetes.stream import portforward

    core = CoreV1Api(ApiClient(connection.client.access.configuration()))
    with connection.doing(f"forward a port to pod {name}"):
        forward = portforward(core.connect_get_namespaced_pod_portforward, name, namespace, ports=str(PORT))
        remote = forward.socket(PORT)
        remote.setblocking(True)
        return remote
