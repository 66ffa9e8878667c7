"""Metrics are tried before anything is trained: their errors end the job then, and nothing else changes."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.jobs import DIGITS
from tests.e2e.all_reduce_jobs import KERAS, TORCH, worker_logs, zoo_of
from tests.explain.explained import the_trouble

JOB = replace(DIGITS, num_workers=2, num_epochs=1)
LOCAL, SERVERS, ALL_REDUCE = "Local", "ParameterServerStrategy", "AllReduceStrategy"
STRATEGIES = [
    (TORCH, LOCAL),
    (TORCH, ALL_REDUCE),
    (KERAS, SERVERS),
    pytest.param(KERAS, LOCAL, marks=pytest.mark.full),
    pytest.param(KERAS, ALL_REDUCE, marks=pytest.mark.full),
]
BROKEN_METRIC = """
def wide(labels, predictions):
    return labels[:, None] == predictions[:, :-1] @ predictions  # 9 columns by all rows: no such product


def eval_metrics_fn():
    return {"wide": wide}
"""
# A model that counts its minibatches, in evaluations, too.
COUNTING = {
    KERAS: """
    class Counter(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(name="count", shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign_add(1.0)
            return x + 0.001 * self.count


    def custom_model():
        image = keras.Input((NUM_PIXELS,), name="image")
        x = keras.layers.Dense(16, activation="relu")(Counter()(image / 16))
        x = keras.layers.Dropout(0.25)(keras.layers.BatchNormalization()(x))
        return keras.Model(image, keras.layers.Dense(NUM_CLASSES)(x))
    """,
    TORCH: """
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x + 0.001 * self.count


    plain_model = custom_model


    def custom_model():
        return nn.Sequential(Counter(), plain_model())
    """,
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return JOB.make_data(tmp_path_factory.mktemp("data"))


def flags_of(strategy: str) -> dict[str, object]:
    servers = {"num_ps_pods": int(strategy == SERVERS)}
    return {"distribution_strategy": strategy, **servers, "num_workers": 1 if strategy == LOCAL else JOB.num_workers}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("framework", "strategy"), STRATEGIES)
def test_metrics_that_raise_end_the_job_before_anything_is_trained(
    framework: str, strategy: str, tmp_path: Path, digits: Path
) -> None:
    zoo = zoo_of(framework, tmp_path, BROKEN_METRIC)
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "num_epochs": 1000, **flags_of(strategy)}
    running = JOB.local_job(tmp_path / "job", digits, **flags).start()
    assert running.wait(150) == 1, running.story()
    text = "\n".join(running.output)
    line = 1 + (zoo / "model.py").read_text().split("\n").index(BROKEN_METRIC.strip().split("\n")[1])
    assert "The evaluation of the first validation minibatch, before anything is trained, raised" in text, text
    assert f'{zoo / "model.py"}", line {line}, in wide' in text, text
    assert "Traceback" not in text, text
    diagnosis = the_trouble(tmp_path / "job", Trouble.MODEL_RAISED)
    assert diagnosis.is_fatal
    assert (diagnosis.evidence["function"], diagnosis.evidence["at"]) == ("wide", f"{zoo / 'model.py'}:{line}")


def state_after(steps: int, directory: Path, data: Path, framework: str, **flags: object) -> dict[str, bytes]:
    """The checkpoint of one worker after some steps of more."""
    directory.mkdir()
    zoo = zoo_of(framework, directory, textwrap.dedent(COUNTING[framework]))
    given = {"model_zoo": zoo, "model_def": "model.custom_model", "seed": 5, "max_step": steps + 1, **flags_of(LOCAL)}
    running = JOB.local_job(directory / "job", data, checkpoint_steps=steps, **given, **flags).start()
    assert running.wait(150) == 0, running.story()
    assert "cannot be evaluated" not in worker_logs(running)
    with np.load(directory / "job" / "checkpoints" / f"version-{steps}" / "local.npz") as state:
        return {name: state[name].tobytes() for name in state.files}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", [TORCH, KERAS])
def test_a_trial_of_metrics_changes_no_bit_of_the_training(framework: str, tmp_path: Path, digits: Path) -> None:
    without = state_after(20, tmp_path / "without", digits, framework, validation_data="")
    assert state_after(20, tmp_path / "with", digits, framework) == without
