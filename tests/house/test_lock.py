"""The versions that CI and developers have: within the ranges that users install by, and none forgotten."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from elasticdl_client.version import CLIENT, RUNTIME
from scripts.lock import HEAD, LOCK, locked

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "tensorflow",
    "allreduce",
    "torch",
    "arrow",
    "sql",
    "huggingface",
    "images",
    "s3",
    "http",
    "tensorboard",
    "analyze",
    "docs",
    "dev",
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    runtime = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "elasticdl_client" / "pyproject.toml").read_text())["project"]
    lines = [*runtime["dependencies"], *client["dependencies"], *client["optional-dependencies"]["zoo"]]
    lines += client["optional-dependencies"]["dashboard"]
    lines += client["optional-dependencies"]["sql"]
    lines += [line for extra in RUN for line in runtime["optional-dependencies"][extra]]
    environment = {"platform_system": "Linux", "platform_machine": "x86_64"}
    found = [Requirement(line) for line in lines]
    applying = [one for one in found if one.marker is None or one.marker.evaluate(environment)]
    return [one for one in applying if one.name not in (CLIENT, RUNTIME) and normal(one.name) not in BUILD]


BUILD = {"setuptools"}  # pip brings its own


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_locked_version_is_one_that_users_may_have(requirement: Requirement) -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    versions = {normal(name): version for name, version in (line.split("==") for line in lines)}
    assert requirement.specifier.contains(versions[normal(requirement.name)], prereleases=True)


def test_a_lock_names_releases_of_an_index_alone() -> None:
    frozen = f"-e /x\n# a comment\n{RUNTIME}==2.0.0\n{CLIENT}==2.0.0\nnumpy==2.4.6\ntorch==2.13.0+cpu\n"
    assert locked(frozen) == f"{HEAD}numpy==2.4.6\ntorch==2.13.0\n"


def test_frameworks_and_the_kubernetes_package_are_ranges() -> None:
    found = {normal(one.name): str(one.specifier) for one in requirements()}
    assert found["torch"] == "<3,>=2.6"
    assert found["tensorflow-cpu"] == "<3,>=2.17"
    assert found["kubernetes"] == ">=29"


def test_the_locked_versions_run_on_the_first_release_of_the_oldest_python() -> None:
    """Distributions keep the release that they began with: Debian 12 has 3.11.2."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    first = f"{described.removeprefix('>=')}.0"
    locked_names = {normal(line.partition("==")[0]) for line in LOCK.read_text().splitlines()}
    needed = {one.name: one.metadata["Requires-Python"] for one in distributions() if normal(one.name) in locked_names}
    assert {name: one for name, one in needed.items() if one and first not in SpecifierSet(one)} == {}
