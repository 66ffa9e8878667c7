"""Real local jobs with a trouble each, and what `explain` says of it, by its kind and evidence."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Diagnosis, Trouble
from elasticdl_client.explain.explanation import Question
from elasticdl_client.job_events import EventKind
from elasticdl_client.jobs import commands
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.explain.explained import explained, the_trouble
from tests.hangs.job_events import events_of

USERS_FILE = REPOSITORY / "tests/e2e_kubernetes/zoo/paced/troubled.py"
SHORT = replace(NUMPY_DIGITS, num_epochs=1, num_workers=1, pace_s=0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NUMPY_DIGITS.make_data(tmp_path_factory.mktemp("data"))


def troubled(trouble: str, job_dir: Path, data: Path, **flags: object) -> LocalJob:
    """A job one part of whose model definition fails."""
    flags = {"model_def": "paced.troubled.custom_model", "max_task_failures": 1, "validation_data": "", **flags}
    job = SHORT.local_job(job_dir, data, **flags)
    job.environment["TROUBLE"] = trouble
    return job


def line_of(code: str) -> str:
    """Where a line of the user's file is, as evidence has it."""
    lines = USERS_FILE.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if code in line)
    return f"{USERS_FILE}:{number}"


@pytest.mark.parametrize(
    ("part", "trouble", "function", "error"),
    [
        ("model", Trouble.MODEL_RAISED, "custom_model", "the layers do not fit on purpose"),
        ("feed", Trouble.FEED_RAISED, "feed", "this feed is broken on purpose"),
        ("loss", Trouble.LOSS_RAISED, "loss", "shapes do not fit on purpose"),
        ("callback", Trouble.CALLBACK_RAISED, "on_train_end", "nowhere to write on purpose"),
    ],
)
def test_an_exception_is_explained_by_the_part_that_raised_it_and_its_line(
    part: str, trouble: Trouble, function: str, error: str, tmp_path: Path, digits: Path
) -> None:
    running = troubled(part, tmp_path / "job", digits).start()
    assert running.wait(150) == 1, running.story()
    diagnosis = the_trouble(tmp_path / "job", trouble)
    assert diagnosis.is_fatal
    assert diagnosis.evidence["function"] == function
    assert diagnosis.evidence["at"] == line_of(f'"{error}"')
    assert error in diagnosis.seen
    assert any(error in line for line in diagnosis.why)
    assert [one.trouble for one in explained(tmp_path / "job").diagnoses] == [trouble]


def test_a_process_that_the_users_code_ends_without_an_error_is_explained_by_its_line(
    tmp_path: Path, digits: Path
) -> None:
    running = troubled("exit", tmp_path / "job", digits).start()
    assert running.wait(150) == 1, running.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.PROGRAM_FAILED)
    assert diagnosis.is_fatal
    assert f'File "{USERS_FILE}"' in str(diagnosis.evidence["message"])
    assert "sys.exit(0)" in str(diagnosis.evidence["message"])
    assert "its last lines" not in diagnosis.done


