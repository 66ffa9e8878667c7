"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of


def version() -> str:
    """As it is installed; "not installed" in a checkout that is only on the path."""
    try:
        return version_of("elasticdl-client")
    except PackageNotFoundError:
        return "not installed"
