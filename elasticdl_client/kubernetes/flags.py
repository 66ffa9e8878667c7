"""The flags of a job that matter on Kubernetes alone: images, resources, priorities, mounts, submission."""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` gives a `dataclasses.field`)
import math
import re
from dataclasses import dataclass
from functools import partial

from elasticdl_client.checks import at_least, check_path, check_url_of_directory, regular_expression
from elasticdl_client.choices import ImagePullPolicy, MasterRestartPolicy
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import Group, parses
from elasticdl_client.kubernetes import names, resources
from elasticdl_client.kubernetes.pod_template import check as check_pod_template
from elasticdl_client.kubernetes.pod_template import parse_cluster_spec_json
from elasticdl_client.kubernetes.resources import parse_resources, parse_volumes
from elasticdl_client.params import parse_envs

DEFAULT_USER = "auto"
CHOSEN_BY_CLUSTER = "none"
_flag = Group.KUBERNETES.flag


def parse_user(text: str) -> int | None:
    """Return the id of --run_as_user; None: the cluster chooses.

    Raises:
        FlagError: it is none, or root's.
    """
    if text == CHOSEN_BY_CLUSTER:
        return None
    if text == DEFAULT_USER:
        return names.USER_ID
    if not re.fullmatch(r"[1-9][0-9]{0,9}", text):
        raise FlagError("is not a user id above 0", "For example 1000, or none: the cluster chooses.")
    return int(text)


def worker_priorities(priority: str, num_workers: int) -> list[str]:
    """Return the PriorityClass of every worker; empty strings without a priority.

    A fraction f makes ``ceil(num_workers * f)`` workers high, taken alternately from both ends of the ids: those are
    the ones that start first and the ones that come last.

    Raises:
        FlagError: with the message of the original.
    """
    if priority in ("", "None", "high", "low"):
        return [priority if priority != "None" else ""] * num_workers
    fraction = _parse_fraction(priority)
    num_high = math.ceil(num_workers * fraction)
    num_front = math.ceil(num_high / 2)
    num_back = num_high - num_front
    return ["high" if index < num_front or index >= num_workers - num_back else "low" for index in range(num_workers)]


def _parse_fraction(priority: str) -> float:
    try:
        fraction = float(priority)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise FlagError(
            f"Not support priority = {priority}, please set priority = high/low/a fraction value.",
            "For example high, low, or 0.5: half of the workers high, the others low.",
        )
    return fraction


@dataclass(frozen=True, init=False, repr=False, eq=False)  # `JobSpec` makes those for all of its fields
class KubernetesFlags:
    """The part of `JobSpec` that the Kubernetes runtime adds; the attributes have the flags' names."""

    code: str = _flag(
        "",
        "Directory of this machine with the model zoo or script, for all pods: no image has to be built for it.",
        check=check_path,
    )
    code_storage: str = _flag(
        "",
        "URL of the directory in storage for --code of more than 4 MiB, e.g. s3://bucket/code.",
        check=check_url_of_directory,
    )
    requirements_cache: str = _flag(
        "",
        "Directory of pods on a mount of --volume where the requirements.txt of --code is installed, once for all pods "
        "that share it; empty: each pod's own disk.",
        check=check_path,
    )
    image_name: str = _flag("", "Image of the master, and of all pods by default.")
    worker_image: str = _flag("", "Image of workers and parameter servers, if another.")
    namespace: str = _flag("", "Namespace of the job; empty: that of the kubeconfig's context.")
    context: str = _flag("", "Context of the kubeconfig; empty: the current one.")
    service_account: str = _flag(
        "elasticdl", "Service account of the master; `elasticdl rbac --print` shows what it needs."
    )
    ttl_after_finished: int = _flag(
        -1,
        "Seconds after its end in which a job stays, with pods and logs; then its master deletes it. -1: it stays.",
        check=at_least(-1),
    )
    worker_service_account: str = _flag(
        "", "Service account of workers and parameter servers, whose pods get no token of it; empty: the namespace's."
    )
    image_pull_secret: str = _flag("", "Image pull secrets of all pods, separated by commas.")
    run_as_user: str = _flag(
        DEFAULT_USER,
        "User id of all pods; none: as the cluster chooses; auto: 1000, or none in a namespace of OpenShift.",
        check=parses(parse_user),
    )
    master_resource_request: str = _flag(
        "cpu=0.1,memory=1024Mi", "Resource request of the master.", check=parses(parse_resources)
    )
    master_resource_limit: str = _flag(
        "", "Resource limit of the master; empty: its request, without the CPUs.", check=parses(parse_resources)
    )
    worker_resource_request: str = _flag(
        "cpu=1,memory=4096Mi", "Resource request per worker.", check=parses(parse_resources)
    )
    worker_resource_limit: str = _flag(
        "", "Resource limit per worker; empty: its request, without the CPUs.", check=parses(parse_resources)
    )
    ps_resource_request: str = _flag(
        "cpu=1,memory=4096Mi", "Resource request per parameter server.", check=parses(parse_resources)
    )
    ps_resource_limit: str = _flag(
        "", "Resource limit per parameter server; empty: its request, without the CPUs.", check=parses(parse_resources)
    )
    master_pod_priority: str = _flag("", "PriorityClass of the master.")
    worker_pod_priority: str = _flag(
        "",
        "high, low, or the fraction of workers that is high, e.g. 0.5.",
        check=parses(partial(worker_priorities, num_workers=1)),
    )
    ps_pod_priority: str = _flag("", "PriorityClass of the parameter servers.")
    node_selector: str = _flag(
        "", "Labels of the nodes for all pods: key=value,key2=value2.", check=parses(resources.parse_node_selector)
    )
    tolerations: str = _flag(
        "",
        "Taints that all pods tolerate, as `kubectl taint` writes them: key=value:NoSchedule,key2:NoExecute,key3.",
        check=parses(resources.parse_tolerations),
    )
    scheduler_name: str = _flag("", "Scheduler of all pods.", check=resources.check_name)
    queue: str = _flag(
        "",
        "Kueue's LocalQueue for workers and parameter servers: each starts when the queue admits it.",
        check=resources.check_name,
    )
    volume: str = _flag(
        "",
        'Mounts of all pods: "claim_name=c,mount_path=/data;host_path=/d,mount_path=/d"; also nfs=HOST:/PATH, '
        "secret_name, config_map_name, empty_dir=SIZE.",
        check=parses(parse_volumes),
    )
    image_pull_policy: ImagePullPolicy = _flag(
        ImagePullPolicy.AUTO,
        "Always, IfNotPresent, Never, or auto: Always for an image without a tag or with :latest, else IfNotPresent.",
    )
    restart_policy: MasterRestartPolicy = _flag(
        MasterRestartPolicy.ON_FAILURE, "Of the master: OnFailure or Never. The master itself replaces other pods."
    )
    envs: str = _flag(
        "", "Environment of all pods: NAME=value,NAME2=value2. Local runtime too.", check=parses(parse_envs)
    )
    populate_env_names: str = _flag(
        "",
        "Regular expression: environment variables of the master to copy to the other pods.",
        check=regular_expression,
    )
    pod_template: str = _flag(
        "",
        "YAML file with any other fields of all pods, merged over ours: metadata (labels, annotations) and spec.",
        check=check_pod_template,
    )
    master_pod_template: str = _flag("", "The same for the master, after --pod_template.", check=check_pod_template)
    worker_pod_template: str = _flag("", "The same for workers, after --pod_template.", check=check_pod_template)
    ps_pod_template: str = _flag("", "The same for parameter servers, after --pod_template.", check=check_pod_template)
    cluster_spec: str = _flag("", "Python file that adapts pods and services to the cluster.", check=check_path)
    cluster_spec_json: str = _flag(
        "",
        "Labels, annotations, affinity, tolerations and env of pods, as JSON; --pod_template takes all fields.",
        check=parses(parse_cluster_spec_json),
    )
    log_file_path: str = _flag(
        "",
        "Also write the master's log to this file, and other pods' logs beside it: -worker-0, -ps-0 before its suffix.",
        check=check_path,
    )
    yaml: str = _flag("", "Write the job's manifests to this file, for `kubectl apply`.", check=check_path)
    dry_run: bool = _flag(False, "Print the job's manifests without its secrets; submit nothing.")
    wait: bool = _flag(False, "Follow the job to its end; the exit code is the job's.")
    force_use_kube_config_file: bool = _flag(False, "Use ~/.kube/config inside a cluster too.")
