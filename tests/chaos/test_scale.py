"""`elasticdl scale` on running jobs: workers come and go, the others stay as they are, and every record counts once."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.job_dir import read_journal
from elasticdl_client.job_events import EventKind, JobEvent
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS, RealJob
from tests.chaos.scenarios import assert_exact
from tests.chaos.test_all_reduce import assert_members_were_equal, started
from tests.e2e.test_stopped_job import resume

STEPS_BETWEEN = 8
# Longer than all starts of workers, up to `hurry`, in few minibatches, each of which costs processor time.
OF_SERVERS = replace(NUMPY_DIGITS, num_epochs=8, pace_s=0.01)
OF_GROUPS = replace(OF_SERVERS, num_ps_pods=0, num_epochs=12)

SCRIPT = """
import elasticdl.api.pytorch  # first: it is imported once for all workers
import sys

sys.path.insert(0, {zoo!r})
from paced.pytorch_script import main

main()
"""


def scale(running: LocalJob, num_workers: int, *flags: str) -> str:
    """Return the command's output."""
    argv = [sys.executable, "-m", "elasticdl_client.main", "scale", str(running.flags["job_name"])]
    argv += [f"--job_dir={running.job_dir}", f"--num_workers={num_workers}", *flags]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def workers(running: LocalJob) -> dict[int, int]:
    """The processes of the workers that run, by number."""
    return {pod.index: pod.pid for pod in running.pods(Role.WORKER)}


def scaled(running: LocalJob, num_workers: int) -> dict[int, int]:
    """Waits until this number of workers trains; earlier ones are the same processes."""
    running.wait_until(f"{num_workers} workers", lambda: _train(running, num_workers))
    status = running.status()
    assert status is not None
    running.wait_for_version(status.model_version + STEPS_BETWEEN)
    return workers(running)


def _train(running: LocalJob, num_workers: int) -> bool:
    """They are all there is, and where there are groups the one of all of them stands."""
    status, pods = running.status(), workers(running)
    if status is None or not len(pods) == status.workers_wanted == status.workers_alive == num_workers:
        return False
    registered = {one.subject for one in _events(running) if one.kind is EventKind.WORKER_REGISTERED}
    is_group = running.flags["num_ps_pods"] or sorted(status.world) == sorted(pods)
    return bool(is_group) and registered >= {f"worker-{number}" for number in pods}


def _events(running: LocalJob) -> tuple[JobEvent, ...]:
    return read_journal(running.job_dir).history.events


def begin(job: RealJob, directory: Path, **flags: object) -> LocalJob:
    """Returns when the job trains."""
    if job.num_ps_pods:
        running = job.local_job(directory / "job", job.make_data(directory), **flags).start()
    else:
        running = started(job, directory, **flags)
    running.wait_for_version(1)
    return running


def two_four_one_three(running: LocalJob) -> None:
    """Scales a job; no worker that stays is another process."""
    name = running.flags["job_name"]
    first = scaled(running, 2)
    assert scale(running, 4) == f'job "{name}" scaled: workers 2 → 4\n'
    four = scaled(running, 4)
    assert four.items() > first.items()
    scale(running, 1, "--current_num_workers=4")
    one = scaled(running, 1)
    assert one.items() < first.items()
    assert scale(running, 1) == f'job "{name}" not changed: workers 1\n'
    scale(running, 3)
    three = scaled(running, 3)
    assert three.items() > one.items()
    assert not three.keys() & (four.keys() - one.keys())


def assert_no_worker_was_lost(running: LocalJob) -> None:
    kinds = [one.kind for one in _events(running)]
    assert EventKind.POD_LOST not in kinds
    assert EventKind.EPOCH_REOPENED not in kinds


def numbers(running: LocalJob) -> list[object]:
    """The numbers that the job was scaled to, one after another."""
    return [one.details["after"] for one in _events(running) if one.kind is EventKind.JOB_SCALED]


