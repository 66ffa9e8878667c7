"""The zoo as a worker imports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ZOO = Path(__file__).resolve().parents[2] / "model_zoo"
FOLDERS = {path.parent.name for path in ZOO.glob("*/__init__.py")}


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The zoo's modules by their names inside it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ZOO))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in FOLDERS:
            del sys.modules[name]
