"""Other libraries' loops with the elastic lines, in jobs of several workers: Accelerate's and Lightning's."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

HERE = Path(__file__).parent
ACCELERATE, LIGHTNING = HERE / "pytorch_accelerate_script.py", HERE / "pytorch_lightning_script.py"
EPOCHS = 3


def job_of(tmp_path: Path, script: Path, arguments: str = "", launcher: str = "python", **flags: object) -> LocalJob:
    pytest.importorskip("accelerate" if script == ACCELERATE else "lightning")
    (tmp_path / "notes").mkdir(exist_ok=True)
    all_flags = {
        "job_name": "loops",
        "job_command": f"{launcher} {script} {tmp_path / 'notes'} {arguments}",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 2,
        "min_workers": 2,
        "num_minibatches_per_task": 2,
    }
    return LocalJob(tmp_path / "job", all_flags | flags, environment={"OMP_NUM_THREADS": "1"})


def kill_and_wait(job: LocalJob, tmp_path: Path) -> None:
    """Worker 1 is killed in the middle of its step."""
    job.start().wait_until("worker 1 to hold", (tmp_path / "notes" / "held").exists, 150)
    os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == 1), signal.SIGKILL)
    assert job.wait(150) == 0, job.story()


def rows_of(tmp_path: Path, kind: str) -> dict[str, list[list[Any]]]:
    """Return the notes of each worker."""
    paths = (tmp_path / "notes").glob(f"{kind}-*")
    return {p.name.removeprefix(f"{kind}-"): [json.loads(line) for line in p.read_text().splitlines()] for p in paths}


def check(tmp_path: Path, job: LocalJob, num_records: int = 600) -> dict[str, dict[int, str]]:
    """Every record of every epoch was trained once, and all makers of a step have the same model.

    Returns:
        By worker and step: the model's digest.
    """
    found = [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)]
    assert found == [(num_records, num_records, 0, 0)] * EPOCHS, job.story()
    steps = {worker: dict(rows) for worker, rows in rows_of(tmp_path, "steps").items()}
    for number in {number for made in steps.values() for number in made}:
        assert len({made[number] for made in steps.values() if number in made}) == 1, number
    ends = {path.name: path.read_text() for path in (tmp_path / "notes").glob("end-*")}
    assert set(ends) == {"end-0", "end-2"}, job.story()
    assert len(set(ends.values())) == 1, ends
    return steps


def test_accelerate_trains_in_several_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    job = job_of(tmp_path, ACCELERATE, "--hold-worker 1 --hold-at 9")
    kill_and_wait(job, tmp_path)
    steps = check(tmp_path, job)
    assert len(set(steps["0"]) & set(steps["2"])) > 5, job.story()
    shown = [job.log(f"elasticdl-loops-worker-{worker}").split("step ")[-1] for worker in (0, 2)]
    assert "accuracy 1.00" in shown[0], job.story()
    assert shown[0] == shown[1]  # the rate of the last step, too


def test_lightnings_trainer_trains_in_several_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    job = job_of(tmp_path, LIGHTNING, "--hold-worker 1 --hold-at 9")
    kill_and_wait(job, tmp_path)
    steps = check(tmp_path, job)
    assert len(set(steps["0"]) & set(steps["2"])) > 5, job.story()
    check_epochs(tmp_path, job, "0")
    check_epochs(tmp_path, job, "2")  # which has come in the middle of one
    for worker in ("0", "2"):
        saved = {path.name for path in (tmp_path / "notes" / f"saved-{worker}").iterdir()}
        assert saved == {f"epoch={row[0]}-step={row[1]}.ckpt" for row in rows_of(tmp_path, "epochs")[worker]}


def check_epochs(tmp_path: Path, job: LocalJob, worker: str) -> None:
    """Its Trainer has counted, validated and scheduled each epoch once."""
    rows = rows_of(tmp_path, "epochs")[worker]
    assert [row[0] for row in rows] == list(range(EPOCHS)), job.story()
    assert [row[2] for row in rows] == [1.0] * EPOCHS, job.story()
    assert [row[3] for row in rows] == [0.01 * 0.5 ** (k + 1) for k in range(EPOCHS)], job.story()
    ends = [row[1] for row in rows]
    assert ends == sorted(ends)
    assert ends[-1] == max(dict(rows_of(tmp_path, "steps")[worker])), job.story()  # global_step


@pytest.mark.full
@pytest.mark.parametrize("script", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_updates_of_a_fixed_number_of_records_take_the_place_of_accumulation(script: Path, tmp_path: Path) -> None:
    flags = {"fixed_global_batch": 64, "minibatch_size": 16}
    job = job_of(tmp_path, script, "--hold-worker 1 --hold-at 5", **flags)
    kill_and_wait(job, tmp_path)
    steps = check(tmp_path, job)
    assert max(steps["0"]) == EPOCHS * 10, job.story()
    if script == LIGHTNING:
        check_epochs(tmp_path, job, "0")
        assert [row[1] for row in rows_of(tmp_path, "epochs")["0"]] == [10, 20, 30]


@pytest.mark.full
def test_manual_optimization_trains_in_several_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    job = job_of(tmp_path, LIGHTNING, "--hold-worker 1 --hold-at 9 --manual")
    kill_and_wait(job, tmp_path)
    check(tmp_path, job)
    assert [row[0] for row in rows_of(tmp_path, "epochs")["2"]] == list(range(EPOCHS))


@pytest.mark.full
def test_a_loop_that_is_cut_by_its_count_continues_with_its_epoch(tmp_path: Path) -> None:
    """Of one minibatch of an epoch there are three: the rehearsal, the step that is lost, and its repetition."""
    job = job_of(tmp_path, LIGHTNING, "--hold-worker 1 --hold-at 0 --records 16")
    kill_and_wait(job, tmp_path)
    check(tmp_path, job, num_records=16)


@pytest.mark.full
def test_a_worker_that_is_asked_to_end_leaves_its_trainer_between_two_steps(tmp_path: Path) -> None:
    job = job_of(tmp_path, LIGHTNING, "--hold-worker 1 --hold-at 9").start()
    job.wait_until("worker 1 to hold", (tmp_path / "notes" / "held").exists, 90)
    leaving = next(pod for pod in job.pods(Role.WORKER) if pod.index == 1)
    os.killpg(leaving.pid, signal.SIGTERM)
    job.wait_until("the signal", lambda: "leaves after the present minibatch" in job.log(leaving.name))
    (tmp_path / "notes" / "go").write_text("")
    assert job.wait(150) == 0, job.story()
    check(tmp_path, job)


REFUSED = {
    "devices=2": "init_process_group() makes a group of a fixed size",
    "strategy=ddp": "init_process_group() makes a group of a fixed size",
    "strategy=ddp_spawn": "an elastic controller belongs to its process",
    "accumulate_grad_batches=2": "accumulate_grad_batches=2 adds up gradients",
    "limit_train_batches=5": "limit_train_batches=5",
    "fast_dev_run=1": "limit_train_batches=1",
    "max_epochs=2": "ends after max_epochs=2 epochs of num_epochs=3",
    "val_check_interval=0.5": "val_check_interval=0.5 is a part",
}


@pytest.mark.full
@pytest.mark.parametrize("argument", REFUSED)
def test_what_a_trainer_cannot_do_in_a_job_is_refused(argument: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, LIGHTNING, f"--trainer {argument}", max_task_failures=1).start()
    assert job.wait(90) == 1, job.story()
    assert REFUSED[argument] in job.story()


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 1", "accelerate launch --cpu --num_processes 2"])
def test_other_launchers_are_refused(launcher: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name(launcher.split()[0])
    whole = f"{program} {launcher.split(' ', 1)[1]}"
    job = job_of(tmp_path, ACCELERATE, launcher=whole, max_task_failures=1).start()
    assert job.wait(120) == 1, job.story()
    logs = "".join(path.read_text() for path in (job.job_dir / "logs").glob("*worker*"))
    assert "this process was started by torchrun, `accelerate launch` or Lightning" in logs, job.story()


@pytest.mark.full
def test_accumulation_over_several_batches_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, ACCELERATE, "--accumulate 2", max_task_failures=1).start()
    assert job.wait(90) == 1, job.story()
    assert "gradient of the batch before, which no optimizer has used" in job.story()
