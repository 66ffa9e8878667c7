"""docs/keras_models.md: every row of its tables is so, and no method of a Keras model is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.compiled import (
    NOTED,
    REFUSED,
    check_compiled,
    check_overrides,
    completed,
    taken_from_compile,
)
from elasticdl.frameworks.keras.losses import TotalLoss
from elasticdl.frameworks.keras.metrics import Evaluated, measures_of
from elasticdl.frameworks.keras.optimizer import make_optimizer
from elasticdl.frameworks.keras.samples import Examples
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "keras_models.md").read_text()
OF_KERAS_ALONE = {  # of serialization, of other backends, of tf.distribute; arguments of `compile` are a table
    *("compile", "get_compile_config", "compile_from_config", "stateless_compute_loss", "jit_compile", "run_eagerly"),
    *("distribute_strategy", "distribute_reduction_method", "loss", "compiled_loss", "compiled_metrics"),
}


def rows(title: str) -> dict[str, str]:
    """Names of the first column, with what the second says of them."""
    table = PAGE.split(f"## {title}")[1].split("\n## ")[0]
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    return {name: line[2].strip() for line in cells for name in re.findall(r"`(\w+)`", line[1])}


def model_with(name: str) -> keras.Model:
    kind = type("Own", (keras.Model,), {name: lambda self, *args, **kwargs: None})
    return kind()


def test_every_method_of_a_trainer_is_on_the_page() -> None:
    public = {name for name in dir(TensorFlowTrainer) if not name.startswith("_")}
    assert public <= OF_KERAS_ALONE | set(rows("What a model may override"))


def test_what_the_page_says_of_overrides_is_so(caplog: pytest.LogCaptureFixture) -> None:
    said = rows("What a model may override")
    refused = {name: mode for mode, group in REFUSED.items() for name in group}
    assert {name for name, what in said.items() if what == "refused"} == set(refused)
    assert {name for name, what in said.items() if what == "not called"} == set(NOTED)
    for name, mode in refused.items():
        with pytest.raises(ModelDefinitionError, match=f"Own overrides {name}, which no worker calls"):
            check_overrides("m.py", model_with(name), mode)
        with pytest.raises(ModelDefinitionError, match=name):
            check_overrides("m.py", model_with(name), Mode.TRAINING)
    check_overrides("m.py", model_with("predict_step"), Mode.EVALUATION)
    check_overrides("m.py", model_with("compute_loss"), Mode.TRAINING)
    assert not caplog.records
    for name in NOTED:
        own = type("Own", (keras.Model,), {name: property(lambda self: [])})
        check_overrides("m.py", own(), Mode.TRAINING)
        assert f"{name} of Own" in caplog.records[-1].getMessage()


class Five(keras.Model):
    def call(self, x: Any) -> Any:
        return x * 5.0


class Built(keras.Model):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer=lambda shape, dtype: keras.ops.full(shape, 4.0, dtype))

    def call(self, x: Any) -> Any:
        return x * self.scale


class Adds(Five):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.sum(x))
        return x


class Says(Five):
    losses = (3.0,)


class Computes(Five):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):  # type: ignore[no-untyped-def]
        return super().compute_loss(x, y, y_pred, sample_weight) + 7.0


HONOURED = {
    "call": (Five, 5),
    "build": (Built, 4),
    "add_loss": (Adds, 3),
    "losses": (Says, 8),
    "compute_loss": (Computes, 12),
}


def test_what_the_page_says_is_honoured_is_in_the_loss() -> None:
    said = rows("What a model may override")
    assert {name for name, what in said.items() if what == "honoured"} == set(HONOURED)
    for kind, expected in HONOURED.values():
        total = TotalLoss(kind(), lambda labels, predictions: tf.reduce_mean(predictions), None)
        assert float(total(Examples(tf.ones([2, 1]), tf.zeros([2, 1])))) == pytest.approx(expected)


def test_the_code_of_the_page_is_what_keras_takes() -> None:
    scope: dict[str, Any] = {"keras": keras}
    compiling, of_data, of_fit, block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compiling, scope)
    bare = ModelDefinition("m.py", "custom_model", scope["custom_model"])
    assert set(taken_from_compile(bare, completed(bare, bare.model()))) == {"loss", "optimizer", "eval_metrics_fn"}
    for one in (of_data, of_fit):  # which take longer: tests/e2e and tests/sdk run such
        compile(one, "keras_models.md", "exec")
    exec(block, scope)
    example = Evaluated(tf.zeros([2]), tf.zeros([2, 5]))
    names = [measure.name for measure in measures_of("m.py", scope["eval_metrics_fn"](), lambda: example)]
    assert names == ["accuracy", "sparse_top_k_categorical_accuracy"]
    definition = ModelDefinition("m.py", "f", keras.Sequential, loss=scope["loss"], optimizer=scope["optimizer"])
    assert isinstance(make_optimizer(definition, keras.Sequential(), False), keras.optimizers.Adam)
    assert TotalLoss(keras.Sequential(), scope["loss"], None).is_described


def test_a_method_put_into_the_object_is_refused() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    check_overrides("m.py", model, Mode.TRAINING)
    model.train_step = lambda data: {}
    with pytest.raises(ModelDefinitionError, match="Sequential overrides train_step"):
        check_overrides("m.py", model, Mode.TRAINING)


def mean_error(labels: Any, predictions: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(labels - predictions))


def compiled(module: dict[str, Any], **settings: Any) -> Callable[[], ModelDefinition]:
    """Completes a module by a model that is compiled like it, but for some settings."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    given = {"optimizer": keras.optimizers.SGD(0.5), "loss": mean_error, "metrics": ["mae"], **settings}
    model.compile(**given)
    definition = ModelDefinition("m.py", "custom_model", lambda: model, **module)

    def check() -> ModelDefinition:
        check_compiled(definition, model, keras.optimizers.SGD(0.5), ["mae"])
        return completed(definition, model)

    return check


