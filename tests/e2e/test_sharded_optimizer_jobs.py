"""A job whose workers hold the optimizer's state in shards: exact though one is killed, and its checkpoint is whole."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from elasticdl.protocol import Role
from tests.chaos import jobs
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import PACED_FEED, TORCH, all_reduce_job, worker_logs

JOB = replace(jobs.DIGITS, num_epochs=8, num_ps_pods=0, num_workers=3, pace_s=0.004)  # longer than the status is late
SLOTS = {"exp_avg", "exp_avg_sq", "step"}  # of Adam

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> LocalJob:
    """A job, at its end, of which a worker was killed, and later all workers were asked to end at once."""
    directory = tmp_path_factory.mktemp("lived")
    flags = {"shard_optimizer": True, "checkpoint_steps": 30}
    running = all_reduce_job(TORCH, directory, JOB.make_data(directory), PACED_FEED, JOB, **flags).start()
    running.wait_for_version(40)
    killed = running.pods(Role.WORKER)[-1]
    os.kill(killed.pid, signal.SIGKILL)

    def is_trained_by_all() -> bool:
        status = running.status()
        return status is not None and len(status.world) == 3 and killed.index not in status.world

    running.wait_until("a group of three with the successor", is_trained_by_all)
    formed = running.status()
    assert formed is not None
    running.wait_for_version(formed.model_version + 20)
    for pod in running.pods(Role.WORKER):
        os.kill(pod.pid, signal.SIGTERM)
    running.hurry()
    assert running.wait(200) == 0, running.story()
    return running


def test_a_job_with_a_sharded_optimizer_is_exact_though_a_worker_is_killed(lived: LocalJob) -> None:
    assert_exact(lived, JOB)
    assert "this worker holds that of" in worker_logs(lived)


def test_its_last_checkpoint_has_the_whole_state(lived: LocalJob) -> None:
    num_minibatches = JOB.num_epochs * -(-JOB.num_train // JOB.minibatch_size)
    newest = max((lived.job_dir / "checkpoints").glob("version-*"), key=lambda path: int(path.name[8:]))
    assert int(newest.name[8:]) == num_minibatches  # the last one lacks nothing
    with np.load(next(newest.glob("*.npz"))) as state:
        parameters = [name for name in state.files if name.endswith((".weight", ".bias"))]
        slots = {name for name in state.files if name.startswith("optimizer/")}
    assert slots == {f"optimizer/{name.removeprefix('model/')}/{slot}" for name in parameters for slot in SLOTS}


def test_all_workers_that_are_asked_to_end_at_once_write_a_checkpoint_together(lived: LocalJob) -> None:
    found = re.search(r"the last checkpoint is written, after step (\d+)", worker_logs(lived))
    assert found is not None, lived.story()
    assert f"Restored the model at step {found[1]} from" in worker_logs(lived), lived.story()
