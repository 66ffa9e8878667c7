"""Jobs whose steps are computed in float16, in parts, clipped: exact, though a worker is killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl.protocol import Role
from tests.chaos import jobs
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact
from tests.e2e.all_reduce_jobs import KERAS, PACED_FEED, TORCH, all_reduce_job, worker_logs

JOB = replace(jobs.DIGITS, num_epochs=4, num_ps_pods=0, pace_s=0.004)  # of PyTorch: until a worker is killed
ALL_REDUCE, LOCAL = "AllReduceStrategy", "Local"
SMALL_AND_STEEP = """
def custom_model():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels) * 1000
"""


KERAS_STEEP = """
def custom_model():
    image = keras.Input((NUM_PIXELS,), name="image")
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Rescaling(1 / 16)(image))
    return keras.Model(image, keras.layers.Dense(NUM_CLASSES, dtype="float32")(hidden))


def loss(labels, predictions):
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return tf.reduce_mean(losses) * 1000
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [ALL_REDUCE, pytest.param(LOCAL, marks=pytest.mark.full)])  # each: 8 s of CPU time
def test_a_job_with_loss_scaling_parts_and_clipping_is_exact_though_a_worker_is_killed(
    strategy: str, tmp_path: Path
) -> None:
    flags: dict[str, object] = {
        "distribution_strategy": strategy,
        "num_workers": 1 if strategy == LOCAL else 2,
        "collective_timeout": 5.0 if strategy == LOCAL else 2.0,
        "precision": "fp16",
        "accumulate_steps": 4,
        "clip_gradient_norm": 1.0,
        "checkpoint_steps": 20,
    }
    code = SMALL_AND_STEEP + PACED_FEED
    running = all_reduce_job(TORCH, tmp_path, JOB.make_data(tmp_path), code, JOB, **flags).start()
    run_life(running, [Kill(Role.WORKER, at_version=60)])
    assert running.wait(200) == 0, running.story()
    assert_exact(running, JOB)
    newest = max((tmp_path / "job" / "checkpoints").glob("version-*"), key=lambda path: int(path.name[8:]))
    with np.load(next(newest.glob("*.npz"))) as state:
        (scale,) = (float(state[name]) for name in state.files if name.endswith("loss_scale/scale"))
    assert 1 < scale < 65536  # a gradient 1,000 times as steep has overflowed
    assert "not finite" not in worker_logs(running)


@pytest.mark.full  # three TensorFlow workers; tests/keras/test_precision.py has the steps
@pytest.mark.timeout(300)
def test_a_keras_job_with_loss_scaling_is_exact_and_keeps_the_scale_though_a_worker_is_killed(tmp_path: Path) -> None:
    flags: dict[str, object] = {"num_workers": 2, "precision": "fp16", "checkpoint_steps": 20}
    running = all_reduce_job(KERAS, tmp_path, JOB.make_data(tmp_path), KERAS_STEEP, JOB, **flags).start()
    run_life(running, [Kill(Role.WORKER, at_version=60)])
    assert running.wait(200) == 0, running.story()
    assert_exact(running, JOB)
    newest = max((tmp_path / "job" / "checkpoints").glob("version-*"), key=lambda path: int(path.name[8:]))
    with np.load(next(newest.glob("*.npz"))) as state:
        (scale,) = (float(state[name]) for name in state.files if name.endswith("dynamic_scale"))
    assert 1 <= scale < 2**15  # a gradient 1,000 times as steep has overflowed
    assert "not finite" not in worker_logs(running)
