"""A job on a compiled model and the module's own data set: exact, though a worker is killed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import coverage_of

NUM_TRAIN, NUM_EPOCHS = 1437, 8
MODULE = """
import keras
import numpy as np

from tests.e2e_kubernetes.zoo.paced.pace import pause

X, Y = (np.load("{directory}/" + name, mmap_mode="r") for name in ("x.npy", "y.npy"))


class Digits(keras.utils.PyDataset):
    def __len__(self):
        return 45  # batches of 32, the last one of 29

    def __getitem__(self, number):
        pause()
        part = slice(32 * number, min(32 * (number + 1), {num_train}))
        return X[part] / 16, Y[part]


def custom_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    return model


def dataset(mode):
    return Digits() if mode == "training" else (X[{num_train}:] / 16, Y[{num_train}:])
"""


@pytest.mark.timeout(300)
def test_a_compiled_model_on_the_data_set_of_its_module_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    x, y = load_digits(return_X_y=True)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    module = textwrap.dedent(MODULE).format(directory=tmp_path, num_train=NUM_TRAIN)
    (tmp_path / "of_module.py").write_text(module)
    flags: dict[str, object] = {
        "job_name": "of-module",
        "model_zoo": tmp_path,
        "model_def": "of_module.custom_model",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 2,
        "num_epochs": NUM_EPOCHS,
        "minibatch_size": 32,
        "num_minibatches_per_task": 4,
        "collective_timeout": 2.0,
    }
    running = LocalJob(tmp_path / "job", flags, pace_s=0.05).start()
    run_life(running, [Kill(Role.WORKER, at_version=60)])
    assert running.wait(200) == 0, running.story()
    coverage = coverage_of(running)
    assert len(coverage) == NUM_EPOCHS
    for epoch in coverage:
        assert str(epoch) == f"records {NUM_TRAIN}, committed {NUM_TRAIN}, repeated 0, lost 0"
    metrics = running.metrics()
    assert set(metrics) == {"accuracy", "loss"}
    assert metrics["accuracy"] > 0.8  # it is about 0.9: a lost worker changes which minibatches make a step
