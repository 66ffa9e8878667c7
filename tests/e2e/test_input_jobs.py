"""Jobs whose minibatches are made in processes of each worker: exact, though a worker is killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos import jobs
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import PACED_FEED, TORCH, all_reduce_job, worker_logs

JOB = replace(jobs.DIGITS, num_epochs=4, num_ps_pods=0, pace_s=0.004)
ALL_REDUCE, LOCAL = "AllReduceStrategy", "Local"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [ALL_REDUCE, pytest.param(LOCAL, marks=pytest.mark.full)])
def test_a_job_with_input_processes_is_exact_though_a_worker_is_killed(strategy: str, tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "distribution_strategy": strategy,
        "num_workers": 1 if strategy == LOCAL else 2,
        "collective_timeout": 5.0 if strategy == LOCAL else 2.0,
        "checkpoint_steps": 20,
        "input_workers": 2,
    }
    running = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), PACED_FEED, JOB, **flags).start()
    run_life(running, [Kill(Role.WORKER, at_version=60)])
    assert running.wait(200) == 0, running.story()
    assert_exact(running, JOB)
    assert "Minibatches are made in 2 processes" in worker_logs(running)
