"""The same PyTorch script in the workers of a job, on the local runtime: they come and go, and the model is one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from noted_jobs import noted_job, steps_of
from script_waits import kept_from_beginning
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticdl.cluster.cluster import Pod
from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.job_status import JobPhase
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.scenarios import assert_time_is_known, coverage_of
from tests.explain.explained import the_trouble
from tests.master.small_disk import small_disk

SCRIPT = Path(__file__).with_name("pytorch_script_of_a_user.py")
RECORDS, MINIBATCHES, EPOCHS = 400, 50, 2


def job_of(tmp_path: Path, arguments: str = "", **flags: object) -> LocalJob:
    return noted_job(SCRIPT, tmp_path, arguments, **{"checkpoint_dir": tmp_path / "checkpoints", **flags})


def check(tmp_path: Path, job: LocalJob) -> dict[str, dict[int, str]]:
    """Every record of every epoch was trained once, and all makers of a step have the same model."""
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(RECORDS, RECORDS, 0, 0)] * 2
    steps = steps_of(tmp_path)
    for number in {number for made in steps.values() for number in made}:
        assert len({made[number].rsplit(" ", 1)[0] for made in steps.values() if number in made}) == 1, number
    trained = [worker for worker in ended(tmp_path) if steps[worker]]  # a successor may come when all is trained
    ends = {(tmp_path / "notes" / f"end-{worker}").read_text().split()[0] for worker in trained}
    assert len(ends) == 1, job.story()
    status = job.status()
    assert status is not None
    assert_time_is_known(status.worker_seconds)
    return steps


def ended(tmp_path: Path) -> list[str]:
    """Workers whose script has come to its end."""
    return [path.name.removeprefix("end-") for path in (tmp_path / "notes").glob("end-*")]


def test_a_worker_is_killed_in_its_step_and_a_successor_joins(tmp_path: Path) -> None:
    flags = {"num_workers": 2, "min_workers": 2, "tensorboard_log_dir": tmp_path / "logs"}
    job = job_of(tmp_path, "--hold-worker 1 --hold-at 9", **flags).start()
    job.wait_until("worker 1 to hold", (tmp_path / "notes" / "held").exists, 90)
    victim = next(pod for pod in job.pods(Role.WORKER) if pod.index == 1)
    os.kill(victim.pid, signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    steps = check(tmp_path, job)
    assert set(steps) == {"0", "1", "2"}, job.story()
    assert len(set(steps["0"]) & set(steps["2"])) > 5, job.story()
    story = job.master_log() + job.log("elasticdl-script-worker-0")
    assert "worker 2 joined" in story
    assert len(re.findall(r"The model is on (the CPU \(\d+ threads?\)|cuda:0 \()", story)) == 1
    told = dict(re.findall(r"Evaluation metrics\[step=(\d+)\]: {'accuracy': (\S+)}", job.master_log()))
    assert len(told) == EPOCHS
    shown = EventAccumulator(str(tmp_path / "logs")).Reload().Scalars("evaluation/accuracy")
    assert {str(point.step): pytest.approx(point.value) for point in shown} == {
        step: float(accuracy) for step, accuracy in told.items()
    }


@pytest.mark.parametrize(
    ("num_saved", "first_step"), [(0, 1), pytest.param(40, 41, marks=pytest.mark.full)], ids=["anew", "checkpoint"]
)
def test_a_script_that_begins_with_an_older_model_gets_the_numbers_of_its_epochs(
    num_saved: int, first_step: int, tmp_path: Path
) -> None:
    flags = {"num_workers": 1, "checkpoint_steps": num_saved or 10_000}
    job = job_of(tmp_path, f"--hold-worker 0 --hold-at {MINIBATCHES + 10}", **flags).start()
    job.wait_until("worker 0 to hold, in the second epoch", (tmp_path / "notes" / "held").exists, 90)
    if num_saved:
        manifest = tmp_path / "checkpoints" / f"version-{num_saved}" / "MANIFEST.json"
        job.wait_until("a checkpoint of the first epoch", manifest.exists)
    os.kill(job.pods(Role.WORKER)[0].pid, signal.SIGKILL)
    assert job.wait(150) == 0, job.story()
    epochs = {step: int(rest.split()[-1]) for step, rest in steps_of(tmp_path)["1"].items()}
    assert epochs == {step: (step - 1) // MINIBATCHES for step in range(first_step, EPOCHS * MINIBATCHES + 1)}


@pytest.mark.parametrize("num_workers", [3, 1])
def test_a_script_that_is_asked_to_end_leaves_between_two_steps(num_workers: int, tmp_path: Path) -> None:
    flags = {"num_workers": num_workers, "min_workers": num_workers}  # no worker trains all before worker 0 comes
    flags |= {"max_task_failures": 1, "checkpoint_steps": 1_000_000}
    job = job_of(tmp_path, "--hold-worker 0 --hold-at 9", **flags).start()
    notes = tmp_path / "notes"
    job.wait_until("worker 0 to hold", (notes / "held").exists, 90)
    leaving = job.pods(Role.WORKER)[0]
    os.killpg(leaving.pid, signal.SIGTERM)  # the loader's process, too
    job.wait_until("the signal", lambda: "leaves after the present minibatch" in job.log(leaving.name))
    (notes / "go").write_text("")
    job.wait_until("its farewell", lambda: "this worker has left" in job.log(leaving.name))
    assert job.wait(150) == 0, job.story()
    steps = check(tmp_path, job)
    logs = "".join(path.read_text() for path in (job.job_dir / "logs").glob("*worker*"))
    assert "is broken" not in logs, job.story()
    assert "Traceback" not in logs, job.story()
    if num_workers == 1:  # it has saved its last step
        assert min(steps["1"]) == max(steps["0"]) + 1, job.story()


def ask_all_to_end(job: LocalJob) -> list[Pod]:
    """SIGTERM to all workers; returns when all have it."""
    asked = job.pods(Role.WORKER)
    for pod in asked:
        os.killpg(pod.pid, signal.SIGTERM)
    for pod in asked:
        job.wait_until("the signal", lambda pod=pod: "leaves after the present minibatch" in job.log(pod.name))
    return asked


def assert_continued_from_last_step(job: LocalJob) -> None:
    logs = "".join(path.read_text() for path in (job.job_dir / "logs").glob("*worker*"))
    found = re.search(r"the last checkpoint is written, after step (\d+)", logs)
    assert found is not None, job.story()
    assert f"Restored the model at step {found[1]} from" in logs, job.story()


def stopped(job: LocalJob, tmp_path: Path) -> None:
    """Ctrl-C in the tenth step of the only worker, as `elasticdl stop` sends it."""
    job.start()

    def waits_in_step() -> bool:
        status = job.status()
        return status is not None and status.records_done > 0 and (tmp_path / "notes" / "asking").exists()

    job.wait_until("its tenth step", waits_in_step, 90)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(150) == 128 + signal.SIGINT, job.story()
    assert (tmp_path / "notes" / "held").exists(), job.story()


def test_a_script_that_is_stopped_continues_after_the_step_in_which_it_was(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--ask-at 9", num_workers=1, checkpoint_steps=1_000_000)
    stopped(job, tmp_path)
    assert "A checkpoint of 10 minibatches is written." in job.output, job.story()
    command = [sys.executable, "-m", "elasticdl_client.main", "resume", "script", f"--job_dir={job.job_dir}"]
    resumed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    assert resumed.returncode == 0, resumed.stdout + job.story()
    assert "Restored the model at step 10 from" in "".join(
        path.read_text() for path in (job.job_dir / "logs").glob("*worker*")
    )
    check(tmp_path, job)


def test_a_stop_does_not_wait_for_a_script_that_keeps_no_checkpoints(tmp_path: Path) -> None:
    stopped(job := job_of(tmp_path, "--ask-at 9 --keep-none", num_workers=1), tmp_path)
    assert "There is no new checkpoint." in job.output, job.story()
    assert "the script keeps none: its checkpoint_dir is empty" in job.master_log(), job.story()


def test_scripts_that_are_all_asked_to_end_leave_a_checkpoint_of_their_last_step(tmp_path: Path) -> None:
    flags = {"num_workers": 2, "min_workers": 2, "max_task_failures": 1, "checkpoint_steps": 1_000_000}
    job = job_of(tmp_path, "--hold-worker 0 --hold-at 9", **flags).start()
    notes = tmp_path / "notes"
    job.wait_until("worker 0 to hold", (notes / "held").exists, 90)
    ask_all_to_end(job)
    (notes / "go").write_text("")
    assert job.wait(150) == 0, job.story()
    check(tmp_path, job)
    assert_continued_from_last_step(job)


def test_scripts_of_which_one_is_killed_when_all_are_asked_to_end_leave_a_checkpoint(tmp_path: Path) -> None:
    flags = {"num_workers": 3, "min_workers": 3, "max_task_failures": 1, "checkpoint_steps": 1_000_000}
    job = job_of(tmp_path, "--hold-worker 0 --hold-at 1", **flags).start()
    notes = tmp_path / "notes"
    job.wait_until("worker 0 to hold", (notes / "held").exists, 90)
    asked = ask_all_to_end(job)
    os.killpg(next(pod for pod in asked if pod.name.endswith("-1")).pid, signal.SIGKILL)
    (notes / "go").write_text("")
    assert job.wait(150) == 0, job.story()
    check(tmp_path, job)
    assert_continued_from_last_step(job)


def test_scripts_whose_last_checkpoint_cannot_be_written_have_failed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=4) as disk:
        job = job_of(tmp_path, "", num_workers=2, min_workers=2, checkpoint_dir=disk / "checkpoints").start()
        assert job.wait(150) == 1, job.story()
    status = job.status()
    assert status is not None
    assert status.phase is JobPhase.FAILED
    assert "The last checkpoint was not written: " in status.message
    assert "No space left on device" in status.message
    assert the_trouble(job.job_dir, Trouble.DISK_FULL).is_fatal


def test_a_script_of_which_all_checkpoints_are_damaged_ends_the_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--hold-worker 0 --hold-at 9", num_workers=1, checkpoint_steps=2).start()
    job.wait_until("worker 0 to hold", (tmp_path / "notes" / "held").exists, 90)
    (worker,) = job.victims(Role.WORKER)
    job.stop(worker)  # it may be writing one
    manifests = list((tmp_path / "checkpoints").glob("version-*/MANIFEST.json"))
    assert manifests
    states = [manifest.with_name("model.npz") for manifest in manifests]
    for state in states:
        state.write_bytes(b"damaged")
    job.kill(worker)
    assert job.wait(150) == 1, job.story()
    status = job.status()
    assert status is not None
    assert f"no checkpoint in {tmp_path / 'checkpoints'} can be restored" in status.message
    assert f"{states[0]} is damaged" in status.message
    assert "elasticdl-script-worker-2" not in job.master_log(), job.story()


@pytest.mark.parametrize("stop", ["", "--stop-at 5"], ids=["at the end", "stopped early"])
def test_scripts_wait_for_storage_that_refuses_the_last_checkpoint_late(tmp_path: Path, stop: str) -> None:
    job = job_of(tmp_path, f"--loaders 0 --refuse-late {stop}", num_workers=2, min_workers=2).start()
    assert job.wait(150) == 1, job.story()
    status = job.status()
    assert status is not None
    assert "The last checkpoint was not written: the storage refuses" in status.message
    assert "0" not in ended(tmp_path), job.story()
    assert stop or "1" not in ended(tmp_path), job.story()


@pytest.mark.full  # 9 s of a processor; tests/chaos/test_processes.py has a whole job, tests/worker that a command runs
def test_the_processes_of_a_worker_run_a_script_together(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--loaders 0", num_workers=1, processes_per_worker=2).start()
    assert job.wait(150) == 0, job.story()
    assert set(check(tmp_path, job)) == {"0", "1"}, job.story()


def test_a_process_that_ends_before_the_data_says_so_and_the_others_of_its_pod_train_the_rest(tmp_path: Path) -> None:
    flags = {"num_workers": 1, "processes_per_worker": 2}
    job = job_of(tmp_path, "--loaders 0 --end-worker 1 --end-at 5", **flags).start()
    assert job.wait(150) == 0, job.story()
    assert [(c.records, c.committed, c.lost) for c in coverage_of(job)] == [(RECORDS, RECORDS, 0)] * 2
    assert ended(tmp_path) == ["0"]
    assert "Worker 0 (process 1) has ended its script" in job.master_log(), job.story()
    assert "Relaunch" not in job.master_log(), job.story()


def test_three_workers_with_a_fixed_global_batch_make_its_steps(tmp_path: Path) -> None:
    flags = {"num_workers": 3, "min_workers": 3, "fixed_global_batch": 32, "minibatch_size": 8}
    job = job_of(tmp_path, "--loaders 0", **flags).start()
    assert job.wait(150) == 0, job.story()
    steps = check(tmp_path, job)
    assert max(max(made) for made in steps.values()) == EPOCHS * -(-MINIBATCHES // 4)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["--amp", "--compile"])
def test_a_kill_under_a_fixed_global_batch_changes_no_step(kind: str, tmp_path: Path) -> None:
    flags = {"num_workers": 3, "min_workers": 3, "fixed_global_batch": 32, "minibatch_size": 16}  # the script says 8
    job = job_of(tmp_path, f"--hold-worker 1 --hold-at 5 --loaders 0 {kind}", **flags).start()
    job.wait_until("worker 1 to hold", (tmp_path / "notes" / "held").exists, 200)
    os.kill(next(pod.pid for pod in job.pods(Role.WORKER) if pod.index == 1), signal.SIGKILL)
    assert job.wait(280) == 0, job.story()
    steps = check(tmp_path, job)
    assert max(max(made) for made in steps.values()) == EPOCHS * -(-MINIBATCHES // 4)
    assert "worker 3 joined" in job.master_log(), job.story()


@pytest.mark.full
def test_a_limit_of_minibatches_ends_a_script(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--loaders 0", num_workers=2, max_step=70).start()
    assert job.wait(150) == 0, job.story()
    first, second = coverage_of(job)
    assert (first.committed, second.committed, second.lost) == (RECORDS, 20 * 8, 0)
    assert set(ended(tmp_path)) == {"0", "1"}, job.story()


@pytest.mark.full
def test_a_loss_that_is_not_finite_ends_the_job_in_words(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--loaders 0 --nan-at 3", num_workers=2).start()
    assert job.wait(150) == 1, job.story()
    text = "\n".join(job.output)
    assert "The loss is nan" in text, job.story()
    assert "Traceback" not in text, text


def test_what_follows_the_loop_is_run_with_the_trained_model_alone(tmp_path: Path) -> None:
    """Where all is trained, a successor goes on with the last checkpoint, and a worker that comes later ends."""
    job = job_of(tmp_path, "--loaders 0 --hold-end", num_workers=2)
    notes = tmp_path / "notes"
    with kept_from_beginning(notes, "1"):
        job.start()
        job.wait_until("worker 0 to come to its end", (notes / "held").exists, 90)
        os.kill(next(pod for pod in job.pods(Role.WORKER) if pod.index == 0).pid, signal.SIGKILL)
        job.wait_until("its successor to end", (notes / "end-2").exists, 90)
    assert job.wait(120) == 0, job.story()
    assert ended(tmp_path) == ["2"], job.story()
    assert (notes / "epochs-0").read_text().split() == ["0", "1"]
    assert (notes / "epochs-2").read_text().split() == ["1"]
    assert [(c.committed, c.lost) for c in coverage_of(job)] == [(RECORDS, 0)] * 2
    made = steps_of(tmp_path)
    assert (made["1"], made["2"]) == ({}, {})
    assert (notes / "end-2").read_text().split()[0] == made["0"][max(made["0"])].split()[0]
    assert "The training has ended without this worker" in job.log("elasticdl-script-worker-1"), job.story()


def test_what_follows_the_loop_is_not_run_with_an_older_model_after_an_early_stop(tmp_path: Path) -> None:
    arguments = "--loaders 0 --hold-worker 1 --hold-at 2 --hold-size 2 --stop-at 9"
    job = job_of(tmp_path, arguments, num_workers=2, collective_timeout=2).start()
    notes = tmp_path / "notes"
    job.wait_until("worker 1 to hold", (notes / "held").exists, 90)
    held = next(pod for pod in job.pods(Role.WORKER) if pod.index == 1)
    os.kill(held.pid, signal.SIGSTOP)
    job.wait_until("worker 0 to end", (notes / "end-0").exists, 90)
    os.kill(held.pid, signal.SIGCONT)
    (notes / "go").write_text("")
    assert job.wait(120) == 0, job.story()
    assert ended(tmp_path) == ["0"], job.story()
    assert "The training has ended without this worker" in job.log("elasticdl-script-worker-1"), job.story()


def test_a_script_that_raises_ends_the_job_with_its_error(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--raise-at 2 --loaders 0", num_workers=1, max_task_failures=1).start()
    assert job.wait(90) == 1, job.story()
    output = "\n".join(job.output)
    assert output.count("ValueError: the script is wrong") == 1, job.story()
    assert f'File "{SCRIPT}", line ' in output
    assert "elasticdl/api" not in output


@pytest.mark.full
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_data_set_that_raises_ends_the_job_and_names_the_record(loaders: int, tmp_path: Path) -> None:
    flags = {"num_workers": 2, "max_task_failures": 2}
    job = job_of(tmp_path, f"--bad-record 123 --loaders {loaders}", **flags).start()
    assert job.wait(280) == 1, job.story()
    assert "ValueError: the record is ugly, in record 123 of Records" in "\n".join(job.output), job.story()


def test_another_strategy_is_refused_in_words(tmp_path: Path) -> None:
    flags = {"num_workers": 1, "max_task_failures": 1, "distribution_strategy": "Local"}
    job = job_of(tmp_path, "--loaders 0", **flags).start()
    assert job.wait(90) == 1, job.story()
    assert "--distribution_strategy=AllReduceStrategy" in job.story()


ORIGINAL = """
import os
import torch
from torch.utils.data import TensorDataset
from elasticdl.api.pytorch import create_elastic_controller
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
controller = create_elastic_controller(batch_size=8, num_epochs=2)
controller.set_broadcast_model(model)
controller.set_broadcast_optimizer(optimizer)
loader = controller.loader(TensorDataset(torch.randn(400, 2), torch.randn(400, 1)))

