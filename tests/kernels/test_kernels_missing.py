"""An installation without the native module says so."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.ci
@pytest.mark.parametrize("statement", ["from elasticdl.kernels import _native", "import elasticdl.kernels._native"])
def test_a_missing_native_module_says_what_to_do(statement: str) -> None:
    program = f"import sys; sys.modules['elasticdl.kernels._native'] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "The native kernels of elasticdl are not built for this Python." in done.stderr
    assert "make setup" in done.stderr
