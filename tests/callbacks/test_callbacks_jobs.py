"""Callbacks in real jobs: training stops early, the best model is saved, hooks are called, TensorBoard's files are."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import keras
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.model_def import load
from elasticdl.protocol import Role
from elasticdl_client.errors import ModelDefinitionError
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import DIGITS, zoo_with

STRATEGIES = {
    "Local": {"distribution_strategy": "Local", "num_workers": 1, "num_ps_pods": 0},
    "PS": {"num_workers": 2, "num_ps_pods": 1},
    "AllReduce": {"distribution_strategy": "AllReduceStrategy", "num_workers": 2, "num_ps_pods": 0},
    "AllReduce, fixed": {
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 2,
        "num_ps_pods": 0,
        "fixed_global_batch": 96,
    },
}

CODE = """
    class Notes(keras.callbacks.Callback):
        def note(self, *values):
            import json
            with open({notes!r}, "a") as file:
                file.write(json.dumps(values) + "\\n")

        def on_train_begin(self, logs=None):
            self.note("begin", len(self.model.weights))

        def on_epoch_end(self, epoch, logs=None):
            self.note("epoch", epoch, logs)

        def on_evaluation_end(self, logs=None):
            self.note("evaluation", logs)

        def on_train_end(self, logs=None):
            self.note("end", self.params["saved_model_path"])


    def callbacks():
        return [
            keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=2),
            keras.callbacks.ModelCheckpoint("best.keras", "val_accuracy", save_best_only=True, mode="max"),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
            Notes(),
        ]
"""


def job_with(tmp_path: Path, code: str, **flags: object) -> LocalJob:
    zoo = zoo_with(tmp_path, code)
    data = DIGITS.make_data(tmp_path)
    job = replace(DIGITS, num_epochs=30)
    return job.local_job(tmp_path / "job", data, model_zoo=zoo, model_def="model.custom_model", **flags)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, as TensorBoard itself reads them."""
    found = EventAccumulator(str(directory)).Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", ["Local", *(pytest.param(name, marks=pytest.mark.full) for name in STRATEGIES if name != "Local")]
)
def test_a_job_stops_early_keeps_its_best_model_and_calls_hooks(tmp_path: Path, strategy: str) -> None:
    notes, logs = tmp_path / "notes", tmp_path / "logs"
    flags = {**STRATEGIES[strategy], "tensorboard_log_dir": logs, "checkpoint_dir": tmp_path / "checkpoints"}
    job = job_with(tmp_path, CODE.format(notes=str(notes)), **flags).start()
    assert job.wait(280) == 0, job.story()
    text = "\n".join(job.output) + job.master_log()
    assert "loss has not improved for 2 evaluations" in text, job.story()
    told = [json.loads(line) for line in notes.read_text().splitlines()]
    epochs = [values for what, *values in told if what == "epoch"]
    assert [epoch for epoch, _ in epochs] == list(range(len(epochs)))
    assert 3 <= len(epochs) <= 5
    assert {"loss", "val_loss", "val_accuracy"} == set(epochs[-1][1])
    assert sum(what == "begin" for what, *_ in told) == flags["num_workers"]
    assert [what for what, *_ in told].count("end") == 1
    assert told[-1][0] == "end"
    assert len([what for what, *_ in told if what == "evaluation"]) >= 3
    best = keras.models.load_model(tmp_path / "checkpoints" / "best.keras")
    assert best.count_params() > 0
    found = scalars(logs)
    assert set(found) >= {"loss", "learning_rate", "records_per_second", "workers", "evaluation/accuracy"}
    assert ("staleness" in found) == (strategy == "PS")
    assert found["evaluation/accuracy"][-1][1] == pytest.approx(job.metrics()["accuracy"])
    assert found["learning_rate"][-1][1] < 0.01
    assert max(value for _, value in found["workers"]) == flags["num_workers"]


STOPS = """
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1


    def callbacks():
        return [Stops()]
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    ["AllReduce", *(pytest.param(name, marks=pytest.mark.full) for name in STRATEGIES if name != "AllReduce")],
)
def test_a_job_ends_after_the_epoch_whose_hook_sets_stop_training(tmp_path: Path, strategy: str) -> None:
    job = job_with(tmp_path, STOPS, **STRATEGIES[strategy]).start()
    assert job.wait(280) == 0, job.story()
    assert "on_epoch_end of Stops has set model.stop_training" in job.master_log(), job.story()
    epochs = re.findall(r"Epoch (\d+): records", job.master_log())
    assert list(dict.fromkeys(epochs)) == ["1", "2"], job.story()


TORCH = """
    from elasticdl.api.callbacks import Callback, EarlyStopping, MaxStepsStopping, ModelCheckpoint, SavedModelExporter

    class Notes(Callback):
        def on_evaluation_end(self, model, step, metrics):
            with open({notes!r}, "a") as file:
                file.write(f"{{step}} {{sorted(metrics)}} {{type(model).__name__}}\\n")

    def callbacks():
        return [
            EarlyStopping("accuracy", min_delta=10.0, patience=1),
            ModelCheckpoint("epoch-{{epoch}}.pt"),
            SavedModelExporter("exported"),
            MaxStepsStopping(2000),
            Notes(),
        ]
