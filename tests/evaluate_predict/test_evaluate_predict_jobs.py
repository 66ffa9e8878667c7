"""Evaluating and predicting as a user does it, with workers and masters that are killed in the middle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pyarrow.parquet as pq
import pytest

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.model_def import load
from elasticdl.protocol import Role
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import DIGITS
from tests.evaluate_predict.passes import (
    NUM_RECORDS,
    Floats,
    assert_exact,
    csv_rows,
    gated_pass,
    make_digits,
    metrics_of,
    one_pass,
    parts_of,
    records_of,
)

pytestmark = pytest.mark.timeout(900)
ALONE = {"distribution_strategy": "AllReduceStrategy", "num_workers": 1}
SERVERS = {"distribution_strategy": "ParameterServerStrategy", "num_ps_pods": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digits(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The job's directory after a short training on one parameter server: `checkpoints` and `export`."""
    directory = tmp_path_factory.mktemp("trained")
    job = replace(DIGITS, num_epochs=1, num_workers=1).local_job(
        directory / "job",
        data,
        checkpoint_dir=directory / "checkpoints",
        output=directory / "export",
        evaluation_steps=0,
    )
    assert job.start().wait() == 0, job.story()
    return directory


@pytest.fixture(scope="module")
def logits(trained: Path, data: Path) -> Floats:
    """Return plain Keras's results for the trained model."""
    model = keras.saving.load_model(trained / "export" / "model.keras")
    return np.asarray(model(records_of(data)["image"], training=False), np.float32)


def test_metrics_of_a_checkpoint_are_those_of_one_process_though_a_worker_and_the_master_are_killed(
    tmp_path: Path, trained: Path, data: Path, logits: Floats
) -> None:
    output = tmp_path / "metrics.json"
    checkpoints = trained / "checkpoints"
    gated = gated_pass(
        "evaluate", tmp_path, data, checkpoint_dir_for_init=checkpoints, metrics_output=output, **SERVERS
    )
    gated.lose(Role.WORKER, Role.MASTER)
    assert_exact(gated.job, "evaluated")
    expected = metrics_of(logits, records_of(data)["label"])
    found = gated.job.metrics()
    assert found == pytest.approx(expected, abs=1e-6)
    step = int(next(checkpoints.glob("version-*")).name.removeprefix("version-"))
    assert f"Evaluation metrics[step={step}]" in gated.job.master_log()
    assert json.loads(output.read_text()) == {"step": step, "metrics": pytest.approx(found)}


