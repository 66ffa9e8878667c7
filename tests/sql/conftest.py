"""Databases of these tests: SQLite files, and a PostgreSQL server of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.data import postgres


@pytest.fixture(scope="session")
def running_server() -> Iterator[str]:
    """The URL of a database of PostgreSQL, for all tests."""
    directory = Path(tempfile.mkdtemp(prefix="pg"))  # the path of a socket must be short, and readable by PostgreSQL
    try:
        with postgres.server(directory) as url:
            yield url
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def server(running_server: str) -> str:
    """The same, with nothing in it."""
    with psycopg.connect(running_server) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; DROP SCHEMA IF EXISTS results CASCADE")
    return running_server
