"""Completion as bash does it: the printed script, and what it offers at a point of a command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client import completion
from elasticdl_client import help as help_text
from elasticdl_client.job_status import JobPhase, JobStatus
from tests.client.api_server import NAMESPACE, own_cluster
from tests.dashboard.written_jobs import write_job

PRINT_JOBS = "import sys; from elasticdl_client import completion; completion.print_jobs(sys.argv[1:], 100.0)"


def script(shell: str) -> str:
    argv = [sys.executable, "-m", "elasticdl_client.main", "completion", shell]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def bash() -> str:
    return script("bash")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of this machine, one of them with a name that a shell would run."""
    program = tmp_path / "elasticdl"  # with the time that a busy machine takes
    program.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{PRINT_JOBS}' \"$@\"\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    write_job(tmp_path / ".elasticdl" / "jobs" / "digits", JobStatus("digits", JobPhase.RUNNING))
    write_job(tmp_path / ".elasticdl" / "jobs" / "ugly", JobStatus("$(touch${IFS}made)"))


def offered(bash: str, *words: str) -> list[str]:
    """Return bash's completions of the last of some words, split as bash splits them."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"{bash}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _elasticdl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True)
    assert done.stderr == ""
    return [line for line in done.stdout.split("\n") if line]


def test_commands_are_offered(bash: str) -> None:
    assert offered(bash, "elasticdl", "") == [f"{command} " for command in help_text.COMMANDS]
    assert offered(bash, "elasticdl", "tr") == ["train "]
    assert offered(bash, "elasticdl", "zoo", "b") == ["build "]


def test_flags_of_the_command_are_offered(bash: str) -> None:
    assert offered(bash, "elasticdl", "train", "--num_w") == ["--num_workers="]
    assert offered(bash, "elasticdl", "train", "--job_name", "=", "x", "--dry") == ["--dry_run "]
    assert offered(bash, "elasticdl", "status", "job", "--wat") == ["--watch "]
    assert offered(bash, "elasticdl", "status", "job", "--num_w") == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--runtime", "=", "l"], ["local "]),
        (["--runtime", "="], ["kubernetes ", "local "]),
        (["--runtime", "l"], ["local "]),
        (["--runtime", ""], ["kubernetes ", "local "]),
        (["--use_async", "f"], ["false "]),
        (["--use_async", "--num_w"], ["--num_workers="]),
        (["--job_name=x", "--num_w"], ["--num_workers="]),
        (["--training_data", "bu"], []),
        (["--runtime=l"], ["--runtime=local "]),  # zsh leaves the word whole
        (["--use_async", "="], ["true ", "false "]),
        (["--training_data", "=", "bu"], []),  # a path, which the shell completes
    ],
)
def test_values_are_offered(bash: str, words: list[str], expected: list[str]) -> None:
    assert offered(bash, "elasticdl", "train", *words) == expected


def test_flags_are_offered_after_a_bare_boolean_too(bash: str) -> None:
    after = offered(bash, "elasticdl", "logs", "--follow", "")
    assert after == ["true ", "false ", *offered(bash, "elasticdl", "logs", "")]
    assert "--follow " in after


def test_formats_are_those_of_the_command(bash: str) -> None:
    assert offered(bash, "elasticdl", "status", "--output", "=") == ["json ", "yaml "]


def test_every_command_has_its_flags_in_each_script(bash: str) -> None:
    fish = script("fish")
    assert script("zsh").endswith(bash)
    for command in help_text.COMMANDS:
        for name in completion.flags_of(command):
            assert f"--{name}" in bash
            assert f"'__fish_seen_subcommand_from {command}' -l {name}" in fish


@pytest.mark.usefixtures("jobs")
def test_names_of_jobs_are_offered_where_a_command_takes_one(bash: str, tmp_path: Path) -> None:
    assert offered(bash, "elasticdl", "status", "di") == ["digits "]
    assert "digits " in offered(bash, "elasticdl", "delete", "")
    assert offered(bash, "elasticdl", "status", "digits", "--wat") == ["--watch "]
    assert offered(bash, "elasticdl", "status", "--runtime", "=", "kubernetes", "di") == []
    assert offered(bash, "elasticdl", "list", "di") == []
    assert not list(Path.cwd().glob("made"))
    assert "__fish_seen_subcommand_from status' -a '(elasticdl completion jobs " in script("fish")


def names_of_jobs(*words: str) -> str:
    argv = [sys.executable, "-c", PRINT_JOBS, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.usefixtures("jobs")
def test_names_of_jobs_come_from_the_place_that_the_command_line_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_cluster(tmp_path, monkeypatch) as cluster:
        cluster.add_pod("master", [])
        assert names_of_jobs("status", "") == "digits\njob\n"
        assert names_of_jobs("logs", "-n", NAMESPACE, "") == "job\n"
        assert names_of_jobs("logs", "--namespace", "=", "other", "") == ""
        assert names_of_jobs("logs", "--runtime=local", "") == "digits\n"
        assert names_of_jobs("logs", "--context=nowhere", "--namespace") == ""
        assert names_of_jobs("logs", "--runtime=nonsense", "") == ""


@pytest.mark.usefixtures("jobs")
def test_a_cluster_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {"clusters": [server], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
        (tmp_path / "config").write_text(json.dumps(config | {"current-context": "c"}))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        argv = [sys.executable, "-m", "elasticdl_client.main", "completion", "jobs", "status", "-n", "team", ""]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=25)  # it would be asked for 30 s
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(arguments: list[str]) -> None:
    argv = [sys.executable, "-m", "elasticdl_client.main", "completion", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "elasticdl completion bash|zsh|fish" in done.stderr
