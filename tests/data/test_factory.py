"""Which reader a data source gets, and what is said when it can have none."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from elasticdl.data.factory import create_reader, open_source
from elasticdl.data.recordio import RecordIOReader, RecordIOWriter
from elasticdl.data.text import TextReader
from elasticdl_client.data_sources import is_hidden, paths_matching
from elasticdl_client.errors import DataError
from elasticdl_client.job_spec import JobSpec


def write_recordio(path: Path, *records: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with RecordIOWriter(str(path)) as writer:
        writer.write_all(records)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("data-00000", RecordIOReader),
        ("data.recordio", RecordIOReader),
        ("data.csv", TextReader),
        ("DATA.CSV", TextReader),
        ("data.tsv", TextReader),
        ("data.txt", TextReader),
    ],
)
def test_the_ending_chooses_the_reader_of_a_file_and_of_its_directory(tmp_path: Path, name: str, kind: type) -> None:
    (tmp_path / name).write_bytes(b"a\tb\n1\t2\n")
    assert isinstance(create_reader(str(tmp_path / name)), kind)
    assert isinstance(create_reader(str(tmp_path)), kind)


@pytest.mark.parametrize("source", ["", "*"])
def test_files_of_several_kinds_are_named(tmp_path: Path, source: str) -> None:
    for name in ("a.csv", "b.tsv", "README.md", "c.csv"):
        (tmp_path / name).write_text("a\n1\n")
    with pytest.raises(DataError, match=r"of several kinds by their names: a\.csv \(CSV\), README\.md \(RecordIO\)"):
        create_reader(str(tmp_path / source))
    assert len(create_reader(str(tmp_path / "*.csv")).shards()) == 2
    assert len(create_reader(str(tmp_path / source), {"reader_type": "CSV"}).shards()) == 4


def test_a_given_reader_type_wins_over_the_ending(tmp_path: Path) -> None:
    path = write_recordio(tmp_path / "odd.csv", b"record")
    assert create_reader(str(path), {"reader_type": "RecordIO"}).shards()[0].end == 1


def test_tabs_separate_the_columns_of_tsv(tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_bytes(b"a,b\tc\n1\t2\n")
    assert create_reader(str(tmp_path)).metadata().column_names == ("a,b", "c")


def test_the_seed_of_the_job_is_in_the_metadata(tmp_path: Path) -> None:
    path = write_recordio(tmp_path / "data", b"record")
    assert create_reader(str(path), {}, seed=7).metadata().seed == 7


def test_two_sources_of_very_many_files_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticdl.data.factory.find_files", lambda source: [f"{source}/{n}" for n in range(40_000)])
    began = time.process_time()
    assert isinstance(create_reader("a,b"), RecordIOReader)
    with pytest.raises(DataError, match="a/0 is in two of the data sources"):
        create_reader("a,a")
    assert time.process_time() - began < 10.0


def test_a_glob_pattern_names_several_files(tmp_path: Path) -> None:
    for name in ("b/data-0", "a/data-0", "a/other"):
        write_recordio(tmp_path / name, name.encode())
    reader = create_reader(str(tmp_path / "*" / "data-*"))
    assert [shard.name for shard in reader.shards()] == [str(tmp_path / "a/data-0"), str(tmp_path / "b/data-0")]


def test_hidden_and_unfinished_files_are_no_data(tmp_path: Path) -> None:
    write_recordio(tmp_path / "data-00000", b"record")
    for name in (".data-00001.partial", "_SUCCESS"):
        (tmp_path / name).write_bytes(b"junk")
    assert len(create_reader(str(tmp_path)).shards()) == 1


@pytest.mark.parametrize("pattern", ["**/*.csv", "*/*/*.csv", "*/*/*/*.csv"])
def test_what_a_job_has_not_finished_is_hidden_from_patterns(tmp_path: Path, pattern: str) -> None:
    for name in (
        "day=1/a/a.csv",
        "_temporary/0/a.csv",
        "day=1/_temporary/0/a.csv",
        ".trash/b/a.csv",
        "day=1/b/c/a.csv",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x\n1\n")
    names = [Path(shard.name).relative_to(tmp_path) for shard in create_reader(str(tmp_path / pattern)).shards()]
    assert names
    assert all(name.parts[0] == "day=1" and "_temporary" not in name.parts for name in names)


def test_a_pattern_may_name_a_hidden_directory(tmp_path: Path) -> None:
    for name in ("_export/a.csv", "b/_parts/b.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x\n1\n")
    for pattern, found in (
        ("_export/*.csv", "_export/a.csv"),
        ("_exp*/*.csv", "_export/a.csv"),
        ("[_]export/*.csv", "_export/a.csv"),
        ("*/_parts/*.csv", "b/_parts/b.csv"),
        ("**/_p*/*.csv", "b/_parts/b.csv"),
    ):
        assert [shard.name for shard in create_reader(str(tmp_path / pattern)).shards()] == [str(tmp_path / found)]


@pytest.mark.parametrize("pattern", ["_*/**/*.csv", "**/_d*/**/*.csv", "_d*/*/*.csv"])
def test_a_pattern_that_names_a_hidden_directory_shows_no_other_below_it(tmp_path: Path, pattern: str) -> None:
    for name in ("_delta/day=1/a.csv", "_delta/_temporary/0/a.csv", "_delta/_temporary/a.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n1\n")
    assert paths_matching(str(tmp_path / pattern)) == [str(tmp_path / "_delta/day=1/a.csv")]


@pytest.mark.parametrize(
    ("pattern", "means_it"),
    [("[A-z]*", False), ("[!a]*", False), ("[A-_]*", False), ("[_a-z]*", True), ("[A-Z_-]*", True), ("[]_]*", True)],
)
def test_a_set_means_a_hidden_name_where_it_has_its_first_letter(pattern: str, means_it: bool) -> None:
    assert is_hidden("_SUCCESS", [pattern]) is not means_it


def test_folders_of_images_for_validation_have_the_classes_of_those_for_training(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/1.png", "train/owl/1.png", "val/cat/1.png", "val/owl/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"image")
    spec = JobSpec(training_data=str(tmp_path / "train"), validation_data=str(tmp_path / "val"))
    assert len(open_source(spec, spec.training_data).shards()) == 1
    with pytest.raises(DataError, match=r"/val lacks the class dog of .*/train\."):
        open_source(spec, spec.validation_data)
    (tmp_path / "val" / "dog").mkdir()
    assert open_source(spec, spec.validation_data).shards()[0].end == 2
    (tmp_path / "val" / "dog").rmdir()
    with pytest.raises(DataError, match=r"/val lacks the class"):
        create_reader(f"{tmp_path}/train,{tmp_path}/val").shards()
    shutil.copytree(tmp_path / "train", tmp_path / "train2")
    several = JobSpec(training_data=f"{tmp_path}/train,{tmp_path}/train2", validation_data=f"{tmp_path}/val")
    with pytest.raises(DataError, match=r"/val lacks the class dog of .*/train2\."):
        open_source(several, several.validation_data)


def test_folders_of_images_that_cannot_be_listed_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: str) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", directory)

    monkeypatch.setattr("elasticdl.data.factory.holds_images", refuse)  # root may list all
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    spec = JobSpec(training_data=str(tmp_path / "train"), validation_data=str(tmp_path / "val"))
    with pytest.raises(DataError, match=r"/train cannot be listed: Permission denied") as caught:
        open_source(spec, spec.validation_data)
    assert "remove it" not in caught.value.hint
    with pytest.raises(DataError, match=r"/train cannot be listed: Permission denied"):
        create_reader(spec.training_data)


@pytest.mark.parametrize("source", ["", "*.txt", "b.txt"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").symlink_to("objects/b")
    with pytest.raises(DataError, match=r"b\.txt is a link to objects/b, which is not there"):
        create_reader(str(tmp_path / source))
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "b").write_text("b\n")
    assert create_reader(str(tmp_path / source)).shards()


@pytest.mark.parametrize(
    "name", [b"caf\xe9.txt", b"caf\xe9.png", b"b/caf\xe9.png", b"b/b/caf\xe9.png", b"caf\xe9/b.png", b"b/caf\xe9/b.png"]
)
def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / "a"
    file = folder / os.fsdecode(name)
    file.parent.mkdir(parents=True)
    for path in (file, file.parent.parent / "a.png"):
        path.write_text("x\n")
    for source in (folder, file):
        with pytest.raises(DataError, match=r"/a/.*caf\\udce9.* is not UTF-8"):
            create_reader(str(source)).shards()


def test_files_without_records_have_no_shard(tmp_path: Path) -> None:
    write_recordio(tmp_path / "data-00000")
    write_recordio(tmp_path / "data-00001", b"record")
    assert [shard.name for shard in create_reader(str(tmp_path)).shards()] == [str(tmp_path / "data-00001")]


def test_files_that_are_all_empty_are_an_error(tmp_path: Path) -> None:
    write_recordio(tmp_path / "data-00000")
    with pytest.raises(DataError, match="has no records"):
        create_reader(str(tmp_path)).shards()


def test_an_empty_directory_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty") as caught:
        create_reader(str(tmp_path))
    assert str(tmp_path) in caught.value.what
    assert "gen_dataset" in caught.value.hint


def test_a_directory_of_directories_says_which_to_name(tmp_path: Path) -> None:
    write_recordio(tmp_path / "train" / "data-00000", b"record")
    with pytest.raises(DataError, match="only directories") as caught:
        create_reader(str(tmp_path))
    assert str(tmp_path / "train") in caught.value.hint
    pattern = f"{tmp_path}/**/*"
    assert pattern in caught.value.hint
    assert len(create_reader(pattern).shards()) == 1
    write_recordio(tmp_path / "test" / "day=1" / "data-00000", b"record")
    assert len(create_reader(pattern).shards()) == 2


@pytest.mark.parametrize("name", ["dataset_info.json", "dataset_infos.json"])
def test_a_description_by_hugging_face_is_no_data(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"builder_name": "rows"}\n')
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "rows.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="only directories") as caught:
        create_reader(str(tmp_path))
    assert str(tmp_path / "train") in caught.value.hint
    assert [len(shard) for shard in create_reader(f"{tmp_path}/**/*").shards()] == [1]
    (tmp_path / "train" / "rows.jsonl").rename(tmp_path / "rows.jsonl")
    assert [len(shard) for shard in create_reader(str(tmp_path)).shards()] == [1]
    assert create_reader(str(tmp_path / name)).metadata().column_names == ("builder_name",)


@pytest.mark.parametrize("missing", ["none", "none/data", "*.none"])
def test_a_missing_source_is_an_error_with_a_hint(tmp_path: Path, missing: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|No file matches") as caught:
        create_reader(str(tmp_path / missing))
    assert caught.value.hint


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" * 10)
    with pytest.raises(DataError, match=r"model\.png, byte 0: no RecordIO chunk begins here"):
        create_reader(str(path)).shards()


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"reader_type": "ODPS"}, "reader type ODPS is not supported"),
        ({"reader_type": "CSV", "colums": "a"}, "does not know the parameter colums"),
        ({"header": True}, "does not know the parameter header"),
        ({"reader_type": "CSV", "header": "perhaps"}, "header is 'perhaps'"),
        ({"reader_type": "CSV", "delimiter": "||"}, "delimiter is '||'"),
        ({"reader_type": "CSV", "delimiter": 7}, "delimiter is 7"),
    ],
)
def test_wrong_reader_params_are_refused_by_name(tmp_path: Path, params: dict[str, object], what: str) -> None:
    path = write_recordio(tmp_path / "data", b"record")
    with pytest.raises(DataError) as caught:
        create_reader(str(path), params)
    assert what in caught.value.what
