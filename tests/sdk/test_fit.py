"""`elasticdl.fit` on a real local job: history and weights come back; objects that no worker can get are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import elasticdl
from elasticdl.api.fit_arguments import as_fitted, read_callbacks, split, write_callbacks
from elasticdl.api.fit_results import WriteBack, best_epoch, take_back
from elasticdl.api.keras_fit import HandedOver, modules_of, write_arrays, write_module
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.input.module_data import ModuleData
from elasticdl.model_def import ModelDefinition, load
from elasticdl_client.choices import JobType
from elasticdl_client.errors import DataError, ElasticDLError, FlagError, ModelDefinitionError
from elasticdl_client.job_dir import holders, wait_for_end
from elasticdl_client.sdk import FlagValue, JobHandle
from elasticdl_client.sdk import start as sdk
from tests.lean_import import LEAN_IMPORT

X = np.zeros((6, 3), "f4")
Y = np.arange(6)
NAN = float("nan")


def digits_model(has_input: bool = True) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = [keras.Input((64,))] if has_input else []
    model = keras.Sequential([*inputs, keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Batches(keras.utils.PyDataset):
    """The digits in batches of fifty."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // 50)

    def __getitem__(self, number: int) -> Any:
        part = slice(50 * number, 50 * (number + 1))
        return self.x[part], self.y[part]


