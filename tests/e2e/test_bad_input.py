"""Bad input, each with its message: what, why, what to do; never a traceback for a user's mistake."""

from __future__ import annotations

import json
import socket
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS, zoo_with
from tests.chaos.scenarios import coverage_of
from tests.e2e.all_reduce_jobs import KERAS
from tests.e2e.ugly_sevens import NOT_FINITE, RAISES, bad_records, check_some_are_skipped, records_set_aside
from tests.explain.explained import the_trouble
from tests.master.small_disk import small_disk

SHORT = replace(DIGITS, num_epochs=4)
CHEAP = replace(NUMPY_DIGITS, pace_s=0)  # where no user code is at fault


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


def said(running: LocalJob) -> tuple[int, str]:
    """The exit code, and everything that the client printed."""
    code = running.start().wait(120)
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    return code, text


def test_a_missing_model_zoo_is_named(tmp_path: Path, digits: Path) -> None:
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, model_zoo=tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere" in text
    assert "--model_zoo" in text


def test_a_missing_symbol_names_the_file_and_the_symbol(tmp_path: Path, digits: Path) -> None:
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, model_def="digits.digits_functional.my_model"))
    assert code == 2
    assert "digits_functional.py" in text
    assert "my_model" in text


def test_a_missing_loss_is_named(tmp_path: Path, digits: Path) -> None:
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, loss="my_loss"))
    assert code != 0
    assert "my_loss" in text


def test_an_empty_data_directory_is_named(tmp_path: Path, digits: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, training_data=empty))
    assert code != 0
    assert str(empty) in text


def test_an_unknown_flag_gets_a_suggestion(tmp_path: Path, digits: Path) -> None:
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, num_worker=3))
    assert code == 2
    assert "--num_workers" in text


def test_code_that_the_masters_pod_could_not_prepare_ends_the_job_with_the_reason(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "--code: requirements.txt cannot be installed: pip has ended with 1"
    monkeypatch.setenv(CODE_ERROR_VARIABLE, json.dumps([reason, "Name packages that the index has.", False]))
    job = DIGITS.local_job(tmp_path / "job", digits)
    code, text = said(job)
    assert code == 1
    assert reason in text
    assert job.status().message == f"{reason}\n  → Name packages that the index has."


def test_a_port_in_use_is_named(tmp_path: Path, digits: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = said(DIGITS.local_job(tmp_path / "job", digits, master_port=port))
    assert code != 0
    assert str(port) in text
    assert "--master_port" in text


def test_all_reduce_in_an_image_without_pytorch_costs_one_worker(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    flags = {"distribution_strategy": "AllReduceStrategy", "num_workers": 1, "num_ps_pods": 0}
    code, text = said(CHEAP.local_job(tmp_path / "job", digits, **flags))
    assert code == 1
    assert "need PyTorch" in text
    assert [path.name for path in (tmp_path / "job" / "logs").glob("*worker*")] == ["elasticdl-digits-worker-0.log"]


@pytest.mark.timeout(180)
def test_a_feed_that_raises_fails_the_job_with_its_exception(tmp_path: Path, digits: Path) -> None:
    zoo = zoo_with(
        tmp_path,
        """
        def feed(dataset, mode, metadata):
            raise ValueError("this feed is broken on purpose")
        """,
    )
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "num_workers": 1}
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, **flags))
    assert code != 0
    assert "this feed is broken on purpose" in text
    diagnosis = the_trouble(tmp_path / "job", Trouble.FEED_RAISED)
    assert diagnosis.is_fatal
    assert diagnosis.evidence["function"] == "feed"
    assert str(diagnosis.evidence["at"]).startswith(f"{zoo / 'model.py'}:")


