"""Submission to a real cluster: errors, the objects created, and that nothing is left behind."""

from __future__ import annotations

import json

import pytest
import yaml
from submission_scene import KINDS, Scene

from elasticdl_client.jobs.cluster_objects import list_objects
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.rbac import MASTER_RIGHTS, USER_RIGHTS, Right
from tests.e2e_kubernetes.locks import one_at_a_time
from tests.e2e_kubernetes.queue_controller import KUEUE, local_queue, local_queues

pytestmark = pytest.mark.cluster

ALL = [
    "ConfigMap elasticdl-job",
    "ConfigMap elasticdl-job-state",
    "Secret elasticdl-job-token",
    "Service elasticdl-job-master",
    "NetworkPolicy elasticdl-job",
    "Pod elasticdl-job-master",
]
REVIEWS = (
    Right("authorization.k8s.io", "localsubjectaccessreviews", ("create",)),
    Right("", "serviceaccounts", ("get",)),
)


def refused(scene: Scene, *said: str, **flags: str) -> str:
    """Submits, and asserts that it is refused with these words and that nothing is left."""
    done = scene.train(**flags)
    assert done.returncode == 2, done.stdout + done.stderr
    for words in said:
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert scene.left() == []
    return done.stderr


def test_a_job_is_created_whole_and_deleted_with_its_config_map(scene: Scene) -> None:
    done = scene.train(need_tf_config="true", num_workers="2", num_ps_pods="1")
    assert done.returncode == 0, done.stderr
    assert "ElasticDL job job was successfully submitted. The master pod is: elasticdl-job-master." in done.stdout
    assert f"kubectl logs -f elasticdl-job-master --namespace={scene.namespace}" in done.stdout
    assert f"elasticdl status job --namespace={scene.namespace}" in done.stdout
    services = [f"Service elasticdl-job-{end}" for end in ("ps-0", "worker-0", "worker-1")]
    assert sorted(scene.left()) == sorted([*ALL, *services])

    listed = yaml.safe_load(scene.kubectl("get", KINDS, "-l", "elasticdl-job-name=job", "-o", "yaml"))["items"]
    [owner] = [item for item in listed if item["metadata"]["name"] == "elasticdl-job" and item["kind"] == "ConfigMap"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "elasticdl-job", "uid": owner["metadata"]["uid"]}
    for item in listed:
        expected = None if item is owner else [reference]
        assert item["metadata"].get("ownerReferences") == expected, item["metadata"]["name"]

    scene.kubectl("delete", "configmap", "elasticdl-job")
    scene.wait_until_gone()


def test_the_code_of_a_job_is_not_fetched_where_jobs_are_listed(scene: Scene) -> None:
    code = scene.directory / "code"
    code.mkdir()
    symbols = ("custom_model", "loss", "optimizer", "feed")
    (code / "model.py").write_text("".join(f"def {symbol}(*arguments): ...\n" for symbol in symbols))
    done = scene.train(code=str(code), model_def="model.custom_model")
    assert done.returncode == 0, done.stderr
    assert "ConfigMap elasticdl-job-code-0" in scene.left()
    where = (scene.connection, "config_map", scene.namespace, "job")
    said = {one["metadata"]["name"] for one in list_objects(*where, without=names.CODE_LABEL)}
    assert said == {"elasticdl-job", "elasticdl-job-state"}
    assert len(list_objects(*where)) == 3


