"""The manifest of a pod, field by field; no cluster is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from elasticdl.cluster.cluster import PodSpec, RestartPolicy
from elasticdl.protocol import Role
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.pods import pod_manifest
from elasticdl_client.kubernetes.resources import container_resources, quantity

BASE = {
    "job_name": "job",
    "namespace": "here",
    "image_name": "image:1",
    "model_def": "m.model",
    "training_data": "/data",
    "num_workers": 4,
    "num_ps_pods": 2,
}
ROLES = ("master", "ps", "worker")


def job(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", BASE | flags)


def manifest(spec: JobSpec, role: str = "worker", index: int = 0, **pod: Any) -> dict[str, Any]:
    found = PodSpec(
        name=names.pod_name("job", role, index),
        role=Role(role),
        index=index,
        command=("python", "-m", f"elasticdl.{role}"),
        restart_policy=RestartPolicy.ON_FAILURE if role == "master" else RestartPolicy.NEVER,
        **pod,
    )
    return pod_manifest(spec, found)


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    [only] = manifest["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def env(manifest: dict[str, Any]) -> dict[str, Any]:
    entries = container(manifest)["env"]
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry.get("value") for entry in entries}


@pytest.mark.parametrize("role", ROLES)
def test_every_pod_is_restricted(role: str) -> None:
    pod = manifest(job(), role)
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(pod)["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    for forbidden in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        assert forbidden not in pod["spec"]
    assert "ports" not in container(pod)


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_can_write_to_tmp_and_to_its_home_and_read_the_token(role: str) -> None:
    pod = manifest(job(), role)
    shared = [{"name": "elasticdl-shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(2**31)}}]
    assert pod["spec"]["volumes"] == [
        {"name": "elasticdl-tmp", "emptyDir": {}},
        {"name": "elasticdl-job", "emptyDir": {}},
        *(shared if role == "worker" else []),
        {
            "name": "elasticdl-token",
            "secret": {"secretName": "elasticdl-job-token", "defaultMode": 0o440, "optional": True},
        },
    ]
    assert container(pod)["volumeMounts"] == [
        {"name": "elasticdl-tmp", "mountPath": "/tmp"},
        {"name": "elasticdl-job", "mountPath": "/var/lib/elasticdl"},
        *([{"name": "elasticdl-shm", "mountPath": "/dev/shm"}] if role == "worker" else []),
        {"name": "elasticdl-token", "mountPath": "/var/run/elasticdl/token", "readOnly": True},
    ]
    assert env(pod)["ELASTICDL_TOKEN_FILE"] == "/var/run/elasticdl/token/token"
    assert env(pod)["HOME"] == env(pod)["ELASTICDL_JOB_DIR"] == "/var/lib/elasticdl"


def test_shared_memory_is_half_of_a_workers_memory_unless_the_user_mounts_it() -> None:
    def shared(**flags: object) -> list[dict[str, Any]]:
        pod = manifest(job(**flags))
        [name] = [mount["name"] for mount in container(pod)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        return [volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == name]

    assert shared(worker_resource_request="memory=1Gi", worker_resource_limit="memory=3Gi") == [
        {"medium": "Memory", "sizeLimit": str(3 * 2**29)}
    ]
    assert shared(worker_resource_request="memory=1Gi", worker_resource_limit="cpu=1") == [{"medium": "Memory"}]
    own = "empty_dir=5Gi,type=Memory,mount_path=/dev/shm"
    assert shared(volume=own) == [{"medium": "Memory", "sizeLimit": "5Gi"}]


def test_the_cluster_may_choose_the_user() -> None:
    chosen = manifest(job(run_as_user="none"))
    assert chosen["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    [token] = [volume["secret"] for volume in chosen["spec"]["volumes"] if "secret" in volume]
    assert token["defaultMode"] == 0o444  # it need not be a member of the file's group
    own = manifest(job(run_as_user="2000"))["spec"]["securityContext"]
    assert (own["runAsUser"], own["runAsGroup"], own["fsGroup"]) == (2000, 2000, 2000)
    assert env(chosen)["USER"] == "elasticdl"
    assert env(manifest(job(envs="USER=me")))["USER"] is None  # it is in the job's Secret
    for wrong in ("0", "root", "-1"):
        with pytest.raises(FlagError, match="run_as_user"):
            job(run_as_user=wrong)


def test_all_pods_have_the_pull_secrets_and_workers_and_servers_an_account_of_their_own() -> None:
    spec = job(image_pull_secret="registry, other", worker_service_account="cloud")
    for role, account in (("master", "elasticdl"), ("ps", "cloud"), ("worker", "cloud")):
        pod = manifest(spec, role)["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
        assert pod["serviceAccountName"] == account
        assert pod["automountServiceAccountToken"] is (role == "master")
    assert "imagePullSecrets" not in manifest(job())["spec"]


def test_only_the_master_talks_to_the_api() -> None:
    master = manifest(job(service_account="me"), "master")["spec"]
    assert (master["serviceAccountName"], master["automountServiceAccountToken"]) == ("me", True)
    for role in ("ps", "worker"):
        spec = manifest(job(service_account="me"), role)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in spec


def test_names_labels_and_what_runs() -> None:
    pod = manifest(job(), "worker", index=5, slot=2, grace_s=9.2, labels={"mine": "1"})
    assert pod["metadata"] == {
        "name": "elasticdl-job-worker-5",
        "namespace": "here",
        "labels": {
            "mine": "1",
            "app": "elasticdl",
            "elasticdl-job-name": "job",
            "elasticdl-replica-type": "worker",
            "elasticdl-replica-index": "5",
            "elasticdl-worker-slot": "2",
        },
    }
    assert container(pod)["name"] == "elasticdl-job-worker-5"
    assert container(pod)["command"] == ["python", "-m", "elasticdl.worker"]
    assert "args" not in container(pod)
    assert container(pod)["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 10
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["enableServiceLinks"] is False
    assert manifest(job(), "master")["spec"]["restartPolicy"] == "OnFailure"
    assert names.SLOT_LABEL not in manifest(job(), "ps")["metadata"]["labels"]


def test_the_longest_names_fit() -> None:
    longest = "a" * 40
    spec = job(job_name=longest, volume="claim_name=c,mount_path=/d", num_workers=100_000)
    name = names.pod_name(longest, "worker", 123_456)
    pod = pod_manifest(spec, PodSpec(name=name, role=Role.WORKER, index=123_456, command=("python",)))
    labels = [*pod["metadata"]["labels"].values(), container(pod)["name"]]
    labels += [volume["name"] for volume in pod["spec"]["volumes"]]
    assert max(map(len, labels)) <= 63
    assert len(names.pod_name(longest, "worker", 99_999)) <= 63  # a Service's name


def test_an_owned_pod_names_the_jobs_config_map_and_does_not_hold_it_up() -> None:
    pod = pod_manifest(job(), PodSpec(name="p", role=Role.PS, index=0, command=("python",)), owner_uid="u-1")
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "elasticdl-job", "uid": "u-1"}
    assert pod["metadata"]["ownerReferences"] == [owner]
    assert "ownerReferences" not in manifest(job())["metadata"]


def test_workers_and_servers_leave_a_lost_node_after_ten_seconds() -> None:
    for role in ("ps", "worker"):
        assert manifest(job(), role)["spec"]["tolerations"] == [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
            for taint in ("not-ready", "unreachable")
        ]
    assert "tolerations" not in manifest(job(), "master")["spec"]


def test_the_image_of_workers_and_servers_may_be_another_one() -> None:
    spec = job(worker_image="image:2", image_pull_policy="never")
    assert [container(manifest(spec, role))["image"] for role in ROLES] == ["image:1", "image:2", "image:2"]
    assert [container(manifest(job(), role))["image"] for role in ROLES] == ["image:1"] * 3
    assert container(manifest(spec))["imagePullPolicy"] == "Never"
    assert "imagePullPolicy" not in container(manifest(job()))  # the server chooses by the tag


def test_priorities_are_those_of_role_and_slot() -> None:
    spec = job(master_pod_priority="high", ps_pod_priority="steady", worker_pod_priority="0.5")
    assert manifest(spec, "master")["spec"]["priorityClassName"] == "high"
    assert manifest(spec, "ps")["spec"]["priorityClassName"] == "steady"
    workers = [manifest(spec, "worker", index=10 + slot, slot=slot)["spec"]["priorityClassName"] for slot in range(4)]
    assert workers == ["high", "low", "low", "high"]
    assert "priorityClassName" not in manifest(job())["spec"]


def test_the_environment_is_the_users_and_ours_and_ours_wins() -> None:
    pod = manifest(job(envs="A=1,2,HOME=/mine,MY_POD_IP=x"), "ps", env={"WORKER_NUM": "4", "A": "3"})
    assert container(pod)["env"][0] == {
        "name": "MY_POD_IP",
        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    found = env(pod)
    assert (found["A"], found["WORKER_NUM"], found["HOME"]) == ("3", "4", "/var/lib/elasticdl")
    assert found["ELASTICDL_POD_NAME"] == "elasticdl-job-ps-0"
    assert "ELASTICDL_NAMESPACE" not in found
    master = env(manifest(job(), "master"))
    assert (master["ELASTICDL_JOB_NAME"], master["ELASTICDL_NAMESPACE"], master["MASTER_PORT"]) == (
        "job",
        "here",
        "50001",
    )


def test_tf_config_names_services_and_the_workers_slot() -> None:
    flags = {"need_tf_config": True, "job_command": "python train.py", "validation_data": "/v", "model_def": ""}
    spec = job(**flags, num_workers=2, num_ps_pods=1)
    cluster = {
        "chief": ["elasticdl-job-worker-0.here.svc:3333"],
        "worker": ["elasticdl-job-worker-1.here.svc:3333"],
        "ps": ["elasticdl-job-ps-0.here.svc:2222"],
    }
    for slot, task in enumerate((("chief", 0), ("worker", 0), ("evaluator", 0))):
        config = json.loads(env(manifest(spec, "worker", index=7, slot=slot))["TF_CONFIG"])
        assert config == {"cluster": cluster, "task": dict(zip(("type", "index"), task, strict=True))}
    server = json.loads(env(manifest(spec, "ps"))["TF_CONFIG"])
    assert server == {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    assert "TF_CONFIG" not in env(manifest(spec, "master"))
    assert "TF_CONFIG" not in env(manifest(job()))


def test_words_of_a_command_stay_what_they_are() -> None:
    """Kubernetes would put a variable in the place of $(NAME)."""
    command = ("python", "-c", "print('$(HOME) $HOME')")
    pod = PodSpec("elasticdl-job-worker-0", Role.WORKER, 0, command)
    container = pod_manifest(job(), pod)["spec"]["containers"][0]
    assert container["command"] == ["python", "-c", "print('$$(HOME) $HOME')"]


def test_volumes_are_claims_first_and_each_source_once() -> None:
    text = (
        "host_path=/h,type=Directory,mount_path=/b;claim_name=c,mount_path=/a,sub_path=s;"
        "claim_name=c,mount_path=/e;host_path=/tmp,mount_path=/tmp"
    )
    pod = manifest(job(volume=text))
    assert pod["spec"]["volumes"][:3] == [
        {"name": "worker-volume-0", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "worker-volume-1", "hostPath": {"path": "/h", "type": "Directory"}},
        {"name": "worker-volume-2", "hostPath": {"path": "/tmp"}},
    ]
    assert container(pod)["volumeMounts"][:4] == [
        {"name": "worker-volume-0", "mountPath": "/a", "subPath": "s"},
        {"name": "worker-volume-0", "mountPath": "/e"},
        {"name": "worker-volume-1", "mountPath": "/b"},
        {"name": "worker-volume-2", "mountPath": "/tmp"},
    ]
    assert [mount["mountPath"] for mount in container(pod)["volumeMounts"]].count("/tmp") == 1


def test_volumes_of_other_kinds() -> None:
    sources = ["nfs=server:/export", "secret_name=s", "config_map_name=c", "empty_dir=10Gi", "empty_dir=10Gi"]
    text = ";".join(f"{source},mount_path=/{number}" for number, source in enumerate(sources))
    volumes = manifest(job(volume=text))["spec"]["volumes"][:5]
    assert [{kind: volume[kind] for kind in volume if kind != "name"} for volume in volumes] == [
        {"nfs": {"server": "server", "path": "/export"}},
        {"secret": {"secretName": "s"}},
        {"configMap": {"name": "c"}},
        {"emptyDir": {"sizeLimit": "10Gi"}},
        {"emptyDir": {"sizeLimit": "10Gi"}},
    ]
    assert len({volume["name"] for volume in volumes}) == 5


def test_what_has_no_limit_is_limited_to_what_it_asks_for_cpus_excepted() -> None:
    spec = job(
        worker_resource_request="cpu=500m,memory=1Gi,gpu=1,disk=2Gi",
        ps_resource_request="cpu=1,gpu=1,hugepages-2Mi=64Mi",
        ps_resource_limit="cpu=2",
    )
    same = {"memory": "1Gi", "nvidia.com/gpu": "1", "ephemeral-storage": "2Gi"}
    assert container(manifest(spec))["resources"] == {"requests": {"cpu": "500m", **same}, "limits": same}
    assert container(manifest(spec, "ps"))["resources"] == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "1", "hugepages-2Mi": "64Mi"},
        "limits": {
            "cpu": "2",
            "nvidia.com/gpu": "1",
            "hugepages-2Mi": "64Mi",
        },  # the API wants both to be the same for what is not shared
    }
    assert container(manifest(job(), "master"))["resources"]["requests"] == {"cpu": "0.1", "memory": "1024Mi"}


@dataclass(frozen=True)
class Growth:
    request: str
    limit: str
    factor: float
    max_memory: int | None
    memory: tuple[str | None, str | None] = field(default=("", ""))


@pytest.mark.parametrize(
    "growth",
    [
        Growth("memory=100Mi", "", 1.5, None, ("150Mi", "150Mi")),
        Growth("memory=100Mi", "memory=200Mi", 1.5, None, ("150Mi", "300Mi")),
        Growth("memory=100Mi", "", 5.0, None, ("400Mi", "400Mi")),
        Growth("memory=100Mi", "", 3.0, 200 * 2**20 + 5, ("200Mi", "200Mi")),
        Growth("memory=100Mi", "", 2.0, 10, ("100Mi", "100Mi")),
        Growth("memory=1M", "", 1.2, None, ("1Mi", "1Mi")),
        Growth("memory=1000Ki", "", 1.01, None, ("1000Ki", "1000Ki")),
        Growth("memory=100Mi", "cpu=1", 2.0, None, ("200Mi", None)),
        Growth("cpu=1", "", 2.0, None, (None, None)),
        Growth("memory=1Gi", "", 1.0, None, ("1Gi", "1Gi")),
    ],
)
def test_memory_grows_within_its_bounds(growth: Growth) -> None:
    found = container_resources(growth.request, growth.limit, growth.factor, growth.max_memory)
    assert (found["requests"].get("memory"), found["limits"].get("memory")) == growth.memory


def test_memory_of_the_pod_is_that_of_its_factor() -> None:
    pod = manifest(job(worker_resource_request="cpu=1,memory=64Mi"), memory_factor=1.5)
    assert container(pod)["resources"]["limits"] == {"memory": "96Mi"}


def test_quantities_are_numbers() -> None:
    assert quantity("100m") * 10 == quantity("1") == quantity("1.0")
    assert quantity("1Ki") == 1024
    assert quantity("1k") == quantity("1e3") == 1000
    assert quantity("24650412Ki") > quantity("23Gi")
    with pytest.raises(ValueError):
        quantity("lots")


@pytest.mark.parametrize(
    ("role", "index", "file"),
    [("master", 0, "/logs/train.log"), ("ps", 1, "/logs/train-ps-1.log"), ("worker", 7, "/logs/train-worker-7.log")],
)
def test_each_pod_has_a_log_file_of_its_own_on_a_shared_volume(role: str, index: int, file: str) -> None:
    plain = container(manifest(job(), role, index))["command"]
    spec = job(log_file_path="/logs/train.log", volume="claim_name=c,mount_path=/logs")
    assert container(manifest(spec, role, index))["command"] == [
        "python",
        "-P",
        "-m",
        "elasticdl.rpc.log_file",
        file,
        *plain,
    ]
