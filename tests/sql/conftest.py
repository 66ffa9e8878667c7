"""Databases of these tests: SQLite files, and servers of their own: PostgreSQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.data import mariadb, postgres


@pytest.fixture(scope="session")
def running_server() -> Iterator[str]:
    """The URL of a database of PostgreSQL, for all tests."""
    with postgres.server() as url:
        yield url


@pytest.fixture
def server(running_server: str) -> str:
    """The same, with nothing in it."""
    with psycopg.connect(running_server) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; DROP SCHEMA IF EXISTS results CASCADE")
    return running_server


@pytest.fixture(scope="session")
def running_mariadb() -> Iterator[str]:
    """The URL of a database of MariaDB, for all tests."""
    with mariadb.server() as url:
        yield url


@pytest.fixture
def mariadb_server(running_mariadb: str) -> str:
    """The same, with nothing in it."""
    mariadb.execute(
        running_mariadb, "DROP DATABASE staff", "CREATE DATABASE staff", "USE staff", "DROP DATABASE IF EXISTS results"
    )
    return running_mariadb
