"""Messages of `status` and --wait about pods of a scripted API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError, connect
from elasticdl_client.kubernetes.follow import ClusterFollower
from elasticdl_client.progress import Display
from tests.client.api_server import NAMESPACE, ApiServer, own_cluster
from tests.client.test_jobs_local import Run, run  # noqa: F401

NOT_FOUND = 'MountVolume.SetUp failed for volume "data" : configmap "data" not found'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with own_cluster(tmp_path, monkeypatch) as server:
        server.status = JobStatus("job", JobPhase.RUNNING, workers_wanted=2, updated_at=1.0)
        server.add_pod("master", [])
        yield server


def show(cluster: ApiServer, role: str, phase: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Adds a pod whose container is in this state."""
    cluster.add_pod(role, [], phase=phase)
    pod = cluster.pods[f"elasticdl-job-{role}"]
    pod["spec"] |= {"restartPolicy": "Never", "nodeName": "n"}
    pod["status"] |= more
    pod["status"]["containerStatuses"][0]["state"] = state
    return pod


def found(run: Run) -> dict[str, Any]:  # noqa: F811
    plain: dict[str, Any] = json.loads(run("status", "job", "-o", "json"))
    return plain | {pod["name"].removeprefix("elasticdl-job-"): pod for pod in plain["pods"]}


def creating(cluster: ApiServer, role: str) -> None:
    show(cluster, role, "Pending", {"waiting": {"reason": "ContainerCreating"}})


def test_a_pod_whose_container_is_not_made_says_what_its_newest_event_says(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    for role in ("worker-0", "worker-1", "worker-2", "ps-0"):
        creating(cluster, role)
    cluster.add_event("worker-0", "00:02:00", "FailedMount", NOT_FOUND)
    cluster.add_event("worker-0", "00:00:00", "Scheduled", "Successfully assigned", "Normal")
    cluster.add_event("worker-1", "00:00:01", "FailedCreatePodSandBox", "no address is left")
    cluster.add_event("worker-1", "00:00:02", "Pulling", 'Pulling image "big:1"', "Normal")
    cluster.add_event("ps-0", "00:00:01", "FailedAttachVolume", "it is attached elsewhere")
    cluster.add_event("ps-0", "00:00:02", "SuccessfulAttachVolume", "attached", "Normal")
    pods = found(run)
    assert pods["worker-0"]["message"] == f"FailedMount: {NOT_FOUND}"
    assert pods["worker-1"]["message"] == 'Pulling image "big:1"'
    assert pods["worker-2"]["message"] == pods["ps-0"]["message"] == "ContainerCreating"
    assert f"FailedMount: {NOT_FOUND}" in run("status", "job")


def test_only_what_runs_is_counted_as_running(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    show(cluster, "worker-0", "Running", {"terminated": {"exitCode": 1, "reason": "Error"}})
    show(cluster, "worker-1", "Running", {"running": {}})
    pods = found(run)
    assert (pods["workers_alive"], pods["worker-0"]["phase"]) == (1, "Failed")
    assert pods["worker-0"]["message"] == "Error, exit code 1"
    assert "Workers:      1/2 running, 1 failed\n" in run("status", "job")
    sidecar = {"name": "mesh", "state": {"running": {}}}
    show(cluster, "worker-1", "Running", {"terminated": {"exitCode": 0}}, initContainerStatuses=[sidecar])
    assert (found(run)["workers_alive"], found(run)["worker-1"]["phase"]) == (0, "Succeeded")
    assert "Workers:      0/2 running, 1 failed, 1 succeeded\n" in run("status", "job")
    creating(cluster, "worker-2")
    assert "Workers:      0/2 running, 1 succeeded, 1 pending\n" in run("status", "job")
    for role in ("worker-1", "worker-2"):
        show(cluster, role, "Running", {"running": {}})
    assert "Workers:      2/2 running\n" in run("status", "job")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("DisruptionTarget", "PreemptionByScheduler"),
        ("DisruptionTarget", "EvictionByEvictionAPI"),
        ("DisruptionTarget", "DeletionByTaintManager"),
        ("DisruptionTarget", "TerminationByKubelet"),
        ("TerminationTarget", "WorkloadEvictedDueToPreempted"),
    ],
)
def test_a_disrupted_pod_says_by_what(cluster: ApiServer, run: Run, kind: str, reason: str) -> None:  # noqa: F811
    target = {"type": kind, "status": "True", "reason": reason, "message": "it had to go"}
    show(cluster, "worker-0", "Failed", {"terminated": {"exitCode": 137}}, conditions=[target])
    assert found(run)["worker-0"]["message"] == f"{reason}: it had to go"


class Told(Display):
    """Ends the following as soon as a line is said."""

    def say(self, line: str) -> None:
        raise EOFError(line)

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        """Of no interest here."""

    def close(self) -> None:
        """Nothing is open."""


def first_line() -> str:
    """Of a client that follows the job."""
    flags = {"job_name": "job", "namespace": NAMESPACE, "image_name": "i", "model_def": "m.m", "training_data": "/d"}
    with pytest.raises(EOFError) as said:
        ClusterFollower(connect(), JobSpec.from_flags("train", flags), Told()).follow()
    return str(said.value)


def test_a_waiting_client_sees_why_the_master_is_not_created(cluster: ApiServer) -> None:
    creating(cluster, "master")
    cluster.add_event("master", "00:02:00", "FailedMount", NOT_FOUND)
    assert first_line() == f"The master's pod is pending: FailedMount: {NOT_FOUND}"


