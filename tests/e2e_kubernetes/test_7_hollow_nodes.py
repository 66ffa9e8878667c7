"""Nodes on which nothing really runs: one of them dies, and one holds a hundred workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from tests.cluster.hollow_node import HollowNode
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.room import ROOM, make_room, room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("owned_cluster")]

WORKERS = 100
LOST_AT_ONCE = 30


def may_run_on(node: HollowNode) -> dict[str, Any]:
    return {"tolerations": [one for one in node.placement["tolerations"] if "hollow" in one["key"]]}


def must_run_on(node: HollowNode) -> dict[str, Any]:
    ((label, name),) = node.placement["nodeSelector"].items()
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": [name]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {**may_run_on(node), "affinity": {"nodeAffinity": required}}


def test_the_worker_of_a_lost_node_is_replaced(open_space: OpenSpace) -> None:
    with HollowNode() as node, room(2):
        make_room(1, node.name)
        job = open_space("nodelost").job(
            "digits",
            num_workers=3,
            worker_resource_request=f"cpu=0.02,memory=256Mi,{ROOM}=1",
            worker_resource_limit=f"memory=2Gi,{ROOM}=1",
            image_pull_policy="IfNotPresent",  # a hollow node has no image, and pulls any
            cluster_spec_json=json.dumps({"worker_pod_spec": may_run_on(node)}),
        )
        job.submit()
        job.wait_for_running("worker", 3)
        (lost,) = [pod for pod in job.pods("worker") if pod.node == node.name]
        job.wait_for_progress()

        node.kill()
        make_room(3)
        job.wait_for_pod(job.worker(3), 120)
        job.wait_for_loss(job.worker(3))
        job.wait_until("the end of the lost pod", lambda: job.pod(lost.name) is None)
        job.assert_ends_exactly()
        assert "NodeLost" in job.log(job.master), job.story()
        assert job.troubles()[Trouble.NODE_LOST]["evidence"]["node"] == node.name


def running_there(job: KubernetesJob, node: HollowNode) -> set[str]:
    return {pod.name for pod in job.pods("worker") if pod.running and pod.node == node.name}


@pytest.mark.quiet
def test_a_hundred_workers_are_created_and_thirty_lost_at_once_are_replaced_within_30_s(open_space: OpenSpace) -> None:
    with HollowNode() as node:
        job = open_space("hundred").job(
            "digits",
            num_workers=WORKERS,
            num_ps_pods=1,
            worker_resource_request="cpu=1m,memory=1Mi",
            worker_resource_limit="",
            image_pull_policy="IfNotPresent",  # a hollow node has no image, and pulls any
            cluster_spec_json=json.dumps({"worker_pod_spec": must_run_on(node)}),
        )
        job.submit()
        took = job.wait_until("the workers' pods", lambda: len(job.pods("worker")) == WORKERS)
        print(f"{WORKERS} workers accepted {took:.1f} s after the submission, the master's start included")
        took = job.wait_until("all of them to run", lambda: len(running_there(job, node)) == WORKERS, 120)
        print(f"{WORKERS} workers running {took:.1f} s later")

        victims = sorted(running_there(job, node))[:LOST_AT_ONCE]
        job.delete_pod(*victims)
        took = job.wait_until(
            "their successors",
            lambda: len(running_there(job, node) - set(victims)) == WORKERS,
            30,
        )
        print(f"{LOST_AT_ONCE} lost workers replaced within {took:.1f} s")
        deleted = job.client("delete")
        assert deleted.returncode == 0, deleted.stderr
