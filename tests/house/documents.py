"""A page of the documentation as a script: its bash blocks, word for word and in order, in one shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)  # not those of another tag: ```bash cloud


def bash_blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text())


def clone(directory: Path) -> Path:
    """The checkout as it is, committed or not, as a user would have it after `make setup`."""
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True,
    ).stdout  # fmt: skip
    present = b"\0".join(name for name in files.split(b"\0") if name and (REPOSITORY / os.fsdecode(name)).is_file())
    copy = f"tar -c --null -T - | tar -x -C {shlex.quote(str(directory))}"
    directory.mkdir(parents=True)
    subprocess.run(["bash", "-c", copy], cwd=REPOSITORY, input=present, check=True)
    for native in (REPOSITORY / "elasticdl" / "kernels").glob("_native.*.so"):
        shutil.copy2(native, directory / "elasticdl" / "kernels")
    for objects in (REPOSITORY / "build").glob("temp.*"):  # of the kernels: a wheel is built from them
        shutil.copytree(objects, directory / "build" / objects.name)
    return directory


def run_page(page: Path, directory: Path, bin_path: Path, timeout_s: float, **environment: str) -> str:
    """Runs a page's blocks until one fails.

    Args:
        bin_path: where `python` and `elasticdl` are.

    Returns:
        What they printed, each command above its output.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(_announced(block) for block in bash_blocks(page))],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        env={**inherited, **environment, "PATH": f"{bin_path}{os.pathsep}{inherited['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, f"{page.name} failed with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _announced(block: str) -> str:
    commands = "".join(f"$ {line}\n" for line in block.splitlines())
    return f"printf '%s' {shlex.quote(commands)}\n{block}"
