"""Where a worker saves a model on the way: where its own module says, or in --checkpoint_dir, for any caller."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticdl.frameworks.callback_rules import Rules
from elasticdl.frameworks.framework import TableRows
from elasticdl.worker.export.exporter import Exporter
from elasticdl_client.errors import CheckpointError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from tests.master.small_disk import small_disk


class Model:
    """A framework and a strategy of nothing: an export is an empty directory."""

    def __init__(self, paths: list[str]) -> None:
        self._rules = Rules(saving=[{"path": path} for path in paths])

    def report(self) -> Any:
        return SimpleNamespace(rules=self._rules)

    def values(self, _held: object) -> Any:
        return SimpleNamespace(parameters=None)

    def tables(self, _held: object) -> list[Any]:
        return []

    def export(self, path: str, *_rest: object) -> None:
        Path(path).mkdir()


class Master:
    """Confirms every lease."""

    def confirm(self, _lease: int) -> bool:
        return True


def save(checkpoint_dir: str, paths: list[str], save_to: str) -> None:
    model: Any = Model(paths)
    link: Any = Master()
    held: Any = SimpleNamespace(id=7, lease=SimpleNamespace(occasion=SimpleNamespace(save_to=save_to)))
    Exporter(model, model, link, JobSpec(checkpoint_dir=checkpoint_dir)).occasion(held)


def test_a_model_is_saved_where_the_module_says_or_among_the_checkpoints(tmp_path: Path) -> None:
    best = str(tmp_path / "models" / "best-{epoch:02d}-{val_auc:.3f}")
    save(str(tmp_path / "checkpoints"), [best], "step-4/export")
    save(str(tmp_path / "checkpoints"), [best], best.format(epoch=3, val_auc=0.5))
    save("", [best], best.format(epoch=4, val_auc=0.25))
    found = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*")) if not any(path.iterdir())]
    assert found == ["checkpoints/step-4/export", "models/best-03-0.500", "models/best-04-0.250"]


@pytest.mark.parametrize("wrong", ["/models/worst", "../best-01-0.1/x", "checkpoints/../../best", "link/best"])
def test_a_path_that_a_message_alone_names_is_an_error(tmp_path: Path, wrong: str) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "link").symlink_to(tmp_path)
    named = str(tmp_path) + wrong if wrong.startswith("/") else wrong
    with pytest.raises(ModelDefinitionError, match="is not saved to"):
        save(str(checkpoints), [str(tmp_path / "models" / "best-{epoch:02d}-{val_auc:.3f}")], named)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_full_disk_is_an_error_that_says_where_the_model_is_now(tmp_path: Path) -> None:
    class Large(Model):
        def export(self, path: str, *_rest: object) -> None:
            super().export(path)
            try:
                Path(path, "weights").write_bytes(b"0" * (1 << 20))
            except OSError as error:
                raise RuntimeError("a writer of a framework failed") from error

    model: Any = Large([])
    link: Any = Master()
    held: Any = SimpleNamespace(id=7)
    with small_disk(tmp_path / "disk", size_kib=256) as disk:
        spec = JobSpec(output=str(disk / "model"), checkpoint_dir="/checkpoints")
        with pytest.raises(CheckpointError, match="No space left") as error:
            Exporter(model, model, link, spec).end_training(held)
        assert "/checkpoints, written when training is done, is the trained model" in error.value.hint
        assert not list(disk.iterdir())


class Files(Model):
    """The same, of an export of some files, and of directories, whose names end with a slash."""

    def __init__(self, *names: str) -> None:
        super().__init__([])
        self._names = names

    def export(self, path: str, *_rest: object) -> None:
        for name in self._names:
            os.makedirs(os.path.dirname(os.path.join(path, name)), exist_ok=True)
            if not name.endswith("/"):
                Path(path, name).write_text("new")

    def end_training(self, *_rest: object) -> None:
        """It has no callbacks."""


def end_training(output: Path, *names: str, lease: int = 7) -> list[str]:
    """Export those files; return the files below the output's parent."""
    model: Any = Files(*names)
    link: Any = Master()
    held: Any = SimpleNamespace(id=lease)
    Exporter(model, model, link, JobSpec(output=str(output))).end_training(held)
    return sorted(str(path.relative_to(output.parent)) for path in output.parent.rglob("*") if path.is_file())


