"""Pods are deleted, evicted and killed under a running job: it continues, and each sample is in the model once."""

from __future__ import annotations

import json
import signal

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.kubernetes import names
from tests.e2e_kubernetes import host, wire
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def evict(job: KubernetesJob, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def lives(job: KubernetesJob) -> dict[str, tuple[str, int]]:
    return {pod.name: (pod.uid, pod.restarts) for pod in job.pods()}


def test_a_worker_deleted_evicted_or_killed_gets_a_successor_and_the_others_never_stop(open_space: OpenSpace) -> None:
    job = open_space("workers").job("digits", num_workers=4).submit()
    job.wait_for_running("worker", 4)
    for index in range(4):
        job.wait_for_loss(job.worker(index))
    before = lives(job)

    job.delete_pod(job.worker(0))
    job.wait_for_pod(job.worker(4))
    job.wait_for_loss(job.worker(4))

    evict(job, job.worker(1))
    job.wait_for_pod(job.worker(5))
    job.wait_for_loss(job.worker(5))

    host.kill(job.the_pod(job.worker(2)).uid, signal.SIGKILL)
    job.wait_for_pod(job.worker(6))
    job.wait_for_loss(job.worker(6))

    after = lives(job)
    for pod in (job.master, job.server(0), job.server(1), job.worker(3)):
        assert after[pod] == before[pod], f"{pod} was started again\n{job.story()}"
    job.assert_ends_exactly()
    lost = {event["subject"]: event for event in job.events() if event["kind"] == "PodLost"}
    assert set(lost) == {"worker-0", "worker-1", "worker-2"}
    causes = {event["subject"]: event["cause"] for event in job.events() if event["kind"] == "PodCreated"}
    assert [causes[f"worker-{4 + index}"] for index in range(3)] == [lost[f"worker-{i}"]["number"] for i in range(3)]
    troubles = job.troubles()
    assert "worker-2" in troubles[Trouble.KILLED]["subjects"], troubles
    assert "worker-0" in troubles[Trouble.DELETED]["subjects"], troubles
    assert job.shown_events("PodLost") == [(job.worker(index), "Warning") for index in range(3)]


def test_a_deleted_parameter_server_comes_back_under_its_id_with_its_checkpoint(open_space: OpenSpace) -> None:
    job = open_space("server").job("digits", encrypt=True).submit()
    job.wait_for_checkpoint()
    before = lives(job)

    with wire.greetings(before[job.worker(0)][0]) as greetings:
        job.delete_pod(job.server(1))
        job.wait_until(
            "another life of PS 1",
            lambda: (pod := job.pod(job.server(1))) is not None and pod.uid != before[job.server(1)][0] and pod.running,
        )
        job.wait_for_progress()
        job.wait_until("worker 0's new connection", lambda: bool(greetings))
    assert set(greetings) == {wire.ENCRYPTED}

    after = lives(job)
    for pod in (job.master, job.server(0), job.worker(0), job.worker(1)):
        assert after[pod] == before[pod], f"{pod} was started again\n{job.story()}"
    job.assert_ends_exactly()


def test_ten_kills_of_parameter_servers_lose_nothing(open_space: OpenSpace) -> None:
    job = open_space("kills").job("digits", checkpoint_steps=10).submit()
    job.wait_for_checkpoint()
    for number in range(10):
        server = job.server(number % 2)
        before = job.the_pod(server).uid
        if number >= 5:
            job.wait_for_open_checkpoint()
        host.kill(before, signal.SIGKILL)
        job.wait_until(
            f"life {number // 2 + 2} of {server}",
            lambda server=server, before=before: (
                (pod := job.pod(server)) is not None and pod.uid != before and pod.running
            ),
        )
        job.wait_for_progress(1)
    job.assert_ends_exactly()
    assert job.metrics()["accuracy"] >= 0.9


def test_a_stopped_job_frees_all_its_room_and_continues_when_it_is_resumed(open_space: OpenSpace) -> None:
    job = open_space("stopped").job("digits").submit()
    job.wait_for_progress(20, 120)
    before = job.version()
    stop(job)
    assert job.checkpoints()[-1] >= before
    resume(job)
    job.wait_for_progress()
    job.assert_ends_exactly()
    events = job.events()
    kinds = [event["kind"] for event in events]
    counts = {kind: kinds.count(kind) for kind in ("JobResumed", "MasterRestarted", "PodLost", "LeaseLost")}
    assert counts == {"JobResumed": 1, "MasterRestarted": 0, "PodLost": 0, "LeaseLost": 0}, job.story()
    assert [event for event in events if event["kind"] == "PsReady"][-1]["details"]["restored_from"], job.story()


def stop(job: KubernetesJob) -> None:
    done = job.client("stop")
    assert done.stdout.startswith(f'job "{job.name}" stopped: '), done.stderr + job.story()
    assert [(pod.role, pod.running) for pod in job.pods()] == [("master", False)], job.story()
    assert "Stopped" in job.client("status").stdout


def resume(job: KubernetesJob) -> None:
    done = job.client("resume")
    assert done.returncode == 0, done.stderr
    job.wait_for_pod(job.master)


def test_a_killed_master_restarts_in_place_and_a_deleted_one_is_resumed(open_space: OpenSpace) -> None:
    job = open_space("master").job("digits", metrics_port=9100).submit()
    job.wait_for_progress(20, 120)
    before, scraped = lives(job), job.scrape()
    assert scraped["elasticdl_records_processed_total"] > 0
    assert scraped["elasticdl_kubernetes_requests_total"] > 5
    assert scraped["elasticdl_pods_ready"] == 4

    host.kill(job.the_pod(job.master).uid, signal.SIGKILL)
    job.wait_until("the master's restart in place", lambda: job.the_pod(job.master).restarts == 1)
    job.wait_for_progress()

    job.delete_pod(job.master)
    job.wait_until("the end of the master", lambda: job.pod(job.master) is None)
    resume(job)
    job.wait_for_progress()

    again = job.scrape()
    assert again["elasticdl_master_restarts_total"] == 2
    lived = {name for name in scraped if name.endswith("_total") and name.startswith("elasticdl_")}
    lived.remove("elasticdl_kubernetes_requests_total")  # of this life of the master alone
    assert {name: again[name] for name in lived if again[name] < scraped[name]} == {}
    after = lives(job)
    for pod in (job.server(0), job.server(1), job.worker(0), job.worker(1)):
        assert after[pod] == before[pod], f"{pod} was started again\n{job.story()}"
    job.assert_ends_exactly()
    events = job.events()
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    kinds = [event["kind"] for event in events]
    once = ("JobStarted", "MasterRestarted", "JobResumed", "JobSucceeded")
    assert [kinds.count(kind) for kind in once] == [1, 1, 1, 1]
    owner = names.job_object(job.name)
    assert job.shown_events("JobStarted") == [(owner, "Normal")]
    assert job.shown_events("MasterRestarted") == [(owner, "Warning")]
    assert job.shown_events("JobResumed") == [(owner, "Normal")]
    assert job.shown_events("JobSucceeded") == [(owner, "Normal")]
    assert job.troubles()[Trouble.MASTER_KILLED]["count"] == 1  # the second end was of the user's own making