@pytest.mark.timeout(180)
def test_a_feed_that_raises_on_a_record_fails_the_job_after_retries(tmp_path: Path, digits: Path) -> None:
    zoo = zoo_with(tmp_path, RAISES[KERAS])
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "num_workers": 1, "max_task_failures": 2}
    code, text = said(DIGITS.local_job(tmp_path / "job", digits, **flags))
    assert code == 1
    assert "an ugly seven" in text
    diagnosis = the_trouble(tmp_path / "job", Trouble.FEED_RAISED)
    assert diagnosis.is_fatal
    assert diagnosis.evidence["failures"] == 2


@pytest.mark.timeout(180)
def test_a_corrupt_chunk_names_file_and_offset(tmp_path: Path, digits: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in sorted((digits / "train").glob("data-*")):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        (damaged / file.name).write_bytes(bytes(content))
    code, text = said(CHEAP.local_job(tmp_path / "job", digits, training_data=damaged))
    assert code != 0
    assert str(damaged) in text
    assert "byte" in text
    assert the_trouble(tmp_path / "job", Trouble.BAD_RECORD).is_fatal


def test_a_damaged_archive_ends_the_job_once_and_not_its_master(tmp_path: Path) -> None:
    """The error of the library that unpacks it is none that a reader expects."""
    archive = tmp_path / "rows.npz"
    np.savez_compressed(archive, x=np.arange(4000.0))
    content = bytearray(archive.read_bytes())
    content[1000:1100] = bytes(100)
    archive.write_bytes(content)
    running = DIGITS.local_job(tmp_path / "job", tmp_path, training_data=archive, validation_data="")
    code, text = said(running)
    assert code == 1
    assert f"NumPy file {archive}, byte 0: x.npy cannot be read" in text
    assert "The master has ended" not in text
    assert "Traceback" not in running.master_log()


@pytest.mark.timeout(180)
def test_a_full_disk_costs_checkpoints_and_the_job_only_at_its_end(tmp_path: Path, digits: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=8) as disk:
        running = CHEAP.local_job(
            tmp_path / "job", digits, num_epochs=4, checkpoint_dir=disk / "checkpoints", checkpoint_steps=50
        )
        code, _ = said(running)
    log = running.master_log()
    assert code == 1, running.story()
    assert "No space left on device" in log
    assert "The last checkpoint was not written" in log
    assert [one.committed - one.records for one in coverage_of(running)] == [0] * 4  # trained to its end
    assert str(disk) in log
    assert str(disk) in str(the_trouble(tmp_path / "job", Trouble.DISK_FULL).evidence["message"])


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> LocalJob:
    """A job, at its end, with records that `feed` does not take, and others of no finite number."""
    directory = tmp_path_factory.mktemp("survivor")
    zoo = zoo_with(directory, "\n".join(textwrap.dedent(code[KERAS]) for code in (NOT_FINITE, RAISES)))
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "max_bad_records": 20, "nan_policy": "skip"}
    flags |= {"num_workers": 1, "num_minibatches_per_task": 15}  # each task that is checked is a pipeline of its own
    running = SHORT.local_job(directory / "job", digits, **flags)
    code, _ = said(running)
    assert code == 0, running.story()
    return running


@pytest.mark.timeout(180)
def test_bad_records_are_set_aside_and_counted(survivor: LocalJob) -> None:
    written = records_set_aside(survivor, SHORT)
    assert 0 < survivor.master_log().count("an ugly seven") <= 20
    assert all("an ugly seven" in str(line["error"]) for line in written)
    assert f"they and their errors are in {bad_records(survivor)}" in survivor.master_log()
    diagnosis = the_trouble(survivor.job_dir, Trouble.BAD_RECORD)
    assert not diagnosis.is_fatal
    assert diagnosis.cost.records == len(written)
    assert "an ugly seven" in str(diagnosis.evidence["message"])


@pytest.mark.timeout(180)
def test_minibatches_that_are_not_finite_are_skipped_counted_and_reported(survivor: LocalJob) -> None:
    check_some_are_skipped(survivor, SHORT)
