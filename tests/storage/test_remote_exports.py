"""Models exported to storage: whole or not to be loaded, whatever is killed, and as good to load as a directory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticdl.frameworks.callback_rules import Rules
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import RemotePath, check_writable, on_this_machine, path_of
from elasticdl.worker.export.exporter import Exporter
from elasticdl.worker.tasks import LeaseLost
from elasticdl_client.errors import CheckpointError, FlagError, ModelDefinitionError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.local_checks import check_local
from elasticdl_client.trained_model import ModelKind, look_at
from tests.storage.faulty_proxy import FaultyProxy

KERAS = ("saved_model.pb", "model.keras", "variables/variables.index", "variables/variables.data-00000-of-00001")


class Model:
    """A framework and a strategy whose export is some files that hold a text."""

    def __init__(self, names: tuple[str, ...], text: str) -> None:
        self._names = names
        self._text = text

    def report(self) -> Any:
        return SimpleNamespace(rules=Rules())

    def values(self, _held: object) -> Any:
        return SimpleNamespace(parameters=None)

    def tables(self, _held: object) -> list[Any]:
        return []

    def export(self, path: str, *_rest: object) -> None:
        for name in self._names:
            file = Path(path, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._text)

    def end_training(self, *_rest: object) -> None:
        pass


class Master:
    """Confirms a lease some times."""

    def __init__(self, num_confirmed: int) -> None:
        self._left = num_confirmed

    def confirm(self, _lease: int) -> bool:
        self._left -= 1
        return self._left >= 0


def export(output: str, names: tuple[str, ...], text: str, num_confirmed: int = 1000) -> None:
    model: Any = Model(names, text)
    link: Any = Master(num_confirmed)
    held: Any = SimpleNamespace(id=7)
    Exporter(model, model, link, JobSpec(output=output)).end_training(held)


@pytest.fixture
def url(proxy: FaultyProxy, tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}/model"


def test_the_files_that_make_an_export_a_model_are_published_last(url: str, proxy: FaultyProxy) -> None:
    export(url, KERAS, "first")
    published = [one.path.partition("/model/")[2] for one in proxy.requests if one.method == "PUT"]
    assert published == [*sorted(KERAS[2:]), "model.keras", "saved_model.pb", "_SUCCESS"]
    assert json.loads(RemotePath(f"{url}/_SUCCESS").read_bytes()) == {"files": published[:-1]}
    found = look_at(path_of(url))
    assert (found.kind, str(found.path)) == (ModelKind.SAVED_MODEL, url)
    with on_this_machine(path_of(url)) as directory:
        assert all((directory / name).read_text() == "first" for name in KERAS)
        assert look_at(directory).kind is ModelKind.SAVED_MODEL


@pytest.mark.parametrize("num_confirmed", [1, 5, 9])
def test_an_upload_that_ends_anywhere_leaves_no_model_or_a_whole_one_and_a_successor_repeats_it(
    url: str, num_confirmed: int
) -> None:
    export(url, (*KERAS, "assets/words"), "first")
    storage_of(url).publish(f"{url}/notes", b"of the user")
    with pytest.raises(LeaseLost):
        export(url, KERAS, "second", num_confirmed)
    names = set(RemotePath(url).files())
    texts = {name: RemotePath(f"{url}/{name}").read_bytes() for name in names}
    if "saved_model.pb" in names:
        assert len({texts[name] for name in KERAS if name in names}) == 1
        assert names >= set(KERAS[2:])
    if "model.keras" not in names and "saved_model.pb" not in names:
        with pytest.raises(CheckpointError, match="is not a trained model"):
            look_at(path_of(url))
    export(url, KERAS, "third")
    assert {name for name in RemotePath(url).files() if not name.startswith("assets")} == {*KERAS, "_SUCCESS", "notes"}
    assert all(RemotePath(f"{url}/{name}").read_bytes() == b"third" for name in KERAS)


def test_a_path_that_names_a_file_gets_that_file_alone(url: str) -> None:
    export(f"{url}.pt", ("model.pt",), "weights")
    found = look_at(path_of(f"{url}.pt"))
    assert (found.kind, found.path.read_bytes()) == (ModelKind.TORCH_STATE, b"weights")
    with on_this_machine(found.path) as file:
        assert (file.name, file.read_text()) == ("model.pt", "weights")
    with pytest.raises(ModelDefinitionError, match=r"no \.keras file"):
        export(f"{url}.keras", ("model.pt",), "weights")


def test_a_job_learns_at_its_start_that_its_model_could_not_be_written(url: str) -> None:
    check_writable(path_of(url), "output")
    assert RemotePath(url).files() == []
    with pytest.raises(StorageError, match="--output=s3://none/model cannot be written"):
        check_writable(path_of("s3://none/model"), "output")


def test_flags_take_urls_that_can_be_written_or_read() -> None:
    flags = {"job_name": "p", "runtime": "local", "model_def": "m.model", "training_data": "s3://b/d"}
    written = {"output": "s3://b/m", "checkpoint_dir": "s3://b/c", "checkpoint_dir_for_init": "hf://m/c"}
    assert JobSpec.from_flags("train", {**flags, **written})
    beside = {"bad_records_dir": "s3://b/r", "tensorboard_log_dir": "s3://b/t"}
    assert JobSpec.from_flags("train", {**flags, **beside})
    for name in ("output", "checkpoint_dir", *beside):
        with pytest.raises(FlagError, match="storage that cannot be written"):
            JobSpec.from_flags("train", {**flags, name: "https://host/out"})
    for name in written:
        with pytest.raises(FlagError, match="has a credential in it"):
            JobSpec.from_flags("train", {**flags, name: "s3://b/out?secret=abc123"})
    assert JobSpec.from_flags(
        "analyze", {"job_name": "a", "runtime": "local", "data": "s3://b/d", "output": "s3://b/o"}
    )


ANALYZE = ("analyze", "output", {"data": "s3://b/d"})
EVALUATE = (
    "evaluate",
    "metrics_output",
    {"model_def": "m.model", "validation_data": "/d", "checkpoint_dir_for_init": "/c"},
)


@pytest.mark.parametrize(("command", "name", "others"), [ANALYZE, EVALUATE])
def test_a_flag_of_a_file_names_one(command: str, name: str, others: dict[str, str]) -> None:
    def spec(place: str) -> JobSpec:
        return JobSpec.from_flags(command, {"job_name": "a", "runtime": "local", **others, name: place})

    for place in ("s3://b/o", "hdfs:///o", "/o", "o"):
        assert getattr(spec(place), name) == place
    for place in ("s3://b", "s3://b/", "s3://b/stats/", "/stats/"):
        with pytest.raises(FlagError, match="names no file"):
            spec(place)


def test_an_existing_directory_is_no_place_for_statistics(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    flags = {"job_name": "a", "runtime": "local", "data": str(tmp_path / "rows.csv")}
    assert check_local(JobSpec.from_flags("analyze", {**flags, "output": str(tmp_path / "statistics.json")}))
    with pytest.raises(FlagError, match="is a directory"):
        check_local(JobSpec.from_flags("analyze", {**flags, "output": str(tmp_path)}))
