"""Fixtures of this directory: the cluster, the image, the data, a namespace each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.image import BUILD, ready_image
from tests.e2e_kubernetes.kubectl import REPOSITORY, apply
from tests.e2e_kubernetes.locks import one_at_a_time
from tests.e2e_kubernetes.room import priority_class
from tests.e2e_kubernetes.space import Space

OpenSpace = Callable[..., Space]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Shows, at its end, what a test in a process of pytest-xdist has printed; with -s it is on the screen already."""
    if report.when == "teardown" and hasattr(report, "node") and report.capstdout:
        print(f"\n--- {report.nodeid} ({report.node.gateway.id})\n{report.capstdout}", flush=True)


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    """The cluster of KUBECONFIG, with the PriorityClasses high and low."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail('KUBECONFIG is not set: ../shared/cluster/up && eval "$(../shared/cluster/env)"', pytrace=False)
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is not on PATH", pytrace=False)
    with one_at_a_time("priorities"):
        apply(priority_class("high", 1_000_000), priority_class("low", 1_000))


@pytest.fixture(scope="session")
def image(cluster: None) -> str:
    with one_at_a_time("image"):
        return ready_image()


@pytest.fixture(scope="session")
def data() -> Path:
    return digits()


def digits() -> Path:
    """The directory of scikit-learn's digits, generated once; on this machine, which is the node."""
    output = BUILD / "data"
    with one_at_a_time("data"):
        if not (output / "digits" / "validation").exists():
            subprocess.run(
                [sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(output / "digits")],
                cwd=REPOSITORY, check=True, capture_output=True,
            )  # fmt: skip
    return output


@pytest.fixture
def open_space(image: str, data: Path, request: pytest.FixtureRequest) -> Iterator[OpenSpace]:
    """Opens namespaces; at the test's end prints what its pods did, and deletes them."""
    spaces: list[Space] = []
    failures_before = request.session.testsfailed

    def opened(topic: str, rights: bool = True) -> Space:
        spaces.append(Space.open(topic, image, data, rights))
        return spaces[-1]

    yield opened
    for space in spaces:
        print(space.recorder.timeline(), flush=True)
        space.close(ended_well=request.session.testsfailed == failures_before)


@pytest.fixture
def owned_cluster() -> None:
    """Skips where the cluster's daemons are not ours to stop."""
    if not host.owns_the_cluster():
        pytest.skip("needs the cluster of ../shared/cluster/up on this machine")
