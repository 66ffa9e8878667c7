"""Lives of a master against a real API server: the process runs here, everything that it makes is in the cluster."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from elasticdl.cluster.cluster import PodPhase
from elasticdl.cluster.kubernetes.adapter import KubernetesCluster
from elasticdl.master.checkpoints import PsCalls
from elasticdl.master.core.commands import CreatePod
from elasticdl.master.core.fleet.pods import KEPT_ENDED
from elasticdl.master.effects import Effects
from elasticdl.master.inbox import Inbox
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.protocol import Role
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.pods import pod_manifest
from tests.master.actors import held_port, running, wait_until
from tests.master.api_proxy import Fault, proxied
from tests.master.kubernetes_job import JOB, KubernetesJob

pytestmark = pytest.mark.cluster
LOCAL: dict[str, object] = {"distribution_strategy": "Local", "num_ps_pods": 0}


def test_pods_are_made_owned_and_explained_and_the_next_life_finds_them(tmp_path: Path) -> None:
    with running(KubernetesJob(tmp_path, num_ps_pods=2, num_workers=2, need_tf_config=False)) as job:
        assert isinstance(job, KubernetesJob)
        wait_until(lambda: len(job.pods()) == 4, f"four pods\n{job.log()}")
        pods = job.pods()
        wait_until(lambda: job.has_status() and len(job.status().pods) == 4, "the pods in the status")
        wait_until(lambda: all("node" in pod.message for pod in job.status().pods), "why they are pending")
        status = job.status()
        assert [pod.name.removeprefix("elasticdl-digits-") for pod in status.pods] == [
            "ps-0", "ps-1", "worker-0", "worker-1",
        ]  # fmt: skip
        assert {pod.phase for pod in status.pods} == {"Pending"}
        assert (status.phase, status.generation) == (JobPhase.PENDING, 1)
        assert "waiting for parameter servers: 0 of 2" in status.message
        assert job.label() == "Pending"
        _check_owners(job)
        _check_environment(job)
        job.kill()
        job.start()
        wait_until(lambda: job.status().generation == 2, "the next life")
        wait_until(lambda: len(job.status().pods) == 4, "the pods in its status")
        assert job.pods() == pods
        log = job.log()
        assert log.count("owns all objects of the job now") == 1
        assert "Pod elasticdl-digits-ps-0: new -> Pending" in log


def _check_owners(job: KubernetesJob) -> None:
    core, namespace = job.namespace.core, job.namespace.name
    uid = core.read_namespaced_config_map(names.job_object(JOB), namespace).metadata.uid
    owned = subprocess.run(
        ["kubectl", "--namespace", namespace, "get", "configmap,secret,service,networkpolicy,pod", "-o", "json",
         "-l", f"{names.JOB_LABEL}={JOB}"],
        check=True, capture_output=True,
    )  # fmt: skip
    items = json.loads(owned.stdout)["items"]
    assert len(items) == 2 + 1 + 1 + 1 + 5
    for item in items:
        owners = [owner["uid"] for owner in item["metadata"].get("ownerReferences", [])]
        assert owners == ([] if item["metadata"]["uid"] == uid else [uid]), item["metadata"]["name"]


def _check_environment(job: KubernetesJob) -> None:
    shown = job.namespace.core.read_namespaced_pod("elasticdl-digits-ps-1", job.namespace.name)
    env = {variable.name: variable.value for variable in shown.spec.containers[0].env}
    assert shown.spec.containers[0].env[0].name == "MY_POD_IP"
    assert shown.spec.containers[0].command == ["python", "-P", "-m", "elasticdl.ps"]
    assert (env["PS_ID"], env["PS_PORT"], env["PS_ADVERTISED_HOST"]) == ("1", "2222", "$(MY_POD_IP)")
    assert env["MASTER_ADDR"] == f"elasticdl-digits-master.{job.namespace.name}.svc:50001"
    assert env["ELASTICDL_MASTER_TIMEOUT_S"] == "300"
    assert shown.spec.termination_grace_period_seconds == 30
    shown = job.namespace.core.read_namespaced_pod("elasticdl-digits-worker-1", job.namespace.name)
    assert shown.metadata.labels[names.SLOT_LABEL] == "1"
    assert shown.spec.termination_grace_period_seconds == 10


def test_old_pods_that_have_ended_are_deleted_and_the_newest_stay(tmp_path: Path) -> None:
    job = KubernetesJob(tmp_path, **LOCAL, num_workers=1)
    ended = [names.pod_name(JOB, "worker", index) for index in range(100, KEPT_ENDED + 103)]
    for name in ended:
        labels = names.pod_labels(JOB, "worker", int(name.rpartition("-")[2]))
        container = {"name": "main", "image": "none"}
        spec = {"containers": [container], "nodeSelector": {"no-node-has": "this-label"}}
        job.namespace.core.create_namespaced_pod(
            job.namespace.name, {"metadata": {"name": name, "labels": labels}, "spec": spec}
        )
        job.namespace.core.patch_namespaced_pod_status(name, job.namespace.name, {"status": {"phase": "Failed"}})
    with running(job):
        left = {*ended[3:], names.pod_name(JOB, "worker", 0)}
        wait_until(lambda: job.pods().keys() == left, f"the end of the three oldest\n{job.log()}")


def test_a_job_continues_after_sigterm_and_kill_and_ends_once(tmp_path: Path) -> None:
    with running(KubernetesJob(tmp_path, **LOCAL)) as job:
        assert isinstance(job, KubernetesJob)
        worker = job.ready_worker()
        first = worker.lease()
        assert worker.progress(first, 0).accepted
        wait_until(lambda: job.label() == "Running", "the label Running")
        assert job.process is not None
        began = time.monotonic()
        job.process.terminate()
        assert job.wait() == 143
        assert time.monotonic() - began < 5
        assert len(job.pods()) == 1
        job.start()
        assert worker.register(held=((first, (0,)),)).generation == 2
        job.kill()
        job.start()
        assert worker.register(held=((first, (0,)),)).generation == 3
        assert worker.progress(first, 1).accepted
        assert worker.finish(first).accepted
        assert worker.train_all() == 3
        assert job.wait() == 0, job.log()
        status = job.status()
        assert (status.phase, status.exit_code) == (JobPhase.SUCCEEDED, 0)
        assert [str(one) for one in status.coverage] == ["records 64, committed 64, repeated 0, lost 0"]
        assert job.label() == "Finished"
        assert job.master_pod().spec.active_deadline_seconds is None
        job.start()
        assert job.wait() == 0
        assert "The job has ended before with exit code 0" in job.log()
        assert job.status().generation == 3


def test_a_failed_job_is_over_for_the_kubelet_too(tmp_path: Path) -> None:
    with running(KubernetesJob(tmp_path, **LOCAL)) as job:
        assert isinstance(job, KubernetesJob)
        worker = job.worker()
        worker.register()
        worker.report_model(error="the metric auc cannot be merged")
        worker.train_all()
        assert job.wait() == 1
        assert "the metric auc cannot be merged" in job.status().message
        assert job.label() == "Failed"
        assert job.master_pod().spec.active_deadline_seconds == 1
        job.start()
        assert job.wait() == 1
        assert "The job has ended before with exit code 1: the metric auc" in job.log()


def test_an_api_server_that_is_away_delays_a_life_and_ends_none(tmp_path: Path) -> None:
    with proxied(Path(os.environ["KUBECONFIG"]), tmp_path / "kubeconfig") as proxy:
        job = KubernetesJob(tmp_path, **LOCAL)
        job.kubeconfig = proxy.kubeconfig
        proxy.fault = Fault.REFUSES
        with running(job):
            wait_until(lambda: "cannot be reached" in job.log(), "the first complaint")
            proxy.fault = Fault.NONE
            worker = job.worker()
            worker.register()
            proxy.fault = Fault.HANGS
            assert not _reports(worker)
            proxy.fault = Fault.NONE
            wait_until(lambda: _reports(worker), "the model to be taken", timeout_s=60)
            proxy.fault = Fault.REFUSES
            for _ in range(3):  # grants and progress need no journal
                lease = worker.lease()
                assert worker.progress(lease, 0, 1).accepted
                assert worker.finish(lease).accepted
            last = worker.lease()
            assert worker.progress(last, 0, 1).accepted
            ending = threading.Thread(target=worker.finish, args=(last,))
            ending.start()
            wait_until(lambda: "cannot be written" in job.log().split("Epoch 1 is complete")[-1], "the end to wait")
            proxy.fault = Fault.NONE
            ending.join()
            worker.train_all()
            assert job.wait(60) == 0, job.log()
            assert job.status().phase is JobPhase.SUCCEEDED
            assert job.label() == "Finished"


def _reports(worker: Any) -> bool:
    try:
        return bool(worker.report_model().accepted)
    except grpc.RpcError as error:
        return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_end_of_a_deleted_job_is_quiet(tmp_path: Path) -> None:
    with running(KubernetesJob(tmp_path, **LOCAL)) as job:
        assert isinstance(job, KubernetesJob)
        job.worker().register()
        job.namespace.core.delete_namespaced_config_map(names.job_object(JOB), job.namespace.name)
        assert job.wait(60) == 3
        assert "the job was deleted" in job.log()
        assert "Traceback" not in job.log()
        wait_until(lambda: not job.pods(), "the pods to go with it", timeout_s=60)


def test_a_second_master_takes_over_and_the_first_ends(tmp_path: Path) -> None:
    with running(KubernetesJob(tmp_path, **LOCAL)) as job, held_port() as other:
        assert isinstance(job, KubernetesJob)
        job.worker().register()
        first, job.process = job.process, None
        job.port = int(other.getsockname()[1])
        job.start()
        second, job.process = job.process, first
        assert job.wait() == 3
        assert "another master has taken over the job" in job.log()
        job.process = second
        assert job.worker().register().generation == 2


def test_missing_rights_are_named_before_anything_is_made(tmp_path: Path) -> None:
    job = KubernetesJob(tmp_path, **LOCAL)
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "patch"]},
    ]
    job.kubeconfig = _kubeconfig_of_a_role(job, rules, tmp_path)
    with running(job):
        assert job.wait() == 1
        log = job.log()
        assert "create, delete, watch pods; get pods/log; watch, update configmaps" in log
        assert "elasticdl rbac --print" in log
        assert job.pods() == {}
        assert job.label() == "Failed"


def _kubeconfig_of_a_role(job: KubernetesJob, rules: list[dict[str, Any]], directory: Path) -> Path:
    core, namespace = job.namespace.core, job.namespace.name
    account = job.namespace.await_object(
        lambda **more: core.list_namespaced_service_account(namespace, **more), lambda shown: bool(shown.get("secrets"))
    )
    secret = core.read_namespaced_secret(account["secrets"][0]["name"], namespace)
    role = {"kind": "Role", "name": "some", "apiGroup": "rbac.authorization.k8s.io"}
    metadata = {"name": "some", "namespace": namespace}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    version = "rbac.authorization.k8s.io/v1"
    items = [
        {"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": rules},
        {"apiVersion": version, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=True, capture_output=True)
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"][0]["user"] = {"token": base64.b64decode(secret.data["token"]).decode()}
    path = directory / "restricted"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.quiet
def test_a_hundred_pods_reach_the_api_server_within_ten_seconds(tmp_path: Path) -> None:
    job = KubernetesJob(tmp_path, num_workers=100, num_ps_pods=2, worker_resource_request="cpu=1m,memory=1Mi")
    try:
        spec = JobSpec.from_json((job.path / "spec.json").read_text())
        cluster = KubernetesCluster(
            spec.namespace, JOB, lambda pod: pod_manifest(spec, pod), job.namespace.connection.client
        )
        effects = Effects(spec, cluster, PodSpecs(spec, "python", "m:1"), PsCalls("t", 1), Inbox(), 16)
        began = time.monotonic()
        for index in range(100):
            effects.create_pod(CreatePod(names.pod_name(JOB, "worker", index), Role.WORKER, index, slot=index))
        wait_until(lambda: len(job.pods()) == 100, "a hundred pods", timeout_s=60)
        took_s = time.monotonic() - began
        print(f"100 pods were accepted within {took_s:.1f} s")
        assert took_s < 10
        assert {pod.phase for pod in cluster.list()} == {PodPhase.PENDING}
        effects.close()
    finally:
        job.end()
