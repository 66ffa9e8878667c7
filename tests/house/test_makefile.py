"""The commands of the Makefile's verbs, by `make --dry-run`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Make the files of `make setup`."""
    for name in ("bin/python", ".installed", ".native"):
        file = tmp_path / "venv" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "venv"


def commands_of(verb: str, environment: Path) -> str:
    done = subprocess.run(
        ["make", "--dry-run", verb, f"VENV={environment}", f"DEMO_VENV={environment.parent / 'demo'}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


def test_the_demo_installs_only_what_it_needs(tmp_path: Path) -> None:
    commands = commands_of("demo", tmp_path / "none")
    assert f"{tmp_path}/demo/bin/python -m pip install" in commands
    assert "requirements.py tensorflow scikit-learn" in commands
    assert not [extra for extra in ("allreduce", "dev]", "torch") if extra in commands]
    assert commands.index("==> filling") < commands.index("pip install")


def test_the_demo_takes_what_setup_has_installed(environment: Path) -> None:
    commands = commands_of("demo", environment)
    assert "pip install" not in commands
    assert f'PATH="{environment}/bin:' in commands


def test_the_demo_does_not_wait_for_an_outdated_setup(environment: Path) -> None:
    for name in (".installed", ".native"):
        os.utime(environment / name, (0, 0))
    commands = commands_of("demo", environment)
    assert f'PATH="{environment.parent}/demo/bin:' in commands
    assert f"{environment}/bin/python -m pip" not in commands
