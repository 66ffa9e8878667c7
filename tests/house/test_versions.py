"""The lanes of `make test-versions` install what both distributions promise, and run tests that exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from scripts.requirements import oldest, requirements
from tests.versions import LANES, Lane

ROOT = Path(__file__).resolve().parents[2]
NO_RANGES = ("docs", "dev", "estimator")  # extras: of developers, and of `make test-estimator`


@pytest.mark.parametrize(
    ("range_", "lowest"),
    [
        ("torch>=2.6,<3", "torch==2.6"),
        ("kubernetes>=29", "kubernetes==29"),
        ("psycopg[binary]>=3.1,<4", "psycopg[binary]==3.1"),
        ("tensorflow>=2.17,<3; platform_system != 'Linux'", "tensorflow==2.17; platform_system != 'Linux'"),
        ("pytest==9.2.0", "pytest==9.2.0"),
    ],
)
def test_the_oldest_version_is_the_lower_bound(range_: str, lowest: str) -> None:
    assert oldest(range_) == lowest


def test_a_range_without_a_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"write torch>=VERSION"):
        oldest("torch<3")


def test_each_range_has_a_lane_with_its_oldest_version() -> None:
    runtime = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    client = tomllib.loads((ROOT / "elasticdl_client" / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    extras = [extra for extra in {**runtime, **client} if extra not in NO_RANGES]
    tested = {line for lane in LANES.values() if lane.is_oldest for line in lane.requirements()}
    assert {oldest(line) for line in requirements(extras, [])} <= tested


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_the_tests_of_a_lane_exist(lane: Lane) -> None:
    for test in (*lane.tests, *lane.tests_apart):
        path, _, function = test.removeprefix("--ignore=").partition("::")
        assert (ROOT / path).exists(), test
        assert not function or f"\ndef {function}(" in (ROOT / path).read_text(), test


def test_ci_runs_no_lane() -> None:
    assert "test-versions" not in (ROOT / ".ci" / "run").read_text()
