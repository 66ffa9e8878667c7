"""Elastic scheduling: others with more right to the room take it and give it back; the job lives with what is left."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.kubernetes import names
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.room import ROOM, room, tenant
from tests.e2e_kubernetes.space import Space
from tests.e2e_kubernetes.test_6_all_reduce import all_reduce_job, wait_for_group

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
MakeJob = Callable[[Space], KubernetesJob]


def server_job(space: Space) -> KubernetesJob:
    return space.job("digits", num_ps_pods=1)


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
            lambda: [pod.state for pod in job.pods("worker")].count("Pending") == 3,
        )
        job.wait_for_progress()

        kubectl("-n", space.namespace, "scale", "deployment/tenant", "--replicas=0")
        job.wait_for_running("worker", 4, 120)
        job.wait_for_progress()
        job.assert_ends_exactly()
    assert "Preempted" in job.log(job.master), job.story()
    troubles = job.troubles()
    assert len(troubles[Trouble.PREEMPTED]["subjects"]) in (3, 4), troubles  # the scheduler may evict one too many
    assert troubles[Trouble.NO_GPU]["evidence"]["resource"] == ROOM, troubles


@pytest.mark.parametrize("make_job", [server_job, all_reduce_job], ids=["servers", "groups"])
def test_two_six_one_four_workers_by_command_and_by_annotation(make_job: MakeJob, open_space: OpenSpace) -> None:
    job = make_job(open_space("scaled")).submit()
    two = trained_by(job, 2)
    assert job.client("scale", "--num_workers=6").stdout == 'job "digits" scaled: workers 2 → 6\n'
    six = trained_by(job, 6)
    assert six.items() >= two.items()

    owner = names.job_object(job.name)
    kubectl("-n", job.namespace, "annotate", "configmap", owner, f"{names.NUM_WORKERS_ANNOTATION}=1", "--overwrite")
    one = trained_by(job, 1)
    assert one.items() <= two.items()

    host.kill(one[job.master], signal.SIGKILL)  # the next life finds the command
    job.client("scale", "--num_workers=4", "--current_num_workers=1")
    assert trained_by(job, 4).items() >= one.items()
    job.assert_ends_exactly()
    kinds = [event["kind"] for event in job.events()]
    assert (kinds.count("JobScaled"), kinds.count("PodLost")) == (3, 0), job.story()


def trained_by(job: KubernetesJob, num_workers: int) -> dict[str, str]:
    """Waits until this number of workers trains; returns the job's pods."""
    job.wait_until(f"{num_workers} workers", lambda: len(job.pods("worker")) == num_workers)
    job.wait_for_running("worker", num_workers)
    if not job.flags["num_ps_pods"]:
        wait_for_group(job, num_workers)
    job.wait_for_progress()
    return uids(job)


def uids(job: KubernetesJob) -> dict[str, str]:
    return {pod.name: pod.uid for pod in job.pods()}
