"""`elasticdl explain` of jobs whose master cannot start, on a real cluster: the trouble by kind and evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from submission_scene import TIMEOUT_S, Scene

from elasticdl_client.explain.diagnosis import Trouble
from tests.e2e_kubernetes.waiting import wait_until
from tests.ready_client import elasticdl

pytestmark = pytest.mark.cluster

TINY = "cpu=10m,memory=64Mi"
NOWHERE = {
    "tolerations": [{"operator": "Exists"}],  # of the nodes that other tests add
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "no-node-has", "operator": "Exists"}]}]
            }
        }
    },
}
UNBOUND_CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "data"},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "no-such-class",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}


def explained(scene: Scene, *options: str) -> list[dict[str, Any]]:
    where = f"--namespace={scene.namespace}"
    done = elasticdl("explain", "job", where, "--output=json", *options, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    troubles: list[dict[str, Any]] = json.loads(done.stdout)["troubles"]
    return troubles


@pytest.mark.parametrize(
    ("flags", "trouble", "evidence"),
    [
        ({"master_resource_request": "cpu=90,memory=64Mi"}, Trouble.NO_CPU, {"resource": "cpu"}),
        ({"master_resource_request": "cpu=10m,memory=900Gi"}, Trouble.NO_MEMORY, {"resource": "memory"}),
        (
            {"master_resource_request": f"{TINY},gpu=1", "master_resource_limit": "gpu=1"},
            Trouble.NO_GPU,
            {"resource": "nvidia.com/gpu"},
        ),
        (
            {"master_resource_request": TINY, "cluster_spec_json": json.dumps({"master_pod_spec": NOWHERE})},
            Trouble.NO_MATCHING_NODE,
            {},
        ),
        ({"master_resource_request": TINY, "volume": "claim_name=data,mount_path=/data"}, Trouble.CLAIM_NOT_BOUND, {}),
        (
            {"master_resource_request": TINY, "image_name": "elasticdl-no-such-image:1"},
            Trouble.IMAGE_NOT_FOUND,
            {},
        ),
        ({"master_resource_request": TINY}, Trouble.IMAGE_WITHOUT_RUNTIME, {}),  # python alone
    ],
    ids=lambda value: value.value if isinstance(value, Trouble) else "",
)
def test_a_master_that_cannot_start_is_explained(
    scene: Scene, flags: dict[str, str], trouble: Trouble, evidence: dict[str, str]
) -> None:
    if "volume" in flags:
        scene.apply(UNBOUND_CLAIM)
    done = scene.train(**flags)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = []

    def is_explained() -> bool:
        found[:] = explained(scene, "--why-pending")
        return bool(found)

    wait_until("an explanation", is_explained, 60, lambda: scene.kubectl("describe", "pods"))
    [diagnosis] = found
    assert (diagnosis["trouble"], diagnosis["subjects"]) == (trouble.value, ["master"])
    assert evidence.items() <= diagnosis["evidence"].items()
    assert diagnosis["advice"]