@pytest.mark.full
def test_predictions_of_an_export_are_whole_and_in_order_though_a_worker_and_the_master_are_killed(
    tmp_path: Path, trained: Path, data: Path, logits: Floats
) -> None:
    outputs = tmp_path / "predictions"
    gated = gated_pass(
        "predict",
        tmp_path,
        data,
        checkpoint_dir_for_init=trained / "export",
        distribution_strategy="AllReduceStrategy",
        prediction_outputs=outputs,
        prediction_format="csv",
    )
    gated.lose(Role.WORKER, Role.MASTER)
    assert_exact(gated.job, "predicted")
    np.testing.assert_allclose(csv_rows(outputs), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("role", [Role.WORKER, Role.PS, Role.MASTER])
def test_predictions_from_servers_are_whole_after_any_kill(
    role: Role, tmp_path: Path, trained: Path, data: Path, logits: Floats
) -> None:
    outputs = tmp_path / "predictions"
    checkpoints = trained / "checkpoints"
    gated = gated_pass(
        "predict", tmp_path, data, checkpoint_dir_for_init=checkpoints, prediction_outputs=outputs, **SERVERS
    )
    gated.lose(role)
    assert_exact(gated.job, "predicted")
    tables = [pq.read_table(part) for part in parts_of(outputs, "parquet")]
    rows = np.array([row for table in tables for row in table["prediction"].to_pylist()], np.float32)
    np.testing.assert_allclose(rows, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("what", ["state", "keras file"])
def test_metrics_of_a_model_of_workers_are_those_of_one_process(
    what: str, tmp_path: Path, trained: Path, data: Path, logits: Floats
) -> None:
    path = trained / "export" / "model.keras"
    if what == "state":
        definition = load(str(REPOSITORY / "model_zoo"), DIGITS.model_def)
        framework = KerasFramework(definition, 8, 0, Metadata(), on_parameter_server=False)
        state, weights = framework.state(), keras.saving.load_model(path).get_weights()
        for name, value in zip([name for name in state if name.startswith("model/")], weights, strict=False):
            assert state[name].shape == value.shape
            state[name] = value
        path = tmp_path / "state"
        StateCheckpoints(str(path), CheckpointKind("j", "Local", "local.npz", {})).save(36, state, Ledger(steps=36))
    gated = gated_pass(
        "evaluate", tmp_path, data, checkpoint_dir_for_init=path, distribution_strategy="AllReduceStrategy"
    )
    gated.lose(Role.WORKER)
    assert_exact(gated.job, "evaluated")
    assert gated.job.metrics() == pytest.approx(metrics_of(logits, records_of(data)["label"]), abs=1e-6)


PROCESSOR = """

class PredictionOutputsProcessor:
    def process(self, predictions, worker_id{more}):
        with open({path!r}, "a") as lines:
            lines.write(f"{{worker_id}} {{{name}}} {{predictions.shape}}\\n")
"""


@pytest.mark.full
@pytest.mark.parametrize("with_name", [True, False])
def test_a_processor_gets_each_minibatch(with_name: bool, tmp_path: Path, trained: Path, data: Path) -> None:
    lines = tmp_path / "lines"
    more, name = (", name=None", "name") if with_name else ("", "0")
    gated = gated_pass(
        "predict",
        tmp_path,
        data,
        checkpoint_dir_for_init=trained / "export",
        distribution_strategy="AllReduceStrategy",
        code=PROCESSOR.format(more=more, name=name, path=str(lines)),
    )
    gated.lose(Role.WORKER)
    assert_exact(gated.job, "predicted")
    found = lines.read_text().splitlines()
    assert all(line.endswith("(8, 10)") for line in found if not line.endswith(("(6, 10)", "(4, 10)", "(2, 10)")))
    if with_name:
        names = {line.partition(" ")[2].rpartition(" (")[0] for line in found}
        sizes = [150, 150, 60]
        tasks = [min(16, size - start) for size in sizes for start in range(0, size, 16)]
        assert names == {f"({task}, {n})" for task, size in enumerate(tasks) for n in range(-(-size // 8))}


@pytest.mark.full
def test_bad_records_are_set_aside_in_both(tmp_path: Path, trained: Path, data: Path, logits: Floats) -> None:
    code = """

gated_feed = feed


def feed(dataset, mode, metadata):
    def checked(record):
        example = tf.io.parse_single_example(record, {"image": tf.io.FixedLenFeature([64], tf.float32)})
        total = tf.reduce_sum(example["image"])
        with tf.control_dependencies([tf.debugging.Assert(total != %r, ["bad"])]):
            return tf.identity(record)

    return gated_feed(dataset.map(checked), mode, metadata)
"""
    sums = records_of(data)["image"].sum(1)
    value, count = next((v, c) for v, c in zip(*np.unique(sums, return_counts=True), strict=True) if c == 2)
    good = sums != value
    for command in ("evaluate", "predict"):
        directory = tmp_path / command
        directory.mkdir()
        outputs = {} if command == "evaluate" else {"prediction_outputs": directory / "out", "prediction_format": "csv"}
        gated = gated_pass(
            command,
            directory,
            data,
            code=code % float(value),
            checkpoint_dir_for_init=trained / "export",
            distribution_strategy="AllReduceStrategy",
            max_bad_records=2,
            **outputs,
        )
        gated.lose(Role.WORKER)
        assert_exact(gated.job, "evaluated" if command == "evaluate" else "predicted", quarantined=int(count))
        assert "Quarantined records: " in gated.job.master_log()
        if command == "evaluate":
            expected = metrics_of(logits[good], records_of(data)["label"][good])
            assert gated.job.metrics() == pytest.approx(expected, abs=1e-6)
        else:
            np.testing.assert_allclose(csv_rows(directory / "out"), logits[good], rtol=1e-4, atol=1e-5)


KEEPS_SMALL_DIGITS = """
whole_feed = feed


def feed(dataset, mode, metadata):
    samples = whole_feed(dataset, mode, metadata)
    return samples.filter(lambda image, label: label < 5) if mode == "evaluation" else samples.take(3)
"""


def test_an_evaluation_whose_feed_leaves_records_out_says_how_many_it_measured(
    tmp_path: Path, trained: Path, data: Path, logits: Floats
) -> None:
    flags = {"checkpoint_dir_for_init": trained / "export", **ALONE}
    job = gated_pass("evaluate", tmp_path, data, code=KEEPS_SMALL_DIGITS, **flags).job.start()
    assert job.wait(120) == 0, job.story()
    small = records_of(data)["label"] < 5
    count = int(small.sum())
    line = f"evaluation: records {NUM_RECORDS}, evaluated {count}, repeated 0, lost 0, filtered {NUM_RECORDS - count}"
    assert line in job.master_log()
    assert "feed (filter in it) makes " in job.master_log()
    assert job.metrics() == pytest.approx(metrics_of(logits[small], records_of(data)["label"][small]), abs=1e-6)


def test_a_prediction_whose_feed_leaves_records_out_fails(tmp_path: Path, trained: Path, data: Path) -> None:
    flags = {"checkpoint_dir_for_init": trained / "export", **ALONE}
    outputs = tmp_path / "predictions"
    gated = gated_pass(
        "predict", tmp_path, data, code=KEEPS_SMALL_DIGITS, prediction_outputs=outputs, max_task_failures=1, **flags
    )
    assert gated.job.start().wait(120) == 1, gated.job.story()
    text = "\n".join(gated.job.output)
    assert "feed (take in it) makes 3 samples of 16 records. A prediction has one row for each record" in text
    assert "Traceback" not in text
    assert not (outputs / "_SUCCESS").exists()


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("evaluate", {"distribution_strategy": "Local"}, "is a checkpoint of parameter servers"),
        ("predict", {}, "has no PredictionOutputsProcessor"),
        ("predict", {"prediction_outputs": "{trained}"}, "is not empty"),
        ("evaluate", {"checkpoint_dir_for_init": "{trained}/export"}, "is a SavedModel: workers load it themselves"),
        ("evaluate", {"checkpoint_dir_for_init": "{trained}/job"}, "is not a trained model: it holds no version"),
        ("evaluate", {"evaluation_steps": "9"}, "--evaluation_steps is a flag of train, not of evaluate"),
        ("evaluate", {"prediction_outputs": "m"}, "--prediction_outputs is a flag of predict, not of evaluate"),
    ],
)
def test_what_cannot_work_is_refused_before_the_job_starts(
    command: str, flags: dict[str, str], said: str, tmp_path: Path, trained: Path, data: Path
) -> None:
    known = {"model_zoo": REPOSITORY / "model_zoo", "model_def": DIGITS.model_def}
    known["checkpoint_dir_for_init"] = trained / "checkpoints"
    given = {name: value.format(trained=trained) for name, value in flags.items()}
    job = one_pass(command, tmp_path, data, **{**known, **given})
    assert job.start().wait(60) == 2
    assert said in "\n".join(job.output)
    assert "Traceback" not in "\n".join(job.output)


@pytest.mark.full
def test_a_checkpoint_of_another_model_fails_the_job_and_is_named(tmp_path: Path, trained: Path, data: Path) -> None:
    for strategy, model in (("ParameterServerStrategy", "checkpoints"), ("AllReduceStrategy", "export/model.keras")):
        directory = tmp_path / strategy
        directory.mkdir()
        flags = {"model_zoo": REPOSITORY / "model_zoo", "model_def": DIGITS.model_def, "model_params": "hidden=32"}
        path = trained / model
        job = one_pass(
            "evaluate", directory, data, checkpoint_dir_for_init=path, distribution_strategy=strategy, **flags
        )
        code = job.start().wait()
        if strategy == "ParameterServerStrategy":
            assert code == 1
            assert "is of another model: dense/bias, dense/kernel" in "\n".join(job.output), job.story()
        else:
            assert code == 0, job.story()  # an export is whole: the module's model is not asked
