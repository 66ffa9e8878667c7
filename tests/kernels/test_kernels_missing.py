"""An installation without the native module says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "elasticdl.kernels._native":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize("statement", ["from elasticdl.kernels import _native", "import elasticdl.kernels._native"])
def test_a_missing_native_module_says_what_to_do(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN + statement], capture_output=True, text=True)
    assert done.returncode != 0
    assert "The native kernels of ElasticDL are not built for this Python." in done.stderr
    assert "make setup" in done.stderr
