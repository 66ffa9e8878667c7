"""The data of these tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.job import REPOSITORY


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("digits")
    argv = [sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(output)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return output / "train"
