"""Completion as bash does it: the printed script, and what it offers at a point of a command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticdl_client import completion
from elasticdl_client import help as help_text


def script(shell: str) -> str:
    argv = [sys.executable, "-m", "elasticdl_client.main", "completion", shell]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def bash() -> str:
    return script("bash")


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


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(arguments: list[str]) -> None:
    argv = [sys.executable, "-m", "elasticdl_client.main", "completion", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "elasticdl completion bash|zsh|fish" in done.stderr
