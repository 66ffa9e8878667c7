"""Prints what to install beside a checkout, one requirement a line: of both packages, an extra, and some tools.

    python scripts/requirements.py EXTRA TOOL …

Tools are those of the extra `dev`, by name, in the versions that it names.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from elasticdl_client.version import CLIENT, RUNTIME

ROOT = Path(__file__).resolve().parents[1]


def name_of(requirement: str) -> str:
    """The package that a requirement is of."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def requirements(extra: str, tools: list[str]) -> list[str]:
    """Of both packages, without themselves.

    Raises:
        KeyError: there is no such extra, or no such tool in `dev`.
    """
    runtime = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "elasticdl_client" / "pyproject.toml").read_text())["project"]
    extras = runtime["optional-dependencies"]
    dev = {name_of(one): one for one in extras["dev"]}
    found = [*runtime["dependencies"], *client["dependencies"], *extras[extra], *(dev[tool] for tool in tools)]
    return [one for one in found if name_of(one) not in (CLIENT, RUNTIME)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], sys.argv[2:])))
