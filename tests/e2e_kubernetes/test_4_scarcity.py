"""Too little room, quota or memory: a job waits, says why, and continues as soon as it can."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from kubernetes.utils.quantity import parse_quantity

from elasticdl_client.explain.diagnosis import Trouble
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.pods import PodView
from tests.e2e_kubernetes.room import ROOM, make_room, room
from tests.e2e_kubernetes.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def quota(pods: int) -> dict[str, Any]:
    metadata = {"name": "pods"}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {"pods": str(pods)}}}


def test_a_job_without_room_for_a_single_worker_waits_and_says_why(open_space: OpenSpace) -> None:
    one_place = {"worker_resource_request": f"cpu=0.02,memory=256Mi,{ROOM}=1", "worker_resource_limit": f"{ROOM}=1"}
    with room(0):
        job = open_space("room").job("digits", **one_place).submit()
        job.wait_until("the reason in the status", lambda: f"Insufficient {ROOM}" in job.client("status").stdout, 90)
        assert [pod.state for pod in job.pods("worker")] == ["Pending", "Pending"]
        assert job.version() == 0
        waiting = job.troubles("--why-pending")
        assert set(waiting) == {Trouble.NO_GPU}, waiting
        assert waiting[Trouble.NO_GPU]["evidence"]["resource"] == ROOM

        make_room(1)
        job.wait_for_progress()
        assert sum(bool(pod.node) for pod in job.pods("worker")) == 1
        job.assert_ends_exactly()


def test_a_job_in_a_namespace_with_a_quota_trains_with_the_pods_that_it_gets(open_space: OpenSpace) -> None:
    space = open_space("quota")
    space.apply(quota(6))
    limit = partial(kubectl, "-n", space.namespace, "get", "resourcequota/pods", "-o", "jsonpath={.status.hard.pods}")
    wait_until("the quota is in force", lambda: limit() == "6")
    job = space.job("digits", num_workers=6).submit()
    job.wait_for_running("worker", 3)
    job.wait_for_progress()
    job.wait_until("the reason in the status", lambda: "quota" in job.client("status").stdout)
    assert len(job.pods()) == 6  # the master, two servers, three workers
    assert set(job.troubles("--why-pending")) == {Trouble.QUOTA_EXCEEDED}

    space.apply(quota(9))
    job.wait_for_running("worker", 6, 120)
    job.assert_ends_exactly()


def test_a_worker_that_was_oom_killed_gets_a_successor_with_more_memory(open_space: OpenSpace) -> None:
    job = open_space("oom").job(
        "digits",
        model_def="paced.hungry.custom_model",
        num_epochs=2,
        num_workers=1,
        worker_resource_request="cpu=0.1,memory=1Gi",
        worker_resource_limit="memory=1Gi",
    )
    job.submit()

    def memory(pod: PodView) -> float:
        (container,) = job.manifest(pod.name)["spec"]["containers"]
        return float(parse_quantity(container["resources"]["limits"]["memory"]))

    # Docker tells of memory that ran out in an event of its own, which may come after the end: then that was a SIGKILL.
    job.wait_until("a successor with more", lambda: 1.5 * 2**30 in map(memory, job.pods("worker")), 240)
    job.assert_ends_exactly()
    assert re.search(r"worker-\d.*OOMKilled", job.log(job.master)), job.story()
    assert Trouble.OUT_OF_MEMORY in job.troubles()
