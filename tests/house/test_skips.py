"""Skips that CI accepts, and those that fail it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
@pytest.mark.parametrize(
    ("reason", "variable", "code"),
    [("there is no GPU", "listed", 0), ("I am tired", "listed", 1), ("I am tired", "", 0)],
)
def test_a_skip_for_a_reason_that_is_not_on_the_list_fails_ci(
    tmp_path: Path, reason: str, variable: str, code: int, options: list[str]
) -> None:
    test = tmp_path / "test_one.py"
    test.write_text(f"import pytest\n\ndef test_one(): pytest.skip({reason!r})\n\ndef test_two(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", *options, str(test)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "ELASTICDL_SKIPS": variable},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("not on the list of tests/skips.py: " in done.stdout) == (code == 1)
