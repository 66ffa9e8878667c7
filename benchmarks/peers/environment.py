"""Virtual environments of other TensorFlows, made once, outside the checkout.

In ``$ELASTICDL_PEERS``, or else in ``~/.cache/elasticdl-peers``, one directory for each version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_with_tensorflow(version: str) -> str:
    """The interpreter of an environment with that TensorFlow; the first time it is installed, which takes a minute."""
    home = Path(os.environ.get("ELASTICDL_PEERS", "") or Path.home() / ".cache" / "elasticdl-peers")
    directory = home / f"tensorflow-{version}"
    python, done = directory / "bin" / "python", directory / ".installed"
    if not done.exists():
        print(f"installing tensorflow-cpu {version} in {directory}", file=sys.stderr, flush=True)
        venv.create(directory, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", f"tensorflow-cpu=={version}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        done.touch()
    return str(python)


def environment() -> dict[str, str]:
    """Variables for a peer's process: it finds `benchmarks`, and TensorFlow is quiet."""
    return os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_FAIL_FAST": "use_caller"}
