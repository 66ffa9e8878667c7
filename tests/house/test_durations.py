"""The order in which processes of tests beside each other begin with the files."""

from __future__ import annotations

from pathlib import Path

from tests import durations
from tests.durations import ROOT, longest_first


def test_the_longest_file_begins_and_one_without_a_record_counts_its_tests() -> None:
    nodeids = ["a.py::x", "b.py::x", *(f"c.py::x[{number}]" for number in range(1000)), "d.py::x"]
    assert list(longest_first(nodeids, {"d.py": 70.0, "b.py": 20.0})) == ["d.py", "c.py", "b.py", "a.py"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "build" / "durations.txt"
    durations.write([("a.py::x", 4.0), ("b.py::x", 30.0), ("a.py::y[::]", 4.0), ("c.py::z", 0.5)], path)
    assert path.read_text() == "30 b.py\n8 a.py\n"
    assert durations.read(path) == {"b.py": 30.0, "a.py": 8.0}


def test_the_record_of_the_repository_names_files_that_are_there() -> None:
    assert [file for file in durations.read() if not (ROOT / file).exists()] == []
