"""An installation without the native module says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = """
import sys
from pathlib import Path
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
    assert "make setup (or pip install -e .)" in done.stderr


def test_a_local_job_is_refused_before_anything_of_it_is_started(tmp_path: Path) -> None:
    command = [
        *("train", "--runtime=local", "--job_name=j", f"--job_dir={tmp_path}/job"),
        *("--model_def=m.custom_model", f"--model_zoo={tmp_path}", f"--training_data={tmp_path}"),
    ]
    main = f"sys.argv = ['elasticdl', *{command!r}]; from elasticdl_client.main import main; main()"
    done = subprocess.run([sys.executable, "-c", HIDDEN + main], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: --runtime=local cannot run a job: The native kernels of ElasticDL are not")
    assert "make setup" in done.stderr
    assert not (tmp_path / "job").exists()
