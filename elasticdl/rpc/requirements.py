"""The requirements.txt of --code in a pod: installed by pip before the pod's process starts, once for each cache.

What is installed lies in an environment over that of the image: pip sees the image's packages and installs what they
do not satisfy, and never touches them.  Its directory is named after the file, the Python and the image's packages, and
is complete once the mark in it is there; a lock keeps pods of one node from making it at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import time
import venv
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from elasticdl_client.errors import JobError
from elasticdl_client.requirements_file import FILE, contents
from elasticdl_client.secret_values import hide

_log = logging.getLogger("elasticdl.rpc.requirements")
_COMPLETE = ".complete"
_NUM_LINES = 6  # of pip's in an error; the log has all, and a pod's failure is told with the ten last lines of that
_SATISFIED = "Requirement already satisfied"
_HINT = (
    "Name packages that the index has. Where pip looks is said by PIP_* variables in --envs (PIP_INDEX_URL, "
    "PIP_FIND_LINKS) or by the image; or build an image with the packages in it."
)


def installed(directory: Path, cache: Path) -> dict[str, str]:
    """Install the requirements of a directory, if it has any.

    Args:
        directory: of the user's code.
        cache: the directory that holds environments; made if it does not exist.

    Returns:
        The variables with which processes find what was installed; empty without requirements.

    Raises:
        JobError: pip has failed, or the cache cannot be written.
    """
    requirements = directory / FILE
    if not requirements.is_file():
        return {}
    cache = cache.absolute()  # pip runs in another directory
    environment = cache / f"python{sysconfig.get_python_version()}-{_key(requirements)}"
    try:
        if not (environment / _COMPLETE).exists():
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(environment.with_suffix(f"{environment.suffix}.lock")):
                if not (environment / _COMPLETE).exists():  # another pod has made it meanwhile
                    _install(requirements, environment, cache)
    except OSError as error:
        raise JobError(
            f"The requirements cannot be installed in {cache}: {error}.",
            "Pods must be able to write to this directory, which --requirements_cache names, and run programs in it.",
        ) from error
    path = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "VIRTUAL_ENV": str(environment)}


def _key(requirements: Path) -> str:
    """Return what an environment depends on, as a digest."""
    packages = sorted(one.name for place in _packages() for one in Path(place).glob("*.dist-info"))
    parts = [contents(requirements), sys.version.encode(), sys.prefix.encode(), "\0".join(packages).encode()]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:32]


def _packages() -> list[str]:
    """Return the directories of the image's packages."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("%s: waiting for another pod that installs it", FILE)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(requirements: Path, environment: Path, cache: Path) -> None:
    started = time.monotonic()
    shutil.rmtree(environment, ignore_errors=True)  # of a pod that was killed meanwhile
    venv.EnvBuilder(symlinks=True).create(environment)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (own / "image.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in _packages()))
    _log.info("%s: pip installs what the image lacks", FILE)
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    ended, last = _run(
        [*command, "--disable-pip-version-check", "--requirement", requirements.name],
        requirements.parent,
        {"PIP_CACHE_DIR": str(cache / "pip"), **os.environ},
    )
    if ended:
        shutil.rmtree(environment, ignore_errors=True)
        said = "\n".join(f"  {line}" for line in last)
        raise JobError(f"{FILE} cannot be installed: pip has ended with {ended}:\n{said}", _HINT)
    (environment / _COMPLETE).touch()
    num = len(list(own.glob("*.dist-info")))
    _log.info("%s: %d packages installed in %.1f s", FILE, num, time.monotonic() - started)


def _run(command: list[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run pip and log what it prints; return its exit code and its last lines."""
    last: deque[str] = deque(maxlen=_NUM_LINES)
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if line.strip() and not line.startswith(_SATISFIED):
                    last.append(hide(line.rstrip()))
                    _log.info("pip: %s", last[-1])
        except BaseException:  # a signal: the pod is to end
            pip.kill()
            raise
    return pip.returncode, list(last)