MODULE = {"loss": mean_error, "optimizer": "sgd", "eval_metrics_fn": lambda: ["mae"]}
ANOTHER = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae", keras.metrics.AUC()]}
SYMBOLS = {"optimizer": "optimizer", "loss": "loss", "metrics": "eval_metrics_fn", "loss_weights": "loss_weights"}
SETTINGS = {
    "loss_weights": [2.0],
    "weighted_metrics": ["mse"],
    "run_eagerly": True,
    "steps_per_execution": 4,
    "jit_compile": True,
    "auto_scale_loss": False,
}


def test_what_the_page_says_of_compile_is_so() -> None:
    compiled(MODULE)()
    said = rows("A compiled model")
    assert set(said) == {*ANOTHER, *SETTINGS}
    for name, what in said.items():
        settings = {name: ANOTHER[name] if name in ANOTHER else SETTINGS[name]}
        if what in ("taken", "refused"):
            with pytest.raises(ModelDefinitionError, match=f"compiled with {name}="):
                compiled(MODULE, **settings)()
        else:
            assert what in ("not needed", "honoured")
            compiled(MODULE, **settings)()
        if what == "taken":
            assert getattr(compiled({}, **settings)(), SYMBOLS[name]) is not None
        elif what == "refused":
            with pytest.raises(ModelDefinitionError, match=f"compiled with {name}=.*which no worker does") as caught:
                compiled({}, **settings)()
            assert caught.value.hint == "Leave it out of compile()."


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("mse", "mean_squared_error"),
        ("mse", keras.losses.mean_squared_error),
        (keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(name="another")),
        (["mse", "mae"], ["mse", "mae"]),
    ],
)
def test_losses_that_are_the_same_in_other_words_are_no_contradiction(given: Any, own: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), given)
    check_compiled(ModelDefinition("m.py", "f", lambda: model, loss=own), model, keras.optimizers.SGD(0.5), ())
