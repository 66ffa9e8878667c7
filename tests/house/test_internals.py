"""Non-public names of TensorFlow, Keras and PyTorch: listed, and checked when a worker starts."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticdl.collective.nccl import STORE, check_engines
from elasticdl.frameworks.internals import KERAS, TENSORFLOW, check_internals, check_names, missing
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ElasticDLError

ROOT = Path(__file__).resolve().parents[2]
CODE = ("elasticdl", "elasticai_api", "elasticdl_preprocessing")


def used_names() -> set[str]:
    """As `module.attribute`: imports of non-public modules, and attributes of `tf.__internal__`."""
    found = set()
    for file in (file for package in CODE for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"(keras\.src|tensorflow\.python)\b", node.module or ""):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Attribute) and node.attr == "__internal__":
                found.add("tensorflow.__internal__")
    return found


def test_every_internal_name_that_is_imported_is_checked() -> None:
    checked = {f"{module}.{attribute}" for module, attribute in (*KERAS, *TENSORFLOW)}
    unchecked = [name for name in used_names() if not any(one == name or one.startswith(f"{name}.") for one in checked)]
    modules = {module for module, _ in (*KERAS, *TENSORFLOW)}  # `from keras.src.backend.common import global_state`
    assert [name for name in unchecked if name not in modules] == []


def test_the_installed_frameworks_have_them() -> None:
    assert missing((*KERAS, *TENSORFLOW)) == []
    check_internals(FrameworkName.TENSORFLOW)
    check_internals(FrameworkName.TORCH)


def test_a_version_without_one_is_refused_with_its_number_and_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "framework_of_old.py").write_text("__version__ = '1.2.3'\nclass Model: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = (("framework_of_old", "Model"), ("framework_of_old", "Model._loss"), ("framework_of_old.inner", "x"))
    with pytest.raises(ElasticDLError) as caught:
        check_names("framework_of_old", names, "framework_of_old>=2")
    sys.modules.pop("framework_of_old")
    said = str(caught.value)
    assert "framework_of_old 1.2.3" in said
    assert "framework_of_old.Model._loss, framework_of_old.inner.x" in said
    assert "pip install 'framework_of_old>=2'" in said


def test_a_torch_without_its_engines_is_refused_by_name() -> None:
    pytest.importorskip("torch")
    engines = SimpleNamespace(Store=SimpleNamespace(get=1, set=1, wait=1), PrefixStore=1)
    check_engines(engines)
    engines.ProcessGroupNCCL = SimpleNamespace(
        abort=1, allgather=1, allreduce=1, broadcast=1, Options=SimpleNamespace()
    )
    with pytest.raises(ElasticDLError) as caught:
        check_engines(engines)
    assert "ProcessGroupNCCL.Options._timeout, ProcessGroupNCCL.eager_connect_single_device" in str(caught.value)
    assert "PrefixStore" in STORE
