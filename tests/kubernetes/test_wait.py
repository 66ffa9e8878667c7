"""`elasticdl train --wait` on a real cluster: its display, its end, Ctrl-C, and outages."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from urllib.parse import urlsplit

import pytest
from breakable_road import Road
from kubernetes import watch
from played_master import DONE, FAILED, RUNNING, play
from submission_scene import NO_ROOM, ROOT, TIMEOUT_S, Scene

from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_status import JobStatus, PodStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.follow import ClusterFollower
from tests.lines import line_with

pytestmark = pytest.mark.cluster
TINY = "cpu=10m,memory=64Mi"

ON_A_NODE = """
class Cluster:
    def with_pod(self, pod):
        pod.spec.node_name = "{node}"
        return pod

    def with_service(self, service):
        return service


cluster = Cluster()
"""

Start = Callable[..., "subprocess.Popen[str]"]


class Told:
    """A display that keeps what is said."""

    def __init__(self) -> None:
        self._lines: Queue[str] = Queue()

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        pass

    def say(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        pass

    def next_line(self, part: str) -> str:
        while part not in (line := self._lines.get(timeout=TIMEOUT_S)):
            pass
        return line


@pytest.fixture
def lost_node(scene: Scene) -> Iterator[str]:
    """A node that has no kubelet; nothing is scheduled onto it."""
    name = f"hollow-{scene.namespace}"
    scene.core.create_node({"metadata": {"name": name}, "spec": {"unschedulable": True}})
    yield name
    scene.core.delete_node(name)


@pytest.fixture
def start(scene: Scene) -> Iterator[Start]:
    """Submits a job with --wait and lets it run; the client."""
    clients: list[subprocess.Popen[str]] = []

    def starting(statuses: list[JobStatus], end: int | str | None, config: Path | None = None, **more: str) -> object:
        flags = {"master_resource_request": TINY, "wait": "true"} | more
        command = scene.command(cluster_spec=play(scene.directory, statuses, end), **flags)
        env = {**os.environ, **({"KUBECONFIG": str(config)} if config else {})}
        client = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        clients.append(client)
        return client

    yield starting  # type: ignore[misc]
    for client in clients:
        client.kill()
        client.communicate()


def end_of(client: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = client.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in errors
    return client.returncode, output, errors


def test_a_job_is_followed_to_its_end(scene: Scene, start: Start) -> None:
    code, output, errors = end_of(start([RUNNING, DONE], 0, output="/tmp/model"))
    assert code == 0, output + errors
    assert "epoch 1: records 100, committed 100, repeated 0, lost 0" in output
    assert "final evaluation at step 10: accuracy 0.97" in output
    assert "Job job succeeded." in output
    assert "model: /tmp/model" in output
    assert f"logs: elasticdl logs job --namespace={scene.namespace}" in output


def test_what_rank_0_prints_is_shown(scene: Scene, start: Start) -> None:
    printing = "print('step 1'); print('step 2')"
    scene.kubectl(
        *("run", "elasticdl-job-worker-0", "--image=python:3.11-slim", "--image-pull-policy=IfNotPresent"),
        *("--restart=Never", "--command", "--", "python", "-c", printing),
    )
    for event in watch.Watch().stream(scene.core.list_namespaced_pod, scene.namespace, timeout_seconds=60):
        if event["raw_object"]["status"].get("phase") == "Succeeded":
            break
    done = dataclasses.replace(DONE, pods=(PodStatus("elasticdl-job-worker-0", "worker", "Succeeded"),))
    code, output, errors = end_of(start([RUNNING, done], 0))
    assert code == 0, output + errors
    assert "[worker-0] step 1\n[worker-0] step 2\n" in output


def test_a_failed_jobs_exit_code_and_reason_are_the_clients(start: Start) -> None:
    code, output, errors = end_of(start([RUNNING, FAILED], 3, restart_policy="Never"))
    assert code == 3, output + errors
    assert "error: Job job failed: feed raised ValueError: broken" in errors
    assert "elasticdl logs job" in errors


def test_ctrl_c_ends_the_following_and_not_the_job(scene: Scene, start: Start) -> None:
    client = start([RUNNING], None)
    line_with(client, "records 50/100")
    client.send_signal(signal.SIGINT)
    code, _, errors = end_of(client)
    assert code == 130
    assert f"elasticdl logs -f job --namespace={scene.namespace}" in errors
    assert f"elasticdl delete job --namespace={scene.namespace}" in errors
    pod = "pod/elasticdl-job-master"
    scene.kubectl("wait", "--for=condition=Ready", pod, "--timeout=100s")  # its kubelet may be slower than its process
    assert "Running" in scene.kubectl("get", pod)


def test_a_deleted_master_can_be_resumed(scene: Scene, start: Start) -> None:
    client = start([RUNNING], None)
    line_with(client, "records 50/100")
    scene.take_away("elasticdl-job-master")
    code, _, errors = end_of(client)
    assert code == 1
    assert "The job job has no master: its pod was deleted" in errors
    assert f"`elasticdl resume job --namespace={scene.namespace}`" in errors


@pytest.mark.parametrize("is_held", [False, True])
def test_a_master_that_should_be_gone_and_is_not_is_reported(scene: Scene, lost_node: str, is_held: bool) -> None:
    place = scene.directory / "place.py"
    place.write_text(ON_A_NODE.format(node=lost_node))
    submitted = scene.train(cluster_spec=str(place), master_resource_request=TINY)
    assert submitted.returncode == 0, submitted.stderr
    core, pod = scene.core, (names.pod_name("job", "master", 0), scene.namespace)
    if is_held:
        core.patch_namespaced_pod(*pod, {"metadata": {"finalizers": ["example.com/hold"]}})
    told = Told()
    with ThreadPoolExecutor() as threads:
        end = threads.submit(ClusterFollower(scene.connection, scene.spec(), told, overdue_s=2.0).follow)
        try:
            scene.kubectl("delete", "pod", pod[0], "--grace-period=1", "--wait=false")
            assert told.next_line("deleted") == "The master's pod is being deleted."
            line = told.next_line("deleted")
            assert "should have been gone 2 s ago" in line
            assert f"`elasticdl resume job --namespace={scene.namespace}`" in line or is_held
            assert ("kept by example.com/hold" if is_held else f"its node {lost_node} has not reported") in line
        finally:  # the follower ends with the pod, and the block above waits for it
            if is_held:
                core.patch_namespaced_pod(*pod, {"metadata": {"finalizers": None}})
            scene.take_away(pod[0])
        with pytest.raises(JobError, match="has no master: its pod was deleted"):
            end.result(TIMEOUT_S)


def test_a_deleted_job_is_called_that(scene: Scene, start: Start) -> None:
    client = start([RUNNING], None)
    line_with(client, "records 50/100")
    scene.kubectl("delete", "configmap", "elasticdl-job")
    scene.take_away("elasticdl-job-master")
    code, _, errors = end_of(client)
    assert code == 1
    assert "The job job was deleted." in errors


def test_a_master_that_ends_for_good_without_a_word_of_the_job(scene: Scene, start: Start) -> None:
    code, _, errors = end_of(start([RUNNING], "the disk is full", restart_policy="Never"))
    assert code == 1
    assert "the disk is full" in errors
    assert "elasticdl resume job" in errors


def test_a_master_that_comes_back_is_followed_further(scene: Scene, start: Start) -> None:
    client = start([RUNNING], "the disk is full")
    line_with(client, "The master has ended (Error, exit code 1) and is started again (restart 1).")
    assert "the disk is full" in line_with(client, "disk")
    assert client.poll() is None


def test_an_image_that_cannot_be_had_ends_the_following(scene: Scene, start: Start) -> None:
    client = start([], None, image_name="registry.invalid/nonesuch:1", image_pull_policy="Never")
    code, _, errors = end_of(client)
    assert code == 1
    assert "The job job does not start; its master's container cannot start: ErrImageNeverPull" in errors
    assert "registry.invalid/nonesuch:1" in errors
    assert f"`elasticdl delete job --namespace={scene.namespace}` deletes it" in errors
    assert "Pod elasticdl-job-master" in scene.left()


def test_why_the_master_waits_is_said(start: Start) -> None:
    client = start([], None, master_resource_request=NO_ROOM)
    assert "Insufficient cpu" in line_with(client, "The master's pod is pending: Unschedulable")
    client.send_signal(signal.SIGINT)
    assert end_of(client)[0] == 130


def test_an_outage_of_the_api_is_said_once_and_outlasted(scene: Scene, start: Start) -> None:
    server = urlsplit(scene.connection.server)
    assert server.hostname is not None
    road = Road((server.hostname, server.port or 443))
    config = scene.kubeconfig("by-road", server=f"https://127.0.0.1:{road.port}")
    client = start([RUNNING], None, config)
    line_with(client, "records 50/100")
    road.break_up()
    assert "context by-road" in line_with(client, "cannot be reached")
    road.mend()
    line = line_with(client, "")
    assert "The cluster answers again." in line
    client.send_signal(signal.SIGINT)
    assert end_of(client)[0] == 130
