"""Synchronous jobs while their pods are killed: no round waits for the dead, and each sample is in the model once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS, RealJob
from tests.chaos.kills import Fault, Freeze, Kill, run_life
from tests.chaos.scenarios import FREEZE_S, LEASE_TIMEOUT_S, assert_exact

MINIBATCHES_OF_AN_EPOCH = 45  # of 32 records, in tasks of four
SYNC = {"use_async": False, "checkpoint_steps": 40, "lease_timeout": LEASE_TIMEOUT_S}


def assert_survives(job: RealJob, life: Sequence[Fault], tmp_path: Path, **flags: object) -> None:
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), **SYNC, **flags).start()
    try:
        assert run_life(running, life) == sum(not isinstance(fault, Freeze) for fault in life)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    assert running.metrics()["accuracy"] >= 0.9, running.story()


def has_workers(running: LocalJob, number: int) -> bool:
    return len(running.pods(Role.WORKER)) == number


@pytest.mark.timeout(300)
def test_a_round_of_three_continues_when_workers_and_a_server_are_killed(tmp_path: Path) -> None:
    job = replace(NUMPY_DIGITS, num_epochs=10, num_workers=3, num_ps_pods=2, pace_s=0.002)
    life = [
        Kill(Role.WORKER, 50),
        Kill(Role.WORKER, 100),
        Freeze(150, FREEZE_S),
        Kill(Role.PS, 210),
        Kill(Role.WORKER, 260),
    ]
    assert_survives(job, life, tmp_path, grads_to_wait=3)


@pytest.mark.timeout(300)
def test_rounds_of_a_keras_model_survive_a_worker_and_a_server(tmp_path: Path) -> None:
    life = [Kill(Role.WORKER, 60), Kill(Role.PS, 150)]
    assert_survives(replace(DIGITS, num_epochs=8, num_ps_pods=2), life, tmp_path, grads_to_wait=2)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tolerance", [0, 2])
def test_rounds_survive_kills_of_every_role_every_few_seconds(tolerance: int, tmp_path: Path) -> None:
    job = replace(DIGITS, num_epochs=200, num_workers=4, num_ps_pods=2)
    roles = [Role.WORKER, Role.WORKER, Role.PS, Role.WORKER, Role.MASTER, Role.WORKER]
    steps = job.num_steps
    life: list[Fault] = [Kill(roles[k % len(roles)], steps * (k + 1) // 22) for k in range(20)]
    assert_survives(job, life, tmp_path, grads_to_wait=2, sync_version_tolerance=tolerance)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_rounds_go_on_while_room_is_taken_and_given_back(tmp_path: Path) -> None:
    """Workers that are asked to end leave rounds; steps stay minibatches, whatever the size of a round."""
    job = replace(DIGITS, num_epochs=100, num_workers=3, num_ps_pods=2)
    flags = {**SYNC, "grads_to_wait": 3, "evaluation_steps": 1000, "local_slots": 5}
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), **flags).start()
    try:
        running.wait_for_version(150)
        for num_workers in (1, 3, 2):
            running.cluster().set_slots(2 + num_workers)
            running.wait_until(f"{num_workers} workers", partial(has_workers, running, num_workers))
            status = running.status()
            assert status is not None
            running.wait_for_version(status.model_version + 150)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    assert "Preempted" in running.master_log()
    num_steps = job.num_epochs * MINIBATCHES_OF_AN_EPOCH
    status = running.status()
    assert status is not None
    assert status.model_version == num_steps
    evaluated = [int(step) for step in re.findall(r"Evaluation metrics\[step=(\d+)\]", running.master_log())]
    assert [step // 1000 for step in evaluated] == [*range(1, num_steps // 1000 + 1), num_steps // 1000]
    saved = sorted(int(path.name.removeprefix("version-")) for path in (tmp_path / "job/checkpoints").glob("version-*"))
    assert saved[-1] == num_steps
