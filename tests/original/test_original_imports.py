"""Import paths of the original ElasticDL: the objects they give, and the errors where they lead nowhere."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticdl.original
from elasticdl.data.recordio_format import RecordIOWriter
from elasticdl.model_def import framework_of, load
from elasticdl.original.objects import OriginalRecordIOReader
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import DataError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.original_imports import TABLE, check_source, successor

PAGE = Path(__file__).parents[2] / "docs" / "original.md"
NAMES = [(module, name) for module, names in TABLE.items() for name in names]


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shop").mkdir()
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("shop", "model_zoo", "pydoc_data"):
            del sys.modules[name]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_a_name_of_the_original_gives_what_it_is_today_or_says_what_to_use(module: str, name: str) -> None:
    found = successor(module, name)
    if found is None:
        with pytest.raises(ImportError, match=re.escape(TABLE[module][name])):
            getattr(importlib.import_module(module), name)
    else:
        assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(found[0]), found[1])


def test_layers_and_statistics_have_the_import_paths_of_the_original() -> None:
    import elasticdl_preprocessing

    for layer in ("Hashing", "Discretization", "SparseEmbedding"):
        package = importlib.import_module("elasticdl_preprocessing.layers")
        assert getattr(package, layer) is getattr(elasticdl_preprocessing, layer)
    module = importlib.import_module("elasticdl_preprocessing.layers.concatenate_with_offset")
    assert module.ConcatenateWithOffset is elasticdl_preprocessing.ConcatenateWithOffset
    statistics = importlib.import_module("elasticdl_preprocessing.utils.analyzer_utils")
    assert statistics.get_min is elasticdl_preprocessing.get_min


def test_an_import_of_the_original_is_warned_of_once_a_module(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elasticdl.original, "_warned", set())
    module = importlib.import_module("elasticdl.python.common.constants")
    with caplog.at_level(logging.WARNING, "elasticdl"):
        assert module.Mode.TRAINING == "training"
        assert module.Mode.PREDICTION == "prediction"
        assert module.MaxComputeConfig.PROJECT_NAME
    assert [record.args[1] for record in caplog.records if record.args] == ["Mode"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from elasticdl.python.common.constants import GRPC", "GRPC does not exist(?s:.*)Mode"),
        ("from elasticai_api.tensorflow.controller import create_elastic_controller", "It is not needed"),
        (
            "from elasticdl_preprocessing.feature_column.feature_column import concatenated_categorical_column",
            "Hashing",
        ),
        ("from elasticdl.python.common.model_utils import load_module", r"docs/original\.md"),
        ("from tensorflow.python.keras import layers", r"tensorflow\.keras"),
        ("from tensorflow.python import keras", r"tensorflow\.keras"),
        ("import tensorflow.python.keras.backend as K", r"tensorflow\.keras"),
        ("layer = tf.keras.layers.DenseFeatures([])", "elasticdl_preprocessing"),
        ("def loss(output, labels): return 0", r"loss\(labels, output\)"),
        ("optimizer = tf.keras.optimizers.SGD(lr=0.1)", r"learning_rate=…"),
        ("optimizer = optimizers.Adam(lr=0.1)", r"learning_rate=…"),
    ],
)
def test_what_this_version_lacks_is_refused_before_anything_runs(zoo: Path, line: str, said: str) -> None:
    (zoo / "shop" / "model.py").write_text("from model_zoo.shop.other import x\n")
    (zoo / "shop" / "other.py").write_text(f"import nothing_that_exists\n{line}\n")
    with pytest.raises(ModelDefinitionError, match=said) as caught:
        check_source(zoo, "shop.model")
    assert "other.py, line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("def eval_metrics_fn(predictions, labels): return {'accuracy': 1}", "lambda labels, predictions"),
        ("def callbacks():\n    def rate(step): return 0.1\n    Scheduler(rate)", "Return them"),
        (
            "def learning_rate_scheduler(version): return 0.1",
            r"callbacks\(\): return \[LearningRateScheduler\(learning",
        ),
    ],
)
def test_symbols_of_older_versions_are_refused_in_the_models_own_module(zoo: Path, line: str, said: str) -> None:
    (zoo / "shop" / "model.py").write_text(f"from model_zoo.shop.other import x\n{line}\n")
    with pytest.raises(ModelDefinitionError, match=said) as caught:
        check_source(zoo, "shop.model")
    assert "model.py, line 2" in str(caught.value)
    (zoo / "shop" / "other.py").write_text(line)  # functions of the zoo's own there, whatever their names are
    (zoo / "shop" / "model.py").write_text("from model_zoo.shop.other import x\n")
    check_source(zoo, "shop.model")


@pytest.mark.parametrize(
    "text",
    [
        "def eval_metrics_fn(top=5): return {}",
        "def callbacks():\n    if True:\n        return []",
        "def learning_rate_scheduler(version): return 0.1\ndef callbacks(): return [Rate(learning_rate_scheduler)]",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "optimizer = tf.keras.optimizers.SGD(learning_rate=0.1)",
    ],
)
def test_what_looks_like_an_older_version_and_is_none_passes(zoo: Path, text: str) -> None:
    (zoo / "shop" / "model.py").write_text(text)
    check_source(zoo, "shop.model")


def test_all_places_to_change_are_named_at_once(zoo: Path) -> None:
    (zoo / "shop" / "model.py").write_text(
        "from tensorflow.python.keras import backend, layers\nfrom model_zoo.shop.other import x\n"
        "def loss(output, labels): return 0\n"
    )
    (zoo / "shop" / "other.py").write_text("from tensorflow.python.keras import layers\n")
    with pytest.raises(ModelDefinitionError) as caught:
        check_source(zoo, "shop.model")
    assert re.findall(r"(\w+\.py), line (\d)", str(caught.value)) == [
        ("model.py", "1"),
        ("model.py", "3"),
        ("other.py", "1"),
    ]


def test_a_loss_in_the_order_of_pytorch_is_fine_there(zoo: Path) -> None:
    (zoo / "shop" / "model.py").write_text("import torch\ndef loss(predictions, labels): return 0\n")
    check_source(zoo, "shop.model")


def test_modules_of_the_zoo_are_found_below_the_name_model_zoo(zoo: Path) -> None:
    (zoo / "shop" / "model.py").write_text(
        "from model_zoo.shop.other import width\ndef custom_model(): return width\ndef feed(dataset, mode, _): ...\n"
    )
    (zoo / "shop" / "other.py").write_text("import torch\nwidth = 7\n")
    definition = load(str(zoo), "shop.model.custom_model", required=("feed",))
    assert definition.model() == 7
    spec = JobSpec.from_flags(
        "train",
        {
            "runtime": "local",
            "job_name": "j",
            "model_zoo": str(zoo),
            "model_def": "shop.model.custom_model",
            "training_data": "data",
        },
    )
    assert framework_of(spec) is FrameworkName.TORCH


def test_a_directory_of_the_zoo_precedes_a_package_of_its_name(
    zoo: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "model_zoo" / "shop").mkdir(parents=True)
    (other / "model_zoo" / "__init__.py").touch()
    (other / "model_zoo" / "shop" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(other))
    for name in ("model_zoo.shop", "model_zoo"):
        sys.modules.pop(name, None)
    (zoo / "shop" / "model.py").write_text("from model_zoo.shop.other import width as custom_model\n")
    (zoo / "shop" / "other.py").write_text("def width(): return 7\n")
    assert load(str(zoo), "shop.model.custom_model", required=()).model() == 7


def test_a_module_uses_the_package_that_its_directory_has_the_name_of(zoo: Path) -> None:
    assert "pydoc_data" not in sys.modules
    (zoo / "pydoc_data").mkdir()
    (zoo / "pydoc_data" / "model.py").write_text("from pydoc_data.topics import topics\ndef custom_model(): return 7\n")
    assert load(str(zoo), "pydoc_data.model.custom_model", required=()).model() == 7


def test_a_package_that_is_not_installed_is_named(zoo: Path) -> None:
    (zoo / "shop" / "model.py").write_text("from no_such_package.layers import Cross\n")
    with pytest.raises(ModelDefinitionError, match=r"Install the package that holds no_such_package"):
        load(str(zoo), "shop.model.custom_model", required=())


def test_several_recordio_files_are_counted_through(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        files.append(str(tmp_path / f"part-{number}"))
        with RecordIOWriter(files[-1]) as writer:
            for record in range(4):
                writer.write(f"{number}.{record}".encode())
    reader = OriginalRecordIOReader(files)
    assert list(reader.read_records(2, 9)) == [b"0.2", b"0.3", b"1.0", b"1.1", b"1.2", b"1.3", b"2.0"]
    with pytest.raises(DataError):
        OriginalRecordIOReader([str(tmp_path)])


def test_the_page_names_every_import_path() -> None:
    text = PAGE.read_text()
    assert [(module, name) for module, name in NAMES if f"`{module}`" not in text or f"`{name}`" not in text] == []


def test_the_paths_come_without_the_specification_of_jobs() -> None:
    program = "import sys, elasticai_api; print('elasticdl_client.job_spec' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
