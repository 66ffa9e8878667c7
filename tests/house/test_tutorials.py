"""The tutorials are true as far as that can be seen without a cluster; the others are run by `make e2e`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client import run_script
from elasticdl_client.job_spec import flag_defaults
from tests.house.documents import REPOSITORY, bash_blocks, clone, run_page

STARTS = sorted((REPOSITORY / "docs" / "start").glob("*.md"))
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "docs/install.md", "docs/monitor.md")),
    *sorted((REPOSITORY / "docs" / "tutorials").glob("*.md")),
    *STARTS,
]


def commands(script: str, program: str) -> list[str]:
    """Calls of a program, each in one line."""
    return re.findall(rf"^\s*{program} .*", script.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_the_tutorials_are_sound_bash_and_their_flags_exist(page: Path) -> None:
    known = {f"--{name}" for name in flag_defaults("train")} | {"--help"}
    script = "\n".join(bash_blocks(page))
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0
    for command in commands(page.read_text(), "elasticdl train"):
        command = re.sub(r'--job_command="[^"]*"', "--job_command=…", command)  # a script has flags of its own
        assert set(re.findall(r"(?<![\w-])--[a-z_]+", command)) <= known, command
    for command in commands(page.read_text(), "elasticdl run"):
        assert run_script.split(shlex.split(command)[2:]).script, command  # an unknown flag raises


@pytest.mark.timeout(300)
def test_the_local_tutorial_works_word_for_word(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    page = REPOSITORY / "docs" / "tutorials" / "local.md"
    said = run_page(page, clone(tmp_path / "elasticdl"), Path(sys.executable).parent, 240, HOME=str(home))
    assert said.count("records 1437, committed 1437, repeated 0, lost 0") >= 10, said
    assert re.search(r"Loss = [0-9.]+, steps = \d+", said), said
    assert "Evaluation metrics[step=450]: {'accuracy': 0.9" in said, said
    assert "Job tutorial succeeded." in said, said
    assert not list(home.glob(".elasticdl/jobs/*")), "the page cleans up"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in STARTS if bash_blocks(page)], ids=lambda page: page.stem)
def test_the_start_pages_work_word_for_word(page: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    said = run_page(page, clone(tmp_path / "elasticdl"), Path(sys.executable).parent, 500, HOME=str(home))
    assert f"Job start-{page.stem} succeeded." in said, said
    assert ", repeated 0, lost 0" in said, said
