"""A whole job with passwords in its flags: they reach the user's code, and stand in no file but the secret one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.job import LocalJob

SECRET = "m4rk3r"
ZOO = """
import os

import numpy as np

from elasticdl.frameworks.framework import Framework
from tests.e2e_kubernetes.zoo.paced import numpy_digits
from tests.e2e_kubernetes.zoo.paced.numpy_digits import custom_model, framework

class Reader:
    def __init__(self, origin, password):
        secret = os.environ["SITE_WORD"]
        assert origin == "postgresql://me:" + secret + "@host/db?table=t&token=" + secret, "the URL is not whole"
        assert password == secret, "the parameter is not whole"
        if os.environ.get("BREAKS") == "yes":
            raise ValueError("cannot open " + origin)

    def create_shards(self):
        return {"t": (0, 64)}

    def read_records(self, task):
        for number in range(task.start, task.end):
            yield str(number).encode()

def custom_data_reader(data_origin, password=None):
    return Reader(data_origin, password)

def examples(records):
    labels = np.array([int(record) % 10 for record in records])
    return np.full((len(records), 65), labels[:, None] / 10, np.float32), labels

numpy_digits._examples = examples
"""


def job(directory: Path, **flags: object) -> LocalJob:
    (directory / "zoo").mkdir()
    (directory / "zoo" / "secretive.py").write_text(ZOO)
    common = {
        "job_name": "secretive",
        "model_zoo": directory / "zoo",
        "model_def": "secretive.custom_model",
        "distribution_strategy": "Local",
        "training_data": f"postgresql://me:{SECRET}@host/db?table=t&token={SECRET}",
        "data_reader_params": f"password={SECRET}",
        "envs": f"SITE_WORD={SECRET}",
        "minibatch_size": 16,
        "num_minibatches_per_task": 2,
    }
    return LocalJob(directory / "job", common | flags)


def holders(directory: Path) -> dict[str, int]:
    """The files that hold the password, and their modes."""
    files = [Path(root) / name for root, _, names in os.walk(directory) for name in names]
    found = [file for file in files if SECRET in str(file) or SECRET.encode() in file.read_bytes()]
    return {str(file.relative_to(directory)): file.stat().st_mode & 0o777 for file in found}


@pytest.mark.timeout(180)
def test_no_file_or_output_of_a_job_holds_its_passwords_but_the_secret_one(tmp_path: Path) -> None:
    running = job(tmp_path).start()
    assert running.wait(120) == 0, running.story()
    assert "committed 64" in running.master_log()
    assert "postgresql://me:***@host/db" in running.master_log()
    assert SECRET not in "\n".join(running.output)
    assert holders(tmp_path / "job") == {"secret_flags.json": 0o600}
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


@pytest.mark.timeout(180)
def test_an_exception_with_a_password_in_it_is_shown_without(tmp_path: Path) -> None:
    running = job(tmp_path, envs=f"SITE_WORD={SECRET},BREAKS=yes").start()
    assert running.wait(120) == 1, running.story()
    said = "\n".join(running.output)
    assert "cannot open postgresql://me:***@host/db?table=t&token=***" in said, said
    assert SECRET not in said
    assert holders(tmp_path / "job") == {"secret_flags.json": 0o600}
