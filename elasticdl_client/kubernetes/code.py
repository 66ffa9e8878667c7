"""--code: a directory of this machine in all pods of a job, without an image of its own.

Its files, those that git does not ignore, are packed into one archive, which lies in ConfigMaps that the job owns: a
successor gets the same code after the submitting machine is gone.  Each pod compares the digest, unpacks the archive to
where an image has its model zoo, and only then starts its process (elasticdl.rpc.unpack_code).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes import names

MAX_BYTES = 4 << 20  # compressed; etcd holds it for each job
_PART_BYTES = 180_000  # with base64, `kubectl apply` can still keep a ConfigMap in an annotation, of 256 KiB at most
_REFERENCE = re.compile(r"sha256:([0-9a-f]{64})/(\d+)")
_SKIPPED = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".elasticdl", ".ipynb_checkpoints"})
_LISTED = 3
_HINT = (
    "Data, checkpoints and environments belong on a volume, or into .gitignore; a larger program into an image "
    "(`elasticdl zoo build`)."
)


@dataclass(frozen=True, slots=True)
class Archive:
    """The packed files of a directory.

    Attributes:
        data: a compressed tar file; the same files give the same bytes.
        num_files: in it.
    """

    data: bytes
    num_files: int

    @property
    def reference(self) -> str:
        """What a job's specification says of it: the digest, and the number of its ConfigMaps."""
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}/{len(self.parts)}"

    @property
    def parts(self) -> list[bytes]:
        return [self.data[start : start + _PART_BYTES] for start in range(0, len(self.data), _PART_BYTES)]


def pack(directory: str) -> Archive:
    """Pack a directory.

    Raises:
        FlagError: it is not one, holds no file or too much, or its .gitignore cannot be read.
    """
    root = Path(directory).expanduser().absolute()
    if not root.is_dir():
        raise FlagError(f"--code={directory} is not a directory.", "Name the directory of your models or script.")
    sizes: dict[str, int] = {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(_files(root)):
            path = root / name
            if not path.is_file():  # in the index of git, and deleted; or a link to nowhere, or a socket
                continue
            content = _read(path)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(content))
            sizes[name] = len(content)
            if sum(sizes.values()) > 16 * MAX_BYTES:
                raise _too_large(directory, f"more than {16 * MAX_BYTES >> 20} MiB", sizes)
    if not sizes:
        raise FlagError(f"--code={directory} holds no file that git does not ignore.", "Name another directory.")
    data = gzip.compress(buffer.getvalue(), mtime=0)
    if len(data) > MAX_BYTES:
        raise _too_large(directory, f"{len(data) / 2**20:.1f} MiB, compressed", sizes)
    return Archive(data, len(sizes))


def config_maps(archive: Archive, job_name: str) -> list[dict[str, Any]]:
    """Return name and content of the ConfigMaps of an archive."""
    return [
        {
            "name": names.code_object(job_name, number),
            "binaryData": {names.CODE_KEY: base64.b64encode(part).decode()},
        }
        for number, part in enumerate(archive.parts)
    ]


def digest_of(reference: str) -> str:
    """Return the digest that a specification names; empty if it names no archive."""
    found = _REFERENCE.fullmatch(reference)
    return found[1] if found else ""


def volumes(job_name: str, reference: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes and mounts of a pod that unpacks an archive."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return [], []
    # Optional, as the job's Secret is: a pod of a deleted job could not end else; one without its code says so.
    sources = [
        {
            "configMap": {
                "name": names.code_object(job_name, number),
                "items": [{"key": names.CODE_KEY, "path": f"{number:04}"}],
                "optional": True,
            }
        }
        for number in range(int(found[2]))
    ]
    return (
        [
            {"name": "elasticdl-code", "projected": {"sources": sources}},
            {"name": "elasticdl-zoo", "emptyDir": {}},
        ],
        [
            {"name": "elasticdl-code", "mountPath": names.CODE_DIRECTORY, "readOnly": True},
            {"name": "elasticdl-zoo", "mountPath": names.ZOO_DIRECTORY},
        ],
    )


def _files(root: Path) -> Iterator[str]:
    """Yields the files of a directory that git does not ignore, whether or not it is in a repository."""
    if shutil.which("git"):
        yield from _by_git(root)
        return
    if (root / ".gitignore").exists():
        raise FlagError(f"--code={root} has a .gitignore, and there is no git to read it.", "Install git.")
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if not path.is_dir() and _SKIPPED.isdisjoint(name.parts):
            yield str(name)


def _by_git(root: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if not listed:  # in no repository, or ignored as a whole by that around it: one of its own, without a commit
            at_scratch = (f"--git-dir={scratch}/git", f"--work-tree={root}")
            _git(root, *at_scratch, "init", "--quiet")
            listed = _git(root, *at_scratch, "ls-files", "-z", "--others", "--exclude-standard")
    for name in (listed or b"").decode(errors="surrogateescape").split("\0"):
        if name and _SKIPPED.isdisjoint(Path(name).parts):
            yield name


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git prints; None if it refuses."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"--code: {path} cannot be read: {error.strerror}.", "Check its permissions.") from error


def _too_large(directory: str, size: str, sizes: dict[str, int]) -> FlagError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LISTED]
    listed = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    most = f"at most {MAX_BYTES >> 20} MiB"
    return FlagError(f"--code={directory} is too large, {size}: {most}. The largest files are {listed}.", _HINT)
