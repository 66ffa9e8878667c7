"""Renew requirements.lock: the newest versions in the ranges of both packages.

    python scripts/lock.py [REQUIREMENT …]

Makes a new virtual environment below build/, so it downloads all packages.  A REQUIREMENT holds a package back, such as
`torch==2.13.0`, or a package with a newest version that needs a later release of the oldest supported Python.  CI and
`make setup` install the versions in the file; users install by the ranges.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from elasticdl_client.version import CLIENT, RUNTIME

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
EXTRAS = "tensorflow,allreduce,dev"
HEAD = "# What CI and developers have: versions for pip's --constraint.  Renewed by scripts/lock.py.\n"


def locked(frozen: str) -> str:
    """Return the lines of `pip freeze` for releases in an index: without our packages and local labels (`+cpu`)."""
    ours = (f"{CLIENT}==", f"{RUNTIME}==")
    lines = [line for line in frozen.splitlines() if "==" in line and not line.startswith(("-e", "#", *ours))]
    return HEAD + "".join(f"{line.partition('+')[0]}\n" for line in lines)


def main(held_back: list[str]) -> None:
    home = ROOT / "build" / "lock-venv"
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip"]
    packages = ["--editable", "./elasticdl_client", "--editable", f".[{EXTRAS}]"]
    subprocess.run([*pip, "install", "--quiet", *packages, *held_back], cwd=ROOT, check=True)
    frozen = subprocess.run([*pip, "freeze", "--all"], cwd=ROOT, check=True, capture_output=True, text=True)
    LOCK.write_text(locked(frozen.stdout))


if __name__ == "__main__":
    main(sys.argv[1:])
