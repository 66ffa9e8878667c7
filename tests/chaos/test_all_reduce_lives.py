"""AllReduce jobs that grow and shrink: lives as data, over Keras and PyTorch."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import DIGITS, MNIST, RealJob
from tests.chaos.kills import Fault, Freeze, Kill, run_life
from tests.chaos.scenarios import LEASE_TIMEOUT_S, assert_exact, assert_time_is_whole
from tests.chaos.test_all_reduce import NUMPY_JOB, KillAll, assert_members_were_equal, started
from tests.e2e.all_reduce_jobs import KERAS, TORCH, all_reduce_job, worker_logs

SMALL = replace(DIGITS, num_ps_pods=0, num_workers=2, num_epochs=60, quality=("accuracy", 0.95))
KERAS_MNIST = replace(MNIST, num_ps_pods=0, num_workers=6)
TORCH_MNIST = replace(KERAS_MNIST, name="torch-mnist", model_def="mnist.mnist_pytorch.custom_model")
SIZE = re.compile(r"Group \d+ of (\d+) worker")
STEPS_OF_EACH_GROUP = 20
START_S = 400.0  # of processes that import PyTorch, all at once
ABSENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class RoomFor:
    """Make room for this number of workers: the youngest beyond it are asked to end, those that wait are started."""

    num_workers: int
    at_version: int

    def strike(self, job: LocalJob) -> int:
        heard = len(groups(job))
        job.cluster().set_slots(self.num_workers)
        job.wait_until(f"a group of {self.num_workers}", lambda: self.num_workers in groups(job)[heard:])
        status = job.status()
        assert status is not None
        job.wait_for_version(status.model_version + STEPS_OF_EACH_GROUP)
        return 0


LIFE: Sequence[Fault] = (Kill(Role.WORKER, 30), RoomFor(6, 100), RoomFor(1, 300), RoomFor(3, 500))


def groups(job: LocalJob) -> list[int]:
    """The sizes of the groups that have formed."""
    return [int(size) for size in SIZE.findall(job.master_log())]


def lived(job: RealJob, running: LocalJob, life: Sequence[Fault]) -> None:
    """Runs a job to its end, through a life that begins when a group of all workers with room has formed."""
    size = min(job.num_workers, int(str(running.flags.get("local_slots", job.num_workers))))
    try:
        running.wait_until(f"a group of {size}", lambda: size in groups(running), START_S)
        run_life(running, life)
        assert running.wait(600) == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    assert assert_members_were_equal(running) >= len(life)
    metric, least = job.quality
    assert running.metrics()[metric] >= least, running.story()
    assert "Traceback" not in worker_logs(running), running.story()


@pytest.mark.timeout(300)
def test_less_room_kills_a_new_master_a_hung_worker_and_the_death_of_all_at_once_cost_no_sample(tmp_path: Path) -> None:
    life: list[Fault] = [
        RoomFor(1, 40),
        RoomFor(3, 80),
        Kill(Role.WORKER, 140),
        Kill(Role.MASTER, 200),
        Freeze(270, 4.5, loses_lease=False),  # longer than the collective time-out: the others go on without it
        Kill(Role.WORKER, 370),
        KillAll(450),
    ]
    running = started(NUMPY_JOB, tmp_path, checkpoint_steps=17, local_slots=3)
    lived(NUMPY_JOB, running, life)
    assert_time_is_whole(running)
    assert "was silent for" in running.master_log()
    assert re.search(r"Restored the model at step \d+ from", worker_logs(running)), running.story()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", [KERAS, TORCH])
def test_a_killed_worker_and_a_killed_master_cost_no_sample(framework: str, tmp_path: Path) -> None:
    job = replace(SMALL, num_epochs=12)
    life: list[Fault] = [Kill(Role.WORKER, 60), Kill(Role.MASTER, 150)]
    data = job.make_data(tmp_path)
    lived(job, all_reduce_job(framework, tmp_path, data, "", job).start(), life)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", [KERAS_MNIST, TORCH_MNIST], ids=["keras", "torch"])
def test_four_one_dies_six_one_three(job: RealJob, tmp_path: Path) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    job = replace(job, num_epochs=12)
    lived(job, started(job, tmp_path, local_slots=4), LIFE)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_same_life_of_a_script(tmp_path: Path) -> None:
    job = replace(TORCH_MNIST, name="script-mnist", num_epochs=12)
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    data = job.make_data(tmp_path)
    script = REPOSITORY / "model_zoo" / "mnist" / "mnist_pytorch_script.py"
    sources = f"--training_data={data / 'train'} --validation_data={data / 'validation'}"
    flags: dict[str, object] = {
        "job_name": job.name,
        "job_command": f"python {script} {sources} --num_epochs={job.num_epochs}",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": job.num_workers,
        "num_minibatches_per_task": job.num_minibatches_per_task,
        "local_slots": 4,
        "log_level": "DEBUG",
        "lease_timeout": LEASE_TIMEOUT_S,
        "collective_timeout": 2.0,
    }
    lived(job, LocalJob(tmp_path / "job", flags).start(), LIFE)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_thirty_kills_cost_no_sample(tmp_path: Path) -> None:
    job = replace(SMALL, num_workers=4, num_epochs=400)
    steps = job.num_steps
    life: list[Fault] = [Kill(Role.WORKER, 100 + kill * (steps - 1000) // 30) for kill in range(30)]
    data = job.make_data(tmp_path)
    lived(job, all_reduce_job(TORCH, tmp_path, data, "", job).start(), life)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", [KERAS, TORCH])
@pytest.mark.parametrize("checkpoint_steps", [50, 1_000_000], ids=["checkpoint", "none"])
def test_all_workers_are_gone_for_a_while(framework: str, checkpoint_steps: int, tmp_path: Path) -> None:
    data = SMALL.make_data(tmp_path)
    flags = {"checkpoint_steps": checkpoint_steps, "local_slots": 2}
    running = all_reduce_job(framework, tmp_path, data, "", SMALL, **flags).start()
    try:
        running.wait_for_version(400)
        running.cluster().set_slots(0)
        for victim in running.victims(Role.WORKER):
            running.kill(victim)
        running.wait_until("nobody", lambda: not running.pods(Role.WORKER))
        threading.Event().wait(ABSENCE_S)
        running.cluster().set_slots(2)
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, SMALL)
    assert_members_were_equal(running)
    assert running.metrics()["accuracy"] >= 0.95, running.story()
    if checkpoint_steps < 1_000_000:
        assert re.search(r"Restored the model at step \d+ from", worker_logs(running)), running.story()
    else:
        assert "is open again" in running.master_log(), running.story()