@pytest.mark.parametrize("damaged", ["{", '{"job_name": "job", "coverage": [{}]}'])
def test_a_waiting_client_outlasts_a_damaged_status(
    cluster: ApiServer, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating(cluster, "master")
    monkeypatch.setattr(JobStatus, "to_json", lambda _: damaged)
    assert first_line() == "The master's pod is pending: its container is made on n."


@pytest.mark.parametrize("shows_gates", [True, False])
def test_a_waiting_client_names_the_queue_that_holds_the_master_back(cluster: ApiServer, shows_gates: bool) -> None:
    message = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": message}
    cluster.add_pod("master", [], phase="Pending")
    pod = cluster.pods["elasticdl-job-master"]
    pod["status"] = {"phase": "Pending", "conditions": [gated]}
    pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    if shows_gates:
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    assert first_line() == "The master's pod is pending: waiting in queue team-a"


def test_of_several_containers_the_pods_own_is_looked_at_though_another_is_first(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    for role in ("master", "worker-0"):
        pod = show(cluster, role, "Failed", {"terminated": {"exitCode": 3, "reason": "Error"}})
        own, name = pod["status"]["containerStatuses"][0], pod["metadata"]["name"]
        sidecar = own | {"name": "a-mesh", "state": {"terminated": {"exitCode": 143, "reason": "Killed"}}}
        pod["status"]["containerStatuses"] = [sidecar, own | {"name": name}]
        pod["spec"]["containers"] = [{"name": "a-mesh"}, {"name": name}]
    assert found(run)["worker-0"]["message"] == "Error, exit code 3"
    master = cluster.pods["elasticdl-job-master"]
    master["status"]["phase"], master["spec"]["restartPolicy"] = "Running", "Never"  # as the mesh ends later
    with pytest.raises(JobError, match="has lost its master: exit code 3"):
        first_line()


def test_the_environment_names_namespace_and_context_of_a_job_command(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = json.loads((tmp_path / "config").read_text())
    config["contexts"].append({"name": "far", "context": {"cluster": "c", "user": "u", "namespace": "elsewhere"}})
    (tmp_path / "config").write_text(json.dumps(config | {"current-context": "far"}))
    with pytest.raises(JobError, match="not found in elsewhere namespace"):
        run("status", "job")
    monkeypatch.setenv("ELASTICDL_NAMESPACE", NAMESPACE)
    assert found(run)["logs"] == f"elasticdl logs job --namespace={NAMESPACE}"
    monkeypatch.setenv("ELASTICDL_CONTEXT", "c")
    assert found(run)["logs"] == f"elasticdl logs job --namespace={NAMESPACE} --context=c"
    assert json.loads(run("list", "-o", "json", "--context=far"))[0]["namespace"] == NAMESPACE
    assert run("list", "-o", "name", "--runtime=local") == ""
    with pytest.raises(ClusterError, match="no context nowhere"):
        run("list", "--context=nowhere")


BROKEN = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'reader_of_mine'"]


@pytest.mark.parametrize(
    ("state", "is_before"),
    [
        ({"running": {}}, True),  # the next start has printed little, and nothing of why the one before has ended
        ({"terminated": {"exitCode": 1, "reason": "Error"}}, False),
        ({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}}, False),
    ],
)
def test_a_master_that_ends_again_and_again_is_explained_by_the_log_of_the_run_that_ended(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    state: dict[str, Any],
    is_before: bool,
) -> None:
    cluster.status = JobStatus("job")
    cluster.add_pod("master", *([BROKEN, ["The master starts"]] if is_before else [["The master starts"], BROKEN]))
    own = cluster.pods["elasticdl-job-master"]["status"]["containerStatuses"][0]
    own |= {"state": state, "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    [trouble] = json.loads(run("explain", "job", "-o", "json"))["troubles"]
    assert trouble["trouble"] == "ProgramFailed"
    assert BROKEN[1] in trouble["evidence"]["log"]
    assert BROKEN[1] in "\n".join(trouble["why"])


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({}, "then submit the job again"),
        ({"checkpoint_dir": "/c"}, "--checkpoint_dir_for_init=/c"),
        ({"job_dir": "s3://b/j"}, "`elasticdl resume --job_dir=s3://b/j --namespace=team` continues it"),
    ],
)
def test_a_job_whose_state_was_deleted_by_hand_is_not_said_to_be_resumable(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    flags: dict[str, str],
    remedy: str,
) -> None:
    required = {"job_name": "job", "namespace": NAMESPACE, "image_name": "i", "model_def": "m.m", "training_data": "/d"}
    cluster.spec = JobSpec.from_flags("train", required | flags)
    cluster.has_state = False
    plain = found(run)
    assert plain["phase"] == "Running"  # until its master has seen it
    assert "ConfigMap elasticdl-job-state" in plain["note"]
    master = cluster.pods["elasticdl-job-master"]
    master["metadata"]["labels"][names.STATUS_LABEL] = "Failed"
    master["status"]["phase"] = "Failed"
    plain = found(run)
    assert plain["phase"] == "Failed"
    assert "`elasticdl delete job --namespace=team`" in plain["note"]
    assert remedy in plain["note"]
    page = run("status", "job")
    assert "elasticdl resume job" not in page
    [trouble] = json.loads(run("explain", "job", "-o", "json"))["troubles"]
    assert (trouble["trouble"], trouble["is_fatal"]) == ("JobFailed", True)
    assert remedy in trouble["advice"]
    with pytest.raises(JobError, match="elasticdl-job-state"):
        first_line()
    del cluster.pods["elasticdl-job-master"]
    assert found(run)["phase"] == "Failed"
    master["metadata"]["labels"][names.STATUS_LABEL] = "Finished"
    cluster.pods["elasticdl-job-master"] = master
    assert found(run)["phase"] == "Succeeded"
