"""Elastic scheduling: others with more right to the room take it and give it back; the job lives with what is left."""

from __future__ import annotations

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.room import ROOM, room, tenant

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_job_gives_way_to_a_service_of_high_priority_and_grows_again(open_space: OpenSpace) -> None:
    space = open_space("elastic")
    one_place = f"cpu=0.02,memory=256Mi,{ROOM}=1"
    job = space.job(
        "digits",
        num_workers=4,
        master_pod_priority="high",
        ps_pod_priority="high",
        worker_pod_priority="low",
        worker_resource_request=one_place,
        worker_resource_limit=f"memory=2Gi,{ROOM}=1",
    )
    with room(4):
        job.submit()
        job.wait_for_running("worker", 4)
        job.wait_for_progress()

        space.apply(tenant(3, space.image))
        job.wait_until("one worker beside the service", lambda: len(job.running("worker")) == 1, 120)
        job.wait_until(
            "three pending successors",
            lambda: [pod.state for pod in job.pods("worker") if pod.index >= 4] == ["Pending"] * 3,
        )
        job.wait_for_progress()

        kubectl("-n", space.namespace, "scale", "deployment/tenant", "--replicas=0")
        job.wait_for_running("worker", 4, 120)
        job.wait_for_progress()
        job.assert_ends_exactly()
    assert "Preempted" in job.log(job.master), job.story()
    troubles = job.troubles()
    assert len(troubles[Trouble.PREEMPTED]["subjects"]) == 3, troubles
    assert troubles[Trouble.NO_GPU]["evidence"]["resource"] == ROOM, troubles
