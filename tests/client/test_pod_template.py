"""Pod templates and placement: fields by the role of the pods, and errors by their path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.errors import FlagError
from elasticdl_client.flag_sources import gather
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes.objects import role_pod, spec_for_pods
from elasticdl_client.kubernetes.pods import pod_manifest, queue_of
from elasticdl_client.kubernetes.resources import why_gated

BASE = {"job_name": "job", "image_name": "i", "model_def": "m.model", "training_data": "/d"}
TEMPLATE = """
metadata:
  labels: {team: a}
  annotations: {example.com/note: "1"}
spec:
  runtimeClassName: gvisor
  priorityClassName: team-a
  securityContext: {supplementalGroups: [42]}
  nodeSelector: {disk: ssd}
  tolerations:
  - {key: gpu, operator: Exists}
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 99}
  imagePullSecrets: [{name: second}]
  hostAliases: [{ip: 10.0.0.1, hostnames: [db]}]
  initContainers: [{name: warm, image: busybox}]
  volumes:
  - {name: cache, emptyDir: {}}
  - {name: elasticdl-tmp, emptyDir: {sizeLimit: 5Gi}}
  containers:
  - name: elasticdl
    env:
    - {name: SITE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: FROM_FLAG, value: template}
    volumeMounts: [{name: cache, mountPath: /cache}]
    securityContext: {readOnlyRootFilesystem: null, seccompProfile: {type: Localhost, localhostProfile: p}}
    resources: {claims: [{name: nic}]}
  - {name: log-shipper, image: shipper:1}
