"""`python -m elasticdl.rpc.unpack_code DIGEST SOURCE TARGET CACHE COMMAND…`: unpacks --code, becomes a pod's command.

The archive lies in a directory with the parts of the job's ConfigMaps, or in storage.  What is not what was submitted
is not run.  The requirements.txt of the code is installed (elasticdl.rpc.requirements).  An error ends the pod's log; a
master is started all the same, and ends the job with the error: its pod would be restarted without end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from elasticdl.rpc import requirements
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.storage.paths import RemotePath, on_this_machine, path_of
from elasticdl_client.any_path import AnyPath
from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.errors import ElasticDLError, JobError

_AGAIN = "Submit the job again."
_UNPACKED = ".elasticdl-code"  # holds the digest of what was unpacked whole, for the next life of a container


def unpack(source: AnyPath, target: Path, digest: str) -> None:
    """Unpack an archive, without permission to write to what it holds.

    Args:
        source: the directory of its parts, or the archive in storage.
        target: where its files go.
        digest: SHA-256 of the archive as it was submitted, in hexadecimal digits.

    Raises:
        JobError: it is not there, or not the one that was submitted.
        StorageError: the storage cannot be reached.
    """
    mark = target / _UNPACKED
    if mark.is_file() and mark.read_text() == digest:
        return
    with _opened(source) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise JobError(f"The code in {_name(source)} is not the code that was submitted.", _AGAIN)
        file.seek(0)
        directories: set[Path] = set()
        with tarfile.open(fileobj=file, mode="r:gz") as archive:  # its `filter` is newer than Python 3.11.0
            for member in archive:
                directories |= _write(archive, member, target)
    mark.write_text(digest)
    for directory in directories:
        directory.chmod(0o555)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> set[Path]:
    """Write a file; return the directories that it lies in, below the target."""
    content = archive.extractfile(member) if member.isfile() else None
    path = target / member.name
    if content is None or member.name.startswith("/") or ".." in path.parts:
        raise JobError(f"The code is not run: {member.name} is not a file below the directory.", _AGAIN)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a life that was killed meanwhile
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
    """Become the command."""
    digest, source, target, cache, *command = sys.argv[1:]
    log_to_stdout()
    signal.signal(signal.SIGTERM, _end)  # the first process of a container has to say so
    changes: dict[str, str] = {}
    try:
        unpack(path_of(source), Path(target), digest)
        changes = requirements.installed(Path(target), Path(cache))
    except ElasticDLError as error:
        if not os.environ.get("ELASTICDL_JOB_NAME"):  # that of the master alone
            sys.exit(f"--code: {error}")
        changes = {CODE_ERROR_VARIABLE: json.dumps([f"--code: {error.what}", error.hint])}
    os.execvpe(command[0], command, {**os.environ, **changes})


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
