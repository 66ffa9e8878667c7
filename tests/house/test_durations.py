"""The order in which processes of tests beside each other begin with the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import ROOT, longest_first, recorded_name


def test_the_longest_begins_and_names_without_a_record_keep_their_order() -> None:
    names = ["test_1.py", "test_2.py", *["test_3.py"] * 1000, "b.py", "d.py", "d.py"]
    order = sorted(names, key=longest_first({"d.py": 70.0, "b.py": 20.0}))
    assert order == ["d.py", "d.py", "b.py", *names[:-3]]


def test_a_test_on_a_cluster_is_recorded_by_itself_and_another_in_its_file() -> None:
    nodeid = "tests/a.py::test_it[a::b]"
    assert [recorded_name(nodeid, on_cluster) for on_cluster in (True, False)] == [nodeid, "tests/a.py"]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "build" / "durations.txt"
    durations.write([("a.py", 4.0, 3.0), ("b.py::x[a b]", 30.0, 5.0), ("a.py", 4.0, 9.4), ("c.py", 0.5, 2.0)], path)
    assert path.read_text() == "30 5 b.py::x[a b]\n8 12 a.py\n"
    assert durations.read(path) == {"b.py::x[a b]": 30.0, "a.py": 8.0}


def test_the_records_of_the_repository_name_tests_that_are_there() -> None:
    gone = []
    for name in durations.read():
        file, _, test = name.partition("::")
        function = f"def {test.partition('[')[0]}("
        if not (ROOT / file).exists() or (test and function not in (ROOT / file).read_text()):
            gone.append(name)
    assert gone == []


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_is_recorded_where_it_is_asked_for_alone(tmp_path: Path, is_asked: bool) -> None:
    record = tmp_path / "build" / "durations.txt"
    environment = {**os.environ, durations.VARIABLE: str(record) if is_asked else ""}
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-k", "name_tests_that_are_there", __file__]
    subprocess.run(argv, cwd=ROOT, env=environment, check=True)
    assert record.exists() == is_asked
