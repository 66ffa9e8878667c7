"""Synchronous jobs while their pods are killed: no round waits for the dead, and each sample is in the model once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.cluster.cluster import Role
from tests.chaos.jobs import DIGITS, RealJob
from tests.chaos.kills import Fault, Freeze, Kill, run_life
from tests.chaos.scenarios import FREEZE_S, LEASE_TIMEOUT_S, assert_exact

SYNC = {"use_async": False, "checkpoint_steps": 40, "lease_timeout": LEASE_TIMEOUT_S}


def assert_survives(job: RealJob, life: list[Fault], tmp_path: Path, **flags: object) -> None:
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), **SYNC, **flags).start()
    try:
        assert run_life(running, life) == sum(not isinstance(fault, Freeze) for fault in life)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    assert running.metrics()["accuracy"] >= 0.9, running.story()


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_round_of_three_goes_on_when_workers_and_a_server_are_killed(tmp_path: Path) -> None:
    job = replace(DIGITS, num_epochs=60, num_workers=3, num_ps_pods=2)
    life = [
        Kill(Role.WORKER, 100),
        Kill(Role.WORKER, 250),
        Freeze(350, FREEZE_S),
        Kill(Role.PS, 500),
        Kill(Role.WORKER, 800),
    ]
    assert_survives(job, life, tmp_path, grads_to_wait=3)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tolerance", [0, 2])
def test_rounds_survive_kills_of_every_role_every_few_seconds(tolerance: int, tmp_path: Path) -> None:
    job = replace(DIGITS, num_epochs=200, num_workers=4, num_ps_pods=2)
    roles = [Role.WORKER, Role.WORKER, Role.PS, Role.WORKER, Role.MASTER, Role.WORKER]
    steps = job.num_steps
    life: list[Fault] = [Kill(roles[k % len(roles)], steps * (k + 1) // 22) for k in range(20)]
    assert_survives(job, life, tmp_path, grads_to_wait=2, sync_version_tolerance=tolerance)
