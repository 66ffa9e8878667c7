"""Two distributions from one repository: their content, their requirements, and their installation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.version import CLIENT, RUNTIME, VERSION
from tests.house.documents import clone

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"tensorflow", "tensorflow-cpu", "keras", "torch"}


def project(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())["project"]


def required_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def files_of_the_repository() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_runtime_needs_exactly_this_client() -> None:
    runtime, client = project("pyproject.toml"), project("elasticdl_client/pyproject.toml")
    assert (runtime["name"], client["name"]) == (RUNTIME, CLIENT)
    assert f"{CLIENT}=={VERSION}" in runtime["dependencies"]


def test_both_take_names_and_versions_that_a_public_index_takes_and_that_are_not_the_originals() -> None:
    assert not {RUNTIME, CLIENT} & {"elasticdl", "elasticdl-client"}  # 0.2.0rc3 of 2020 and 1.0.0 of 2021
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", VERSION)  # no local label: an index would refuse it
    assert int(VERSION.partition(".")[0]) >= 2


@pytest.mark.parametrize("source", ["elasticdl_client", "."])
def test_the_version_that_is_built_is_that_of_the_command(source: str) -> None:
    code = (
        "from setuptools.config.pyprojecttoml import apply_configuration\n"
        "from setuptools.dist import Distribution\n"
        "print(apply_configuration(Distribution(), 'pyproject.toml').get_version())"
    )
    built = subprocess.run([sys.executable, "-c", code], cwd=ROOT / source, check=True, capture_output=True, text=True)
    assert built.stdout.strip() == VERSION


def test_both_distributions_say_their_license_and_author_alike() -> None:
    runtime, client = project("pyproject.toml"), project("elasticdl_client/pyproject.toml")
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    for key in ("license", "authors", "classifiers", "keywords", "requires-python"):
        assert runtime[key] == client[key]
    assert runtime["license"] == "MIT"


def test_neither_distribution_forces_a_framework_on_its_user() -> None:
    runtime, client = project("pyproject.toml"), project("elasticdl_client/pyproject.toml")
    assert not required_names(runtime["dependencies"]) & FRAMEWORKS
    assert not required_names(client["dependencies"]) & (FRAMEWORKS | {"grpcio", "numpy", "protobuf"})


def test_every_folder_with_code_is_a_package_that_setuptools_finds() -> None:
    for package in ("elasticdl", "elasticdl_client", "elasticdl_preprocessing"):
        for folder in {file.parent for file in (ROOT / package).rglob("*.py") if "build" not in file.parts}:
            assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} would be missing from the wheel"


def test_the_wheel_of_the_client_has_every_folder_and_every_file_of_the_page() -> None:
    tool = tomllib.loads((ROOT / "elasticdl_client" / "pyproject.toml").read_text())["tool"]["setuptools"]
    client = ROOT / "elasticdl_client"
    folders = {file.parent for file in client.rglob("*.py") if "build" not in file.parts}
    assert sorted(tool["packages"]) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    packed = {file for pattern in tool["package-data"]["elasticdl_client"] for file in client.glob(pattern)}
    page = {file for file in (client / "dashboard" / "page").rglob("*") if file.is_file()}
    assert page <= packed
    assert {"index.html", "main.js", "uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE.txt"} <= {
        one.name for one in page
    }


def test_the_client_starts_without_framework_and_without_grpc() -> None:
    code = (
        "import sys, elasticdl_client.main\n"
        "sys.exit(' '.join(set(sys.modules) & {'tensorflow', 'keras', 'torch', 'grpc', 'numpy'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"the client imports {done.stderr}"


def test_no_file_names_a_path_or_an_index_of_some_machine() -> None:
    wrong = re.compile(r"(?<![\w.~}$])/(?:work|opt|home|Users)/|--(?:extra-)?index-url|trusted-host|pypi\.org/simple")
    found = []
    for file in files_of_the_repository():
        if file == Path(__file__).resolve():
            continue
        text = file.read_bytes()
        if b"\0" not in text:
            for number, line in enumerate(text.decode().splitlines(), 1):
                if wrong.search(line):
                    found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_no_advice_installs_a_stranger_from_the_index() -> None:
    advice = re.compile(r"""pip install ['"]?elasticdl(-client)?(?![\w/.])""")
    found = []
    for file in files_of_the_repository():
        if file.suffix in (".py", ".md") and file != Path(__file__).resolve():
            found += [
                f"{file.relative_to(ROOT)}: {line.strip()}"
                for line in file.read_text().splitlines()
                if advice.search(line)
            ]
    assert found == []  # the index has the original of 2020 and 2021 under these names


def editable_wheel(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Return the build of `pip install --editable`, with a compiler that always fails."""
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "editable_wheel", "--dist-dir", str(checkout / "dist")],
        cwd=checkout, capture_output=True, text=True, env={**os.environ, "CC": "false", "CXX": "false"},
    )  # fmt: skip


def test_an_editable_install_compiles_nothing_that_is_compiled_in_place(tmp_path: Path) -> None:
    checkout = clone(tmp_path / "elasticdl")
    for kernels in (checkout / "elasticdl" / "kernels").glob("_native.*.so"):
        os.utime(kernels)
    built = editable_wheel(checkout)
    assert built.returncode == 0, built.stderr
    assert list((checkout / "dist").glob("*.whl"))
    os.utime(next((checkout / "elasticdl" / "kernels" / "src").glob("*.hpp")))
    assert "returned non-zero exit status 1" in editable_wheel(checkout).stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_both_wheels_install_into_a_fresh_environment_and_bring_the_command(tmp_path: Path) -> None:
    wheels, home = tmp_path / "wheels", tmp_path / "venv"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    subprocess.run([*build, "./elasticdl_client", "."], cwd=ROOT, check=True)
    runtime = next(wheels.glob("elasticdl2-*.whl"))
    client = next(wheels.glob("elasticdl2_client-*.whl"))
    names = zipfile.ZipFile(runtime).namelist()
    assert "elasticdl/py.typed" in names
    assert "elasticdl/rpc/elasticdl_pb2.pyi" in names
    assert not [name for name in names if name.split("/")[0] in ("elasticdl_client", "tests", "model_zoo")]
    assert "elasticdl_client/py.typed" in zipfile.ZipFile(client).namelist()

    venv.create(home, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": str(home / "bin"), "PIP_ONLY_BINARY": ":all:"}  # there is no compiler
    (install,) = re.findall(
        r"^    pip (install --find-links=FOLDER .*)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    arguments = shlex.split(install.replace("FOLDER", str(wheels)))
    subprocess.run([home / "bin" / "pip", *arguments, "--quiet"], check=True, env=environment)
    imports = "import elasticdl.kernels._native, elasticdl.master, elasticdl.ps, tensorflow"
    for command in (["elasticdl", "train", "--help"], ["python", "-c", imports]):
        done = subprocess.run([home / "bin" / command[0], *command[1:]], cwd=tmp_path, env=environment)
        assert done.returncode == 0
