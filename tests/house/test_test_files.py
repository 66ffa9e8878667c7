"""The tests themselves: names that pytest can tell apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_files_outside_of_packages_have_names_of_their_own() -> None:
    names = Counter(file.name for file in TESTS.rglob("*.py") if not (file.parent / "__init__.py").exists())
    repeated = {name for name, count in names.items() if count > 1 and name != "conftest.py"}
    assert not repeated, "pytest cannot import two files of one name"
