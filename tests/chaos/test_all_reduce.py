"""AllReduce jobs whose workers die, freeze, leave and come back: every sample counts once, all members are equal."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS, RealJob
from tests.chaos.kills import run_life
from tests.chaos.scenarios import LEASE_TIMEOUT_S, assert_exact, assert_time_is_whole, coverage_of

JOB = replace(DIGITS, num_epochs=60, num_workers=3, num_ps_pods=0)
NUMPY_JOB = replace(NUMPY_DIGITS, num_epochs=15, num_workers=3, num_ps_pods=0, pace_s=0.0024)
NEVER = 1_000_000


@dataclass(frozen=True, slots=True)
class KillAll:
    """SIGKILL of all workers at once."""

    at_version: int

    def strike(self, job: LocalJob) -> int:
        victims = job.victims(Role.WORKER)
        for victim in victims:  # else a successor of the first may get the model from the last
            job.stop(victim)
        for victim in victims:
            job.kill(victim)
        return len(victims)


def started(job: RealJob, tmp_path: Path, **flags: object) -> LocalJob:
    flags = {
        "distribution_strategy": "AllReduceStrategy",
        "log_level": "DEBUG",
        "lease_timeout": LEASE_TIMEOUT_S,
        "collective_timeout": 2.0,
        **flags,
    }
    return job.local_job(tmp_path / "job", job.make_data(tmp_path), **flags).start()


def worker_logs(running: LocalJob) -> str:
    return "".join(path.read_text() for path in sorted((running.job_dir / "logs").glob("*worker*.log")))


def assert_members_were_equal(running: LocalJob) -> int:
    """Whenever a group formed, all its members had the same bytes; returns the number of groups."""
    digests: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for group, step, digest in re.findall(r"Group (\S+), step (\d+): state (\w+)", worker_logs(running)):
        digests[group].add((step, digest))
    assert digests, running.story()
    assert all(len(states) == 1 for states in digests.values()), digests
    return len(digests)


def assert_good(running: LocalJob, job: RealJob) -> None:
    assert running.wait() == 0, running.story()
    assert_exact(running, job)
    assert_time_is_whole(running)
    assert_members_were_equal(running)
    metric, least = job.quality
    assert running.metrics()[metric] >= least, running.story()
    assert "Traceback" not in worker_logs(running), running.story()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_group_shrinks_to_one_and_grows_again(tmp_path: Path) -> None:
    job = replace(JOB, num_epochs=120)
    running = started(job, tmp_path)
    try:
        running.wait_for_version(100)
        for victim in running.victims(Role.WORKER)[1:]:
            running.kill(victim)
        running.wait_until("a group of one", lambda: "of 1 worker has formed" in running.master_log().split("of 3")[-1])
        alone = running.master_log()
        running.wait_until("a group of three", lambda: "of 3 workers has formed" in running.master_log()[len(alone) :])
        assert_good(running, job)
    finally:
        running.end()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_worker_that_is_asked_to_end_leaves_between_two_steps(tmp_path: Path) -> None:
    running = started(JOB, tmp_path, max_task_failures=1)
    try:
        running.wait_for_version(100)
        leaving = running.pods(Role.WORKER)[0]
        os.kill(leaving.pid, signal.SIGTERM)
        running.wait_until("its farewell", lambda: "this worker has left" in running.log(leaving.name))
        assert_good(running, JOB)
    finally:
        running.end()
    assert "is broken" not in worker_logs(running)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_when_all_die_at_once_without_a_checkpoint_what_is_lost_is_trained_again(tmp_path: Path) -> None:
    running = started(NUMPY_JOB, tmp_path, checkpoint_steps=NEVER)
    try:
        assert run_life(running, [KillAll(130)]) > 0
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert running.metrics()["accuracy"] >= 0.9, running.story()
    assert_members_were_equal(running)
    assert all(epoch.lost == 0 and epoch.committed == NUMPY_JOB.num_train for epoch in coverage_of(running))
    assert "is open again" in running.master_log()
