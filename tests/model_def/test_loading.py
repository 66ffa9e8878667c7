"""Loading of model-definition modules: the symbols found, and the errors for missing ones."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial, wraps
from pathlib import Path

import pytest

from elasticdl.frameworks.user_code import num_taken
from elasticdl.model_def import load, load_model_definition
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec

_MODULE = """
from shop.layers import WIDTH

def custom_model(width=WIDTH, name="m"): return ("model", width, name)
def feed(dataset, mode, metadata): return dataset
def loss(labels, predictions): return 0
def optimizer(): return "sgd"
def eval_metrics_fn(): return {}
number = 5
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "layers.py").write_text(
        "WIDTH = 7\ndef other_loss(labels, predictions): return 1\ndef bare(): pass\n"
    )
    (tmp_path / "shop" / "model.py").write_text(_MODULE)
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_module_may_import_from_the_zoo(zoo: Path) -> None:
    definition = load(str(zoo), "shop.model.custom_model")
    assert definition.model() == ("model", 7, "m")
    assert definition.path == str(zoo / "shop" / "model.py")
    assert definition.loss is not None
    assert definition.loss(1, 2) == 0
    assert definition.callbacks is None


def test_losses_and_optimizers_may_be_names_configs_and_lists_and_nothing_else_may(zoo: Path) -> None:
    module = zoo / "shop" / "model.py"
    for k, value in enumerate(["'mse'", "{'class_name': 'Huber'}", "['mse', 'mae']"]):
        (zoo / "shop" / f"m{k}.py").write_text(_MODULE + f"loss = optimizer = {value}\n")
        definition = load(str(zoo), f"shop.m{k}.custom_model")
        assert repr(definition.loss) == repr(definition.optimizer) == value
    for name, value in [("loss", "5"), ("feed", "'table'"), ("eval_metrics_fn", "['accuracy']")]:
        module.with_name(f"bad_{name}.py").write_text(_MODULE + f"{name} = {value}\n")
        with pytest.raises(ModelDefinitionError, match=f"{name} is a "):
            load(str(zoo), f"shop.bad_{name}.custom_model")


def test_a_function_that_cannot_take_its_arguments_is_named(zoo: Path) -> None:
    (zoo / "shop" / "bad.py").write_text(
        _MODULE + "from functools import *\n@cache\ndef loss(labels): return 0\nfeed = partial(feed, 1, 2, 3)\n"
    )
    load(str(zoo), "shop.bad.custom_model", required=())
    for name, said in [("feed", r"feed\(\) cannot"), ("loss", r"loss\(labels\) cannot be called with 2")]:
        with pytest.raises(ModelDefinitionError, match=said):
            load(str(zoo), "shop.bad.custom_model", required=[name])


def test_a_decorator_may_give_arguments_that_the_function_lacks_a_default_for(zoo: Path) -> None:
    (zoo / "shop" / "good.py").write_text(
        _MODULE + "from functools import wraps\n"
        "def scaled(function):\n    return wraps(function)(lambda *arguments: function(*arguments, 2))\n"
        "@scaled\ndef feed(dataset, mode, metadata, scale): return dataset * scale\n"
        "def loss(labels, predictions, sample_weight): return sample_weight\n"
    )
    definition = load(str(zoo), "shop.good.custom_model")
    assert definition.feed is not None
    assert definition.feed(3, "training", None) == 6
    assert num_taken(definition.feed) >= 2


def test_a_feed_gets_the_arguments_that_its_outermost_decorator_takes() -> None:
    def three(dataset: object, mode: str, metadata: object) -> None: ...

    assert num_taken(wraps(three)(lambda *arguments: three(*arguments))) == 2
    assert num_taken(wraps(three)(lambda dataset: three(dataset, "training", None))) == 0
    assert num_taken(partial(three, metadata=None)) == 1
    assert num_taken(cache(three)) == 2
    assert num_taken(lambda *arguments: None) == 2


