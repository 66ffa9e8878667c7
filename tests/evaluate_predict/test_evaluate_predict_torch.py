"""PyTorch models: a state_dict, what --output has written, and a checkpoint of workers, with killed workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load
from elasticdl.protocol import Role
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.errors import CheckpointError
from tests.e2e.all_reduce_jobs import TORCH_DIGITS
from tests.evaluate_predict.gated import gated_zoo
from tests.evaluate_predict.passes import (
    assert_exact,
    csv_rows,
    gated_pass,
    make_digits,
    metrics_of,
    records_of,
)

pytestmark = pytest.mark.timeout(900)
SEED = 5


def framework_of(zoo: Path, seed: int = SEED) -> TorchFramework:
    """Its model has initial values of the seed, which is as good a model as a trained one here."""
    return TorchFramework(load(str(zoo), "model.custom_model"), 8, seed, Metadata())


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return gated_zoo(directory, TORCH_DIGITS)[0]


def write(kind: str, framework: TorchFramework, directory: Path) -> Path:
    """A trained model of a kind."""
    if kind == "checkpoint":
        StateCheckpoints(str(directory / "c"), CheckpointKind("j", "AllReduceStrategy", "model.npz", {})).save(
            7, framework.state(), Ledger(steps=7)
        )
        return directory / "c"
    framework.export(str(directory / "export"), None, ())
    return directory / "export" if kind == "export" else directory / "export" / "model.pt"


def logits_of(path: Path, data: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Of a state_dict, with nothing but PyTorch."""
    scope: dict[str, object] = {}
    exec(TORCH_DIGITS, scope)
    module = scope["custom_model"]()  # type: ignore[operator]
    module.load_state_dict(torch.load(path, weights_only=True))
    with torch.no_grad():
        return np.asarray(module.eval()(torch.from_numpy(records_of(data)["image"]) / 16))


@pytest.mark.parametrize("kind", ["checkpoint", "export", "file"])
def test_values_come_back_without_an_optimizer(kind: str, tmp_path: Path, zoo: Path) -> None:
    written, read = framework_of(zoo), framework_of(zoo, SEED + 1)
    path = write(kind, written, tmp_path)
    expected = written.initial()
    assert not np.array_equal(read.initial().trainable, expected.trainable)
    if kind == "checkpoint":
        read.load_weights(written.state())
    else:
        read.load_file(str(path if kind == "file" else path / "model.pt"))
    np.testing.assert_array_equal(read.initial().trainable, expected.trainable)
    np.testing.assert_array_equal(read.initial().non_trainable, expected.non_trainable)


def test_values_of_another_model_are_refused_by_name(tmp_path: Path, zoo: Path) -> None:
    framework = framework_of(zoo)
    state = framework.state()
    torch.save({"other.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"1\.bias.*other\.weight"):
        framework.load_file(str(tmp_path / "other.pt"))
    (tmp_path / "text.pt").write_text("no model")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        framework.load_file(str(tmp_path / "text.pt"))
    with pytest.raises(CheckpointError, match=r"6\.bias"):
        framework.load_weights({**state, "model/6.bias": np.zeros(3)})
    with pytest.raises(CheckpointError, match="lost"):
        framework.load_weights({**state, "model/lost": np.zeros(3)})


@pytest.mark.full
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_metrics_are_those_of_one_process(kind: str, tmp_path: Path, zoo: Path) -> None:
    data = make_digits(tmp_path)
    framework = framework_of(zoo)
    path = write(kind, framework, tmp_path)
    gated = gated_pass(
        "evaluate",
        tmp_path,
        data,
        TORCH_DIGITS,
        checkpoint_dir_for_init=path,
        distribution_strategy="AllReduceStrategy",
    )
    gated.lose(Role.WORKER)
    assert_exact(gated.job, "evaluated")
    expected = metrics_of(logits_of(write("file", framework, tmp_path), data), records_of(data)["label"])
    assert gated.job.metrics() == pytest.approx(expected, abs=1e-6)
    assert f"Evaluation metrics[step={7 if kind == 'checkpoint' else 0}]" in gated.job.master_log()


@pytest.mark.full
def test_predictions_are_whole_though_a_worker_and_the_master_are_killed(tmp_path: Path, zoo: Path) -> None:
    data = make_digits(tmp_path)
    path = write("file", framework_of(zoo), tmp_path)
    gated = gated_pass(
        "predict",
        tmp_path,
        data,
        TORCH_DIGITS,
        checkpoint_dir_for_init=path,
        distribution_strategy="Local",
        num_workers=1,
        prediction_outputs=tmp_path / "out",
        prediction_format="csv",
    )
    gated.lose(Role.WORKER, Role.MASTER)
    assert_exact(gated.job, "predicted")
    np.testing.assert_allclose(csv_rows(tmp_path / "out"), logits_of(path, data), rtol=1e-4, atol=1e-5)
