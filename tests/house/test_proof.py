"""How tests are run: a second chance on the cluster, many times under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coverage import by_package
from tests.stress import CGROUPS

REPOSITORY = Path(__file__).resolve().parents[2]

# Each test counts its runs in a file beside it.
SUITE = """
from pathlib import Path

def nth_run(name):
    count = Path(__file__).with_name(name)
    runs = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(runs))
    return runs

def test_good():
    assert nth_run("good")

def test_shaky():
    assert nth_run("shaky") > {shaky_after}

def test_bad():
    assert nth_run("bad") > {bad_after}
"""


def run(
    module: str, directory: Path, *options: str, shaky_after: int = 0, bad_after: int = 0, **variables: str
) -> tuple[int, str]:
    """The exit code and the output of a module that runs the suite in `directory`."""
    suite = directory / "test_suite.py"
    suite.write_text(SUITE.format(shaky_after=shaky_after, bad_after=bad_after))
    argv, environment = [sys.executable, "-m", module, str(suite), *options], {**os.environ, **variables}
    done = subprocess.run(argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def runs(directory: Path) -> tuple[int, int, int]:
    good, shaky, bad = (int((directory / name).read_text()) for name in ("good", "shaky", "bad"))
    return good, shaky, bad


def test_what_fails_on_the_cluster_is_run_once_more_alone_and_named(tmp_path: Path) -> None:
    code, output = run("tests.again", tmp_path, "-n", "2", shaky_after=1)
    assert code == 0
    assert runs(tmp_path) == (1, 2, 1)
    assert output.splitlines()[-1].startswith("flaky: ")
    assert output.splitlines()[-1].endswith("test_suite.py::test_shaky")
    assert "assert 1 > 1" in output  # the message of the first run


@pytest.mark.parametrize(("shaky_after", "is_made"), [(0, False), (1, True)])
def test_the_second_run_may_have_a_fresh_cluster(tmp_path: Path, shaky_after: int, is_made: bool) -> None:
    fresh = tmp_path / "fresh"
    code, _ = run("tests.again", tmp_path, shaky_after=shaky_after, ELASTICDL_FRESH_CLUSTER=f"touch '{fresh}'")
    assert (code, fresh.exists()) == (0, is_made)


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    code, output = run("tests.again", tmp_path, shaky_after=1, bad_after=2)
    assert code == 1
    assert runs(tmp_path) == (1, 2, 2)
    assert [line.split(":")[0] for line in output.splitlines()[-2:]] == ["FAILED twice", "flaky"]


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    suite = "".join(f"def test_{n}():\n    assert False\n" for n in range(4))
    (tmp_path / "test_others.py").write_text(suite)
    code, output = run("tests.again", tmp_path, str(tmp_path / "test_others.py"))
    assert code == 1
    assert "once more" not in output


def test_stress_counts_what_fails_in_many_runs(tmp_path: Path) -> None:
    group = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "cpu"
    limit = ["--cpus", "1.5"] if os.access(group, os.W_OK) else []
    code, output = run("tests.stress", tmp_path, "--times", "2", *limit, shaky_after=1)
    assert code == 1
    assert output.splitlines()[-1] == "2 runs under load: 1 passed, 1 failed"
    assert "test_suite.py::test_shaky" in output
    assert not list(group.glob("elasticdl-stress-*"))


def test_the_load_ends_with_a_stress_run_that_is_killed() -> None:
    code = (
        "from tests.stress import busy_processors\nwith busy_processors():\n    print('busy', flush=True)\n    input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stress:
        assert stress.stdout is not None
        assert stress.stdout.readline() == "busy\n"
        stress.kill()
        assert stress.stdout.read() == ""  # the end of file: none of its processes has the pipe any more


@pytest.mark.full
def test_coverage_is_counted_for_each_package_subprocesses_included(tmp_path: Path) -> None:
    """A run of one test that only starts a process: the lines of that process are counted."""
    (tmp_path / "test_one.py").write_text(
        "import subprocess, sys\n\ndef test_one():\n"
        '    code = \'from elasticdl_client.kubernetes.names import pod_name; pod_name("a", "worker", 0)\'\n'
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    data, report = f"--data-file={tmp_path}/data", tmp_path / "report.json"
    for arguments in (
        ["run", data, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        ["combine", data, "--quiet"],
        ["json", data, "--quiet", "-o", str(report)],
    ):
        subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=REPOSITORY, check=True, capture_output=True)
    counted = by_package(json.loads(report.read_text()))
    assert counted["elasticdl_client/kubernetes"]["covered_lines"] > 0
    assert counted["total"]["num_branches"] > counted["elasticdl_client/kubernetes"]["num_branches"] > 0
    said = subprocess.run(
        [sys.executable, "-m", "tests.coverage", report], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert said.stdout.splitlines()[-1].startswith("total ")