def test_the_api_keeps_the_security_of_the_master_as_it_was_asked_for(scene: Scene) -> None:
    assert scene.train().returncode == 0
    spec = yaml.safe_load(scene.kubectl("get", "pod", "elasticdl-job-master", "-o", "yaml"))["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = spec["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["enableServiceLinks"] is False


def test_the_api_keeps_placement_and_a_template_of_the_master_and_takes_those_of_the_others(scene: Scene) -> None:
    template = scene.directory / "pod.yaml"
    template.write_text(
        "metadata: {annotations: {example.com/note: kept}}\n"
        "spec:\n"
        "  volumes: [{name: cache, emptyDir: {}}]\n"
        "  containers:\n"
        "  - name: elasticdl\n"
        "    volumeMounts: [{name: cache, mountPath: /cache}]\n"
        "  - {name: beside, image: 'python:3.11-slim', command: [sleep, '1'], securityContext: {runAsUser: 1234}}\n"
    )
    place = {"node_selector": "kubernetes.io/os=linux", "tolerations": "spot=yes:NoExecute", "scheduler_name": "other"}
    done = scene.train(pod_template=str(template), **place)
    assert done.returncode == 0, done.stderr
    pod = json.loads(scene.kubectl("get", "pod", "elasticdl-job-master", "-o", "json"))
    assert pod["metadata"]["annotations"]["example.com/note"] == "kept"
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert pod["spec"]["schedulerName"] == "other"
    toleration = {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute"}
    assert toleration in pod["spec"]["tolerations"]
    own, beside = pod["spec"]["containers"]
    assert "/cache" in [mount["mountPath"] for mount in own["volumeMounts"]]
    assert beside["command"] == ["sleep", "1"]
    text = scene.kubectl("get", "configmap", "elasticdl-job", "-o", "jsonpath={.data.spec\\.json}")
    assert json.loads(json.loads(text)["pod_template"])["metadata"]["annotations"] == {"example.com/note": "kept"}


def test_a_field_of_a_worker_that_the_api_refuses_is_named_before_anything_is_made(scene: Scene) -> None:
    refused(scene, "dnsPolicy", worker_pod_template='{"spec": {"dnsPolicy": "Nowhere"}}')


@pytest.mark.timeout(900)  # it waits until no test has a queue
def test_a_queue_needs_kueue_and_must_be_there(scene: Scene) -> None:
    with one_at_a_time(KUEUE):
        refused(scene, "--queue=team-a: there is no Kueue in the cluster", queue="team-a")
    with local_queues():
        refused(scene, f"there is no LocalQueue team-a in the namespace {scene.namespace}", queue="team-a")
        scene.apply(local_queue("team-a", scene.namespace))
        done = scene.train(queue="team-a")
        assert done.returncode == 0, done.stderr


def test_kubectl_applies_what_yaml_writes(scene: Scene) -> None:
    file = scene.directory / "job.yaml"
    done = scene.train(yaml=str(file))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert scene.left() == []
    scene.kubectl("apply", "--dry-run=server", "-f", str(file))
    assert scene.left() == []
    scene.kubectl("apply", "-f", str(file))
    assert sorted(scene.left()) == sorted(ALL)
    scene.kubectl("apply", "-f", str(file))  # a second time changes nothing


def test_a_dry_run_says_what_the_cluster_has_against_the_job(scene: Scene) -> None:
    done = scene.train(dry_run="true", master_pod_priority="nonesuch")
    assert done.returncode == 0
    assert "warning" in done.stderr
    assert "there is no PriorityClass nonesuch" in done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == len(ALL)
    assert scene.left() == []


def test_a_namespace_that_does_not_exist(scene: Scene) -> None:
    refused(scene, "The namespace nonesuch-here does not exist", "kubectl create", namespace="nonesuch-here")


def test_a_service_account_that_does_not_exist(empty: Scene) -> None:
    hint = f"elasticdl rbac --print --namespace={empty.namespace} | kubectl apply -f -"
    refused(empty, "The service account elasticdl does not exist", hint)


def test_a_service_account_without_rights_is_shown_every_missing_verb(scene: Scene) -> None:
    said = refused(scene, "The service account default", "--service_account=default", service_account="default")
    for right in MASTER_RIGHTS:
        assert f"{', '.join(right.verbs)} {right.resource}" in said


def test_a_service_account_that_lacks_two_verbs_is_shown_these(scene: Scene) -> None:
    patch = [{"op": "replace", "path": "/rules/0/verbs", "value": ["create", "delete", "get", "list"]}]
    scene.kubectl("patch", "role", "elasticdl", "--type=json", "-p", json.dumps(patch))
    said = refused(scene, "The service account elasticdl")
    assert "Missing: watch, patch pods." in said


@pytest.mark.parametrize(("flag", "value"), [("master_pod_priority", "nonesuch"), ("ps_pod_priority", "nonesuch")])
def test_a_priority_class_that_does_not_exist(scene: Scene, flag: str, value: str) -> None:
    refused(scene, f"--{flag}={value}", "there is no PriorityClass nonesuch", "priority_classes.yaml", **{flag: value})


def test_a_claim_that_does_not_exist(scene: Scene) -> None:
    volume = "host_path=/tmp,mount_path=/b;claim_name=nonesuch,mount_path=/data"
    refused(scene, "there is no PersistentVolumeClaim nonesuch", scene.namespace, volume=volume)


def test_a_claim_that_is_not_bound_is_a_note(scene: Scene) -> None:
    scene.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "later", "namespace": scene.namespace},
            "spec": {
                "storageClassName": "nonesuch",
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Mi"}},
            },
        }
    )
    done = scene.train(volume="claim_name=later,mount_path=/data")
    assert done.returncode == 0, done.stderr
    assert "note: the claim later is Pending" in done.stderr


