"""A namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from submission_scene import Scene


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Scene]:
    """A namespace in which nothing has been granted."""
    scene = Scene(tmp_path)
    yield scene
    scene.end()


@pytest.fixture
def scene(empty: Scene) -> Scene:
    """A namespace in which jobs can run."""
    empty.grant_master()
    return empty
