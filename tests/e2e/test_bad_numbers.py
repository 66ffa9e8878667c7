"""Numbers that are not finite, ids that no table has, optimizers and models that no job can run: each is said."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import keras
import pytest

from elasticdl.frameworks.keras.optimizer import describe_optimizer
from elasticdl.ps.optim.optimizers import check_optimizer
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.explain.diagnosis import Trouble
from tests.chaos.job import LocalJob
from tests.chaos.jobs import DIGITS, NUMPY_DIGITS, zoo_with
from tests.e2e.all_reduce_jobs import KERAS, NUMPY, zoo_of
from tests.e2e.ugly_sevens import NOT_FINITE
from tests.explain.explained import the_trouble

EMBEDDED = """
from elasticdl.layers import Embedding

def custom_model():
    image = keras.Input((64,), name="image")
    ids = keras.ops.cast(keras.ops.where(image > 0, image + 1, -1), "int64")
    codes = keras.layers.Flatten()(Embedding(4, input_dim=17, name="shades")(ids))
    return keras.Model(image, keras.layers.Dense(10)(codes))
"""

# ReLU makes zeros of NaN on some processors, and NaN on others.
GATED = """
def custom_model():
    image = keras.Input((64,), name="image")
    hidden = keras.layers.Dense(32)(image)
    return keras.Model(image, keras.layers.Dense(10)(keras.ops.where(keras.ops.isfinite(hidden), hidden, 0.0)))
"""

OWN_STEP = """
loss = "sparse_categorical_crossentropy"
optimizer = "sgd"

class Own(keras.Model):
    def train_step(self, data):
        return {"loss": 0.0}

def custom_model():
    image = keras.Input((64,), name="image")
    return Own(image, keras.layers.Dense(10, activation="softmax")(image))
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DIGITS.make_data(tmp_path_factory.mktemp("data"))


def job_with(code: str, tmp_path: Path, digits: Path, **flags: object) -> LocalJob:
    zoo = zoo_with(tmp_path, code)
    return DIGITS.local_job(tmp_path / "job", digits, model_zoo=zoo, model_def="model.custom_model", **flags)


def refused_of_one(code: str, tmp_path: Path, digits: Path, **flags: object) -> tuple[LocalJob, str]:
    """A failing job with one worker, and what its client printed."""
    running = job_with(code, tmp_path, digits, num_workers=1, **flags)
    return running, refused(running)


def refused(running: LocalJob) -> str:
    """Return the output of a failing job's client."""
    assert running.start().wait(120) == 1, running.story()
    text = "\n".join(running.output)
    assert "Traceback" not in text, text
    return text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "Local"])
def test_gradients_that_are_not_finite_fail_the_job_and_say_where(strategy: str, tmp_path: Path, digits: Path) -> None:
    num_ps_pods = 0 if strategy == "Local" else 1
    flags = {"distribution_strategy": strategy, "num_ps_pods": num_ps_pods, "checkpoint_steps": 1000}
    code = textwrap.dedent(NOT_FINITE[KERAS]) + GATED  # the loss is finite
    running, text = refused_of_one(code, tmp_path, digits, **flags)
    assert "gradient is not finite" in text, running.story()
    assert not list((tmp_path / "job" / "checkpoints").glob("*")), "a checkpoint of a model that is worth nothing"
    assert re.search(r"in minibatch \d+ \(epoch 1, task ", text), text
    assert "--nan_policy" in text
    diagnosis = the_trouble(tmp_path / "job", Trouble.LOSS_NOT_FINITE)
    assert diagnosis.is_fatal
    assert str(diagnosis.evidence["records"]).startswith(str(digits / "train"))


@pytest.mark.timeout(180)
def test_ids_that_no_table_has_name_the_layer(tmp_path: Path, digits: Path) -> None:
    running, text = refused_of_one(EMBEDDED, tmp_path, digits, max_task_failures=1)
    assert "shades" in text, running.story()
    assert "not in [0, 17), its input_dim: -1, 17" in text


@pytest.mark.timeout(180)
def test_an_optimizer_that_servers_do_not_know_fails_by_name_before_any_update(tmp_path: Path, digits: Path) -> None:
    zoo = zoo_of(NUMPY, tmp_path)
    described = describe_optimizer(keras.optimizers.Lion(0.001))
    with (zoo / "model.py").open("a") as module:
        module.write(f"from paced import numpy_digits\n\nnumpy_digits.OPTIMIZER = {described!r}\n")
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "num_workers": 1}
    running = NUMPY_DIGITS.local_job(tmp_path / "job", digits, **flags)
    assert "Lion" in refused(running), running.story()
    status = running.status()
    assert status is not None
    assert status.model_version == 0


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: keras.optimizers.Lion(0.001), "Lion"),
        (lambda: keras.optimizers.Adam(0.001, use_ema=True), "use_ema"),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps"),
    ],
    ids=["class", "average", "accumulation"],
)
def test_optimizers_of_keras_that_servers_do_not_know_are_refused_by_name(
    made: Callable[[], keras.optimizers.Optimizer], named: str
) -> None:
    with pytest.raises(ModelDefinitionError, match=named):
        check_optimizer(describe_optimizer(made()))


@pytest.mark.timeout(180)
def test_a_train_step_that_no_worker_calls_fails_by_name_before_any_update(tmp_path: Path, digits: Path) -> None:
    running, text = refused_of_one(OWN_STEP, tmp_path, digits)
    assert "Own overrides train_step, which no worker calls" in text, running.story()
    assert "compute_loss" in text
    status = running.status()
    assert status is not None
    assert status.model_version == 0
