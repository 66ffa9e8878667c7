"""Everything dies at once, or a parameter server hangs: the job continues by itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS
from tests.chaos.scenarios import FREEZE_S, LEASE_TIMEOUT_S, coverage_of

JOB = replace(DIGITS, num_epochs=60)


def started(tmp_path: Path) -> LocalJob:
    data = JOB.make_data(tmp_path)
    return JOB.local_job(tmp_path / "job", data, checkpoint_steps=40, lease_timeout=LEASE_TIMEOUT_S).start()


def assert_ends_exactly(running: LocalJob) -> None:
    assert running.wait() == 0, running.story()
    coverage = coverage_of(running)
    assert len(coverage) == JOB.num_epochs
    for epoch in coverage:
        assert (epoch.records, epoch.committed, epoch.repeated, epoch.lost) == (JOB.num_train, JOB.num_train, 0, 0)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_all_pods_are_killed_at_once(tmp_path: Path) -> None:
    running = started(tmp_path)
    try:
        running.wait_for_version(200)
        for victim in [victim for role in Role for victim in running.victims(role)]:
            running.kill(victim)
        assert_ends_exactly(running)
    finally:
        running.end()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_parameter_server_that_hangs_for_a_while_is_waited_for(tmp_path: Path) -> None:
    running = started(tmp_path)
    try:
        running.wait_for_version(200)
        (server,) = running.victims(Role.PS)
        running.stop(server)
        threading.Event().wait(FREEZE_S)
        running.resume(server)
        assert_ends_exactly(running)
    finally:
        running.end()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_without_any_checkpoint_lost_state_is_trained_again_from_the_first_epoch(tmp_path: Path) -> None:
    data = JOB.make_data(tmp_path)
    running = JOB.local_job(tmp_path / "job", data, checkpoint_steps=1_000_000).start()
    try:
        running.wait_for_version(200)
        (server,) = running.victims(Role.PS)
        running.kill(server)
        assert_ends_exactly(running)
    finally:
        running.end()
    assert "Epoch 1 is open again" in running.master_log()
