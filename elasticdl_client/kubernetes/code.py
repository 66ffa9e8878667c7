"""--code: a directory of this machine in all pods of a job, without an image of its own.

Its files, those that git does not ignore, are packed into one archive.  It lies in ConfigMaps that the job owns, or in
storage (--code_storage) if it is too large for them, so that a successor gets the same code after the submitting
machine is gone.  Each pod compares the digest, unpacks the archive to where an image has its model zoo, and only then
starts its process (elasticdl.rpc.unpack_code).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl_client.errors import FlagError, StorageError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.storage_kinds import check_installed, is_remote, scheme_of

MAX_BYTES = 4 << 20  # compressed; etcd holds it for each job
MAX_STORED_BYTES = 256 << 20  # compressed, in storage; each pod fetches it, and it is packed in memory
_MAX_RATIO = 16  # of the files to the archive; more is padding, and would fill the disks of the pods
_PART_BYTES = 180_000  # with base64, `kubectl apply` can still keep a ConfigMap in an annotation, of 256 KiB at most
_REFERENCE = re.compile(r"sha256:([0-9a-f]{64})(?:/(\d+)|@(.+))")
_UPLOAD_S = 900.0  # of one attempt, on the line of a laptop
_SKIPPED = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".elasticdl", ".ipynb_checkpoints"})
_LISTED = 3
_HINT = (
    "Data, checkpoints and environments belong on a volume, or into .gitignore; a larger program into an image "
    "(`elasticdl zoo build`)."
)


@dataclass(frozen=True, slots=True)
class Reference:
    """The archive as a job's specification names it.

    Attributes:
        digest: SHA-256 of the archive, in hexadecimal digits.
        num_parts: ConfigMaps that hold it; 0: it lies in storage.
        url: URL of the archive in storage; empty: it is in ConfigMaps.
    """

    digest: str
    num_parts: int = 0
    url: str = ""

    def __str__(self) -> str:
        return f"sha256:{self.digest}" + (f"@{self.url}" if self.url else f"/{self.num_parts}")

    @property
    def source(self) -> str:
        """Where a pod finds it: the directory of the ConfigMaps, or the URL."""
        return self.url or names.CODE_DIRECTORY


def parse(reference: str) -> Reference | None:
    """Return the archive that a specification names; None if it names none."""
    found = _REFERENCE.fullmatch(reference)
    return Reference(found[1], int(found[2] or 0), found[3] or "") if found else None


@dataclass(frozen=True, slots=True)
class Archive:
    """The packed files of a directory.

    Attributes:
        data: a compressed tar file; the same files give the same bytes.
        num_files: in it.
        storage: URL of the directory that it is published to; empty: it lies in ConfigMaps.
    """

    data: bytes
    num_files: int
    storage: str = ""

    @property
    def reference(self) -> Reference:
        digest = hashlib.sha256(self.data).hexdigest()
        if self.storage:
            return Reference(digest, url=f"{self.storage}/{digest}.tar.gz")
        return Reference(digest, len(self.parts))

    @property
    def parts(self) -> list[bytes]:
        """The contents of the ConfigMaps; none of an archive in storage."""
        if self.storage:
            return []
        return [self.data[start : start + _PART_BYTES] for start in range(0, len(self.data), _PART_BYTES)]


def pack(spec: JobSpec) -> Archive:
    """Pack the directory of --code.

    Raises:
        FlagError: it is not one, holds no file or too much, or its .gitignore cannot be read.
    """
    directory = spec.code
    root = Path(directory).expanduser().absolute()
    if not root.is_dir():
        raise FlagError(f"--code={directory} is not a directory.", "Name the directory of your models or script.")
    limit = MAX_STORED_BYTES if spec.code_storage else MAX_BYTES
    sizes: dict[str, int] = {}
    total = 0
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(_files(root)):
            path = root / name
            if path.is_dir():
                raise FlagError(
                    f"--code={directory}: {name} is a link to a directory: pods would not get its files.",
                    f"Replace it by the directory, or add the line /{path.name} to {path.parent / '.gitignore'}, "
                    "without a slash at its end; where git tracks it, "
                    f"`git -C {path.parent} rm --cached {path.name}` comes first.",
                )
            if not path.is_file():  # in the index of git, and deleted; or a link to nowhere, or a socket
                continue
            sizes[name] = path.stat().st_size
            total += sizes[name]
            if total > _MAX_RATIO * limit:
                raise _too_large(spec, f"more than {_MAX_RATIO * limit >> 20} MiB", sizes)
            content = _read(path)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(content))
    if not sizes:
        raise FlagError(f"--code={directory} holds no file that git does not ignore.", "Name another directory.")
    _check_script(spec, root, sizes)
    data = buffer.getvalue()
    if len(data) > limit:
        raise _too_large(spec, f"{len(data) / 2**20:.1f} MiB, compressed", sizes)
    is_stored = len(data) > MAX_BYTES or is_remote(spec.job_dir)  # such a job outlives its ConfigMaps
    return Archive(data, len(sizes), spec.code_storage.rstrip("/") if is_stored else "")


def _check_script(spec: JobSpec, root: Path, packed: Container[str]) -> None:
    for word in shlex.split(spec.job_command)[:2]:  # the program, or Python and its script
        script = os.path.normpath(word)
        if script not in packed and not os.path.isabs(script) and (root / script).is_file():
            raise FlagError(
                f"{script} is not among the files that --code={spec.code} takes to the pods: git ignores it.",
                f"`git check-ignore -v {script}` names the rule; remove it, or end it with !{script}.",
            )


def publish(archive: Archive) -> str:
    """Publish an archive of storage; one that is there already is not sent again: its name is its digest.

    Returns:
        Warnings for the user; empty for an archive in ConfigMaps.

    Raises:
        StorageError: the storage cannot be written, or a package for it is not installed here.
    """
    url = archive.reference.url
    if not url:
        return ""
    check_installed(url)
    try:
        from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy
    except ImportError as error:
        raise StorageError(
            f"--code_storage: {url} cannot be written: the package elasticdl2, which does it, is not installed here.",
            "pip install elasticdl2",
        ) from error
    storage = FsspecStorage(scheme_of(url), RetryPolicy(request_s=_UPLOAD_S))
    try:
        if not storage.exists(url) or storage.stat(url).size_bytes != len(archive.data):
            storage.publish(url, archive.data)
    except StorageError as error:
        raise StorageError(f"--code_storage: the code cannot be published: {error.what}", error.hint) from error
    size = f"{len(archive.data) / 2**20:.1f} MiB in {archive.num_files} files"
    return f"the code of --code, {size}, lies in {url}, and stays there when the job is deleted."


def config_maps(archive: Archive, job_name: str) -> list[tuple[str, dict[str, str]]]:
    """Return name and binary data of the ConfigMaps of an archive."""
    return [
        (names.code_object(job_name, number), {names.CODE_KEY: base64.b64encode(part).decode()})
        for number, part in enumerate(archive.parts)
    ]


def volumes(job_name: str, reference: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes and mounts of a pod that unpacks an archive."""
    found = parse(reference)
    if found is None:
        return [], []
    zoo = {"name": "elasticdl-zoo", "emptyDir": {}}
    zoo_mount = {"name": "elasticdl-zoo", "mountPath": names.ZOO_DIRECTORY}
    if found.url:
        return [zoo], [zoo_mount]
    # Optional, as the job's Secret is: a pod of a deleted job could not end else; one without its code says so.
    sources = [
        {
            "configMap": {
                "name": names.code_object(job_name, number),
                "items": [{"key": names.CODE_KEY, "path": f"{number:04}"}],
                "optional": True,
            }
        }
        for number in range(found.num_parts)
    ]
    return (
        [{"name": "elasticdl-code", "projected": {"sources": sources}}, zoo],
        [{"name": "elasticdl-code", "mountPath": names.CODE_DIRECTORY, "readOnly": True}, zoo_mount],
    )


