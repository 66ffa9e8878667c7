"""Print the requirements to install for a checkout, one per line: of both packages, of some extras, and some tools.

    python scripts/requirements.py EXTRA,… TOOL …

Extras belong to the runtime or the client.  Tools are names in the extra `dev`, which also has their versions.
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
    """Return the name of the package in a requirement."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def requirements(extras: list[str], tools: list[str]) -> list[str]:
    """Return the requirements of both packages with these extras and tools, without the packages themselves.

    Raises:
        KeyError: Neither package has such an extra, or `dev` has no such tool.
    """
    of_client = [extra for extra in extras if extra in _project(CLIENT)["optional-dependencies"]]
    of_runtime = [
        extra for extra in extras if extra in _project(RUNTIME)["optional-dependencies"] or extra not in of_client
    ]
    found = [*_requirements_of(CLIENT, of_client), *_requirements_of(RUNTIME, of_runtime)]
    dev = {name_of(one): one for one in _project(RUNTIME)["optional-dependencies"]["dev"]}
    return list(dict.fromkeys([*found, *(dev[tool] for tool in tools)]))


def oldest(requirement: str) -> str:
    """Pin a range to its lowest version: `torch==2.6` for `torch>=2.6,<3`; a pin is returned unchanged.

    Raises:
        ValueError: The requirement has no lowest version.
    """
    bounds, separator, marker = requirement.partition(";")
    found = re.fullmatch(r"\s*([A-Za-z0-9._-]+(?:\[[^]]*\])?)\s*(?:>=|==)\s*([0-9][A-Za-z0-9.]*)\s*(?:,.*)?", bounds)
    if found is None:
        raise ValueError(f"'{requirement}' has no lowest version: write {name_of(requirement)}>=VERSION.")
    return f"{found[1]}=={found[2]}{separator}{marker}"


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
