"""Prints what to install beside a checkout, one requirement a line: of both packages, some extras, and some tools.

    python scripts/requirements.py EXTRA,… TOOL …

Tools are those of the extra `dev`, by name, in the versions that it names.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticdl_client.version import CLIENT, RUNTIME

ROOT = Path(__file__).resolve().parents[1]


def name_of(requirement: str) -> str:
    """The package that a requirement is of."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def requirements(extras: list[str], tools: list[str]) -> list[str]:
    """Of both packages with these extras of the runtime, without themselves.

    Raises:
        KeyError: there is no such extra, or no such tool in `dev`.
    """
    found = [*_requirements_of(CLIENT, []), *_requirements_of(RUNTIME, extras)]
    dev = {name_of(one): one for one in _project(RUNTIME)["optional-dependencies"]["dev"]}
    return list(dict.fromkeys([*found, *(dev[tool] for tool in tools)]))


def _requirements_of(package: str, extras: list[str]) -> Iterator[str]:
    project = _project(package)
    named = [one for extra in extras for one in project["optional-dependencies"][extra]]
    for one in [*project["dependencies"], *named]:
        if name_of(one) not in (CLIENT, RUNTIME):
            yield one
        elif more := re.search(r"\[(.+)\]", one):  # extras of our own within an extra
            yield from _requirements_of(name_of(one), more[1].split(","))


def _project(package: str) -> dict[str, Any]:
    directory = ROOT if package == RUNTIME else ROOT / "elasticdl_client"
    project: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return project


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1].split(","), sys.argv[2:])))
