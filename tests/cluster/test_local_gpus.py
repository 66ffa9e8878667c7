"""One GPU for each worker of the local runtime.  No GPU is needed: a variable names those that a pod sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer, Wire
from pod_specs import master, worker

from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.cluster.local.gpus import Gpus
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError


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
        more.setdefault("num_gpus", int(name.startswith("w-")))
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
        ({}, ["null"], []),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "2, 3,-1,1"}, ["nvidia0"], ["2", "3"]),  # CUDA ignores what follows an invalid one
    ],
)
def test_the_gpus_are_those_that_cuda_would_show(
    environment: dict[str, str], files: list[str], expected: list[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert Gpus.of(environment, tmp_path).shares(1) == [tuple(expected)]


def test_pods_of_several_gpus_get_those_that_are_used_least() -> None:
    gpus = Gpus(["0", "GPU-5e1f", "2"])
    assert gpus.least_used([], 2) == ("0", "GPU-5e1f")
    assert gpus.least_used(["0", "GPU-5e1f"], 2) == ("0", "2")
    assert gpus.least_used(["0"], 4) == ("0", "GPU-5e1f", "2")
    assert Gpus([]).least_used([], 2) == ()


@pytest.mark.parametrize(
    ("names", "number", "expected"),
    [
        ("01234567", 8, [(name,) for name in "01234567"]),
        ("0123", 2, [("0", "1"), ("2", "3")]),
        ("01", 3, [("0",), ("1",), ("0",)]),  # on a machine that has fewer
        ("", 2, [(), ()]),
    ],
)
def test_the_processes_of_a_pod_share_out_its_gpus(names: str, number: int, expected: list[tuple[str, ...]]) -> None:
    assert Gpus(names).shares(number) == expected


def test_gpus_that_some_process_would_leave_idle_are_refused() -> None:
    with pytest.raises(ElasticDLError):
        Gpus("012").shares(2)
