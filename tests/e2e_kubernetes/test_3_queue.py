"""A job in a queue: its pods run as its quota allows, and it gives back what others have more right to."""

from __future__ import annotations

import re

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.kubernetes.resources import QUEUE_LABEL
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.queue_controller import QUEUE, SCHEDULER, queue
from tests.e2e_kubernetes.space import Space
from tests.lines import line_with

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
WAITING = f"waiting in queue {QUEUE}"
MASTER_TOO = f'{{"metadata": {{"labels": {{"{QUEUE_LABEL}": "{QUEUE}"}}}}}}'


def queued_job(space: Space, **flags: object) -> KubernetesJob:
    return space.job("digits", **{"num_workers": 6, "queue": QUEUE, "scheduler_name": SCHEDULER, **flags})


def waiting(job: KubernetesJob) -> list[str]:
    """Return the pods that the status says wait in the queue."""
    return re.findall(rf"elasticdl-{job.name}-(\S+) .*{WAITING}", job.client("status").stdout)


def test_a_job_in_a_queue_trains_with_the_workers_that_its_quota_admits(open_space: OpenSpace) -> None:
    space = open_space("queue")
    with queue(space, places=5) as team:  # two servers, three workers
        job = queued_job(space).submit()
        job.wait_for_running("worker", 3)
        job.wait_for_progress()
        job.wait_until("three workers in the queue", lambda: len(waiting(job)) == 3, 30)
        assert len(job.running("ps")) == 2, job.story()
        found = job.troubles("--why-pending")
        assert set(found) == {Trouble.SCHEDULING_GATED}, found
        assert set(found[Trouble.SCHEDULING_GATED]["subjects"]) >= set(waiting(job)), found
        assert found[Trouble.SCHEDULING_GATED]["evidence"]["queue"] == QUEUE, found

        team.places = 8
        job.wait_for_running("worker", 6)
        job.wait_for_progress()
        job.assert_ends_exactly()
    assert "PodLost" not in [event["kind"] for event in job.events()], job.story()


def test_a_queue_that_takes_workers_back_costs_no_record_and_no_failure(open_space: OpenSpace) -> None:
    space = open_space("reclaimed")
    with queue(space, places=8) as team:
        job = queued_job(space).submit()
        job.wait_for_running("worker", 6)
        job.wait_for_progress()

        space.apply(team.service(3, space.image))
        job.wait_until("three workers beside the service", lambda: len(job.running("worker")) == 3)
        job.wait_until("three successors in the queue", lambda: len(waiting(job)) == 3)
        job.wait_for_progress()

        kubectl("-n", space.namespace, "scale", "deployment/tenant", "--replicas=0")
        job.wait_for_running("worker", 6)
        job.wait_for_progress()
        job.assert_ends_exactly()
    lost = [event for event in job.events() if event["kind"] == "PodLost"]
    assert [event["details"]["reason"] for event in lost] == ["Preempted"] * 3, lost
    drained = {event["subject"] for event in job.events() if event["kind"] == "PodDraining"}
    assert drained == {event["subject"] for event in lost} <= {f"worker-{index}" for index in range(6)}, job.story()


def test_a_lost_server_gets_the_quota_that_a_worker_has_taken(open_space: OpenSpace) -> None:
    space = open_space("server-first")
    with queue(space, places=5):
        job = queued_job(space).submit()
        job.wait_for_running("worker", 3)
        job.wait_for_progress()
        job.delete_pod(job.server(1))
        job.wait_until("a worker in its place", lambda: len(job.running("worker")) == 4)
        job.wait_for_running("ps", 2)
        job.wait_for_progress()
        assert len(job.running("worker")) <= 3, job.story()
        job.assert_ends_exactly()
    events = job.events()
    assert [event["subject"] for event in events if event["kind"] == "PodLost"] == ["ps-1"], job.story()
    told = {(event["kind"], event["subject"], event["message"]) for event in events}
    assert ("PodPending", "ps-1", WAITING) in told, told
    given = [event for event in events if event["message"] == "gives its quota to ps-1"]
    assert {"worker-4", "worker-5"} < {event["subject"] for event in given}, given  # and one that ran


def test_a_client_says_that_the_master_waits_in_a_queue(open_space: OpenSpace) -> None:
    space = open_space("queued-master")
    with queue(space, places=0) as team:
        job = queued_job(space, num_workers=2, num_epochs=2, master_pod_template=MASTER_TOO)
        with job.submit_and_follow() as client:
            line_with(client, f"The master's pod is pending: {WAITING}")
            assert waiting(job) == ["master"], job.output
            found = job.troubles("--why-pending")
            assert found[Trouble.SCHEDULING_GATED]["subjects"] == ["master"], found

            team.places = 5
            job.wait_for_progress()
            job.assert_ends_exactly()
            assert client.wait(30) == 0


def test_a_job_that_a_queue_has_evicted_with_its_master_continues_where_it_was(open_space: OpenSpace) -> None:
    space = open_space("evicted")
    with queue(space, places=5) as team:
        job = queued_job(space, num_workers=2, master_pod_template=MASTER_TOO).submit()
        job.wait_for_progress(24)
        space.apply(team.service(5, space.image))
        job.wait_until("the end of all of its pods", lambda: not job.running("") and job.pod(job.master) is None)
        reached = job.version()

        kubectl("-n", space.namespace, "scale", "deployment/tenant", "--replicas=0")
        assert job.client("resume").returncode == 0, job.output
        job.wait_until("more than before", lambda: job.version() > reached)
        job.assert_ends_exactly()