def _files(root: Path) -> Iterator[str]:
    """Yield the files of a directory that git does not ignore, whether or not it is in a repository, with those of
    submodules and of other repositories in it; and links to directories."""
    if shutil.which("git"):
        yield from _by_git(root)
        return
    if (root / ".gitignore").exists():
        raise FlagError(f"--code={root} has a .gitignore, and there is no git to read it.", "Install git.")
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if (path.is_symlink() or not path.is_dir()) and _SKIPPED.isdisjoint(name.parts):
            yield str(name)


def _by_git(root: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        # In no repository, ignored as a whole by that around it, or a submodule with a damaged .git, which git names
        # alone: one of its own, without a commit.
        if listed in (None, b"", b"./\0"):
            at_scratch = (f"--git-dir={scratch}/git", f"--work-tree={root}")
            _git(root, *at_scratch, "init", "--quiet")
            listed = _git(root, *at_scratch, "ls-files", "-z", "--others", "--exclude-standard")
    for name in (listed or b"").decode(errors="surrogateescape").split("\0"):
        if not name or not _SKIPPED.isdisjoint(Path(name).parts):
            continue
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield name
        elif (path / ".git").exists():  # of another repository git lists the directory alone
            yield from (str(Path(name, inner)) for inner in _by_git(path))


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return git's output; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"--code: {path} cannot be read: {error.strerror}.", "Check its permissions.") from error


def _too_large(spec: JobSpec, size: str, sizes: dict[str, int]) -> FlagError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LISTED]
    listed = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    if spec.code_storage:
        most, hint = f"at most {MAX_STORED_BYTES >> 20} MiB, compressed, in --code_storage", _HINT
    else:
        example = f"{spec.checkpoint_dir}/code" if scheme_of(spec.checkpoint_dir) else "s3://BUCKET/code"
        most = f"at most {MAX_BYTES >> 20} MiB, compressed, without --code_storage"
        hint = f"{_HINT} Up to {MAX_STORED_BYTES >> 20} MiB go through storage: --code_storage={example}."
    return FlagError(f"--code={spec.code} is too large, {size}: {most}. The largest files are {listed}.", hint)