def test_a_loss_that_is_nan_is_explained_with_its_records(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = troubled("nan", tmp_path / "job", digits).start()
    assert running.wait(150) == 1, running.story()
    said = "\n".join(running.output)
    assert "The loss is nan" in said, running.story()
    assert "in minibatch 0 (epoch 1, task " in said
    assert "Traceback" not in said
    diagnosis = the_trouble(tmp_path / "job", Trouble.LOSS_NOT_FINITE)
    assert diagnosis.is_fatal
    assert (diagnosis.evidence["policy"], diagnosis.evidence["epoch"]) == ("fail", 1)
    assert str(diagnosis.evidence["records"]).startswith(str(digits / "train"))

    place = f"--job_dir={tmp_path / 'job'}"
    assert commands.run("explain", ["digits", place, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["phase"], document["troubles"]) == ("Failed", [diagnosis.to_plain()])
    assert commands.run("explain", ["digits", place, "--epoch=1", "--pod=worker-0"]) == 0
    said = capsys.readouterr().out
    assert "1. LossNotFinite" in said
    assert "--nan_policy=skip" in said
    assert commands.run("explain", ["digits", place, "--why_pending"]) == 0
    assert "No trouble that keeps pods from starting is known." in capsys.readouterr().out


def test_a_damaged_record_is_explained_with_its_file(tmp_path: Path, digits: Path) -> None:
    data = tmp_path / "digits"
    shutil.copytree(digits, data)
    (file,) = (data / "train").glob("data-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    running = troubled("", tmp_path / "job", data).start()
    assert running.wait(150) == 1, running.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.BAD_RECORD)
    assert diagnosis.is_fatal
    assert str(file) in str(diagnosis.evidence["message"])


def kill_master(running: LocalJob) -> None:
    (master,) = running.pods(Role.MASTER)
    os.kill(master.pid, signal.SIGKILL)


@pytest.mark.parametrize("trouble", [Trouble.DATA_GONE, Trouble.DATA_CHANGED])
def test_data_that_a_restarted_master_does_not_find_is_explained(
    trouble: Trouble, tmp_path: Path, digits: Path
) -> None:
    data = tmp_path / "digits"
    shutil.copytree(digits, data)
    running = replace(NUMPY_DIGITS, pace_s=0.01).local_job(tmp_path / "job", data, validation_data="").start()
    try:
        running.wait_for_version(2)
        if trouble is Trouble.DATA_GONE:
            shutil.rmtree(data / "train")
        else:
            (data / "train/SHA256SUMS").unlink()
            (file,) = (data / "train").glob("data-*")
            file.rename(file.with_name("data-of-another-day"))
        kill_master(running)
        assert running.wait(150) == 1, running.story()
    finally:
        running.end()
    diagnosis = the_trouble(tmp_path / "job", trouble)
    assert diagnosis.is_fatal
    if trouble is Trouble.DATA_CHANGED:  # lost data is reported by workers, too
        assert diagnosis.evidence["data"] == "training"
    assert str(data / "train") in str(diagnosis)
    assert the_trouble(tmp_path / "job", Trouble.MASTER_KILLED).evidence["generation"] == 2


def test_a_file_that_is_replaced_by_one_of_its_length_during_an_epoch_ends_the_job_and_is_explained(
    tmp_path: Path, digits: Path
) -> None:
    data = tmp_path / "digits"
    shutil.copytree(digits, data)
    (data / "train/SHA256SUMS").unlink()
    (file,) = (data / "train").glob("data-*")
    running = replace(NUMPY_DIGITS, pace_s=0.01).local_job(tmp_path / "job", data, validation_data="").start()
    try:
        running.wait_for_version(2)
        (tmp_path / "other").write_bytes(file.read_bytes()[::-1])
        (tmp_path / "other").replace(file)
        running.hurry()
        assert running.wait(150) == 1, running.story()
    finally:
        running.end()
    diagnosis = the_trouble(tmp_path / "job", Trouble.DATA_CHANGED)
    assert diagnosis.is_fatal
    assert f"{file} has changed since the job began: it has {file.stat().st_size} bytes as before" in str(diagnosis)


def test_a_healthy_job_says_so_in_one_line_and_workers_without_tasks_are_counted(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"num_minibatches_per_task": 64, "num_workers": 2, "validation_data": ""}
    running = SHORT.local_job(tmp_path / "job", digits, **flags).start()
    assert running.wait(150) == 0, running.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.TOO_MANY_WORKERS)
    assert (diagnosis.evidence["workers"], diagnosis.evidence["tasks"]) == (2, 1)
    assert commands.run("explain", ["digits", f"--job_dir={tmp_path / 'job'}", "--pod=ps-0"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Job digits has succeeded")
    assert line.endswith("No trouble of ps-0 is known.")


def test_input_that_workers_wait_for_is_reported_with_its_share(tmp_path: Path, digits: Path) -> None:
    running = replace(SHORT, pace_s=0.005).local_job(tmp_path / "job", digits, validation_data="").start()
    assert running.wait(150) == 0, running.story()
    diagnosis = the_trouble(tmp_path / "job", Trouble.INPUT_SLOW)
    assert float(diagnosis.evidence["share"]) > 0.5
    assert diagnosis.cost.slot_seconds > 3
    assert not diagnosis.cost.is_open


def pods_of(diagnoses: list[Diagnosis]) -> list[str]:
    return [subject for diagnosis in diagnoses for subject in diagnosis.subjects]


def test_killed_pods_are_explained_with_their_successors_while_the_job_runs(tmp_path: Path, digits: Path) -> None:
    job = replace(NUMPY_DIGITS, num_epochs=8, pace_s=0.003)
    running = job.local_job(tmp_path / "job", digits, checkpoint_steps=20, validation_data="").start()
    try:
        running.wait_for_version(20)
        running.wait_until("a checkpoint", lambda: bool(events_of(running, EventKind.CHECKPOINT_SAVED)))
        first, _ = running.pods(Role.WORKER)
        (server,) = running.pods(Role.PS)
        os.kill(first.pid, signal.SIGKILL)
        os.kill(server.pid, signal.SIGKILL)
        running.wait_until("the next server", lambda: "PS 0 is ready (incarnation 2" in running.master_log())
        running.wait_until("the loss in the events", lambda: bool(explained(tmp_path / "job").diagnoses))
        lost = [one for one in explained(tmp_path / "job").diagnoses if one.trouble is Trouble.KILLED]
        assert {"worker-0", "ps-0"} >= set(pods_of(lost)) != set()
        running.hurry()
        assert running.wait(150) == 0, running.story()
    finally:
        running.end()
    lost = [one for one in explained(tmp_path / "job").diagnoses if one.trouble is Trouble.KILLED]
    assert sorted(pods_of(lost)) == ["ps-0", "worker-0"]
    for diagnosis in lost:
        assert not diagnosis.is_fatal
        assert diagnosis.evidence["exit_code"] == 137
        assert diagnosis.cost.slot_seconds > 0
        assert not diagnosis.cost.is_open
    by_pod = {diagnosis.subject: diagnosis for diagnosis in lost}
    assert "worker-2" in by_pod["worker-0"].done
    assert "restored from" in by_pod["ps-0"].done
    of_pod = explained(tmp_path / "job", Question(pod="worker-0")).diagnoses
    assert [one.subject for one in of_pod] == ["worker-0"]
