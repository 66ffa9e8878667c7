"""A master's place on a scripted API server: its clock is another one, or it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticdl.master.journal import Superseded
from elasticdl.master.kubernetes.environment import KubernetesEnvironment, OwnPod
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import connect
from elasticdl_client.kubernetes.objects import job_manifests
from elasticdl_client.kubernetes.pods import owned
from tests.master.object_server import ObjectServer

TOKEN = "0" * 64
JOB = names.job_object("j")
FLAGS = {"job_name": "j", "model_def": "m.m", "training_data": "/d", "image_name": "i", "tls": "false"}


Scene = Callable[[float], ObjectServer]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Start a server with the objects of a job, given by how many seconds its clock is ahead."""
    servers: list[ObjectServer] = []

    def start(ahead_s: float) -> ObjectServer:
        spec = JobSpec.from_flags("train", {**FLAGS, "namespace": "team", "model_zoo": str(tmp_path)})
        first, *others = job_manifests(spec, TOKEN)
        servers.append(ObjectServer([first, *(owned(one, "j", f"uid-{JOB}") for one in others)], ahead_s))
        (tmp_path / "token").write_text(TOKEN)
        monkeypatch.setenv("KUBECONFIG", str(servers[0].kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("ELASTICDL_TOKEN_FILE", str(tmp_path / "token"))
        return servers[0]

    yield start
    servers[0].close()


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_submission_and_resume_are_by_this_machines_clock_and_never_in_the_future(scene: Scene, ahead_s: float) -> None:
    before = time.time()
    scene(ahead_s)
    place = KubernetesEnvironment(connect(), "team", "j", 0)
    now = time.time()
    for moment in (place.run.submitted_at, place.run.resumed_at):
        assert before - 2 <= moment <= now  # the server tells whole seconds
    place.close()


def test_a_run_is_named_by_the_masters_pod(scene: Scene) -> None:
    pod = scene(0.0).objects["pods", names.pod_name("j", "master", 0)]
    place = KubernetesEnvironment(connect(), "team", "j", 0)
    assert place.run.name == pod["metadata"]["uid"] != ""
    place.close()


@pytest.mark.parametrize("has_looked", [True, False])
def test_a_dying_master_leaves_the_pod_of_its_successor_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, has_looked: bool
) -> None:
    """`elasticdl resume` makes a pod of the same name, while the process of a deleted one may still run."""
    monkeypatch.setenv("MY_POD_IP", "10.0.0.1")
    pod = scene(0.0).objects["pods", names.pod_name("j", "master", 0)]
    pod["status"]["podIP"] = "10.0.0.1"
    own = OwnPod(connect(), "team", "j")
    if has_looked:
        own.load(f"uid-{JOB}")
    pod["metadata"]["uid"], pod["status"]["podIP"] = "uid-of-the-successor", "10.0.0.2"
    before = copy.deepcopy(pod)
    own.label("Failed")
    own.end()
    assert pod == before


def test_a_job_whose_state_was_deleted_by_hand_has_failed_and_is_not_started_again(scene: Scene) -> None:
    server = scene(0.0)
    pod = server.objects["pods", names.pod_name("j", "master", 0)]
    journal = ConfigMapJournal(connect(), "team", "j")
    journal.save({}, JobStatus("j", JobPhase.RUNNING))
    del server.objects["configmaps", names.state_object("j")]
    with pytest.raises(Superseded, match="was deleted, and the job has not been"):
        journal.save({"n": 1})
    journal.close()
    with pytest.raises(Superseded, match="was deleted, and the job has not been"):
        KubernetesEnvironment(connect(), "team", "j", 0)
    assert pod["metadata"]["labels"][names.STATUS_LABEL] == "Failed"
    assert pod["spec"]["activeDeadlineSeconds"] == 1


def test_a_deleted_job_takes_the_pod_of_its_master_with_it(scene: Scene) -> None:
    server = scene(0.0)
    journal = ConfigMapJournal(connect(), "team", "j")
    del server.objects["configmaps", names.state_object("j")]
    del server.objects["configmaps", JOB]
    with pytest.raises(Superseded, match="the job was deleted"):
        journal.save({"n": 1})
    journal.close()


@pytest.mark.parametrize(("has_begun", "is_hidden"), [(False, False), (True, False), (True, True)])
def test_missing_rights_end_a_job_that_has_not_begun_and_delay_one_that_has(
    scene: Scene, has_begun: bool, is_hidden: bool
) -> None:
    server = scene(0.0)
    server.allows = False
    pod = server.objects["pods", names.pod_name("j", "master", 0)]
    pod["spec"]["restartPolicy"] = "Never"  # there is no kubelet that could end it
    if has_begun:
        server.objects["configmaps", names.state_object("j")]["binaryData"] = {names.JOURNAL_KEY: "e30="}
        server.hidden = {names.state_object("j")} if is_hidden else set()
    with pytest.raises(JobError, match="lacks rights"):
        KubernetesEnvironment(connect(), "team", "j", 0)
    assert (pod["metadata"]["labels"].get(names.STATUS_LABEL) == "Failed") is not has_begun
    server.allows, server.hidden = True, set()
    KubernetesEnvironment(connect(), "team", "j", 0).close()


@pytest.mark.parametrize(("has_begun", "may_pass"), [(False, True), (True, False), (True, True)])
def test_a_node_without_room_for_the_code_ends_no_job_that_has_begun(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, has_begun: bool, may_pass: bool
) -> None:
    server = scene(0.0)
    pod = server.objects["pods", names.pod_name("j", "master", 0)]
    pod["spec"]["restartPolicy"] = "Never"  # there is no kubelet that could end it
    if has_begun:
        journal = ConfigMapJournal(connect(), "team", "j")
        journal.save({}, JobStatus("j", JobPhase.RUNNING))
        journal.close()
    for name, value in {"NAMESPACE": "team", "JOB_NAME": "j"}.items():
        monkeypatch.setenv(f"ELASTICDL_{name}", value)
    monkeypatch.setenv(CODE_ERROR_VARIABLE, json.dumps(["--code: No space left on device", "", may_pass]))
    command = [sys.executable, "-P", "-m", "elasticdl.master"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "No space left" in done.stdout) == (1, True), done.stdout + done.stderr
    is_left = has_begun and may_pass
    text = server.objects["configmaps", names.state_object("j")]["data"][names.STATUS_KEY]
    assert JobStatus.from_json(text).phase is (JobPhase.RUNNING if is_left else JobPhase.FAILED)
    assert (pod["metadata"]["labels"].get(names.STATUS_LABEL) == "Failed") is not is_left