@controller.elastic_run
def train(features, labels):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(features), labels).backward()
    optimizer.step()

with controller.scope():
    for features, labels in loader:
        train(features, labels)
        {after}
"""


def original_job(tmp_path: Path, after: str, **flags: object) -> LocalJob:
    (tmp_path / "train.py").write_text(ORIGINAL.format(after=after))
    return job_of(tmp_path, **{"job_command": f"python {tmp_path / 'train.py'}", **flags})


@pytest.mark.parametrize("after", ["pass", "if controller.num_steps == 100: break"], ids=["to the end", "by counting"])
def test_a_script_in_the_originals_style_trains_all_epochs_in_one_loop(tmp_path: Path, after: str) -> None:
    job = original_job(tmp_path, after, num_workers=1).start()
    assert job.wait(120) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(400, 400, 0, 0)] * 2


def test_a_script_that_leaves_its_loop_has_failed_unless_it_has_stopped_training(tmp_path: Path) -> None:
    after = "if controller.num_steps == 9 and not controller.is_rehearsal: {}"
    (tmp_path / "stops").mkdir()
    stops = original_job(tmp_path / "stops", after.format("controller.stop_training('nine steps')"), num_workers=2)
    assert stops.start().wait(120) == 0, stops.story()
    (coverage,) = coverage_of(stops)
    assert coverage.committed + coverage.unplanned == 400
    assert coverage.unplanned > 0
    assert not coverage.lost
    job = original_job(tmp_path, after.format("break"), num_workers=1).start()
    assert job.wait(120) == 1, job.story()
    assert "of 800 planned records 64 are trained, 736 are left out (unplanned)" in "\n".join(job.output)