def test_a_model_takes_the_place_of_an_earlier_one_alone(tmp_path: Path) -> None:
    output = tmp_path / "output"
    (output / "data").mkdir(parents=True)
    (output / "data" / "train.csv").write_text("the user's")
    names = ["output/data/train.csv", "output/saved_model.pb", "output/variables/v1"]
    assert end_training(output, "saved_model.pb", "variables/v1") == names
    assert end_training(output, "model.pt", "model.pt2") == [
        "output/data/train.csv",
        "output/model.pt",
        "output/model.pt2",
    ]
    assert end_training(output, "model.pt") == ["output/data/train.csv", "output/model.pt"]


def test_a_directory_that_only_has_the_name_of_a_models_part_stays(tmp_path: Path) -> None:
    output = tmp_path / "output"
    (output / "assets").mkdir(parents=True)
    (output / "assets" / "logo.png").write_text("the user's")
    for lease in (7, 8):  # the second replaces a model
        assert end_training(output, "model.pt", lease=lease) == ["output/assets/logo.png", "output/model.pt"]
    kept = ["output/assets/logo.png", "output/saved_model.pb"]
    assert end_training(output, "saved_model.pb", "assets/", lease=9) == kept
    names = ["output/assets/vocabulary", "output/saved_model.pb"]
    assert end_training(output, "saved_model.pb", "assets/vocabulary", lease=10) == names


def test_a_model_is_exported_to_the_root_of_a_volume(tmp_path: Path) -> None:
    with small_disk(tmp_path / "volume", size_kib=256) as volume:
        assert end_training(volume, "model.pt") == ["volume/model.pt"]
        assert end_training(volume, "variables/v1", "saved_model.pb") == [
            "volume/saved_model.pb",
            "volume/variables/v1",
        ]
        assert [path.name for path in tmp_path.iterdir()] == ["volume"]


def test_what_a_killed_worker_has_left_of_a_model_goes_with_the_next_export(tmp_path: Path) -> None:
    kept = [".model.backup/weights", ".other.3/weights"]
    for name in (".model.3/weights", ".model.5.old/weights", *kept):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("old")
    assert end_training(tmp_path / "model", "model.pt") == [*kept, "model/model.pt"]
    assert end_training(tmp_path / "model.pt", "model.pt") == [*kept, "model.pt", "model/model.pt"]


class Huge(Files):
    """A model that does not fit into memory, but for its first exports."""

    def __init__(self, *names: str, num_small: int = 0) -> None:
        super().__init__(*names)
        self._num_small = num_small

    def tables(self, _held: object) -> list[Any]:
        self._num_small -= 1
        return [] if self._num_small >= 0 else [TableRows("table", 1 << 10, 1 << 40, iter(()))]


def test_a_model_too_large_to_export_is_reported_with_the_reason(tmp_path: Path) -> None:
    model: Any = Huge("model.pt")
    link: Any = Master()
    held: Any = SimpleNamespace(id=7)
    spec = JobSpec(output=str(tmp_path / "model"), checkpoint_dir="/checkpoints")
    reason = Exporter(model, model, link, spec).end_training(held)
    assert "needs up to" in reason
    assert "/checkpoints, written when training is done, is the trained model" in reason
    assert not list(tmp_path.iterdir())


def test_a_model_is_exported_where_a_callbacks_copy_of_it_does_not_fit(tmp_path: Path) -> None:
    model: Any = Huge("model.pt", num_small=1)
    model.report().rules.export_paths.append("copy")
    link: Any = Master()
    held: Any = SimpleNamespace(id=7)
    spec = JobSpec(output=str(tmp_path / "model"), checkpoint_dir=str(tmp_path / "checkpoints"))
    assert Exporter(model, model, link, spec).end_training(held) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_too_large_to_save_on_the_way_has_no_checkpoint_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = Huge("model.pt")
    link: Any = Master()
    held: Any = SimpleNamespace(id=7, lease=SimpleNamespace(occasion=SimpleNamespace(save_to="step-4")))
    reason = Exporter(model, model, link, JobSpec(checkpoint_dir=str(tmp_path))).occasion(held)
    assert "needs up to" in reason
    assert "trained model" not in reason + caplog.text
    assert f"No model is written to {tmp_path}/step-4: {reason}" in caplog.text
