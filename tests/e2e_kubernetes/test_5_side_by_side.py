"""Jobs beside each other in a namespace, what their pods may do, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob, elasticdl
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.space import KERAS
from tests.e2e_kubernetes.test_6_all_reduce import all_reduce_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def assert_is_restricted(pod: dict[str, Any]) -> None:
    """The restricted Pod Security profile field by field, and a read-only root file system."""
    name, of_pod = pod["metadata"]["name"], pod["spec"]["securityContext"]
    assert of_pod["runAsNonRoot"] is True, name
    assert (of_pod["runAsUser"], of_pod["runAsGroup"], of_pod["fsGroup"]) == (1000, 1000, 1000), name
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
    for container in pod["spec"]["containers"]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert own["readOnlyRootFilesystem"] is True, name
        assert own.get("privileged", False) is False, name
        assert container["command"][:3] == ["python", "-P", "-m"], f"{name}: no shell"
        empty = {volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume}
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in empty}
        memory = {"/dev/shm"} if "-worker-" in name else set()  # DataLoaders of PyTorch
        assert writable == {"/tmp", "/var/lib/elasticdl", *memory}, name
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        assert not pod["spec"].get(key), f"{name}: {key}"


def assert_has_a_token_only_if_master(job: KubernetesJob, pod: dict[str, Any]) -> None:
    mounts = [mount["mountPath"] for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
    has_token = any(path.startswith("/var/run/secrets/kubernetes.io") for path in mounts)
    assert has_token == (pod["metadata"]["name"] == job.master), pod["metadata"]["name"]


def objects_of(job: KubernetesJob) -> list[str]:
    kinds = "pods,configmaps,secrets,services,networkpolicies"
    selector = f"elasticdl-job-name={job.name}"
    return kubectl("-n", job.namespace, "get", kinds, "-l", selector, "-o", "name").split()


def test_two_jobs_in_one_namespace_train_at_once_in_restricted_pods(open_space: OpenSpace) -> None:
    space = open_space("two")
    of_both: dict[str, Any] = {"model_def": KERAS, "num_epochs": 4}
    jobs = [space.job("first", num_ps_pods=1, **of_both), all_reduce_job(space, "second", **of_both)]
    for job in jobs:
        job.submit()
    for job in jobs:
        job.wait_for_running("worker", 2, 120)
        job.wait_for_progress()

    again = jobs[0].try_to_submit()
    assert again.returncode == 2
    assert "first" in again.stderr
    listed = json.loads(elasticdl("list", f"--namespace={space.namespace}", "--output=json").stdout)
    assert {"first", "second"} <= set(json.dumps(listed).replace('"', " ").split())

    for job in jobs:
        for pod in job.pods():
            assert_is_restricted(job.manifest(pod.name))
            assert_has_a_token_only_if_master(job, job.manifest(pod.name))
    for job in jobs:
        job.assert_ends_exactly()

    assert jobs[0].client("delete").returncode == 0
    jobs[1].wait_until("the end of all that the first job had", lambda: not objects_of(jobs[0]))
    assert objects_of(jobs[1])


def test_a_service_account_without_rights_is_refused_by_name_and_nothing_is_made(open_space: OpenSpace) -> None:
    space = open_space("rights", rights=False)
    kubectl("-n", space.namespace, "create", "serviceaccount", "elasticdl")
    job = space.job("digits")
    refused = job.try_to_submit()
    assert refused.returncode == 2, refused.stdout
    for missing in ("pods", "create", "watch", "configmaps", "update", "elasticdl rbac --print"):
        assert missing in refused.stderr, refused.stderr
    assert not objects_of(job)
