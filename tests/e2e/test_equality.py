"""A job on parameter servers computes what plain Keras computes, and any number of servers the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import FRAPPE, MNIST, TEST_DATA, RealJob
from tests.e2e.saved_model import SavedModel, assert_same_bits, read_checkpoint

STEPS, SEED = 100, 11
SIZES = {"mnist": 32, "frappe": 64}
PARAMS = {"mnist": "dropout=0.0", "frappe": ""}


def record_file(job: RealJob, directory: Path) -> Path:
    """One file of exactly as many records as the steps need, so that there is one task, in order."""
    argv = [sys.executable, "scripts/gen_dataset.py", job.dataset, "--output", str(directory / job.dataset)]
    argv += ["--records_per_shard", str(STEPS * SIZES[job.name])]
    argv += ["--source", str(TEST_DATA / job.dataset)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return directory / job.dataset / "train" / "data-00000"


def trained(job: RealJob, job_dir: Path, file: Path, **flags: object) -> SavedModel:
    """What a job of one worker, one task and plain SGD ends with."""
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
def test_a_synchronous_worker_trains_as_plain_keras_does(job: RealJob, tmp_path: Path) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    file = record_file(job, tmp_path)
    ours = trained(job, tmp_path / "job", file, use_async=False, num_ps_pods=1)
    argv = [sys.executable, "-m", "tests.e2e.plain_sgd", job.name, file, SIZES[job.name], STEPS, SEED]
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
def test_two_parameter_servers_hold_the_bits_of_one(use_async: bool, tmp_path: Path) -> None:
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    file = record_file(FRAPPE, tmp_path)
    one, two = (
        trained(FRAPPE, tmp_path / f"job-{num_ps}", file, use_async=use_async, num_ps_pods=num_ps) for num_ps in (1, 2)
    )
    assert_same_bits(one, two)
