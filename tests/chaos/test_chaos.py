"""Jobs on real data while their pods are killed: they end right, with every sample in the model exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, FRAPPE, MNIST, NUMPY_DIGITS, RealJob
from tests.chaos.kills import Freeze, Kill, KillInCheckpoint, run_life
from tests.chaos.scenarios import (
    FREEZE_S,
    LEASE_TIMEOUT_S,
    assert_events_are_whole,
    assert_time_is_whole,
    coverage_of,
    life_of,
)
from tests.explain.explained import explained


def assert_survives(
    job: RealJob, faults: Sequence[Kill | KillInCheckpoint | Freeze], tmp_path: Path, checkpoint_steps: int = 40
) -> None:
    life: list[Kill | Freeze] = [
        Kill(Role.PS, one.at_version) if isinstance(one, KillInCheckpoint) else one for one in faults
    ]
    data = job.make_data(tmp_path)
    flags = {"checkpoint_steps": checkpoint_steps, "lease_timeout": LEASE_TIMEOUT_S}
    running = job.local_job(tmp_path / "job", data, **flags).start()
    try:
        kills = run_life(running, faults)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert kills >= sum(isinstance(fault, Kill) for fault in life)
    assert_events_are_whole(running, life)
    assert_explained(tmp_path / "job", life)
    assert_time_is_lost_where_it_was(running, life)
    coverage = coverage_of(running)
    assert len(coverage) == job.num_epochs
    for epoch in coverage:
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (job.num_train, job.num_train, 0, 0)
    metric, least = job.quality
    assert running.metrics()[metric] >= least, running.story()


def assert_explained(job_dir: Path, life: Sequence[Kill | Freeze]) -> None:
    """Each fault is a trouble, none of which has ended the job."""
    found = explained(job_dir)
    assert not any(diagnosis.is_fatal for diagnosis in found.diagnoses)
    counts = {(one.trouble, one.key): one.count for one in found.diagnoses}
    for role in (Role.WORKER, Role.PS):
        kills = sum(isinstance(fault, Kill) and fault.role is role for fault in life)
        assert counts.get((Trouble.KILLED, role.value), 0) == kills, found.to_plain()
    restarts = sum(isinstance(fault, Kill) and fault.role is Role.MASTER for fault in life)
    assert counts.get((Trouble.MASTER_KILLED, ""), 0) == restarts, found.to_plain()
    freezes = sum(isinstance(fault, Freeze) for fault in life)
    assert counts.get((Trouble.WORKER_SILENT, ""), 0) >= freezes, found.to_plain()


def assert_time_is_lost_where_it_was(running: LocalJob, life: Sequence[Kill | Freeze]) -> None:
    """All time is accounted for, and what the faults have cost is seen."""
    seconds = assert_time_is_whole(running)
    if any(isinstance(fault, Kill) and fault.role is Role.PS for fault in life):
        assert seconds["repeated"] > 0.0, seconds  # the work since the checkpoint
    status = running.status()
    assert status is not None
    assert 0.0 < status.ps_seconds["busy"] < sum(status.ps_seconds.values()), status.ps_seconds
    assert " INFO time: " in running.master_log()


@pytest.mark.timeout(300)
def test_digits_survive_the_death_of_a_worker_two_servers_in_turn_and_in_checkpoints_the_master_and_a_zombie(
    tmp_path: Path,
) -> None:
    life: list[Kill | KillInCheckpoint | Freeze] = [
        Kill(Role.WORKER, at_version=12),
        Kill(Role.PS, at_version=36),
        Kill(Role.MASTER, at_version=60),
        Freeze(at_version=80, for_s=FREEZE_S),
        Kill(Role.WORKER, at_version=120),
        Kill(Role.MASTER, at_version=144),
        KillInCheckpoint(at_version=180, index=0),
        KillInCheckpoint(at_version=240, index=1),
    ]
    assert_survives(replace(NUMPY_DIGITS, num_ps_pods=2, pace_s=0.0025), life, tmp_path, checkpoint_steps=8)


@pytest.mark.timeout(300)
def test_a_keras_model_survives_the_death_of_a_worker_a_ps_and_the_master(tmp_path: Path) -> None:
    life = [Kill(Role.WORKER, at_version=30), Kill(Role.PS, at_version=90), Kill(Role.MASTER, at_version=150)]
    assert_survives(DIGITS, life, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", [MNIST, FRAPPE], ids=lambda job: job.name)
def test_real_data_survives_kills_every_few_seconds(job: RealJob, tmp_path: Path) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    longer = job.lengthened()
    assert_survives(longer, life_of(longer), tmp_path)