@pytest.mark.timeout(300)
def test_a_model_is_fitted_by_two_workers_and_has_their_weights_and_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("f4")
    model, held = digits_model(), (x[1437:], y[1437:])
    history = elasticdl.fit(
        model, Batches(x[:1437], y[:1437]), batch_size=64, epochs=4, validation_data=held, num_workers=2, progress=False
    )
    assert history.epoch == [0, 1, 2, 3]
    assert set(history.history) == {"loss", "val_loss", "val_accuracy"}
    assert model.history is history
    of_keras = model.evaluate(*held, verbose=0, return_dict=True)
    assert history.history["val_accuracy"][-1] == pytest.approx(of_keras["accuracy"], abs=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(of_keras["loss"], rel=1e-4)
    assert of_keras["accuracy"] > 0.85
    assert not list(tmp_path.glob("elasticdl-fit-*"))


@pytest.mark.timeout(300)
def test_the_arguments_of_keras_do_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    x, y = load_digits(return_X_y=True)
    x, weights = (x / 16).astype("f4"), {digit: 1 + digit / 5 for digit in range(9)}
    model = digits_model(has_input=False)
    history = elasticdl.fit(
        model,
        x,
        y,
        batch_size=64,
        epochs=8,
        class_weight=weights,
        validation_split=0.2,
        callbacks=[
            keras.callbacks.ModelCheckpoint("best.keras", "val_loss", save_best_only=True),
            keras.callbacks.EarlyStopping("val_accuracy", patience=0, min_delta=10.0, restore_best_weights=True),
        ],
        num_workers=1,
        verbose=0,
    )
    assert history.epoch == [0, 1]  # no epoch gains so much; none begins before the stop
    restored = model.evaluate(x[1437:], y[1437:], verbose=0, return_dict=True)
    assert restored["loss"] == pytest.approx(history.history["val_loss"][0], rel=1e-3)  # of the best epoch, the first
    assert restored["loss"] > history.history["val_loss"][-1] * 1.01
    best = keras.saving.load_model("best.keras").evaluate(x[1437:], y[1437:], verbose=0, return_dict=True)
    assert best["loss"] <= min(history.history["val_loss"]) * 1.0001


@pytest.mark.timeout(300)
def test_without_validation_data_a_model_with_metrics_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x, y = load_digits(return_X_y=True)
    history = elasticdl.fit(digits_model(), (x / 16).astype("f4"), y, epochs=2, num_workers=1)
    assert set(history.history) == {"loss"}
    assert history.epoch == [0, 1]
    printed = capsys.readouterr().out
    assert " succeeded." in printed
    assert str(tmp_path) not in printed  # its directory is removed


def test_another_backend_of_keras_is_refused() -> None:
    source = LEAN_IMPORT + (
        "import keras, numpy as np, elasticdl\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "elasticdl.fit(model, np.zeros((6, 3)), np.zeros(6))\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    ended = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert "Keras runs on torch in this process" in ended.stderr
    assert "Set KERAS_BACKEND=tensorflow" in ended.stderr


@pytest.mark.timeout(300)
def test_a_job_ends_with_the_process_that_fits(tmp_path: Path) -> None:
    """Interrupted, and then killed: a process of both, as it imports TensorFlow for seconds."""
    source = LEAN_IMPORT + (
        "import signal, keras, numpy as np, elasticdl\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "while True:\n"
        "    try:\n"
        "        x, y = np.zeros((640, 3)), np.zeros(640)\n"
        "        elasticdl.fit(model, x, y, epochs=100_000, num_workers=1, batch_size=64)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as fitting:
        assert fitting.stdout is not None
        for by in (signal.SIGINT, signal.SIGKILL):
            assert any("records 640, committed 640" in line for line in fitting.stdout)
            (lock,) = tmp_path.glob("elasticdl-fit-*/job/lock")
            of_job = holders(lock.parent)
            assert of_job
            fitting.send_signal(by)
            assert by is signal.SIGKILL or any(line == "interrupted\n" for line in fitting.stdout)
            assert wait_for_end(of_job, 60)
            assert lock.exists() == (by is signal.SIGKILL)


def test_weights_of_classes_and_the_split_are_those_of_keras() -> None:
    y = np.arange(10) % 4
    weights = {0: 2.0, 2: 0.5}
    expected = [2, 1, 0.5, 1, 2, 1, 0.5, 1, 2, 1]
    smooth = np.where(y > 0, y - 0.1, 0.1)  # Keras rounds them
    for labels in (y, y[:, None], np.eye(4)[y], pd.Series(y, index=range(10, 0, -1)), smooth, smooth[:, None]):
        made = as_fitted({"a": np.arange(10)}, labels, None, weights)
        assert made[2].tolist() == expected
        first, last = split(made, 0.25)
        assert first[0]["a"].tolist() == list(range(7))
        assert (np.asarray(last[1]).shape[0], last[2].tolist()) == (3, expected[7:])


def bare_model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def model_of(model: keras.Model | None = None, **compiled: Any) -> keras.Model:
    model = model or bare_model()
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def model_of_own_step() -> keras.Model:
    model = type("Stepping", (keras.Sequential,), {"train_step": lambda self, data: {}})([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def model_of_script() -> keras.Model:
    model = type("Net", (keras.Sequential,), {"__module__": "__main__"})([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@keras.saving.register_keras_serializable("tests")
class Tuned(keras.Model):
    """Written without a config of its own."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.base, self.head = keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")

    def call(self, inputs: Any) -> Any:
        return self.head(self.base(inputs))


def tuned(**changed: Any) -> keras.Model:
    """A model that is not what its file says."""
    model = Tuned()
    model(X)
    for name, value in changed.items():
        setattr(model.base, name, value)
    model.compile("sgd", "mse")
    return model


def adapted() -> keras.Model:
    """A model with weights that its file does not make."""
    model = tuned()
    model.base.enable_lora(2)
    return model


def own_loss(labels: Any, predictions: Any) -> Any:
    return tf.reduce_mean(tf.square(labels - predictions))


RESTORING = keras.callbacks.EarlyStopping(restore_best_weights=True)
Attempt = tuple[tuple[Any, ...], dict[str, Any], type[ElasticDLError], str]
REFUSED: dict[str, Callable[[], Attempt]] = {
    "not compiled": lambda: ((bare_model(), X, Y), {}, ModelDefinitionError, "no model that is compiled with loss"),
    "eager": lambda: (
        (model_of(run_eagerly=True), X, Y),
        {},
        ModelDefinitionError,
        "^elasticdl.fit: the model is compiled with run_eagerly=True, which no worker does",
    ),
    "own step": lambda: ((model_of_own_step(), X, Y), {}, ModelDefinitionError, "Stepping overrides train_step"),
    "averages": lambda: (
        (model_of(optimizer=keras.optimizers.SGD(use_ema=True)), X, Y),
        {},
        ModelDefinitionError,
        "has use_ema=True",
    ),
    "half weights": lambda: (
        (model_of(keras.Sequential([keras.layers.Dense(1, dtype="bfloat16")])), X, Y),
        {},
        ModelDefinitionError,
        "kernel is bfloat16",
    ),
    "no model": lambda: (("mse", X, Y), {}, ModelDefinitionError, "was given a str"),
    "no data": lambda: ((model_of(),), {}, FlagError, "no data"),
    "no labels": lambda: ((model_of(), X), {}, FlagError, "x without y"),
    "labels twice": lambda: ((model_of(), Batches(X, Y), Y), {}, FlagError, "which holds it"),
    "lengths": lambda: ((model_of(), X, Y[:2]), {}, DataError, "differ in length"),
    "few samples": lambda: ((model_of(), X, Y), {"batch_size": 2, "num_workers": 3}, FlagError, "no sample of a step"),
    "own flag": lambda: ((model_of(), X, Y), {"minibatch_size": 2}, FlagError, "fit takes no minibatch_size"),
    "unknown flag": lambda: ((model_of(), X, Y), {"minibatches": 3}, FlagError, "minibatches"),
    "of Keras": lambda: ((model_of(), X, Y), {"initial_epoch": 2}, FlagError, "fit takes no initial_epoch"),
    "no epoch": lambda: ((model_of(), X, Y), {"epochs": 0}, FlagError, "epochs=0"),
    "no samples": lambda: ((model_of(), X[:0], Y[:0]), {}, FlagError, "no samples for training"),
    "all for validation": lambda: ((model_of(), X, Y), {"validation_split": 1.0}, FlagError, "leaves none"),
    "split of batches": lambda: ((model_of(), Batches(X, Y)), {"validation_split": 0.1}, FlagError, "is for arrays"),
    "split of lists": lambda: ((model_of(), X, Y.tolist()), {"validation_split": 0.5}, FlagError, "a int in x or y"),
    "weights of lists": lambda: ((model_of(), X, Y.tolist()), {"class_weight": {0: 2.0}}, FlagError, "y is a list"),
    "weights twice": lambda: (
        (model_of(), X, Y),
        {"sample_weight": Y, "class_weight": {0: 2.0}},
        FlagError,
        "both class_weight and",
    ),
    "callback": lambda: (
        (model_of(), X, Y),
        {"callbacks": [keras.callbacks.ReduceLROnPlateau()]},
        ModelDefinitionError,
        "no place in",
    ),
    "best weights exported": lambda: (
        (model_of(), X, Y),
        {"callbacks": [RESTORING], "output": "exported"},
        FlagError,
        "restore_best_weights=True. exports no model",
    ),
    "best weights of no epoch": lambda: (
        (model_of(), X, Y),
        {"callbacks": RESTORING, "validation_data": (X, Y), "evaluation_steps": 5},
        FlagError,
        "restore_best_weights=True. takes no evaluation_steps",
    ),
    "weights alone": lambda: (
        (model_of(), X, Y),
        {"callbacks": keras.callbacks.ModelCheckpoint("a.weights.h5", save_weights_only=True)},
        ModelDefinitionError,
        "whole models are saved",
    ),
    "class of the script": lambda: (
        (model_of_script(), X, Y),
        {},
        ModelDefinitionError,
        "is a Net, a class of this script",
    ),
    "local function": lambda: (
        (model_of(), X, Y),
        {"callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)]},
        ModelDefinitionError,
        "cannot be sent to a worker",
    ),
    "thawed by loading": lambda: (
        (tuned(trainable=False), X, Y),
        {},
        ModelDefinitionError,
        "kernel is frozen, and is trained in the loaded model",
    ),
    "less when loaded": lambda: ((adapted(), X, Y), {}, ModelDefinitionError, "has 6 weights, and the loaded model 4"),
    "of another precision": lambda: (
        (tuned(dtype_policy="mixed_bfloat16"), X, Y),
        {},
        ModelDefinitionError,
        "computes in mixed_bfloat16, and computes in float32 in the loaded model",
    ),
    "precision": lambda: ((model_of(), X, Y), {"precision": "bf16"}, FlagError, "fit takes no precision"),
    "unregistered": lambda: ((model_of(loss=own_loss), X, Y), {}, ModelDefinitionError, "cannot be saved and loaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fitted_is_refused_before_a_job_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments, options, kind, message = REFUSED[name]()
    with pytest.raises(kind, match=message):
        elasticdl.fit(*arguments, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("OUTPUT", "exported", "exports no model"), ("EVALUATION_STEPS", "5", "takes no eval")],
)
def test_best_weights_are_refused_what_the_environment_asks_for(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(f"ELASTICDL_{name}", value)
    with pytest.raises(FlagError, match=message) as caught:
        elasticdl.fit(model_of(), X, Y, validation_data=(X, Y), callbacks=RESTORING)
    assert f"ELASTICDL_{name}" in caught.value.hint


def test_the_precision_of_the_environment_is_not_that_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("ELASTICDL_PRECISION", "bf16")

    def start(kind: JobType, flags: Mapping[str, FlagValue], **_: Any) -> JobHandle:
        raise FlagError(f"a job in {sdk.spec_of(kind, flags, print).precision.value}")

    monkeypatch.setattr(sdk, "start", start)
    with pytest.raises(FlagError, match="a job in fp32"):
        elasticdl.fit(model_of(), X, Y)


def steps_down(epoch: int) -> float:
    return 0.1 / (1 + epoch)


def test_callbacks_may_hold_functions_of_modules_and_none_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = keras.callbacks.LearningRateScheduler(steps_down)
    write_callbacks(callback, tmp_path / "one", tmp_path)
    assert read_callbacks(tmp_path / "one")[0].schedule is steps_down
    write_callbacks(None, tmp_path / "none", tmp_path)
    assert read_callbacks(tmp_path / "none") == []
    monkeypatch.setattr(steps_down, "__module__", "__main__")
    with pytest.raises(ModelDefinitionError, match="needs steps_down, which is of this script or notebook"):
        write_callbacks([callback], tmp_path / "refused", tmp_path)
    assert not (tmp_path / "refused").exists()


class Counted(keras.Model):
    """A model whose only weight is given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(), dtype="bfloat16", name="count")


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        ({"patience": 9}, [3.0, 1.0, 2.0, 1.0]),  # training ends without a stop
        ({"patience": 9, "min_delta": 0.5}, [3.0, 2.8, 2.6, 2.4, 2.2]),
        ({"patience": 9, "min_delta": 0.5, "mode": "max"}, [1.0, 2.0, 2.4, 2.6]),
        ({"patience": 2, "baseline": 1.0}, [3.0, 2.0, 2.5]),
        ({"patience": 9, "start_from_epoch": 2}, [0.5, 0.4, 3.0, 2.0, 2.5]),
        ({"patience": 9, "start_from_epoch": 9}, [0.5, 0.4]),  # nothing is restored
    ],
)
def test_the_best_weights_are_those_of_keras(settings: dict[str, Any], losses: list[float], tmp_path: Path) -> None:
    of_keras = keras.callbacks.EarlyStopping(restore_best_weights=True, **settings)
    first, *ours = write_callbacks([of_keras], tmp_path / "callbacks", tmp_path)
    assert not first.restore_best_weights
    model = Counted()
    for callback in (of_keras, *ours, write_back := WriteBack(tmp_path)):
        callback.set_model(model)
    of_keras.on_train_begin()
    for epoch, loss in enumerate(losses):
        model.count.assign(epoch)
        for callback in (of_keras, *ours, *ours, write_back):  # as if the worker of the first call was lost
            callback.on_epoch_end(epoch, {"val_loss": loss})
    write_back.on_train_end()
    of_keras.on_train_end()
    taken = Counted()
    assert take_back(taken, tmp_path).history["val_loss"] == pytest.approx(losses)
    assert float(taken.count) == float(model.count)


@pytest.mark.parametrize(
    ("losses", "best"), [([NAN, 3.0, 2.0], 2), ([NAN, 3.0, NAN, 4.0], 1), ([NAN, NAN], None)], ids=str
)
def test_no_epoch_with_a_nan_is_the_best(losses: list[float], best: int | None) -> None:
    """Keras takes a first NaN for the best loss; the master trains on, as no NaN is one for it."""
    assert best_epoch(RESTORING, [{"val_loss": loss} for loss in losses]) == best


@keras.saving.register_keras_serializable("test_fit")
class Doubled(keras.layers.Layer):
    """A layer of the user's."""

    def call(self, x: Any) -> Any:
        return 2 * x


def test_workers_import_the_modules_of_the_user_s_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = keras.Sequential([keras.Input((3,)), Doubled(), keras.layers.Dense(1)])
    model.save(tmp_path / "own.keras")
    assert modules_of(tmp_path / "own.keras") == [Doubled.__module__]
    model.compile("sgd", "mse")
    monkeypatch.setattr(Doubled, "__module__", "__main__")
    with pytest.raises(ModelDefinitionError, match="of this script or notebook, which no worker can import"):
        elasticdl.fit(model, X, Y)


@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_workers_get_the_model_in_its_precision(tmp_path: Path, kind: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x = keras.Input((3,))
        layers = [keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")]
        model = {
            "sequential": lambda: keras.Sequential([x, *layers]),
            "functional": lambda: keras.Model(x, layers[1](layers[0](x))),
            "subclassed": Tuned,
        }[kind]()
        model(X)
    finally:
        keras.config.set_dtype_policy(before)
    model.compile("sgd", "mse")
    write_module(model, tmp_path)
    loaded = load(str(tmp_path), "fitted.custom_model", required=()).model()
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert [layer.dtype_policy.name for layer in loaded.layers[-2:]] == ["mixed_float16", "float32"]
    assert keras.config.dtype_policy() == before


def with_base(kind: str) -> keras.Model:
    """A float32 base below a head in another precision."""
    x, dense = keras.Input((3,)), keras.layers.Dense(4)
    base = keras.Sequential([x, dense]) if kind == "sequential" else keras.Model(x, dense(x))
    keras.config.set_dtype_policy("mixed_float16")
    whole = keras.Input((3,))
    return keras.Model(whole, keras.layers.Dense(1)(base(whole)))


def built_later() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(1)])
    keras.config.set_dtype_policy("mixed_bfloat16")
    model(X)
    return model


def with_extractor() -> keras.Model:
    x = keras.Input((3,))
    hidden = keras.layers.Dense(4)(x)
    model = keras.Model(x, keras.layers.Dense(1)(hidden))
    model.extractor = keras.Model(x, hidden)
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: with_base("sequential"), lambda: with_base("functional"), built_later, with_extractor],
    ids=["sequential base", "functional base", "built later", "extractor"],
)
def test_parts_that_compute_nothing_may_differ_in_the_file(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    before = keras.config.dtype_policy()
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy(before)
    model.compile("sgd", "mse")
    write_module(model, tmp_path)
    loaded = load(str(tmp_path), "fitted.custom_model", required=()).model()
    x = np.linspace(0, 1, 18, dtype="f4").reshape(6, 3)
    assert (loaded(x).numpy() == model(x).numpy()).all()


def test_workers_get_texts_of_any_length(tmp_path: Path) -> None:
    texts = np.array([["a", "é" * 1_000_000], [b"ends in\0", ""], *[["b", "c"]] * 5000], object)
    given = ({"texts": texts, "numbers": np.arange(5002)}, np.array(["yes", "no"] * 2501))
    definition = ModelDefinition("test", "test", digits_model, dataset=lambda _: given)
    write_arrays(ModuleData(definition, Mode.TRAINING), tmp_path, Mode.TRAINING)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3_000_000
    handed_over = HandedOver(str(tmp_path), "float32")
    data = ModuleData(replace(definition, dataset=handed_over.arrays), Mode.TRAINING)
    for start, end in ((0, 3), (4000, 5002)):
        for column, expected in zip(data.rows.read(start, end), (np.arange(5002), texts, given[1]), strict=True):
            values = [one.encode() if isinstance(one, str) else one for one in expected[start:end].reshape(-1)]
            assert column.shape == expected[start:end].shape
            assert column.reshape(-1).tolist() == values


class TwoInputs(keras.Model):
    """Written without shapes, as subclasses are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = keras.layers.Embedding(10, 4), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(keras.ops.concatenate([self.embedding(inputs["id"]), inputs["x"]], -1))


def test_a_model_without_input_is_built_for_its_data(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # refused after the model is built
    for model, x, shapes in (
        (digits_model(has_input=False), np.zeros((6, 64)), [(64, 32), (32,), (32, 10), (10,)]),
        (TwoInputs(), {"id": np.arange(6), "x": X}, [(10, 4), (7, 1), (1,)]),
    ):
        model.compile("adam", "mse")
        with pytest.raises(FlagError, match="not empty"):
            elasticdl.fit(model, x, Y, directory=tmp_path)
        assert [weight.shape for weight in model.weights] == shapes
    model = digits_model(has_input=False)
    with pytest.raises(ModelDefinitionError, match="cannot be built for its data"):
        elasticdl.fit(model, np.array(["a"] * 6), Y)


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(FlagError, match="is not empty"):
        elasticdl.fit(model_of(), X, Y, directory=tmp_path)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_refused_call_leaves_the_directory_for_the_next_one(tmp_path: Path, is_new: bool) -> None:
    place = tmp_path / "new" if is_new else tmp_path
    with pytest.raises(ModelDefinitionError, match="cannot be saved and loaded"):  # module and callbacks are written
        elasticdl.fit(model_of(loss=own_loss), X, Y, directory=place)
    assert not list(tmp_path.iterdir())


def test_importing_elasticdl_imports_no_tensorflow() -> None:
    code = "import sys, elasticdl; assert 'fit' in dir(elasticdl); print('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
