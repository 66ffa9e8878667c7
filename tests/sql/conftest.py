"""Databases of these tests: SQLite files, and a PostgreSQL server of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data import postgres


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a database of PostgreSQL."""
    directory = Path(tempfile.mkdtemp(prefix="pg"))  # the path of a socket must be short, and readable by PostgreSQL
    try:
        with postgres.server(directory) as url:
            yield url
    finally:
        shutil.rmtree(directory)
