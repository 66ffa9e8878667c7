"""A page of the documentation as a script: its bash blocks, word for word and in order, in one shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)  # not those of another tag: ```bash cloud


def bash_blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text())


def halves(page: Path, heading: str) -> tuple[list[str], list[str]]:
    """A page's blocks above one of its headings, and those below it."""
    above, found, below = page.read_text().partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return _BLOCK.findall(above), _BLOCK.findall(below)


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
    """Runs a page's blocks: see `run_blocks`."""
    return run_blocks(page.name, bash_blocks(page), directory, bin_path, timeout_s, **environment)


def run_blocks(
    name: str, blocks: Sequence[str], directory: Path, bin_path: Path, timeout_s: float, **environment: str
) -> str:
    """Runs blocks in one shell until a command fails.

    Args:
        name: for errors.
        bin_path: where `python` and `elasticdl` are.

    Returns:
        Their output, each below its command.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(_announced(block) for block in blocks)],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        env={**inherited, **environment, "PATH": f"{bin_path}{os.pathsep}{inherited['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, f"{name} failed with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _announced(block: str) -> str:
    commands = "".join(f"$ {line}\n" for line in block.splitlines())
    return f"printf '%s' {shlex.quote(commands)}\n{block}"
