"""The client's checks before a local job starts."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import re
import socket
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import DataError, ElasticDLError, FlagError, JobError, ModelDefinitionError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.local_checks import check_local, check_sources
from elasticdl_client.model_source import dataset_flags

MODEL = "def custom_model(): ...\ndef feed(d, m, md): ...\ndef loss(l, p): ...\ndef optimizer(): ...\n"


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    package = tmp_path / "zoo" / "pkg"
    package.mkdir(parents=True)
    (package / "model.py").write_text(MODEL)
    data = tmp_path / "data"
    data.mkdir()
    (data / "part-0").write_text("a record")
    flags = {"job_name": "j", "runtime": "local", "model_def": "pkg.model.custom_model"}
    return JobSpec.from_flags("train", flags | {"model_zoo": str(tmp_path / "zoo"), "training_data": str(data)})


def model(spec: JobSpec, text: str) -> JobSpec:
    (Path(spec.model_zoo) / "pkg" / "model.py").write_text(text)
    return spec


def refused(spec: JobSpec, kind: type[ElasticDLError], **changes: object) -> str:
    with pytest.raises(kind) as caught:
        check_local(dataclasses.replace(spec, **changes))  # type: ignore[arg-type]
    assert caught.value.hint
    return str(caught.value)


def test_a_good_job_gets_absolute_paths(spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = check_local(dataclasses.replace(spec, model_zoo="zoo", training_data="data", output="out/model"))
    assert checked.model_zoo == str(tmp_path / "zoo")
    assert checked.training_data == str(tmp_path / "data")
    assert checked.output == str(tmp_path / "out" / "model")


def test_packages_that_the_zoo_asks_for_and_this_python_lacks_are_named(spec: JobSpec) -> None:
    requirements = Path(spec.model_zoo) / "requirements.txt"
    requirements.write_text("numpy\nno-such-package>=2\n")
    assert "does not have: no-such-package>=2." in refused(spec, FlagError)
    requirements.write_text("numpy\n")
    check_local(spec)


def test_a_relative_directory_of_bad_records_is_that_of_the_client(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_local(dataclasses.replace(spec, bad_records_dir="bad")).bad_records_dir == str(tmp_path / "bad")


def test_an_analysis_writes_to_directories_that_are_there_and_needs_no_packages_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("no-such-package\n")  # an analysis has no code
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "bad").mkdir()
    (tmp_path / "s.json.parts").mkdir()  # of a job that failed
    flags = {"job_name": "a", "runtime": "local", "data": "rows.csv", "output": "s.json", "bad_records_dir": "bad"}
    checked = check_local(JobSpec.from_flags("analyze", flags))
    assert checked.prediction_outputs == str(tmp_path / "s.json.parts")


def test_a_missing_zoo_module_or_symbol_is_named_with_its_file(spec: JobSpec) -> None:
    assert "/nowhere does not exist" in refused(spec, ModelDefinitionError, model_zoo="/nowhere")
    said = refused(spec, ModelDefinitionError, model_def="pkg.other.custom_model")
    assert "pkg/other.py does not exist" in said
    said = refused(spec, ModelDefinitionError, model_def="pkg.model.my_model")
    assert "pkg/model.py has no my_model" in said
    assert "a function that returns a model" in said
    said = refused(spec, ModelDefinitionError, loss="my_loss")
    assert "pkg/model.py has no my_loss" in said
    assert "loss(labels, predictions)" in said


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("feed(d, m, md)", "feed()", r"model\.py:2: feed\(\) cannot be called with 3 arguments"),
        ("feed(d, m, md)", "feed(records, mode)", ""),
        ("feed(d, m, md)", "feed(d, m, *, md)", r"feed\(d, m, \*, md\) cannot"),
        ("feed(d, m, md)", "feed(d, m, md, more)", "cannot be called with 3"),
        ("loss(l, p)", "loss(labels, predictions, weights)", "cannot be called with 2"),
        ("feed(d, m, md)", "feed(*all)", ""),
        ("feed(d, m, md)", "feed(d, m=1, *rest, n=2)", ""),
        ("loss(l, p)", "loss(l, p, weights=None)", ""),
        ("def feed(d, m, md)", "@batched\ndef feed(d)", ""),  # the worker sees what it takes
        ("def feed(d, m, md)", "def feed(d, m, md, words): ...\nfeed = partial(feed, words=1)\ndef f()", ""),
        ("def feed(d, m, md)", "from pkg.feeds import feed\ndef dataset()", ""),
        ("loss(l, p)", "loss(l, p, sample_weight)", ""),  # where `feed` gives weights
        ("loss(l, p)", "loss(l, p, *, sample_weight)", "cannot be called with 2"),  # it comes by position
    ],
)
def test_a_function_that_cannot_take_its_arguments_is_refused(
    spec: JobSpec, before: str, after: str, complaint: str
) -> None:
    spec = model(spec, MODEL.replace(before, after))
    if complaint:
        said = refused(spec, ModelDefinitionError)
        assert re.search(complaint, said), said
        assert f"a function {before.partition('(')[0]}(" in said
    else:
        check_local(spec)


def test_another_backend_of_keras_is_refused(spec: JobSpec) -> None:
    check_local(dataclasses.replace(spec, envs="KERAS_BACKEND=tensorflow"))
    assert "KERAS_BACKEND=jax: workers run Keras on" in refused(spec, FlagError, envs="KERAS_BACKEND=jax")


def test_a_module_that_compiles_its_model_needs_no_loss_and_no_optimizer(spec: JobSpec) -> None:
    bare = "import keras\n\ndef feed(dataset): ...\n\ndef custom_model():\n    model = keras.Sequential()\n"
    said = refused(model(spec, bare + "    return model\n"), ModelDefinitionError)
    assert "has no loss" in said
    assert "return a model compiled with loss" in said
    check_local(model(spec, bare + "    model.compile('adam', 'mse')\n    return model\n"))
    said = refused(
        model(spec, bare + "    return keras.saving.load_model('m.keras')\n"), ModelDefinitionError, loss="other"
    )
    assert "has no other" in said
    check_local(model(spec, "import segmentation\n" + bare + "    return segmentation.compiled()\n"))
    assert "has no loss" in refused(
        model(spec, "import numpy, pkg\n" + bare + "    return model\n"), ModelDefinitionError
    )


def test_a_module_that_is_not_python_is_said_to_be_so(spec: JobSpec) -> None:
    assert "not valid Python" in refused(model(spec, "def custom_model(:"), ModelDefinitionError)


@pytest.mark.parametrize(
    "text",
    [
        MODEL.replace("def feed", "def dataset_fn"),
        MODEL.replace("def loss(l, p): ...", "from losses import mse as loss"),
        MODEL.replace("def loss(l, p): ...", "loss = optimizer = custom_model"),
        MODEL.replace("def loss(l, p): ...", "try:\n    from a import loss\nexcept ImportError:\n    loss = None"),
        MODEL.replace("def loss(l, p): ...", "from losses import *"),
        MODEL.replace("def custom_model", "class custom_model"),
    ],
)
def test_symbols_may_be_defined_in_any_way(spec: JobSpec, text: str) -> None:
    check_local(model(spec, text))


def test_symbols_may_be_in_another_module_of_the_zoo(spec: JobSpec) -> None:
    (Path(spec.model_zoo) / "losses.py").write_text("def mse(l, p): ...")
    check_local(dataclasses.replace(spec, loss="losses.mse"))
    assert "losses.py has no mae" in refused(spec, ModelDefinitionError, loss="losses.mae")


def test_missing_and_empty_data_are_named_unless_the_module_reads_by_itself(spec: JobSpec, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "/nowhere does not exist" in refused(spec, DataError, training_data="/nowhere")
    assert f"{empty} is empty" in refused(spec, DataError, training_data=str(empty))
    assert "--validation_data" in refused(spec, DataError, validation_data=str(empty))
    model(spec, MODEL + "def custom_data_reader(o): ...\n")
    assert check_local(dataclasses.replace(spec, training_data="table")).training_data == "table"


def test_a_pattern_that_matches_is_data(spec: JobSpec) -> None:
    check_local(dataclasses.replace(spec, training_data=spec.training_data + "/part-*"))
    refused(spec, DataError, training_data=spec.training_data + "/other-*")


def test_an_output_below_a_file_is_refused(spec: JobSpec) -> None:
    assert "--output" in refused(spec, ElasticDLError, output=spec.training_data + "/part-0/model")


def test_a_checkpoint_to_start_from_is_a_version_or_a_directory_of_versions(spec: JobSpec, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert "is not a directory" in refused(spec, ElasticDLError, checkpoint_dir_for_init=str(directory))
    version = directory / "version-100"
    directory.mkdir()
    assert "holds no version" in refused(spec, ElasticDLError, checkpoint_dir_for_init=str(directory))
    version.mkdir()
    assert "1 versions were never completed" in refused(spec, ElasticDLError, checkpoint_dir_for_init=str(directory))
    (version / "MANIFEST.json").write_text("{}")
    for path in (directory, version):
        checked = check_local(dataclasses.replace(spec, checkpoint_dir_for_init=str(path)))
        assert checked.checkpoint_dir_for_init == str(path)


def test_training_begins_with_a_checkpoint_and_not_with_an_exported_model(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"")
    (tmp_path / "net.keras").write_bytes(b"")
    for path, kind in ((tmp_path, "a SavedModel"), (tmp_path / "net.keras", "a .keras file")):
        message = refused(spec, FlagError, checkpoint_dir_for_init=str(path))
        assert f"{path} is {kind}, and training begins with a checkpoint" in message


def test_training_begins_with_a_checkpoint_of_its_own_strategy(spec: JobSpec, tmp_path: Path) -> None:
    servers = dataclasses.replace(spec, distribution_strategy=DistributionStrategy.PARAMETER_SERVER)
    workers = dataclasses.replace(spec, distribution_strategy=DistributionStrategy.ALL_REDUCE)
    for begun, other, manifest in (
        (servers, workers, {"parts": []}),
        (workers, servers, {"strategy": "AllReduceStrategy"}),
    ):
        directory = tmp_path / f"checkpoints-{begun.distribution_strategy}"
        version = directory / "version-100"
        version.mkdir(parents=True)
        (version / "MANIFEST.json").write_text(json.dumps(manifest))
        for path in (directory, version):
            check_local(dataclasses.replace(begun, checkpoint_dir_for_init=str(path)))
            message = refused(other, FlagError, checkpoint_dir_for_init=str(path))
            assert f"--checkpoint_dir_for_init={version} is a checkpoint of" in message


def test_a_port_in_use_is_refused(spec: JobSpec) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--master_port={port}" in refused(spec, JobError, master_port=port)
        assert f"--metrics_port={port}" in refused(spec, JobError, metrics_port=port)
    check_local(dataclasses.replace(spec, master_port=port))


def test_several_sources_and_tables_get_absolute_paths(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "part-1").write_text("a record")
    checked = check_local(dataclasses.replace(spec, training_data="data,more"))
    assert checked.training_data == f"{tmp_path}/data,{tmp_path}/more"
    with sqlite3.connect("rows.db") as database:
        database.execute("create table t (id integer primary key, a real, y integer)")
    database.close()
    columns = {"columns": "a", "label_column": "y"}
    checked = check_local(dataclasses.replace(spec, training_data="sqlite:///rows.db?table=t", **columns))
    assert checked.training_data == f"sqlite:///{tmp_path}/rows.db?table=t"
    said = refused(spec, DataError, training_data="sqlite:///rows.db?table=t", columns="b")
    assert "the table t of" in said
    assert "has no column b, which --columns names" in said
    assert "has no table u" in refused(spec, DataError, training_data="sqlite:///rows.db?table=u")
    assert "names no table" in refused(spec, DataError, training_data="sqlite:///rows.db")
    assert "none.db does not exist" in refused(spec, DataError, training_data="sqlite:///none.db?table=t")
    assert "ftp:// is not a data source" in refused(spec, DataError, training_data="ftp://host/data")


def test_several_sources_below_a_directory_with_a_comma_are_refused(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "a,b"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("one", "two"):
        (here / name).write_text("a record")
    assert check_local(dataclasses.replace(spec, training_data="one")).training_data == str(here / "one")
    assert f"{here}/one has a comma in it" in refused(spec, DataError, training_data="one,two")


def test_urls_of_storage_are_checked_without_a_request(spec: JobSpec) -> None:
    url = "s3://bucket/data,s3://bucket/more/*.csv"
    assert check_local(dataclasses.replace(spec, training_data=url)).training_data == url
    said = refused(spec, StorageError, training_data="az://container/data")  # its package is not among ours
    assert "needs the package adlfs" in said
    assert "pip install 'adlfs>=2026.8' (the extra azure)" in said
    said = refused(spec, StorageError, training_data="https://host/a.csv?token=abc123")
    assert "abc123" not in said
    assert "--envs" in said
    assert "Write s3://." in refused(spec, StorageError, training_data="S3://bucket/data")
    said = refused(spec, DataError, training_data="s3://b/d", data_reader_params="reader_type=ImageFolder")
    assert "mounted directories alone" in said
    said = refused(spec, DataError, training_data="s3://b/d", data_reader_params="reader_type=CSV;headr=True")
    assert "headr" in said


def test_columns_and_parameters_of_files_are_checked_where_that_is_cheap(spec: JobSpec, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text('n,"a, b",y\n1,2,3\n')
    check_local(dataclasses.replace(spec, training_data=str(data), columns="n", label_column="y"))
    said = refused(spec, DataError, training_data=str(data), label_column="z")
    assert "rows.csv has no column z, which --label_column names" in said
    assert "n, a, b, y" in said
    said = refused(spec, DataError, training_data=str(data), data_reader_params="headr=True")
    assert "CSV reader" in said
    assert "headr" in said
    said = refused(spec, DataError, training_data=str(data), data_reader_params="reader_type=ODPS")
    assert "reader type ODPS is not supported" in said


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_of_parquet_and_arrow_files_are_read_off_their_schema(
    ending: str, spec: JobSpec, tmp_path: Path
) -> None:
    rows = pa.table({"length": [1.0], "kind": [1], "place": [{"x": 1}]})
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(rows, path)
    else:
        feather.write_feather(rows, path)
    check_local(dataclasses.replace(spec, training_data=str(path), columns="length,place.x", label_column="kind"))
    said = refused(spec, DataError, training_data=str(path), label_column="sort")
    assert f"rows.{ending} has no column sort, which --label_column names" in said
    assert "It has: length, kind, place.x." in said


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_columns_in_the_names_of_directories_are_known_where_a_pattern_names_the_files(
    ending: str, spec: JobSpec, tmp_path: Path
) -> None:
    (tmp_path / "dt=1" / "shop=2").mkdir(parents=True)
    path = tmp_path / "dt=1" / "shop=2" / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"length": [1.0], "kind": [1]}), path)
    else:
        path.write_text("length,kind\n1.0,1\n")
    named = {"columns": "length,shop", "label_column": "kind"}
    check_local(dataclasses.replace(spec, training_data=f"{tmp_path}/dt=1/*/*.{ending}", **named))
    said = refused(spec, DataError, training_data=f"{tmp_path}/dt=1/*/*.{ending}", columns="dt", label_column="kind")
    assert "has no column dt, which --columns names" in said
    assert "It has: length, kind, shop." in said


def test_a_module_needs_no_feed_where_a_label_is_named(spec: JobSpec, tmp_path: Path) -> None:
    without = model(spec, "def custom_model(): ...\ndef loss(l, p): ...\ndef optimizer(): ...\n")
    said = refused(without, ModelDefinitionError)
    assert "has no feed" in said
    assert "or give --label_column" in said
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    check_local(dataclasses.replace(without, training_data=str(tmp_path / "rows.csv"), label_column="y"))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter_is_named(spec: JobSpec, tmp_path: Path, delimiter: str) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"city{delimiter}price\nKöln{delimiter}1,5\n")
    check_local(dataclasses.replace(spec, training_data=str(rows)))  # a feed may split the rows itself
    spec = dataclasses.replace(spec, label_column="price")
    said = refused(spec, DataError, training_data=str(rows))
    assert "have a single field" in said
    params = re.findall(r"--data_reader_params='(.*)'", said)
    check_local(dataclasses.replace(spec, training_data=str(rows), data_reader_params=params[0]))
    rows.write_text("price\none; two\n")
    check_local(dataclasses.replace(spec, training_data=str(rows)))


def test_two_columns_of_one_name_are_refused(spec: JobSpec, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b,a\n1,2,3\n")
    assert "names 2 columns a" in refused(spec, DataError, training_data=str(rows))
    check_local(dataclasses.replace(spec, training_data=str(rows), data_reader_params="header=False"))
    rows.write_text(",".join(f"{number:07}" for number in range(1 << 17)) + ",0\n")  # 1 MiB ends within a name
    check_local(dataclasses.replace(spec, training_data=str(rows)))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_that_is_no_text_is_named_by_its_kind(spec: JobSpec, tmp_path: Path, name: str) -> None:
    rows, text = tmp_path / name, b"city,price\nBonn,1\n"
    kinds = {gzip.compress(text): "gzip", lzma.compress(text): "xz", text.decode().encode("utf-16"): "UTF-16"}
    kinds |= {bz2.compress(text): "bzip2", bz2.compress(b""): "bzip2", b"PAR1\x15\x04\x15PAR1": "Parquet"}
    for content, kind in kinds.items():
        rows.write_bytes(content)
        assert kind in refused(spec, DataError, training_data=str(rows))


@pytest.mark.parametrize("source", ["parts", "parts/*", "parts/rows.csv.gz"])
def test_compressed_files_are_not_taken_for_recordio(spec: JobSpec, tmp_path: Path, source: str) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rows.csv.gz").write_bytes(gzip.compress(b"city,price\nBonn,1\n"))
    assert "rows.csv.gz is compressed by gzip" in refused(spec, DataError, training_data=str(tmp_path / source))


def test_an_archive_may_lie_beside_the_images_unpacked_from_it(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04")
    check_local(dataclasses.replace(spec, training_data=str(tmp_path)))


@pytest.mark.parametrize("header", ["PAR1,PAR2", "BZh,city", "BZh91,city", "a"])
def test_a_text_may_begin_like_a_file_of_another_kind(spec: JobSpec, tmp_path: Path, header: str) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{header}\n1,2\n")
    check_local(dataclasses.replace(spec, training_data=str(rows)))


def test_json_that_is_not_one_object_a_line_is_refused_with_its_first_line(spec: JobSpec, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('[\n{"a": 1}]\n')
    said = refused(spec, DataError, training_data=str(rows))
    assert f"the first line of {rows} is not a JSON object: [" in said
    rows.write_text('\ufeff{"a": 1}\n')
    check_local(dataclasses.replace(spec, training_data=str(rows)))


OWN_DATA = "import keras\n\ndef custom_model():\n    return keras.saving.load_model('m.keras')\n\n"


@pytest.mark.parametrize(
    ("functions", "of_training", "of_others"),
    [
        ("def dataset(): ...", ["training_data"], []),
        (
            "def dataset(): ...\ndef validation_dataset(): ...",
            ["training_data", "validation_data"],
            ["validation_data"],
        ),
        ("def dataset(mode): ...", ["training_data", "validation_data"], ["validation_data", "prediction_data"]),
        ("def dataset(records, mode, metadata): ...", [], []),
        ("def feed(dataset): ...", [], []),
    ],
)
def test_a_data_set_of_the_module_stands_for_the_data_flags(
    spec: JobSpec, functions: str, of_training: list[str], of_others: list[str]
) -> None:
    zoo = Path(model(spec, OWN_DATA + functions).model_zoo)
    assert dataset_flags("train", zoo, spec.model_def) == of_training
    found = [name for job_type in ("evaluate", "predict") for name in dataset_flags(job_type, zoo, spec.model_def)]
    assert found == of_others


def test_a_job_has_all_of_its_data_from_the_module_or_none(spec: JobSpec) -> None:
    own = dataclasses.replace(model(spec, OWN_DATA + "def dataset(): ...\n"), training_data=OF_MODULE)
    assert check_local(own).training_data == OF_MODULE
    said = refused(own, FlagError, validation_data=spec.training_data)
    assert "and the other data are those of" in said
    without = dataclasses.replace(model(spec, OWN_DATA), training_data=OF_MODULE)
    assert "has no dataset" in refused(without, ModelDefinitionError)


@pytest.mark.parametrize(
    ("beside", "params"), [("dataset_dict.json", "split=train"), ("classes.json", "image_size=(8,8)")]
)
def test_a_file_of_json_does_not_decide_on_the_kind_of_directories_beside_it(
    beside: str, params: str, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / beside).write_text('{\n  "splits": ["train"]\n}\n')
    check_sources("training_data", JobSpec(data_reader_params=params), str(tmp_path))
