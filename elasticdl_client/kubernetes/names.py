"""Names and labels of a job's objects on Kubernetes; client and runtime agree here.

The ConfigMap `job_object` owns everything else of a job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elasticdl_client.errors import FlagError

MASTER_PORT = 50001
PS_PORT = 2222
WORKER_PORT = 3333
METRICS_PORT_NAME = "metrics"  # of the master's container, where --metrics_port asks for it

SPEC_KEY = "spec.json"  # in the ConfigMap `job_object`
MASTER_POD_KEY = "master-pod.json"  # there too: the master's pod as it was made, for `elasticdl resume`
JOURNAL_KEY = "journal"  # in `state_object`, binary
STATUS_KEY = "status.json"  # in `state_object`
TOKEN_KEY = "token"  # in the Secret `token_object`
CERTIFICATE_KEYS = AUTHORITY_KEY, CERTIFICATE_KEY, PRIVATE_KEY_KEY = "ca.crt", "tls.crt", "tls.key"  # there, with --tls
TLS_NAME = "job.elasticdl"  # of every job's certificate; the authority, which is the job's own, is what differs
SECRET_FLAGS_KEY = "secret_flags.json"  # there too: the flags that hold something secret, whole
_ENV_KEY_PREFIX = "env."  # there too: the value of a variable of --envs

TOKEN_DIRECTORY = "/var/run/elasticdl/token"  # where the Secret is mounted in every pod
JOB_DIRECTORY = "/var/lib/elasticdl"  # writable in every pod, gone with it; also the home directory
ZOO_DIRECTORY = "/model_zoo"  # in every image
CODE_DIRECTORY = "/var/run/elasticdl/code"  # where the ConfigMaps with the code of --code are mounted in every pod
CODE_KEY = "part"  # in the ConfigMaps `code_object`, binary
REQUIREMENTS_DIRECTORY = f"{JOB_DIRECTORY}/requirements"  # where the requirements of --code are installed by default
CLUSTER_SPEC_DIRECTORY = "/cluster_spec"  # in every image that was built with one
USER_ID = 1000  # of every process and of mounted files, in images and pods

APP_LABEL = "app"
APP = "elasticdl"
JOB_LABEL = "elasticdl-job-name"
ROLE_LABEL = "elasticdl-replica-type"
INDEX_LABEL = "elasticdl-replica-index"
SLOT_LABEL = "elasticdl-worker-slot"
CODE_LABEL = "elasticdl-code"  # of the large ConfigMaps that hold the code of --code
NUM_WORKERS_ANNOTATION = "elasticdl-num-workers"  # of `job_object`: how many workers the user wants by now
STOP_ANNOTATION = "elasticdl-stop"  # of `job_object`: anything but empty: the job is to stop until it is resumed
STATUS_LABEL = "status"  # of the master's pod: Pending, Running, Finished, Failed, or
STOPPED = "Stopped"  # by `elasticdl stop`


def job_object(job_name: str) -> str:
    """Return the name of the ConfigMap that holds the job's specification and owns its other objects."""
    return f"elasticdl-{job_name}"


def state_object(job_name: str) -> str:
    """Return the name of the ConfigMap with journal and status, which the master creates."""
    return f"elasticdl-{job_name}-state"


def token_object(job_name: str) -> str:
    """Return the name of the Secret with the job's token and its other secrets."""
    return f"elasticdl-{job_name}-token"


def code_object(job_name: str, number: int) -> str:
    """Return the name of a ConfigMap with a part of the code of --code."""
    return f"elasticdl-{job_name}-code-{number}"


def check_own_names(job_name: str) -> None:
    """Check that no other job has a ConfigMap of the name of this job's `job_object`.

    Raises:
        FlagError: it may.
    """
    found = re.fullmatch(r"(.+)-(state|code-\d+)", job_name)
    if found is not None:
        raise FlagError(
            f"--job_name={job_name}: the ConfigMap {job_object(job_name)} would also be one of a job {found[1]}.",
            f"On Kubernetes no name ends in -{found[2]}: choose another --job_name.",
        )


def env_key(variable: str) -> str:
    """Return the key of the Secret that holds a variable of --envs."""
    return f"{_ENV_KEY_PREFIX}{variable}"


def pod_name(job_name: str, role: str, index: int) -> str:
    """Return the name of a pod; the single master has no number."""
    return f"elasticdl-{job_name}-master" if role == "master" else f"elasticdl-{job_name}-{role}-{index}"


def container_name(pod: str) -> str:
    """Return the name of the main container of a pod; injectors add others, some of them before it."""
    return pod[:63].rstrip("-")


def own_container(pod: str, containers: Sequence[str]) -> str:
    """Return which of a pod's containers does the work: that of its name, else the first."""
    own = container_name(pod)
    return own if own in containers else containers[0]


def master_service(job_name: str) -> str:
    """Return the name of the Service in front of the master's pod."""
    return pod_name(job_name, "master", 0)


def service_address(job_name: str, role: str, index: int, namespace: str) -> str:
    """host:port of the Service of a parameter server or of a worker's slot."""
    port = {"master": MASTER_PORT, "ps": PS_PORT, "worker": WORKER_PORT}[role]
    return f"{pod_name(job_name, role, index)}.{namespace}.svc:{port}"


def master_address(job_name: str, namespace: str) -> str:
    """host:port by which a job's pods reach their master after each of its restarts."""
    return service_address(job_name, "master", 0, namespace)


def job_labels(job_name: str) -> dict[str, str]:
    """Return the labels of every object of a job."""
    return {APP_LABEL: APP, JOB_LABEL: job_name}


def pod_labels(job_name: str, role: str, index: int) -> dict[str, str]:
    """Return the labels of a pod."""
    return {**job_labels(job_name), ROLE_LABEL: role, INDEX_LABEL: str(index)}