def test_a_module_that_ends_the_process_is_an_error_with_its_line(zoo: Path) -> None:
    (zoo / "shop" / "over.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ModelDefinitionError, match=r"cannot be imported: SystemExit: 0") as caught:
        load(str(zoo), "shop.over.custom_model")
    assert 'over.py", line 2' in caught.value.details


def test_a_child_that_user_code_forks_ends_as_it_wants() -> None:
    program = """if True:
        import os, sys
        from elasticdl.frameworks.user_code import user_call
        def model():
            child = os.fork()
            if not child:
                sys.exit(7)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(user_call(model, "model()"))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr


def test_model_params_are_arguments_of_the_model(zoo: Path) -> None:
    assert load(str(zoo), "shop.model.custom_model", {"width": 3}).model() == ("model", 3, "m")
    with pytest.raises(ModelDefinitionError, match="custom_model cannot be called with depth=2"):
        load(str(zoo), "shop.model.custom_model", {"depth": 2})


def test_the_flags_of_a_job_name_the_symbols(zoo: Path) -> None:
    spec = JobSpec(
        job_name="j", model_zoo=str(zoo), model_def="shop.model.custom_model", model_params="width=4;name=x",
        loss="shop.layers.other_loss",
    )  # fmt: skip
    definition = load_model_definition(spec)
    assert definition.model() == ("model", 4, "x")
    assert definition.loss is not None
    assert definition.loss(1, 2) == 1


def test_feed_has_an_older_name(zoo: Path) -> None:
    old = zoo / "shop" / "old.py"
    old.write_text(_MODULE.replace("def feed(", "def dataset_fn("))
    definition = load(str(zoo), "shop.old.custom_model")
    assert definition.feed is not None
    assert definition.feed(3, "training", None) == 3


def test_the_data_set_of_a_mode_is_made_once(zoo: Path) -> None:
    own = "def dataset(): return ['training']\ndef validation_dataset(): return ['validation']\n"
    (zoo / "shop" / "own.py").write_text(f"def custom_model(): ...\n{own}")
    spec = JobSpec(job_name="j", model_zoo=str(zoo), model_def="shop.own.custom_model", training_data="dataset()")
    definition = load_model_definition(spec)
    assert definition.has_data
    assert definition.feed is None
    assert definition.dataset is not None
    assert definition.dataset("training") == ["training"]
    assert definition.dataset("evaluation") == ["validation"]
    assert definition.dataset("training") is definition.dataset("training")
    with pytest.raises(ModelDefinitionError, match=r"own\.py has no data set for prediction"):
        definition.dataset("prediction")


@pytest.mark.parametrize(
    ("model_def", "symbols", "message"),
    [
        ("shop.absent.custom_model", {}, r"shop/absent\.py does not exist"),
        ("custom_model", {}, r"expected package\.module\.symbol"),
        ("shop.model.other_model", {}, r"shop/model\.py has no other_model"),
        ("shop.model.number", {}, r"number is a int, not a function that returns a model"),
        ("shop.model.custom_model", {"loss": "my_loss"}, r"shop/model\.py has no my_loss"),
        ("shop.model.custom_model", {"loss": "number"}, r"number is a int, not a function loss\(labels, predictions\)"),
        ("shop.model.custom_model", {"loss": "shop.absent.my_loss"}, r"shop/absent\.py does not exist"),
        ("shop.model.custom_model", {"callbacks": "my_callbacks"}, r"has no my_callbacks"),
        ("shop.layers.bare", {}, r"shop/layers\.py has no feed"),
    ],
)
def test_what_is_missing_is_named(zoo: Path, model_def: str, symbols: dict[str, str], message: str) -> None:
    with pytest.raises(ModelDefinitionError, match=message) as raised:
        load(str(zoo), model_def, {}, symbols)
    assert raised.value.hint or "expected" in raised.value.what


def test_a_missing_zoo_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDefinitionError, match="nowhere is not a directory"):
        load(str(tmp_path / "nowhere"), "shop.model.custom_model")


def test_an_error_of_the_module_keeps_its_traceback(zoo: Path) -> None:
    (zoo / "shop" / "broken.py").write_text("def custom_model(): pass\nimport no_such_package\n")
    with pytest.raises(ModelDefinitionError, match=r"broken\.py cannot be imported: ModuleNotFoundError") as raised:
        load(str(zoo), "shop.broken.custom_model")
    assert "import no_such_package" in raised.value.details
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_module_may_have_the_name_of_an_installed_package(zoo: Path) -> None:
    (zoo / "json").mkdir()
    (zoo / "json" / "model.py").write_text(_MODULE)
    (zoo / "pathlib.py").write_text(_MODULE)
    assert load(str(zoo), "json.model.custom_model").model() == ("model", 7, "m")
    assert load(str(zoo), "pathlib.custom_model").model() == ("model", 7, "m")
    assert load(str(zoo), "pathlib.custom_model").feed is load(str(zoo), "pathlib.custom_model").feed


def test_two_zoos_may_have_modules_of_one_name(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "shop").mkdir()
    (other / "shop" / "model.py").write_text(_MODULE.replace("from shop.layers import WIDTH", "WIDTH = 9"))
    assert load(str(zoo), "shop.model.custom_model").model() == ("model", 7, "m")
    assert load(str(other), "shop.model.custom_model").model() == ("model", 9, "m")


def test_a_module_that_does_not_come_to_an_end_is_named_with_its_line(zoo: Path) -> None:
    """It loops until that has been said."""
    (zoo / "loops.py").write_text(
        f"from pathlib import Path\nwhile not Path({str(zoo / 'said')!r}).exists():\n    pass\n"
        "def custom_model(): pass\ndef loss(labels, predictions): pass\ndef optimizer(): pass\ndef feed(d): pass\n"
    )
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            (zoo / "said").touch()

    log, handler = logging.getLogger("elasticdl.model_def"), Listening()
    log.addHandler(handler)
    try:
        load(str(zoo), "loops.custom_model")
    finally:
        log.removeHandler(handler)
    assert said[0].startswith(f"Importing {zoo / 'loops.py'} for 5 s, now at line ")


def test_the_working_directory_comes_before_installed_packages_and_after_the_standard_library(
    zoo: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here, installed = (tmp_path_factory.mktemp(name) for name in ("here", "installed"))
    for directory in (here, installed):
        (directory / "own_project.py").write_text(f"WHERE = {directory.name!r}\n")
    for name in ("colorsys", "_lsprof"):  # a file of Python, and of C, of the standard library
        (here / f"{name}.py").write_text("raise RuntimeError('not the standard library')\n")
    (zoo / "shop" / "mine.py").write_text(
        "import os\nos.chdir('/')\nimport colorsys, _lsprof\nfrom own_project import WHERE\n"
        "def custom_model(): return WHERE\n"
    )
    code = f"import sys; sys.path.append({str(installed)!r}); from elasticdl.model_def import load; "
    code += f"print(load({str(zoo)!r}, 'shop.mine.custom_model', required=()).model())"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=here, capture_output=True, text=True)
    assert done.stdout == f"{here.name}\n", done.stderr