@pytest.mark.timeout(300)
def test_two_four_one_three_workers_cost_nothing_and_a_stopped_job_keeps_its_number_until_it_gets_another(
    tmp_path: Path,
) -> None:
    job = replace(OF_SERVERS, name="numpy")
    running = begin(job, tmp_path)
    try:
        two_four_one_three(running)
        assert_no_worker_was_lost(running)
        assert running.process is not None
        running.process.send_signal(signal.SIGINT)
        assert running.wait(120) == 128 + signal.SIGINT, running.story()
    finally:
        running.end()
    assert numbers(running) == [4, 1, 3]
    assert sum("scaled: workers 4 → 1" in line for line in running.output) == 1, running.output
    assert scale(running, 1) == 'job "numpy" scaled: workers 3 → 1\n'
    said = resume(running)
    status = running.status()
    assert status is not None
    assert (numbers(running), status.workers_wanted) == ([4, 1, 3, 1], 1), said
    assert_exact(running, job)
    assert EventKind.POD_LOST not in [event.kind for event in _events(running)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [{}, {"fixed_global_batch": 128}], ids=["elastic", "fixed"])
def test_two_four_one_three_workers_of_a_group_cost_no_record_and_no_other_process(
    flags: dict[str, object], tmp_path: Path
) -> None:
    running = begin(OF_GROUPS, tmp_path, **flags)
    try:
        two_four_one_three(running)
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert numbers(running) == [4, 1, 3]
    assert sum("scaled: workers 4 → 1" in line for line in running.output) == 1, running.output
    assert_exact(running, OF_GROUPS)
    assert_no_worker_was_lost(running)
    assert_members_were_equal(running)


@pytest.mark.timeout(300)
def test_the_workers_of_a_script_come_and_go_with_the_number(tmp_path: Path) -> None:
    job = OF_SERVERS
    data, zoo = job.make_data(tmp_path), REPOSITORY / str(job.flags["model_zoo"])
    (tmp_path / "script.py").write_text(SCRIPT.format(zoo=str(zoo)))
    flags: dict[str, object] = {
        "job_name": "script",
        "job_command": f"python {tmp_path}/script.py {data / 'validation'}",
        "model_zoo": zoo,
        "training_data": data / "train",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 1,
        "num_ps_pods": 0,
        "num_epochs": job.num_epochs,
        "minibatch_size": job.minibatch_size,
        "num_minibatches_per_task": job.num_minibatches_per_task,
    }
    running = LocalJob(tmp_path / "job", flags, pace_s=job.pace_s).start()
    try:
        running.wait_for_version(1)
        one = scaled(running, 1)
        scale(running, 3)
        three = scaled(running, 3)
        assert three.items() > one.items()
        scale(running, 2)
        two = scaled(running, 2)
        assert one.items() < two.items() < three.items()
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    assert EventKind.POD_LOST not in [event.kind for event in _events(running)]


@pytest.mark.timeout(300)
def test_no_number_changes_nothing_and_one_that_a_killed_master_has_not_read_is_read_by_the_next(
    tmp_path: Path,
) -> None:
    running = begin(OF_SERVERS, tmp_path)
    try:
        two = scaled(running, 2)
        (running.job_dir / "num_workers").write_text("many")
        running.wait_until(
            "the event",
            lambda: any(one.kind is EventKind.SCALE_REFUSED for one in _events(running)),
            30,
        )
        scale(running, 3)
        three = scaled(running, 3)
        assert three.items() > two.items()
        (master,) = running.victims(Role.MASTER)
        running.stop(master)
        scale(running, 4)
        running.kill(master)
        assert scaled(running, 4).items() > three.items()
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, OF_SERVERS)
    assert numbers(running) == [3, 4]


@pytest.mark.timeout(300)
def test_a_job_with_a_range_grows_by_itself_until_a_number_by_hand_ends_that(tmp_path: Path) -> None:
    job = replace(OF_SERVERS, num_epochs=20)  # each worker sleeps for most of a minibatch: two are twice as fast
    running = begin(job, tmp_path, num_workers="1:2", scaling_window=2.0, min_gain=0.05)
    try:
        two = scaled(running, 2)
        status = running.status()
        assert status is not None
        assert status.scaling is not None
        assert status.scaling.workers == "1:2"
        assert scale(running, 1) == f'job "{job.name}" scaled: workers 2 → 1\n'
        assert scaled(running, 1).items() < two.items()
        status = running.status()
        assert status is not None
        assert status.scaling is None
        running.hurry()
        assert running.wait() == 0, running.story()
    finally:
        running.end()
    assert_exact(running, job)
    changes = [one for one in _events(running) if one.kind is EventKind.JOB_SCALED]
    assert [(one.subject, one.details["after"]) for one in changes] == [("master", 2), ("user", 1)]
