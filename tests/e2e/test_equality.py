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
from tests.e2e import plain_sgd
from tests.e2e.saved_model import SavedModel, assert_same_bits, read_checkpoint

STEPS, SEED = 100, 11
SIZES = {"mnist": 32, "frappe": 64}
PARAMS = {"mnist": "dropout=0.0", "frappe": ""}
JOBS = {job.name: job for job in (MNIST, FRAPPE)}
RecordFile = Callable[[str], Path]
Train = Callable[[str, bool, int], SavedModel]


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    """The records of the job with a name."""
    return cache(lambda name: _record_file(JOBS[name], tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, record_file: RecordFile) -> Train:
    """Return the final model of the job with a name, synchronous and by plain SGD or not, on a number of servers."""

    @cache
    def train(name: str, is_plain: bool, num_ps_pods: int) -> SavedModel:
        job, file = JOBS[name], record_file(name)
        flags: dict[str, object] = {"num_ps_pods": num_ps_pods, "use_async": not is_plain}
        if is_plain:
            flags |= _plain(job)
        elif num_ps_pods > 1:
            flags |= {"validation_data": file, "evaluation_steps": STEPS // 2}
        return _trained(job, tmp_path_factory.mktemp(name) / "job", file, **flags)

    return train


def _record_file(job: RealJob, directory: Path) -> Path:
    """One file of exactly as many records as the steps need, so that there is one task, in order."""
    argv = [sys.executable, "scripts/gen_dataset.py", job.dataset, "--output", str(directory / job.dataset)]
    argv += ["--records_per_shard", str(STEPS * SIZES[job.name])]
    argv += ["--source", str(TEST_DATA / job.dataset)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return directory / job.dataset / "train" / "data-00000"


def _plain(job: RealJob) -> dict[str, object]:
    """Flags for plain SGD on the records in order."""
    return {
        "model_zoo": ".",
        "model_def": f"model_zoo.{job.model_def}",
        "model_params": PARAMS[job.name],
        "feed": f"tests.e2e.plain_sgd.{job.name}_feed",
        "optimizer": f"tests.e2e.plain_sgd.{job.name}_sgd",
    }


def _trained(job: RealJob, job_dir: Path, file: Path, **flags: object) -> SavedModel:
    """Return the final model of a job of one worker and one task."""
    given: dict[str, object] = {
        "training_data": file,
        "validation_data": "",
        "minibatch_size": SIZES[job.name],
        "num_minibatches_per_task": STEPS,
        "num_epochs": 1,
        "num_workers": 1,
        "seed": SEED,
    }
    running = job.local_job(job_dir, file.parent.parent, **(given | flags)).start()
    assert running.wait() == 0, running.story()
    return read_checkpoint(job_dir / "checkpoints" / f"version-{STEPS}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", [MNIST, FRAPPE], ids=lambda job: job.name)
def test_a_synchronous_worker_trains_as_plain_keras_does(job: RealJob, trained: Train, record_file: RecordFile) -> None:
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    ours = trained(job.name, True, 1)
    plain = plain_sgd.train(job.name, record_file(job.name), SIZES[job.name], STEPS, SEED)
    assert np.abs(plain["trainable"] - plain["initial"]).max() > 1e-2, "it has hardly learned anything"
    np.testing.assert_allclose(ours.trainable, plain["trainable"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.non_trainable, plain["non_trainable"], rtol=0, atol=1e-5)
    for name, (ids, rows) in ours.tables.items():
        np.testing.assert_allclose(rows, plain[f"table/{name}"][ids], rtol=0, atol=1e-5)
    assert len(ours.tables) == len([name for name in plain if name.startswith("table/")])


@pytest.mark.timeout(300)
def test_two_parameter_servers_hold_the_bits_of_one(trained: Train) -> None:
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    assert_same_bits(trained(FRAPPE.name, True, 1), trained(FRAPPE.name, True, 2))


@pytest.mark.timeout(300)
def test_asynchronous_runs_with_one_worker_are_bit_equal_on_any_number_of_servers(trained: Train) -> None:
    """With the optimizer of the zoo, shuffled, and one of them evaluated in between."""
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    assert_same_bits(trained(FRAPPE.name, False, 1), trained(FRAPPE.name, False, 2))
