"""Jobs whose lone worker begins steps before the numbers of the one before are known, as it does on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind
from tests.chaos import jobs
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import PACED_FEED, TORCH, all_reduce_job, worker_logs
from tests.hangs.job_events import events_of

STEPS = 60
JOB = replace(jobs.DIGITS, num_epochs=4, num_ps_pods=0)
PACED_JOB = replace(JOB, pace_s=0.004)  # longer than the status is late
AHEAD = """
from elasticdl.frameworks.torch import gradients

gradients._RUN_AHEAD = ("cpu",)
run_ahead = gradients.ModuleGradients._run_ahead


def logged(self, *given):
    run_ahead(self, *given)
    print("The next step is", "begun" if self._begun else "not begun", flush=True)


gradients.ModuleGradients._run_ahead = logged
"""
BROKEN_SCHEDULE_THEN_DEVICE = """
own_numbers = gradients.ModuleGradients._own_numbers
failed = []


def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def rate(step):
    if step == 5 and not failed:
        failed.append(step)
        return 1 // 0
    return 1.0


def broken(self, *given):
    if failed:
        raise RuntimeError("device-side assert triggered")
    return own_numbers(self, *given)


gradients.ModuleGradients._own_numbers = broken
"""
FLAWED = """
plain_loss = loss
calls = []


def loss(labels, predictions):
    calls.append(labels)
    return plain_loss(labels, predictions) * (float("nan") if len(calls) == 50 else 1.0)
"""


def last_state(directory: Path, data: Path, code: str, **flags: object) -> tuple[dict[str, bytes], str]:
    """The newest checkpoint after some steps of one worker, and the worker's log."""
    running = all_reduce_job(TORCH, directory, data, code, JOB, num_workers=1, max_step=STEPS, seed=7, **flags).start()
    assert running.wait(200) == 0, running.story()
    (path,) = (directory / "job" / "checkpoints" / f"version-{STEPS}").glob("*.npz")
    with np.load(path) as state:
        return {name: state[name].tobytes() for name in state.files}, worker_logs(running)


@pytest.mark.timeout(300)
def test_a_worker_that_runs_ahead_trains_the_same_model_bit_by_bit(tmp_path: Path) -> None:
    data = JOB.make_data(tmp_path)
    plain, _ = last_state(tmp_path / "plain", data, "", validation_data="")
    ahead, log = last_state(tmp_path / "ahead", data, AHEAD, evaluation_steps=STEPS // 3, checkpoint_steps=STEPS // 4)
    assert ahead == plain
    assert log.count("The next step is begun") > STEPS // 2, log


@pytest.mark.timeout(300)
def test_a_killed_worker_that_runs_ahead_and_a_killed_master_cost_no_record(tmp_path: Path) -> None:
    data, code, flags = PACED_JOB.make_data(tmp_path), AHEAD + PACED_FEED, {"num_workers": 1, "checkpoint_steps": 30}
    running = all_reduce_job(TORCH, tmp_path, data, code, PACED_JOB, **flags).start()
    run_life(running, [Kill(Role.WORKER, at_version=30), Kill(Role.MASTER, at_version=70)])
    assert running.wait(200) == 0, running.story()
    assert_exact(running, PACED_JOB)
    assert "The next step is begun" in worker_logs(running)


@pytest.mark.timeout(300)
def test_the_last_checkpoint_of_a_job_that_ends_by_a_bad_number_is_without_it(tmp_path: Path) -> None:
    running = all_reduce_job(
        TORCH, tmp_path, JOB.make_data(tmp_path), AHEAD + FLAWED, JOB, num_workers=1, checkpoint_steps=10
    ).start()
    assert running.wait(200) == 1, running.story()
    assert "is not finite" in running.story()
    checkpoints = sorted((tmp_path / "job" / "checkpoints").glob("version-*"), key=lambda path: int(path.name[8:]))
    with np.load(next(checkpoints[-1].glob("*.npz"))) as state:
        assert all(np.isfinite(state[name]).all() for name in state.files if name.startswith(("model/", "optimizer/")))


@pytest.mark.timeout(300)
def test_an_error_of_the_schedule_or_the_device_fails_its_task_and_not_the_worker(tmp_path: Path) -> None:
    flags = {"num_workers": 1, "max_task_failures": 2}
    code = AHEAD + BROKEN_SCHEDULE_THEN_DEVICE
    running = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), code, JOB, **flags).start()
    assert running.wait(200) == 1, running.story()
    assert "failed 2 times" in running.story()
    failed = [event.message for event in events_of(running, EventKind.TASK_FAILED)]
    assert "ZeroDivisionError" in failed[0], running.story()
    assert all("device-side assert triggered" in error for error in failed[1:]), running.story()
    assert len(failed) >= 2
    assert len(list((tmp_path / "job" / "logs").glob("*worker*"))) == 1