"""


def job(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", BASE | flags)


def pod(spec: JobSpec, role: str = "worker") -> dict[str, Any]:
    return pod_manifest(spec, role_pod(spec, role))


def refused(**flags: object) -> str:
    with pytest.raises(FlagError) as caught:
        job(**flags)
    assert caught.value.hint
    return str(caught.value)


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "pod.yaml"
    file.write_text(TEMPLATE)
    return str(file)


def test_a_template_is_merged_over_the_pod_by_the_names_in_its_lists(template: str) -> None:
    plain = pod(job(image_pull_secret="first", envs="FROM_FLAG=flag"))
    found = pod(job(image_pull_secret="first", envs="FROM_FLAG=flag", pod_template=template))
    assert found["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "a"}
    assert found["metadata"]["annotations"] == {"example.com/note": "1"}
    spec, before = found["spec"], plain["spec"]
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("gvisor", "team-a")
    assert spec["securityContext"] == before["securityContext"] | {"supplementalGroups": [42]}
    assert spec["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]
    assert {one["key"]: one.get("tolerationSeconds") for one in spec["tolerations"]} == {
        "node.kubernetes.io/unreachable": 10,
        "gpu": None,
        "node.kubernetes.io/not-ready": 99,
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert list(volumes) == [volume["name"] for volume in before["volumes"]] + ["cache"]
    assert volumes["elasticdl-tmp"]["emptyDir"] == {"sizeLimit": "5Gi"}
    own, shipper = spec["containers"]
    [plain_own] = before["containers"]
    assert shipper == {"name": "log-shipper", "image": "shipper:1"}
    for kept in ("name", "image", "command", "terminationMessagePolicy"):
        assert own[kept] == plain_own[kept]
    assert own["resources"] == plain_own["resources"] | {"claims": [{"name": "nic"}]}
    env = {variable["name"]: variable for variable in own["env"]}
    assert env["FROM_FLAG"] == {"name": "FROM_FLAG", "value": "template"}
    assert env["SITE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert {variable["name"] for variable in plain_own["env"]} < set(env)
    assert own["volumeMounts"] == [*plain_own["volumeMounts"], {"name": "cache", "mountPath": "/cache"}]
    assert "readOnlyRootFilesystem" not in own["securityContext"]
    assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_roles_template_comes_after_that_of_all_and_reaches_pods_without_the_file(tmp_path: Path) -> None:
    for name, host in (("all", "x"), ("worker", "y"), ("master", "z")):
        (tmp_path / name).write_text(f"spec: {{hostname: {host}, schedulerName: {name}}}")
    spec = job(
        pod_template=str(tmp_path / "all"),
        worker_pod_template=str(tmp_path / "worker"),
        master_pod_template=str(tmp_path / "master"),
    )
    there = spec_for_pods(spec)
    for name in ("all", "worker", "master"):
        (tmp_path / name).unlink()
    assert JobSpec.from_json(there.to_json()) == there
    assert [pod(there, role)["spec"]["schedulerName"] for role in ("ps", "worker")] == ["all", "worker"]


def test_a_job_file_may_hold_the_template_itself(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("job_name: j\nworker_pod_template:\n  spec: {hostname: h}\n")
    given = gather("train", ["-f", str(tmp_path / "job.yaml")], {})
    assert json.loads(str(given.values["worker_pod_template"])) == {"spec": {"hostname": "h"}}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"metadata": {"name": "x"}}', "may not set metadata.name"),
        ('{"metadata": {"labels": {"elasticdl-job-name": "x"}}}', "metadata.labels[elasticdl-job-name]"),
        ('{"spec": {"restartPolicy": "Always"}}', "may not set spec.restartPolicy"),
        ('{"spec": {"serviceAccountName": "x"}}', "may not set spec.serviceAccountName"),
        ('{"spec": {"containers": [{"name": "elasticdl", "image": "x"}]}}', "spec.containers[elasticdl].image"),
        ('{"spec": {"containers": [{"command": ["x"]}]}}', "spec.containers[elasticdl].command"),
        (
            '{"spec": {"containers": [{"name": "elasticdl", "resources": {"limits": {"cpu": "1"}}}]}}',
            "spec.containers[elasticdl].resources.limits",
        ),
        ('{"spec": {"containers": [{"env": [{"name": "MASTER_ADDR"}]}]}}', "containers[elasticdl].env[MASTER_ADDR]"),
        ('{"spec": {"volumes": [{"name": "elasticdl-token", "emptyDir": {}}]}}', "spec.volumes[elasticdl-token]"),
        ('{"spec": {"containers": [{"name": "elasticdl"}, {}]}}', "has the container elasticdl twice"),
        ('{"spec": {"tolerationz": []}}', "has the field spec.tolerationz, which spec does not have"),
        ('{"spec": {"containers": [{"name": "a", "imag": "b"}]}}', "has the field spec.containers[a].imag"),
        ('{"spec": {"nodeSelector": {"gpu": true}}}', "spec.nodeSelector is not a mapping of texts to texts"),
        ('{"spec": {"hostNetwork": "yes"}}', "spec.hostNetwork is not true or false"),
        ('{"spec": {"volumes": null}}', "spec.volumes is empty"),
        ('{"spec": {"containers": {}}}', "spec.containers is not a list"),
        ('{"template": {}}', "has the field template, which a pod template does not have"),
        ('{"spec": ', "neither YAML nor JSON"),
        ("no/such/file.yaml", "cannot be read"),
    ],
)
def test_what_a_template_may_not_have_is_refused_by_its_path(text: str, what: str) -> None:
    said = refused(pod_template=text)
    assert what in said
    assert said.startswith("--pod_template=")


def test_a_slip_in_a_field_is_answered_with_the_one_that_was_meant() -> None:
    assert "Did you mean tolerations?" in refused(ps_pod_template='{"spec": {"tolerationz": []}}')


def test_placement_reaches_all_pods_and_the_queue_those_that_compute() -> None:
    spec = job(
        node_selector="disk=ssd, topology.kubernetes.io/zone=eu-1",
        tolerations="gpu=a100:NoSchedule,spot:NoExecute,dedicated=ml,any",
        scheduler_name="volcano",
        queue="team-a",
    )
    for role in ("master", "ps", "worker"):
        found = pod(spec, role)
        assert found["spec"]["nodeSelector"] == {"disk": "ssd", "topology.kubernetes.io/zone": "eu-1"}
        assert found["spec"]["schedulerName"] == "volcano"
        assert found["spec"]["tolerations"][-4:] == [
            {"key": "gpu", "operator": "Equal", "value": "a100", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Exists", "effect": "NoExecute"},
            {"key": "dedicated", "operator": "Equal", "value": "ml"},
            {"key": "any", "operator": "Exists"},
        ]
        queue = found["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        assert queue == (None if role == "master" else "team-a")


def test_a_template_names_the_queue_of_its_role() -> None:
    template = '{"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "servers"}}}'
    spec = job(queue="team-a", ps_pod_template=template)
    assert (queue_of(spec, "worker"), queue_of(spec, "ps")) == ("team-a", "servers")
    assert pod(spec, "ps")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "servers"


@pytest.mark.parametrize(
    "flags",
    [
        {"node_selector": "disk"},
        {"node_selector": "disk=a b"},
        {"node_selector": "disk=a,disk=b"},
        {"node_selector": "Example.com/disk=a"},
        {"tolerations": "gpu:Never"},
        {"tolerations": "=x"},
        {"scheduler_name": "My Scheduler"},
        {"queue": "Team_A"},
    ],
)
def test_a_wrong_place_is_refused_with_the_form_to_write(flags: dict[str, str]) -> None:
    [(name, value)] = flags.items()
    assert refused(**flags).startswith(f"--{name}={value}: ")


def test_a_gated_pod_waits_in_its_queue_or_for_its_gates() -> None:
    gated: dict[str, Any] = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
        "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
    }
    assert why_gated(gated) == "waiting in queue team-a"
    gated["spec"]["schedulingGates"] = [{"name": "example.com/approval"}]
    assert why_gated(gated) == "waiting for its scheduling gates: example.com/approval"
    gated["spec"]["schedulingGates"] = []
    assert why_gated(gated) == ""
    # Read by a client that is older than the field.
    gated["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}
    assert why_gated(gated) == "waiting in queue team-a"
    gated["status"]["conditions"][0]["reason"] = "Unschedulable"
    assert why_gated(gated) == ""