def test_a_name_that_is_taken(scene: Scene) -> None:
    assert scene.train().returncode == 0
    before = sorted(scene.left())
    done = scene.train()
    assert done.returncode == 2
    assert "A job of the name job exists" in done.stderr
    assert "status Pending" in done.stderr
    assert "pod elasticdl-job-master (Pending)" in done.stderr
    assert f"`elasticdl delete job --namespace={scene.namespace}`" in done.stderr
    assert sorted(scene.left()) == before
    assert scene.train(job_name="another").returncode == 0


def test_a_worker_that_the_api_would_not_take_is_refused_at_once(scene: Scene) -> None:
    parts = {"worker_pod_spec": {"tolerations": [{"key": "a", "operator": "Sometimes"}]}}
    refused(scene, "Cannot make a worker pod of this job", "Sometimes", cluster_spec_json=json.dumps(parts))


def test_limits_of_a_namespace_that_no_worker_fits_into_are_refused_with_what_to_do(scene: Scene) -> None:
    room = {"master_resource_request": "cpu=10m,memory=32Mi", "worker_resource_request": "cpu=1,memory=32Mi"}
    scene.limit_containers(default={"cpu": "500m"}, defaultRequest={"cpu": "10m"})
    refused(scene, "must be less than or equal to cpu limit", "give --worker_resource_limit", **room)
    scene.limit_containers(max={"cpu": "750m"})
    refused(scene, "maximum cpu usage per Container", "A LimitRange", **room, worker_resource_limit="cpu=1")
    scene.kubectl("delete", "limitrange", "limits")
    scene.forbid("limits.cpu")
    refused(scene, "must specify limits.cpu", "A quota of the namespace counts them", **room)


def test_pods_that_no_node_can_hold_are_a_note(scene: Scene) -> None:
    done = scene.train()
    assert done.returncode == 0
    assert "no node is large enough for a master (cpu=90,memory=64Mi)" in done.stderr
    assert "large enough for a worker" not in done.stderr


def test_a_user_without_rights_is_shown_all_of_them(scene: Scene) -> None:
    config = scene.user([Right("", "configmaps", ("create", "get", "list"))])
    done = scene.train(config)
    assert done.returncode == 2
    assert "the cluster of context user" in done.stderr
    missing = "delete configmaps; create secrets; create services; create networkpolicies; create, get, list pods."
    assert f"Missing: {missing}" in done.stderr
    assert scene.left() == []


def test_a_user_with_just_these_rights_submits_and_is_shown_what_was_not_checked(scene: Scene) -> None:
    done = scene.train(scene.user(USER_RIGHTS))
    assert done.returncode == 0, done.stderr
    assert "whether the service account elasticdl may do what a master does could not be checked" in done.stderr
    assert sorted(scene.left()) == sorted(ALL)


def test_a_user_with_the_right_to_review_others_sees_their_missing_rights(scene: Scene) -> None:
    done = scene.train(scene.user([*USER_RIGHTS, *REVIEWS]), service_account="default")
    assert done.returncode == 2
    assert "Missing: create, delete, get, list, watch, patch pods" in done.stderr


def test_credentials_that_are_not_accepted(scene: Scene) -> None:
    done = scene.train(scene.kubeconfig("expired", {"token": "nonesuch"}))
    assert done.returncode == 2
    assert "The cluster of context expired" in done.stderr
    assert "rejects your credentials" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("resource", "kind"), [("services", "Service elasticdl-job-master"), ("pods", "Pod elasticdl-job-master")]
)
def test_a_submission_that_fails_midway_leaves_nothing(scene: Scene, resource: str, kind: str) -> None:
    scene.forbid(resource)
    done = scene.train()
    assert done.returncode == 2
    assert f"Cannot create the {kind}" in done.stderr
    assert "exceeded quota" in done.stderr
    assert "Traceback" not in done.stderr
    scene.wait_until_gone()
