"""The order in which processes of tests beside each other begin with the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import ROOT, longest_first


def test_the_longest_file_begins_and_files_without_a_record_keep_their_order() -> None:
    whole_jobs = ["test_1.py::long", "test_2.py::long", *(f"test_3.py::short[{number}]" for number in range(1000))]
    nodeids = [*whole_jobs, "b.py::x", "d.py::x", "d.py::y"]
    order = sorted(nodeids, key=longest_first({"d.py": 70.0, "b.py": 20.0}))
    assert order == ["d.py::x", "d.py::y", "b.py::x", *whole_jobs]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "build" / "durations.txt"
    of_tests = [("a.py::x", 4.0, 3.0), ("b.py::x", 30.0, 5.0), ("a.py::y[::]", 4.0, 9.4), ("c.py::z", 0.5, 2.0)]
    durations.write(of_tests, path)
    assert path.read_text() == "30 5 b.py\n8 12 a.py\n"
    assert durations.read(path) == {"b.py": 30.0, "a.py": 8.0}


def test_the_record_of_the_repository_names_files_that_are_there() -> None:
    assert [file for file in durations.read() if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_is_recorded_where_it_is_asked_for_alone(tmp_path: Path, is_asked: bool) -> None:
    record = tmp_path / "build" / "durations.txt"
    environment = {**os.environ, durations.VARIABLE: str(record) if is_asked else ""}
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-k", "names_files_that_are_there", __file__]
    subprocess.run(argv, cwd=ROOT, env=environment, check=True)
    assert record.exists() == is_asked
