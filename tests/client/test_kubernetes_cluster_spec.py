"""Adapt pods and Services to a cluster: JSON, and a Python file of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.objects import job_manifests, role_pod
from elasticdl_client.kubernetes.pods import pod_manifest

GOOD_FILE = """
from kubernetes import client

class Cluster:
    pods = 0

    def with_pod(self, pod):
        Cluster.pods += 1
        pod.metadata.labels["number"] = str(Cluster.pods)
        pod.spec.tolerations = [client.V1Toleration(key="gpu", operator="Exists")]
        pod.spec.containers[0].env.append(client.V1EnvVar(name="SITE", value="a"))
        return pod

    def with_service(self, service):
        service.metadata.annotations["site"] = "a"
        return service

cluster = Cluster()
"""


def job(**flags: object) -> JobSpec:
    base = {"job_name": "job", "image_name": "i", "model_def": "m.model", "training_data": "/d", "envs": "A=1"}
    return JobSpec.from_flags("train", base | flags)


def pod(spec: JobSpec, role: str) -> dict[str, Any]:
    return pod_manifest(spec, role_pod(spec, role))


def test_json_parts_reach_their_roles() -> None:
    parts = {
        "pod_spec": {
            "labels": {"team": "a", "app": "mine"},
            "annotations": {"x": "1"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "2"}],
        },
        "worker_pod_spec": {
            "affinity": {"nodeAffinity": {}},
            "annotations": {"y": "2"},
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
            ],
            "env": [{"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        },
    }
    spec = job(cluster_spec_json=json.dumps(parts))
    master, worker = pod(spec, "master"), pod(spec, "worker")
    assert master["metadata"]["labels"]["team"] == "a"
    assert master["metadata"]["labels"]["app"] == "elasticdl"
    assert master["metadata"]["annotations"] == {"x": "1"}
    assert worker["metadata"]["annotations"] == {"x": "1", "y": "2"}
    assert worker["spec"]["affinity"] == {"nodeAffinity": {}}
    assert "affinity" not in master["spec"]
    assert [toleration["key"] for toleration in master["spec"]["tolerations"]] == ["gpu"]
    assert worker["spec"]["tolerations"][1:] == [
        parts["pod_spec"]["tolerations"][0],
        parts["worker_pod_spec"]["tolerations"][0],
    ]
    assert worker["spec"]["tolerations"][0]["key"] == "node.kubernetes.io/unreachable"
    env = {entry["name"]: entry for entry in worker["spec"]["containers"][0]["env"]}
    assert env["A"]["valueFrom"]["secretKeyRef"]["key"] == "env.A"  # ours, of --envs
    assert env["B"]["value"] == "2"
    assert env["C"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


def test_json_of_services_reaches_every_service() -> None:
    spec = job(cluster_spec_json='{"service_spec": {"type": "NodePort"}}', need_tf_config=True)
    services = [found for found in job_manifests(spec, "t") if found["kind"] == "Service"]
    assert len(services) == 1 + 1 + 2
    assert all(service["spec"]["type"] == "NodePort" for service in services)


def test_a_file_changes_pods_and_services(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    file.write_text(GOOD_FILE)
    spec = job(cluster_spec=str(file), cluster_spec_json='{"pod_spec": {"labels": {"ignored": "1"}}}')
    manifests = job_manifests(spec, "t")
    master = manifests[-1]
    assert master["metadata"]["labels"]["number"] == "1"
    assert "ignored" not in master["metadata"]["labels"]
    assert master["metadata"]["labels"][names.JOB_LABEL] == "job"
    assert master["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert master["spec"]["containers"][0]["env"][-1] == {"name": "SITE", "value": "a"}
    [service] = [found for found in manifests if found["kind"] == "Service"]
    assert service["metadata"]["annotations"] == {"app": "elasticdl", "elasticdl-job-name": "job", "site": "a"}
    worker = pod(spec, "worker")
    assert worker["metadata"]["labels"]["number"] == "2", "the file keeps its state from pod to pod"


def test_a_file_that_changes_nothing_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    same = "class C:\n    def with_pod(self, x):\n        return x\n    with_service = with_pod\ncluster = C()\n"
    file.write_text(same)
    plain = job(volume="host_path=/h,mount_path=/h", need_tf_config=True)
    changed = job(volume="host_path=/h,mount_path=/h", need_tf_config=True, cluster_spec=str(file))
    for role in ("master", "ps", "worker"):
        assert pod(changed, role) == pod(plain, role)
    assert job_manifests(changed, "t")[1:] == job_manifests(plain, "t")[1:]


def test_in_the_jobs_own_specification_the_file_is_where_the_image_has_it(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    file.write_text(GOOD_FILE)
    data = job_manifests(job(cluster_spec=str(file)), "t")[0]["data"]
    assert JobSpec.from_json(data["spec.json"]).cluster_spec == "/cluster_spec/site.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a Python file"),
        ("x = 1\ny = (\n", "SyntaxError in line 2"),
        ("import nonesuch\n", "raised ModuleNotFoundError in line 1: No module named 'nonesuch'"),
        ("x = 1\n", "defines no `cluster`"),
        ("cluster = object()\n", "has no method with_"),
        (
            "class C:\n    def with_pod(self, p):\n        pass\n    with_service = with_pod\ncluster = C()\n",
            "did not return",
        ),
        (
            "class C:\n    def with_pod(self, p):\n        return p.spec.nonesuch\ncluster = C()\n",
            "AttributeError in line 3",
        ),
    ],
)
def test_an_error_in_the_file_names_file_and_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "site.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FlagError) as caught:
        job_manifests(job(cluster_spec=str(file)), "t")
    assert said in caught.value.what
    assert str(file) in caught.value.what
