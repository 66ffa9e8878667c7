"""Jobs whose workers run a command of the user's, on the local runtime."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

from script_waits import kept_from_beginning
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import assert_time_is_known, coverage_of
from tests.explain.explained import the_trouble

SCRIPT = Path(__file__).with_name("script_of_a_user.py")


def job_of(tmp_path: Path, command: str, **flags: object) -> LocalJob:
    (tmp_path / "notes").mkdir()
    return LocalJob(tmp_path / "job", {"job_name": "script", "job_command": command, "num_workers": 1} | flags)


def script(tmp_path: Path, arguments: str) -> str:
    return f"python {SCRIPT} {tmp_path / 'notes'} {arguments}"


def held_job(tmp_path: Path) -> LocalJob:
    """Two workers, of which the first has trained three minibatches and holds the next; then the second begins."""
    job = job_of(tmp_path, script(tmp_path, "--size 100 --hold-at 3"), num_workers=2)
    notes = tmp_path / "notes"
    with kept_from_beginning(notes, "1"):
        job.start()
        job.wait_until("worker 0 to hold a minibatch", (notes / "held").exists)
    return job


def seconds_of(job: LocalJob) -> dict[str, float]:
    """Of its workers, by state; no more than there were."""
    status = job.status()
    assert status is not None
    assert sum(status.worker_seconds.values()) <= 1.01 * status.elapsed_seconds * status.workers_wanted
    return status.worker_seconds


def noted(tmp_path: Path) -> Counter[tuple[int, int, int]]:
    """How often each minibatch was trained, by all workers."""
    names: Counter[tuple[int, int, int]] = Counter()
    for path in (tmp_path / "notes").glob("worker-*"):
        names.update(tuple(json.loads(line)[:3]) for line in path.read_text().splitlines())
    return names


def test_two_scripts_share_the_data_and_each_ends_by_itself(tmp_path: Path) -> None:
    job = job_of(tmp_path, script(tmp_path, "--size 100 --after 1"), num_workers=2).start()
    assert job.wait(120) == 0, job.story()
    assert len(noted(tmp_path)) == 2 * 13
    assert set(noted(tmp_path).values()) == {1}
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(100, 100, 0, 0)] * 2
    assert {path.name for path in (tmp_path / "notes").glob("done-*")} == {"done-0", "done-1"}
    assert "of 2: 13 minibatches" in job.log("elasticdl-script-worker-0")
    found = EventAccumulator(
        str(tmp_path / "job" / "tensorboard")
    ).Reload()  # a local job is watched without being asked
    assert "workers" in found.Tags()["scalars"]


def test_a_killed_script_loses_nothing_and_has_a_successor(tmp_path: Path) -> None:
    job = held_job(tmp_path)
    victim = next(pod for pod in job.pods(Role.WORKER) if pod.index == 0)
    os.kill(victim.pid, signal.SIGKILL)
    assert job.wait(120) == 0, job.story()
    assert len(noted(tmp_path)) == 2 * 13
    assert [(c.committed, c.lost) for c in coverage_of(job)] == [(100, 0)] * 2
    assert set(noted(tmp_path).values()) == {1}  # it was held before it was noted
    assert_time_is_known(seconds_of(job))
    assert "done-2" in {path.name for path in (tmp_path / "notes").glob("done-*")}


def test_a_killed_master_is_followed_by_another_and_scripts_go_on(tmp_path: Path) -> None:
    job = held_job(tmp_path)
    os.kill(job.pods(Role.MASTER)[0].pid, signal.SIGKILL)
    job.wait_until("the next life of the master", lambda: "takes over from the journal" in job.master_log())
    (tmp_path / "notes" / "go").write_text("")
    assert job.wait(120) == 0, job.story()
    assert len(noted(tmp_path)) == 2 * 13
    assert set(noted(tmp_path).values()) == {1}
    assert [(c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(100, 0, 0)] * 2
    assert {path.name for path in (tmp_path / "notes").glob("done-*")} == {"done-0", "done-1"}
    assert_time_is_known(seconds_of(job))


def test_records_of_the_jobs_training_data_reach_a_script(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n" + "".join(f"{n}\n" for n in range(20)))
    flags = {"training_data": tmp_path / "rows.csv", "minibatch_size": 64}
    job = job_of(tmp_path, script(tmp_path, ""), **flags).start()
    assert job.wait(120) == 0, job.story()
    assert [(c.records, c.committed) for c in coverage_of(job)] == [(20, 20)] * 2
    lines = [json.loads(line) for line in (tmp_path / "notes" / "worker-0").read_text().splitlines()]
    assert all(size == records <= 8 for *_, size, records in lines)


def test_a_command_that_knows_nothing_of_us_is_over_when_it_ends(tmp_path: Path) -> None:
    code = "import os, sys; print('here is', *sys.argv[1:], os.environ['WORKER_ID'], os.getcwd())"
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    job = job_of(tmp_path, f'python -c "{code}" "a b" $HOME', model_zoo=zoo).start()
    assert job.wait(150) == 0, job.story()
    assert f"here is a b $HOME 0 {zoo}" in job.log("elasticdl-script-worker-0")
    assert f"here is a b $HOME 0 {zoo}" in job.output
    assert "warning: the commands have taken no data from ElasticDL" in "\n".join(job.output)


def test_a_command_that_fails_ends_the_job_with_its_log(tmp_path: Path) -> None:
    command = "python -c \"import sys; sys.exit('the rate is wrong')\""
    job = job_of(tmp_path, command, max_task_failures=2).start()
    assert job.wait(150) == 1, job.story()
    assert "\n".join(job.output).count("the rate is wrong") == 1
    assert "2 pods in a row ended by their own fault" in "\n".join(job.output)
    diagnosis = the_trouble(tmp_path / "job", Trouble.PROGRAM_FAILED)
    assert (diagnosis.is_fatal, diagnosis.count, diagnosis.evidence["exit_code"]) == (True, 2, 1)
    assert "the rate is wrong" in "\n".join(diagnosis.why)


def test_an_error_of_the_script_is_reported_once_with_its_line_and_not_tried_a_third_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\n\n\ndef read() -> object:\n    return json.loads(1)\n\n\nread()\n")
    job = job_of(tmp_path, f"python {script}", num_workers=1, max_task_failures=5).start()
    assert job.wait(150) == 1, job.story()
    output = "\n".join(job.output)
    assert output.count("TypeError: the JSON object must be") == 1, output
    assert f'File "{script}", line 5, in read\n    return json.loads(1)\n' in output
    assert "json/__init__.py" not in output
    assert f'File "{script}", line 5, in read' in "\n".join(the_trouble(tmp_path / "job", Trouble.PROGRAM_FAILED).why)
    assert not job.log("elasticdl-script-worker-2"), job.story()


def test_a_script_that_ends_before_the_data_has_failed_unless_it_says_so(tmp_path: Path) -> None:
    code = (
        "from elasticdl.api.data import DataShardService as D; d = D(8, dataset_size=64); m = iter(d); next(m); next(m)"
    )
    line = "epoch 1: records 64, committed 8, repeated 0, lost 0, unplanned 56"
    (tmp_path / "asked").mkdir()
    asked = job_of(tmp_path / "asked", f"python -c \"{code}; d.stop_training('it is enough')\"").start()
    assert asked.wait(150) == 0, asked.story()
    assert "Training stops at step 1: it is enough" in asked.master_log()
    assert line in asked.output
    job = job_of(tmp_path, f'python -c "{code}"').start()
    assert job.wait(150) == 1, job.story()
    assert line in job.output
    assert "8 are trained, 56 are left out (unplanned)" in "\n".join(job.output)
    status = json.loads((tmp_path / "job" / "status.json").read_text())
    assert (status["phase"], status["coverage"][0]["unplanned"]) == ("Failed", 56)
    assert "56 are left out" in status["message"]


def test_a_script_with_a_data_service_alone_is_rejected_under_all_reduce(tmp_path: Path) -> None:
    """The master hands out no data before a group stands, and no worker of this job would form one."""
    flags = {"distribution_strategy": "AllReduceStrategy", "num_workers": 2, "max_task_failures": 5}
    job = job_of(tmp_path, script(tmp_path, "--size 100"), **flags).start()
    assert job.wait(150) == 1, job.story()
    output = "\n".join(job.output)
    assert "The script takes its data from a DataShardService alone, and the job's strategy is AllReduce" in output
    assert "Start it without --distribution_strategy=AllReduceStrategy" in output


def test_a_command_that_takes_none_of_the_data_that_the_flags_name_has_failed(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    job = job_of(tmp_path, "python -c pass", training_data=tmp_path / "rows.csv").start()
    assert job.wait(150) == 1, job.story()
    assert "none of them has taken any data" in "\n".join(job.output)


def test_what_cannot_be_run_is_refused_before_the_job_starts(tmp_path: Path) -> None:
    job = job_of(tmp_path, "no-such-program --fast").start()
    assert job.wait(150) != 0
    assert "no-such-program is not executable, or not on PATH" in "\n".join(job.output)
