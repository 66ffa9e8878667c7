"""A model definition with an adapter of its own, in whole jobs on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elasticdl.frameworks import framework
from elasticdl.model_def import load
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.model_source import check_model_source
from elasticdl_client.zoo_modules import framework_of

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "tests" / "e2e_kubernetes" / "zoo"
MODEL = "paced.numpy_digits.custom_model"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("digits")
    subprocess.run([sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(output)], cwd=ROOT, check=True)
    return output


@pytest.mark.parametrize(
    ("strategy", "others"),
    [
        (
            {"num_workers": 2, "num_ps_pods": 2},
            (framework.TrainsAlone, framework.TrainsByAllReduce, framework.KeepsState),
        ),
        (
            {"num_workers": 2, "distribution_strategy": "AllReduceStrategy"},
            (framework.TrainsAlone, framework.TrainsWithServers),
        ),
        ({"distribution_strategy": "Local"}, (framework.TrainsWithServers, framework.TrainsByAllReduce)),
    ],
    ids=["servers", "all-reduce", "local"],
)
def test_a_module_with_an_adapter_of_its_own_trains_and_is_counted_exactly(
    digits: Path, tmp_path: Path, strategy: dict[str, object], others: tuple[type, ...]
) -> None:
    """The adapter lacks what other strategies call."""
    zoo = tmp_path / "zoo"
    shutil.copytree(ZOO / "paced", zoo / "paced")
    unneeded = [name for port in others for name in vars(port) if not name.startswith("_")]
    with (zoo / "paced" / "numpy_digits.py").open("a") as module:
        module.writelines(f"del NumpyFramework.{name}\n" for name in unneeded)
    flags = {
        "runtime": "local", "job_name": "own", "job_dir": tmp_path / "job", "model_zoo": zoo, "model_def": MODEL,
        "training_data": digits / "train", "validation_data": digits / "validation", "num_epochs": 8,
        "minibatch_size": 32, "output": tmp_path / "out", **strategy,
    }  # fmt: skip
    command = [sys.executable, "-m", "elasticdl_client.main", "train"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 8: records 1437, committed 1437, repeated 0, lost 0" in done.stdout
    assert float(done.stdout.rpartition("final evaluation at step ")[2].split()[2]) >= 0.9
    assert np.load(tmp_path / "out" / "weights.npy").shape == (65, 10)


def test_files_in_the_working_directory_that_are_named_like_standard_modules_stop_no_job(
    digits: Path, tmp_path: Path
) -> None:
    zoo, here = tmp_path / "zoo", tmp_path / "here"
    shutil.copytree(ZOO / "paced", zoo / "paced")
    here.mkdir()
    for directory in (zoo, here):
        for name in ("queue", "selectors", "secrets", "random", "types"):
            (directory / f"{name}.py").write_text(f"raise RuntimeError('{directory}: not the standard library')\n")
    (here / "beside.py").write_text("")
    with (zoo / "paced" / "numpy_digits.py").open("a") as module:
        module.write("\nimport beside\n")
    flags = {
        "runtime": "local", "job_name": "own", "job_dir": tmp_path / "job", "model_zoo": zoo,
        "model_def": MODEL, "training_data": digits / "train", "num_ps_pods": 1,
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "elasticdl_client.main", "train"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: records 1437, committed 1437, repeated 0, lost 0" in done.stdout


def test_a_module_that_imports_the_port_must_define_framework(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from elasticdl.frameworks.framework import Framework\n\ndef custom_model(): ...\n"
    )
    spec = JobSpec(model_zoo=str(tmp_path), model_def="own.custom_model")
    assert framework_of(spec) is FrameworkName.CUSTOM
    with pytest.raises(ModelDefinitionError, match="has no framework"):
        check_model_source(spec, tmp_path)
    with (tmp_path / "own.py").open("a") as file:
        file.write("def framework(**arguments): ...\n")
    check_model_source(spec, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\nfrom elasticdl.frameworks.framework import Mode\n", FrameworkName.TORCH),
        ("import keras\nfrom elasticdl.frameworks.framework import Mode\n", FrameworkName.TENSORFLOW),
        ("from elasticdl.frameworks.framework import Mode\nfrom other import net\n", FrameworkName.TORCH),
        ("from elasticdl.frameworks.framework import Framework\n", FrameworkName.CUSTOM),
    ],
)
def test_the_port_counts_only_where_no_framework_is_imported(
    tmp_path: Path, text: str, expected: FrameworkName
) -> None:
    (tmp_path / "other.py").write_text("import torch\n\ndef net(): ...\n")
    (tmp_path / "own.py").write_text(text + "\ndef custom_model(): ...\n")
    assert framework_of(JobSpec(model_zoo=str(tmp_path), model_def="own.custom_model")) is expected


def test_the_runtime_in_a_zoo_is_no_part_of_the_users_program(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from elasticdl.frameworks.framework import Mode\n")
    (tmp_path / "elasticdl").mkdir()
    (tmp_path / "elasticdl" / "__init__.py").write_text("import keras\n")
    spec = JobSpec(model_zoo=str(tmp_path), model_def="own.custom_model")
    assert framework_of(spec) is FrameworkName.CUSTOM


@pytest.mark.parametrize("value", ['"keras"', "print"])
def test_what_another_module_calls_framework_is_its_own_affair(tmp_path: Path, value: str) -> None:
    (tmp_path / "plain.py").write_text(f"framework = {value}\n\ndef custom_model(): ...\n")
    assert load(str(tmp_path), "plain.custom_model", required=()).framework is None
