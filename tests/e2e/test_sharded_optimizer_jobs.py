"""A job whose workers hold the optimizer's state in shards: exact though one is killed, and its checkpoint is whole."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl.protocol import Role
from tests.chaos import jobs
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import PACED_FEED, TORCH, all_reduce_job, worker_logs

JOB = replace(jobs.DIGITS, num_epochs=4, num_ps_pods=0, pace_s=0.004)  # longer than the status is late
SLOW_JOB = replace(JOB, num_epochs=8)
SLOTS = {"exp_avg", "exp_avg_sq", "step"}  # of Adam


@pytest.mark.timeout(300)
def test_a_job_with_a_sharded_optimizer_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    running = all_reduce_job(
        TORCH,
        tmp_path,
        JOB.make_data(tmp_path),
        PACED_FEED,
        JOB,
        num_workers=3,
        shard_optimizer=True,
        checkpoint_steps=30,
    ).start()
    run_life(running, [Kill(Role.WORKER, at_version=40)])
    assert running.wait(200) == 0, running.story()
    assert_exact(running, JOB)
    num_minibatches = JOB.num_epochs * -(-JOB.num_train // JOB.minibatch_size)
    newest = max((tmp_path / "job" / "checkpoints").glob("version-*"), key=lambda path: int(path.name[8:]))
    assert int(newest.name[8:]) == num_minibatches  # the last one lacks nothing
    with np.load(next(newest.glob("*.npz"))) as state:
        parameters = [name for name in state.files if name.endswith((".weight", ".bias"))]
        slots = {name for name in state.files if name.startswith("optimizer/")}
    assert slots == {f"optimizer/{name.removeprefix('model/')}/{slot}" for name in parameters for slot in SLOTS}
    assert "this worker holds that of" in worker_logs(running)


@pytest.mark.timeout(300)
def test_all_workers_that_are_asked_to_end_at_once_write_a_checkpoint_together(tmp_path: Path) -> None:
    running = all_reduce_job(
        TORCH,
        tmp_path,
        SLOW_JOB.make_data(tmp_path),
        PACED_FEED,
        SLOW_JOB,
        num_workers=3,
        shard_optimizer=True,
        checkpoint_steps=10_000,
    ).start()

    def is_trained_by_all() -> bool:
        status = running.status()
        return status is not None and len(status.world) == 3 and status.model_version >= 30

    running.wait_until("a world of three", is_trained_by_all)
    for pod in running.pods(Role.WORKER):
        os.kill(pod.pid, signal.SIGTERM)
    running.hurry()
    assert running.wait(200) == 0, running.story()
    assert_exact(running, SLOW_JOB)
    found = re.search(r"the last checkpoint is written, after step (\d+)", worker_logs(running))
    assert found is not None, running.story()
    assert f"Restored the model at step {found[1]} from" in worker_logs(running), running.story()
