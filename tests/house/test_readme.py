"""The README tells the truth: its commands run, its links lead somewhere, its flags exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from elasticdl_client.job_spec import flag_defaults
from elasticdl_client.jobs.options import FORMATS, options_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_OURS = {"--quick", "--json", "--workers", "--seconds", "--find-links"}  # of the benchmarks; of pip
OF_SCRIPTS = {"--output", "--source"}
OF_JOB_COMMANDS = {f"--{name}" for command in FORMATS for name in options_of(command)}
OF_OTHER_COMMANDS = OF_JOB_COMMANDS | {"--print", "--local_pkg_dir", "--image", "--without"}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def run(script: str, directory: Path, path: list[Path], home: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": os.pathsep.join([*map(str, path), environment["PATH"]]), "HOME": str(home)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_the_commands_of_the_readme_are_sound_bash() -> None:
    found = blocks(ROOT / "README.md")
    assert found
    for block in found:
        assert subprocess.run(["bash", "-n", "-c", block]).returncode == 0, block


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 66


def test_every_link_of_our_pages_leads_to_a_file() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_flag_that_the_readme_names_exists() -> None:
    known = (
        {f"--{name}" for name in flag_defaults("train")}
        | NOT_OURS
        | {"--help", "--quiet", "--version"}
        | OF_SCRIPTS
        | OF_OTHER_COMMANDS
    )
    pages = (
        "README",
        *(f"docs/{name}" for name in ("exactly_once", "features", "install", "model_definition", "monitor")),
    )
    for page in (ROOT / f"{name}.md" for name in pages):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", page.read_text()))
        unknown = named - known - {name for name in named if f"--{name[2:].replace('-', '_')}" in known}
        assert not unknown, f"{page.name}: {unknown}"


def test_every_verb_that_a_page_names_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ROOT.glob("*.md"):
        for verb in set(re.findall(r"`make ([\w-]+)", page.read_text())):
            assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"{page.name}: make {verb}"


def test_the_help_that_the_documentation_shows_is_there(tmp_path: Path) -> None:
    command = tmp_path / "elasticdl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m elasticdl_client.main "$@"\n')
    command.chmod(0o755)
    (help_block,) = [block for block in blocks(ROOT / "docs" / "monitor.md") if "--help" in block]
    done = run(help_block, ROOT, [tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--num_workers" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_readme_works_from_a_fresh_clone(tmp_path: Path) -> None:
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(environment, with_pip=True)
    for block in blocks(ROOT / "README.md"):
        done = run(block, clone, [environment / "bin"], tmp_path)
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    shutil.rmtree(clone)
