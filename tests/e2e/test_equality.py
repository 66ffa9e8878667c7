"""A job on parameter servers computes what plain Keras computes, and any number of servers the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import FRAPPE, MNIST, TEST_DATA, RealJob
from tests.e2e.saved_model import SavedModel, assert_same_bits, read_checkpoint
from tests.lean_import import LEAN_IMPORT

STEPS, SEED = 100, 11
SIZES = {"mnist": 32, "frappe": 64}
PARAMS = {"mnist": "dropout=0.0", "frappe": ""}
PLAIN_SGD = "import runpy; runpy.run_module('tests.e2e.plain_sgd', run_name='__main__')"
JOBS = {job.name: job for job in (MNIST, FRAPPE)}
RecordFile = Callable[[str], Path]
Train = Callable[[str, bool, int], SavedModel]


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    """The records of the job with a name."""
    return cache(lambda name: _record_file(JOBS[name], tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, record_file: RecordFile) -> Train:
    """Return the final model of the job with a name, asynchronous or not, on a number of servers; trained once."""

    @cache
    def train(name: str, use_async: bool, num_ps_pods: int) -> SavedModel:
        job_dir = tmp_path_factory.mktemp(name) / "job"
        return _trained(JOBS[name], job_dir, record_file(name), use_async=use_async, num_ps_pods=num_ps_pods)

    return train


def _record_file(job: RealJob, directory: Path) -> Path:
    """One file of exactly as many records as the steps need, so that there is one task, in order."""
    argv = [sys.executable, "scripts/gen_dataset.py", job.dataset, "--output", str(directory / job.dataset)]
    argv += ["--records_per_shard", str(STEPS * SIZES[job.name])]
    argv += ["--source", str(TEST_DATA / job.dataset)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return directory / job.dataset / "train" / "data-00000"


def _trained(job: RealJob, job_dir: Path, file: Path, **flags: object) -> SavedModel:
    """Return the final model of a job of one worker, one task and plain SGD."""
    running = job.local_job(
        job_dir,
        file.parent.parent,
        model_zoo=".",
        model_def=f"model_zoo.{job.model_def}",
        model_params=PARAMS[job.name],
        feed=f"tests.e2e.plain_sgd.{job.name}_feed",
        optimizer=f"tests.e2e.plain_sgd.{job.name}_sgd",
        training_data=file,
        validation_data="",
        minibatch_size=SIZES[job.name],
        num_minibatches_per_task=STEPS,
        num_epochs=1,
        num_workers=1,
        seed=SEED,
        **flags,
    ).start()
    assert running.wait() == 0, running.story()
    return read_checkpoint(job_dir / "checkpoints" / f"version-{STEPS}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", [MNIST, FRAPPE], ids=lambda job: job.name)
def test_a_synchronous_worker_trains_as_plain_keras_does(
    job: RealJob, trained: Train, record_file: RecordFile, tmp_path: Path
) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    ours = trained(job.name, False, 1)
    argv = [
        sys.executable,
        "-c",
        LEAN_IMPORT + PLAIN_SGD,
        job.name,
        record_file(job.name),
        SIZES[job.name],
        STEPS,
        SEED,
    ]
    argv.append(tmp_path / "plain.npz")
    printed = subprocess.run([str(arg) for arg in argv], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr[-3000:]
    plain = np.load(tmp_path / "plain.npz")
    assert np.abs(plain["trainable"] - plain["initial"]).max() > 1e-2, "it has hardly learned anything"
    np.testing.assert_allclose(ours.trainable, plain["trainable"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.non_trainable, plain["non_trainable"], rtol=0, atol=1e-5)
    for name, (ids, rows) in ours.tables.items():
        np.testing.assert_allclose(rows, plain[f"table/{name}"][ids], rtol=0, atol=1e-5)
    assert len(ours.tables) == len([name for name in plain.files if name.startswith("table/")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("use_async", [True, False], ids=["async", "sync"])
def test_two_parameter_servers_hold_the_bits_of_one(use_async: bool, trained: Train) -> None:
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    assert_same_bits(trained(FRAPPE.name, use_async, 1), trained(FRAPPE.name, use_async, 2))
