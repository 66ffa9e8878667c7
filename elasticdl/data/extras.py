"""Packages that only some readers need, imported when they do, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any

from elasticdl_client.errors import DataError


def need(module: str, what: str, extra: str) -> Any:
    """A module of an optional package.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} need the package {package}, which cannot be imported: {error}.",
            f"Install it: pip install 'elasticdl[{extra}]'; in an image, name it in the requirements of your zoo.",
        ) from error
