"""Packages that only some readers need, imported when they do, with an error that names the package to install."""

from __future__ import annotations

import importlib
from typing import Any

from elasticdl_client.errors import DataError


def need(module: str, what: str, requirement: str) -> Any:
    """A module of an optional package.

    Args:
        module: to import.
        what: needs it, in the plural.
        requirement: for pip.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} need the package {package}, which cannot be imported: {error}.",
            f"Install it: pip install '{requirement}'; in an image, name it in the requirements.txt of your zoo.",
        ) from error