"""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["Local", "AllReduce"])
def test_a_job_of_pytorch_does_the_same(tmp_path: Path, strategy: str) -> None:
    notes, checkpoints = tmp_path / "notes", tmp_path / "checkpoints"
    job = job_with(tmp_path, "", **STRATEGIES[strategy], checkpoint_dir=checkpoints)
    source = Path(__file__).with_name("torch_digits.py").read_text()
    (tmp_path / "zoo" / "model.py").write_text(source + textwrap.dedent(TORCH.format(notes=str(notes))))
    assert job.start().wait(280) == 0, job.story()
    assert "accuracy has not improved for 1 evaluations" in job.master_log(), job.story()
    assert len(notes.read_text().splitlines()) >= 2
    state = torch.load(checkpoints / "epoch-1.pt", weights_only=True)
    last = torch.load(checkpoints / "exported" / "model.pt", weights_only=True)
    assert state.keys() == last.keys()
    assert any(not torch.equal(state[name], last[name]) for name in state)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ("keras.callbacks.EarlyStopping(restore_best_weights=True)", "restore_best_weights=True"),
        ("keras.callbacks.EarlyStopping('loss')", "monitor='loss'"),
        ("keras.callbacks.EarlyStopping('val_auc')", "there is no such metric"),
        ("keras.callbacks.ModelCheckpoint('a.weights.h5', save_weights_only=True)", "save_weights_only=True"),
        ("keras.callbacks.ModelCheckpoint('a-{val_f1}.keras')", "KeyError('val_f1')"),
        ("keras.callbacks.BackupAndRestore('a')", "BackupAndRestore has no place in a distributed job"),
        ("keras.callbacks.TensorBoard()", "--tensorboard_log_dir"),
    ],
)
def test_impossible_callbacks_are_refused_by_name_before_the_first_update(made: str, complaint: str) -> None:
    definition = load(str(REPOSITORY / "model_zoo"), DIGITS.model_def)
    callback = eval(made)  # text of this file
    framework = KerasFramework(replace(definition, callbacks=lambda: [callback]), 32, 0, Metadata(), False)
    with pytest.raises(ModelDefinitionError) as refused:
        framework.report()
    assert complaint in str(refused.value)


def test_a_callback_of_the_users_own_may_have_such_a_setting() -> None:
    class SaveBest(keras.callbacks.Callback):  # type: ignore[misc]
        save_weights_only = restore_best_weights = True

    definition = load(str(REPOSITORY / "model_zoo"), DIGITS.model_def)
    framework = KerasFramework(replace(definition, callbacks=lambda: [SaveBest()]), 32, 0, Metadata(), False)
    assert framework.report().has_callbacks is False


KILLED = """
    from elasticdl.api.callbacks import Callback, EarlyStopping

    class Notes(Callback):
        def on_epoch_end(self, model, epoch, logs):
            with open({notes!r}, "a") as file:
                file.write(f"{{epoch}}\\n")
            if epoch == 1:
                open({go_on!r}).close()  # a pipe, which waits for its other end

    def callbacks():
        return [EarlyStopping("accuracy", min_delta=10.0, patience=3), Notes()]
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_master_continues_with_what_was_decided_and_shown(tmp_path: Path) -> None:
    notes, logs, go_on = tmp_path / "notes", tmp_path / "logs", tmp_path / "go_on"
    job = job_with(tmp_path, "", **STRATEGIES["Local"], tensorboard_log_dir=logs)
    source = Path(__file__).with_name("torch_digits.py").read_text()
    code = textwrap.dedent(KILLED.format(notes=str(notes), go_on=str(go_on)))
    (tmp_path / "zoo" / "model.py").write_text(source + code)
    os.mkfifo(go_on)
    job.start().wait_until("two epochs", lambda: notes.exists() and "1" in notes.read_text(), 300)
    (master,) = job.pods(Role.MASTER)
    os.kill(master.pid, signal.SIGKILL)  # two evaluations have counted, and a worker is at an occasion
    other_end = os.open(go_on, os.O_RDWR)
    assert job.wait(280) == 0, job.story()
    os.close(other_end)
    assert "accuracy has not improved for 3 evaluations" in job.master_log(), job.story()
    epochs = [int(line) for line in dict.fromkeys(notes.read_text().split())]
    assert epochs == list(range(len(epochs)))
    assert len(epochs) in (4, 5)  # the fourth evaluation ends training, maybe when the fifth epoch has begun
    assert len(list(logs.iterdir())) == 2
    for tag, points in scalars(logs).items():
        steps = [step for step, _ in points]
        assert steps == sorted(steps), tag


BY_TIME = """
    from elasticdl.api.callbacks import EarlyStopping

    def callbacks():
        return [EarlyStopping("accuracy", min_delta=10.0, patience=3)]
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_job_without_end_is_evaluated_by_time_and_stops_by_what_is_found(tmp_path: Path) -> None:
    flags = {"num_epochs": 0, "evaluation_start_delay_secs": 3, "evaluation_throttle_secs": 2}
    job = job_with(tmp_path, "", **STRATEGIES["Local"])
    job.flags |= flags
    source = Path(__file__).with_name("torch_digits.py").read_text()
    (tmp_path / "zoo" / "model.py").write_text(source + textwrap.dedent(BY_TIME))
    assert job.start().wait(280) == 0, job.story()
    log = job.master_log()
    assert "accuracy has not improved for 3 evaluations" in log, job.story()
    began, *evaluated = [
        datetime.strptime(found, "%Y-%m-%d %H:%M:%S,%f")
        for found in re.findall(r"^(\S+ \S+) INFO Starting (?:epoch 1$|the evaluation)", log, re.MULTILINE)
    ]
    assert len(evaluated) == 4
    between = [(later - earlier).total_seconds() for earlier, later in pairwise([began, *evaluated])]
    assert between[0] >= 2.9
    assert all(seconds >= 1.9 for seconds in between), between
    assert sum(between) < 60, between
