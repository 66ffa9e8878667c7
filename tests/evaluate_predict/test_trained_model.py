"""The model of --checkpoint_dir_for_init is recognized by content, and refused where no job could load it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy, FrameworkName
from elasticdl_client.errors import CheckpointError, FlagError
from elasticdl_client.trained_model import ModelKind, TrainedModel, check_beginning, check_unused, look_at


def write_state(directory: Path, step: int, strategy: str = "AllReduceStrategy") -> Path:
    checkpoints = StateCheckpoints(str(directory), CheckpointKind("j", strategy, "model.npz", {}))
    checkpoints.save(step, {"model/w": np.arange(step)}, Ledger(steps=step))
    return directory / f"version-{step}"


def write_servers(directory: Path, version: int) -> Path:
    path = directory / f"version-{version}"
    path.mkdir(parents=True)
    (path / "ps-0").write_bytes(b"12345")
    manifest = {"parts": [{"file": "ps-0", "size_bytes": 5}], "model_version": version}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    return path


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_each_kind_is_known_by_what_lies_there(tmp_path: Path) -> None:
    state, servers = write_state(tmp_path / "a", 7), write_servers(tmp_path / "b", 9)
    assert look_at(state) == look_at(tmp_path / "a") == TrainedModel(ModelKind.STATE, state, 7)
    assert look_at(servers) == look_at(tmp_path / "b") == TrainedModel(ModelKind.SERVERS, servers, 9)
    saved = touched(tmp_path / "c" / "saved_model.pb").parent
    touched(saved / "model.keras")
    assert look_at(saved) == TrainedModel(ModelKind.SAVED_MODEL, saved)
    assert look_at(saved / "model.keras").kind is ModelKind.KERAS_FILE
    torch = touched(tmp_path / "d" / "model.pt")
    assert look_at(torch.parent) == look_at(torch) == TrainedModel(ModelKind.TORCH_STATE, torch)


def test_the_newest_whole_version_is_taken(tmp_path: Path) -> None:
    whole = write_state(tmp_path, 8)
    damaged = write_state(tmp_path, 10)
    (damaged / "model.npz").write_bytes(b"cut")
    assert look_at(tmp_path) == TrainedModel(ModelKind.STATE, whole, 8)
    with pytest.raises(CheckpointError, match="is damaged"):
        look_at(damaged)
    (write_servers(tmp_path, 12) / "ps-0").unlink()
    assert look_at(tmp_path).path == whole


@pytest.mark.parametrize("name", ["nothing", "empty", "notes.txt"])
def test_what_is_no_model_is_refused_with_what_would_be_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    touched(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError) as refused:
        look_at(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)
    assert ".keras file" in str(refused.value)


def test_the_error_of_a_wrong_model_names_the_jobs_that_can_load_it() -> None:
    own, servers = TrainedModel(ModelKind.SAVED_MODEL, Path("m")), TrainedModel(ModelKind.SERVERS, Path("c"))
    own.check_strategy(DistributionStrategy.LOCAL)
    own.check_strategy(DistributionStrategy.ALL_REDUCE)
    servers.check_strategy(DistributionStrategy.PARAMETER_SERVER)
    with pytest.raises(FlagError, match="--distribution_strategy=AllReduceStrategy"):
        own.check_strategy(DistributionStrategy.PARAMETER_SERVER)
    with pytest.raises(FlagError, match="--distribution_strategy=ParameterServerStrategy"):
        servers.check_strategy(DistributionStrategy.LOCAL)
    own.check_framework(FrameworkName.TENSORFLOW)
    with pytest.raises(FlagError, match="written for torch"):
        own.check_framework(FrameworkName.TORCH)
    with pytest.raises(FlagError, match="written for tensorflow"):
        TrainedModel(ModelKind.TORCH_STATE, Path("m")).check_framework(FrameworkName.TENSORFLOW)


def test_no_training_begins_with_a_checkpoint_of_local(tmp_path: Path) -> None:
    version = write_state(tmp_path, 9, "Local")
    assert look_at(version).kind is ModelKind.STATE
    for strategy in DistributionStrategy:
        for path in version, tmp_path:
            with pytest.raises(FlagError, match="is a checkpoint of Local, with which no training begins"):
                check_beginning(path, strategy)
    write_state(tmp_path, 10)
    check_beginning(tmp_path, DistributionStrategy.ALL_REDUCE)


def test_predictions_of_two_jobs_are_never_mixed(tmp_path: Path) -> None:
    check_unused(tmp_path / "new")
    check_unused(tmp_path)
    touched(tmp_path / "part-00000.csv")
    with pytest.raises(FlagError, match="is not empty"):
        check_unused(tmp_path)
