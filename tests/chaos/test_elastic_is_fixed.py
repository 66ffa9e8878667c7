"""With --fixed_global_batch the loss trace does not depend on how many workers there were or what became of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.kills import Kill
from tests.chaos.loss_traces import BOUND, FRAMEWORKS, JOB, UP_AND_DOWN, trace

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_worker_four_and_four_that_become_two_three_and_one_make_the_same_steps(
    framework: str, tmp_path: Path
) -> None:
    data = JOB.make_data(tmp_path)
    alone = trace(framework, tmp_path / "alone", data, 1)
    four = trace(framework, tmp_path / "four", data, 4)
    elastic = trace(framework, tmp_path / "elastic", data, 4, UP_AND_DOWN)
    assert [size for _, size in four.groups] == [4]
    assert [size for _, size in elastic.groups][-4:] == [4, 2, 3, 1]
    for other in (four, elastic):
        differences = other.differences(alone)
        assert max(differences) < BOUND, differences.index(max(differences))
        assert max(differences[:20]) < 1e-5


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_four_workers_that_are_killed_make_the_steps_of_one(framework: str, tmp_path: Path) -> None:
    data = JOB.make_data(tmp_path)
    alone = trace(framework, tmp_path / "alone", data, 1)
    life = [Kill(Role.WORKER, 60), Kill(Role.WORKER, 120), Kill(Role.WORKER, 300)]
    differences = trace(framework, tmp_path / "elastic", data, 4, life).differences(alone)
    assert max(differences) < BOUND, differences.index(max(differences))
    assert max(differences[:20]) < 1e-5
