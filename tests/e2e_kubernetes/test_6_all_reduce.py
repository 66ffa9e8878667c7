"""AllReduce on a cluster: members are killed, hang and are cut off, and the others go on in the living processes."""

from __future__ import annotations

import re
import signal

import pytest

from tests.e2e_kubernetes import host, wire
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.space import Space
from tests.e2e_kubernetes.test_2_lost_pods import resume, stop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
_ALL_REDUCE: dict[str, object] = {"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 0, "num_epochs": 16}


def all_reduce_job(space: Space, name: str = "digits", **flags: object) -> KubernetesJob:
    job = space.job(name, **{**_ALL_REDUCE, **flags})
    for flag in ("ps_resource_request", "ps_resource_limit"):
        del job.flags[flag]
    return job


def sizes_of_groups(job: KubernetesJob) -> list[int]:
    """How many members each group has had, as the master's log tells."""
    return [int(found) for found in re.findall(r"Group \d+ of (\d+)", job.log(job.master))]


def wait_for_group(job: KubernetesJob, size: int) -> None:
    job.wait_until(f"a group of {size}", lambda: sizes_of_groups(job)[-1:] == [size], 120)


def test_ten_kills_of_members_lose_nothing(open_space: OpenSpace) -> None:
    job = all_reduce_job(open_space("kills"), num_workers=3).submit()
    wait_for_group(job, 3)
    for number in range(10):
        job.wait_for_pod(job.worker(number + 2))
        host.kill(job.the_pod(job.worker(number)).uid, signal.SIGKILL)  # the oldest, which has rank 0
        job.wait_for_progress(4)
    job.assert_ends_exactly()
    assert job.metrics()["accuracy"] >= 0.9


def test_a_process_that_is_killed_costs_its_pod_and_no_sample(open_space: OpenSpace) -> None:
    job = all_reduce_job(open_space("processes"), num_workers=2, processes_per_worker=2).submit()
    wait_for_group(job, 2)
    host.kill_child(job.the_pod(job.worker(0)).uid)
    job.wait_for_pod(job.worker(2))
    wait_for_group(job, 2)
    job.wait_for_progress(4)
    job.assert_ends_exactly()
    assert "(4 processes)" in job.log(job.master)


def test_a_member_that_hangs_or_is_cut_off_is_left_behind(open_space: OpenSpace) -> None:
    job = all_reduce_job(open_space("silence"), num_workers=3, encrypt=True).submit()
    wait_for_group(job, 3)
    job.wait_for_progress(4)
    hung = job.the_pod(job.worker(1))
    with wire.greetings(job.the_pod(job.worker(0)).uid) as greetings:
        host.kill(hung.uid, signal.SIGSTOP)
        wait_for_group(job, 2)
        job.wait_for_progress(4)
        host.kill(hung.uid, signal.SIGCONT)
        wait_for_group(job, 3)
        job.wait_until("the connections of both groups", lambda: len(greetings) >= 2)
    assert set(greetings) == {wire.ENCRYPTED}

    with host.cut_off(job.the_pod(job.worker(2)).uid):
        wait_for_group(job, 2)
        job.wait_for_progress(4)
    wait_for_group(job, 3)
    job.assert_ends_exactly()


def test_training_continues_from_a_checkpoint_when_all_pods_are_lost_or_stopped(
    open_space: OpenSpace,
) -> None:
    job = all_reduce_job(open_space("all")).submit()
    job.wait_for_checkpoint()
    for worker in (pod for pod in job.pods("worker") if pod.running):
        host.kill(worker.uid, signal.SIGKILL)
    host.kill(job.the_pod(job.master).uid, signal.SIGKILL)
    job.wait_until("the master's restart in place", lambda: job.the_pod(job.master).restarts == 1)
    job.wait_for_progress(4, 120)

    host.kill(job.the_pod(job.master).uid, signal.SIGKILL)  # its next life finds the request
    stop(job)
    resume(job)
    job.wait_for_progress(4, 120)
    job.assert_ends_exactly()
    assert job.metrics()["accuracy"] >= 0.9
