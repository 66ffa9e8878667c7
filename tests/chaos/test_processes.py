"""AllReduce jobs of workers of several processes: a lost process is a lost pod, and every sample counts once."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import LEASE_TIMEOUT_S, assert_exact, assert_time_is_known

JOB = replace(NUMPY_DIGITS, num_epochs=10, num_workers=2, num_ps_pods=0, pace_s=0.03)


def wait_for_group(running: LocalJob, members: set[int]) -> None:
    def stands() -> bool:
        status = running.status()
        return status is not None and set(status.world) == members

    running.wait_until(f"a group of {members}", stands)


@pytest.mark.timeout(200)
def test_a_killed_process_and_a_killed_pod_cost_no_sample(tmp_path: Path) -> None:
    flags = {
        "distribution_strategy": "AllReduceStrategy",
        "processes_per_worker": 2,
        "lease_timeout": LEASE_TIMEOUT_S,
        "collective_timeout": 2.0,
    }
    running = JOB.local_job(tmp_path / "job", JOB.make_data(tmp_path), **flags).start()
    try:
        wait_for_group(running, {0, 1, 2, 3})
        pod = running.pods(Role.WORKER)[0]
        processes = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(processes[1]), signal.SIGKILL)
        wait_for_group(running, {2, 3, 4, 5})
        running.kill(running.victims(Role.WORKER)[0])
        wait_for_group(running, {4, 5, 6, 7})
        running.hurry()
        assert running.wait() == 0, running.story()
        assert_exact(running, JOB)
    finally:
        running.end()
    status = running.status()
    assert status is not None
    assert status.processes_per_worker == 2
    num_slots = status.workers_wanted * status.processes_per_worker
    assert sum(status.worker_seconds.values()) == pytest.approx(status.elapsed_seconds * num_slots, rel=0.01)
    assert_time_is_known(status.worker_seconds)
    log = running.log("elasticdl-digits-worker-0")
    assert "Process 1 of 2 has ended with exit code 137" in log
    assert "[process 0] " in log
