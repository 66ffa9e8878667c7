"""Jobs of PyTorch models and scripts on a GPU: exact, though a worker is killed, and with quiet logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos import jobs
from tests.chaos.job import LocalJob
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact, coverage_of
from tests.e2e.all_reduce_jobs import TORCH, all_reduce_job, worker_logs

pytestmark = pytest.mark.gpu

JOB = replace(jobs.DIGITS, num_epochs=12, num_ps_pods=0)
OWN_GPU_EACH = 'import os\nos.environ["NCCL_HOSTID"] = str(os.getpid())\n'
TENSOR_METRIC = """
class Accuracy:
    def __init__(self):
        self.right, self.all = torch.zeros(()), torch.zeros(())

    def update(self, labels, predictions):
        self.right += (predictions.argmax(1) == labels).sum()
        self.all += len(labels)

    def compute(self):
        return self.right / self.all

    def state_dict(self):
        return {"right": self.right, "all": self.all}

    def load_state_dict(self, state):
        self.right, self.all = state["right"], state["all"]


def eval_metrics_fn():
    return {"accuracy": Accuracy()}
"""
SCRIPT = Path(__file__).with_name("gpu_script.py")


def assert_logs_are_quiet(job: LocalJob) -> None:
    for path in (job.job_dir / "logs").glob("*worker*.log"):
        text = path.read_text()
        for word in ("ProcessGroupNCCL", "TCPStore", "Traceback", "libtorch"):
            assert word not in text, text[-6000:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("code", "engine"), [(OWN_GPU_EACH, "NCCL"), ("", "main memory")])
def test_a_killed_worker_of_a_zoo_model_loses_and_repeats_nothing(code: str, engine: str, tmp_path: Path) -> None:
    job = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), TENSOR_METRIC + code, JOB, num_workers=3).start()
    run_life(job, [Kill(Role.WORKER, at_version=60), Kill(Role.WORKER, at_version=250)])
    assert job.wait(100) == 0, job.story()
    assert_exact(job, JOB)
    assert engine in worker_logs(job)
    assert "no worker has the model" not in job.master_log()
    assert job.metrics()["accuracy"] > 0.9
    assert_logs_are_quiet(job)


@pytest.mark.timeout(120)
def test_the_processes_of_a_worker_sum_by_nccl(tmp_path: Path) -> None:
    flags = {"num_workers": 1, "processes_per_worker": 2}
    job = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), OWN_GPU_EACH, JOB, **flags).start()
    assert job.wait(100) == 0, job.story()
    assert_exact(job, JOB)
    assert "it sums by NCCL" in worker_logs(job)
    assert "The model is on cuda:0" in worker_logs(job)
    assert_logs_are_quiet(job)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["Local", "AllReduceStrategy"])
@pytest.mark.parametrize(
    "flags",
    [
        {"precision": "fp16", "accumulate_steps": 2, "clip_gradient_norm": 1.0},
        {"precision": "bf16", "channels_last": True, "compile": True},
    ],
)
def test_options_of_the_computation_train(strategy: str, flags: dict[str, object], tmp_path: Path) -> None:
    is_local = strategy == "Local"
    own = {"num_workers": 1 if is_local else 2, "collective_timeout": 5.0 if is_local else 2.0, "checkpoint_steps": 20}
    flags = {**flags, **own, "distribution_strategy": strategy}
    job = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), OWN_GPU_EACH, JOB, **flags)
    assert job.start().wait(100) == 0, job.story()
    assert_exact(job, JOB)
    assert job.metrics()["accuracy"] > 0.9
    assert_logs_are_quiet(job)


@pytest.mark.timeout(120)
def test_a_killed_worker_with_shards_of_the_optimizer_loses_and_repeats_nothing(tmp_path: Path) -> None:
    flags = {"num_workers": 3, "shard_optimizer": True, "checkpoint_steps": 50}
    job = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), OWN_GPU_EACH, JOB, **flags).start()
    run_life(job, [Kill(Role.WORKER, at_version=60)])
    assert job.wait(100) == 0, job.story()
    assert_exact(job, JOB)
    assert "NCCL" in worker_logs(job)
    assert job.metrics()["accuracy"] > 0.9


@pytest.mark.timeout(120)
def test_a_killed_worker_of_a_script_loses_and_repeats_nothing(tmp_path: Path) -> None:
    flags = {
        "job_name": "script",
        "job_command": f"python {SCRIPT} --records 4000",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 2,
        "num_minibatches_per_task": 4,
    }
    job = LocalJob(tmp_path / "job", flags).start()
    run_life(job, [Kill(Role.WORKER, at_version=200)])
    assert job.wait(100) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(4000, 4000, 0, 0)] * 3
    assert_logs_are_quiet(job)
