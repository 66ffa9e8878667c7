"""`python -m elasticdl.rpc.unpack_code DIGEST SOURCE TARGET CACHE COMMAND…`: unpacks --code, becomes a pod's command.

The archive is in a directory with the parts of the job's ConfigMaps, or in storage.  An archive that differs from the
submitted one is not run.  The requirements.txt of the code is installed.  An error ends the pod's log.  A master is
started in spite of it, and fails the job with the error: otherwise its pod would be restarted forever.  An error of
the node, of storage or of pip does not fail a job that has begun: its container is restarted.

`installed`: installs the requirements.txt of --code with pip before the pod's process starts, once per cache.

Packages are installed into an environment on top of the image's: pip sees the image's packages, installs the missing
ones, and never changes the image's.  The environment's directory is named after the file, the Python and the image's
packages, and is complete once it has its marker file; a lock keeps pods of a node from creating it at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from elasticdl.rpc.logs import log_to_stdout
from elasticdl.storage.paths import RemotePath, on_this_machine, path_of
from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.errors import ElasticDLError, JobError, StorageUnreachable
from elasticdl_client.requirements_file import FILE, contents
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import AnyPath

_AGAIN = "Submit the job again."
_UNPACKED = ".elasticdl-code"  # has the digest of completely unpacked code, for the container's next start


class NodeError(JobError):
    """The cause may be the node, its volumes, or a package index, not the code: the next start may succeed."""


def unpack(source: AnyPath, target: Path, digest: str) -> None:
    """Unpack an archive; its files and directories become read-only.

    Args:
        source: The directory of its parts, or the archive in storage.
        target: The directory for its files.
        digest: SHA-256 of the submitted archive, as hexadecimal digits.

    Raises:
        JobError: the archive is missing, or is not the submitted one.
        NodeError: files cannot be read or written.
        StorageError: the storage cannot be reached.
    """
    try:
        _unpack(source, target, digest)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise NodeError(
            f"The code cannot be unpacked in {target}: {error}.",
            "Pods need room for the files of --code: free space on their nodes, or ask for more disk."
            if is_full
            else "Look at the volumes of the pod, and at its node.",
        ) from error


def _unpack(source: AnyPath, target: Path, digest: str) -> None:
    mark = target / _UNPACKED
    if mark.is_file() and mark.read_text() == digest:
        return
    with _opened(source) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise JobError(f"The code in {_name(source)} is not the code that was submitted.", _AGAIN)
        file.seek(0)
        directories: set[Path] = set()
        with tarfile.open(fileobj=file, mode="r:gz") as archive:  # without `filter`, which Python 3.11.0 lacks
            for member in archive:
                directories |= _write(archive, member, target)
    mark.write_text(digest)
    for directory in directories:
        directory.chmod(0o555)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> set[Path]:
    """Write a file; return its parent directories below the target."""
    content = archive.extractfile(member) if member.isfile() else None
    path = target / member.name
    if content is None or member.name.startswith("/") or ".." in path.parts:
        raise JobError(f"The code is not run: {member.name} is not a file below the directory.", _AGAIN)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by a killed run
    path.write_bytes(content.read())
    path.chmod(member.mode & 0o555)
    return {directory for directory in path.parents if directory != target and directory.is_relative_to(target)}


@contextlib.contextmanager
def _opened(source: AnyPath) -> Iterator[io.BufferedIOBase]:
    if isinstance(source, RemotePath):
        try:
            with on_this_machine(source) as copy, open(copy, "rb") as file:
                yield file
        except FileNotFoundError as error:
            raise JobError(f"The code of the job is gone from {source}.", _AGAIN) from error
        return
    parts = sorted(Path(str(source)).glob("[0-9]*"))
    if not parts:
        raise JobError("The ConfigMaps with the code of the job are gone.", _AGAIN)
    yield io.BytesIO(b"".join(part.read_bytes() for part in parts))


def _name(source: AnyPath) -> str:
    return str(source) if isinstance(source, RemotePath) else "the ConfigMaps of the job"


def main() -> None:
    """Unpack the code, and become the command."""
    digest, source, target, cache, *command = sys.argv[1:]
    log_to_stdout()
    signal.signal(signal.SIGTERM, _end)  # the first process of a container ignores it by default
    changes: dict[str, str] = {}
    try:
        unpack(path_of(source), Path(target), digest)
        changes = installed(Path(target), Path(cache))
    except ElasticDLError as error:
        if not os.environ.get("ELASTICDL_JOB_NAME"):  # which only the master has
            sys.exit(f"--code: {error}")
        may_pass = isinstance(error, NodeError | StorageUnreachable)
        changes = {CODE_ERROR_VARIABLE: json.dumps([f"--code: {error.what}", error.hint, may_pass])}
    os.execvpe(command[0], command, {**os.environ, **changes})


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


_log = logging.getLogger("elasticdl.rpc.unpack_code")
_COMPLETE = ".complete"
_NUM_LINES = 6  # of pip's output in an error; a failed pod is reported with the last ten lines of its log
_SATISFIED = "Requirement already satisfied"
_HINT = (
    "Name packages that the index has. PIP_* variables of --envs or of the image set pip's "
    "indexes (PIP_INDEX_URL, PIP_FIND_LINKS). Or build an image with the packages in it."
)


def installed(directory: Path, cache: Path) -> dict[str, str]:
    """Install the requirements of a directory, if it has any.

    Args:
        directory: The directory of the user's code.
        cache: The directory of environments; created if it does not exist.

    Returns:
        The environment variables that make the packages importable; empty without requirements.

    Raises:
        NodeError: pip has failed, or the cache cannot be written.
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
                if not (environment / _COMPLETE).exists():  # another pod may have made it meanwhile
                    _install(requirements, environment, cache)
    except OSError as error:
        raise NodeError(
            f"The requirements cannot be installed in {cache}: {error}.",
            "Pods must be able to write to this directory, which --requirements_cache names, and run programs in it.",
        ) from error
    path = os.pathsep.join([str(environment / "bin"), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "VIRTUAL_ENV": str(environment)}


def _key(requirements: Path) -> str:
    """Return a digest of everything that an environment depends on."""
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
    shutil.rmtree(environment, ignore_errors=True)  # left by a killed pod
    venv.EnvBuilder(symlinks=True).create(environment)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (own / "image.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in _packages()))
    _log.info("%s: pip installs what the image lacks", FILE)
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    ended, last = _run(  # --compile: the image has PYTHONDONTWRITEBYTECODE=1, so each start would compile again
        [*command, "--compile", "--disable-pip-version-check", "--requirement", requirements.name],
        requirements.parent,
        {"PIP_CACHE_DIR": str(cache / "pip"), **os.environ},
    )
    if ended:
        shutil.rmtree(environment, ignore_errors=True)
        said = "\n".join(f"  {line}" for line in last)
        raise NodeError(f"{FILE} cannot be installed: pip has ended with {ended}:\n{said}", _HINT)
    (environment / _COMPLETE).touch()
    num = len(list(own.glob("*.dist-info")))
    _log.info("%s: %d packages installed in %.1f s", FILE, num, time.monotonic() - started)


def _run(command: list[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run pip and log its output; return its exit code and its last lines."""
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
        except BaseException:  # a signal: the pod must end
            pip.kill()
            raise
    return pip.returncode, list(last)


if __name__ == "__main__":
    main()
