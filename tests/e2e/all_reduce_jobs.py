"""Small AllReduce jobs over the digits, with a model of Keras, PyTorch or NumPy and more code of the user's."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS, RealJob, zoo_with
from tests.chaos.scenarios import LEASE_TIMEOUT_S

JOB = replace(DIGITS, num_workers=3, num_ps_pods=0)
KERAS, TORCH, NUMPY = "keras", "torch", "numpy"
TORCH_DIGITS = """
import torch
from torch import nn

from elasticdl.api.examples import parse_examples


def custom_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.BatchNorm2d(32), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.003)


def feed(records, mode, metadata):
    columns = parse_examples(records, {"image": (64,), "label": ()})
    return torch.from_numpy(columns["image"]) / 16, torch.from_numpy(columns["label"])


def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: predictions.argmax(1) == labels}
"""
# More code for PyTorch: a job as long as its test has use for it, see `RealJob.pace_s`.
PACED_FEED = """
from tests.e2e_kubernetes.zoo.paced.pace import pause

at_once = feed


def feed(records, mode, metadata):
    pause(len(records))
    return at_once(records, mode, metadata)
"""


def zoo_of(framework: str, directory: Path, code: str = "") -> Path:
    """A model zoo in ``directory/zoo`` whose module `model` is an example with more code at its end."""
    if framework == KERAS:
        return zoo_with(directory, code)
    zoo = directory / "zoo"
    if framework == NUMPY:
        shutil.copytree(REPOSITORY / str(NUMPY_DIGITS.flags["model_zoo"]), zoo)
        (zoo / "model.py").write_text("from paced.numpy_digits import custom_model, framework\n")
        return zoo
    zoo.mkdir()
    (zoo / "model.py").write_text(TORCH_DIGITS + "\n\n" + textwrap.dedent(code))
    return zoo


def all_reduce_job(
    framework: str, directory: Path, data: Path, code: str = "", job: RealJob = JOB, /, **flags: object
) -> LocalJob:
    """Not started yet."""
    directory.mkdir(exist_ok=True)
    flags = {
        "distribution_strategy": "AllReduceStrategy",
        "log_level": "DEBUG",
        "lease_timeout": LEASE_TIMEOUT_S,
        "collective_timeout": 2.0,
        **flags,
    }
    zoo = zoo_of(framework, directory, code)
    return job.local_job(directory / "job", data, model_zoo=zoo, model_def="model.custom_model", **flags)


def worker_logs(running: LocalJob) -> str:
    return "".join(path.read_text() for path in sorted((running.job_dir / "logs").glob("*worker*.log")))
