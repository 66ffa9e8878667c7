"""One GPU for each worker of the local runtime.  No GPU is needed: what a pod sees is a variable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer, Wire
from pod_specs import master, worker

from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.cluster.local.gpus import Gpus
from elasticdl.protocol.values import Role


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5e1f")
    agent = LocalAgent(tmp_path)
    yield agent.cluster
    agent.stop()


def test_each_worker_sees_one_gpu_and_a_successor_that_of_the_one_lost(
    cluster: ProcessCluster, observer: Observer, tmp_path: Path
) -> None:
    def seen_by(name: str, **more: object) -> list[str]:
        wire = Wire(tmp_path / name)
        create = master if name == "m" else worker
        cluster.create(create(name, f'echo "$CUDA_VISIBLE_DEVICES" > {wire.path}; exec sleep 1000', **more))
        return wire.read()

    assert seen_by("m") == ["4,GPU-5e1f"]
    assert seen_by("w-0") == ["4"]
    assert seen_by("w-1") == ["GPU-5e1f"]
    assert seen_by("ps-0", role=Role.PS) == ["4,GPU-5e1f"]
    assert seen_by("w-2") == ["4"]  # more workers than GPUs share them
    cluster.delete("w-1", grace_s=0.0)
    observer.deleted("w-1")
    assert seen_by("w-3") == ["GPU-5e1f"]
    assert seen_by("w-4", env={"CUDA_VISIBLE_DEVICES": "-1"}) == ["-1"]  # by --envs


@pytest.mark.parametrize(
    ("environment", "files", "expected"),
    [
        ({}, ["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"], ["0", "1"]),
        ({}, ["null"], [""]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], [""]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], [""]),
        ({"CUDA_VISIBLE_DEVICES": "2, 3,-1,1"}, ["nvidia0"], ["2", "3"]),  # CUDA ignores what follows an invalid one
    ],
)
def test_the_gpus_are_those_that_cuda_would_show(
    environment: dict[str, str], files: list[str], expected: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    gpus = Gpus.of(environment, tmp_path)
    taken: list[str] = []
    for _ in expected:
        taken.append(gpus.least_used(taken))
    assert taken == expected
