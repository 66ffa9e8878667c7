"""The versions in a directory of checkpoints: their names, whether they are complete, how one is created and removed.

A checkpoint is ``<checkpoint_dir>/version-<N>/`` with a MANIFEST.json, which is written last: a directory without one
is not a checkpoint.  That is the same for checkpoints of parameter servers and of workers, on file systems and in
storage; the content of the files and the manifest belongs to their writers.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from elasticdl.storage.paths import make_directory, remove_directory, remove_file, remove_if_empty, writing
from elasticdl_client.checkpoint_manifest import MANIFEST, NewerFormat, read_manifest, with_checksum
from elasticdl_client.errors import CheckpointError, ElasticDLError, StorageError, StorageUnreachable
from elasticdl_client.storage_kinds import AnyPath, is_remote

PREFIX = "version-"
T = TypeVar("T")
PATIENCE_S = 1800.0  # the same as for a part that a PS writes
_PAUSE_S = 2.0  # between reads: a mount without its server fails at once
_SAY_AGAIN_S = 60.0
_OF_LOST_VOLUMES = frozenset(  # a network file system without its server, a disk in replacement
    {
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.EREMOTEIO, errno.ESHUTDOWN, errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENODEV, errno.ENXIO),
    }
)

_log = logging.getLogger("elasticdl.storage")


class NoneIsWhole(CheckpointError):
    """No checkpoint of this job can be restored; starting from scratch silently would lose the training.

    Attributes:
        damaged: The fault of each checkpoint.
    """

    def __init__(self, checkpoint_dir: AnyPath, damaged: Sequence[str]) -> None:
        super().__init__(
            f"no checkpoint in {checkpoint_dir} can be restored",
            "repair one: a new job with --model_def, not of Local, takes it by --checkpoint_dir_for_init with another "
            "--checkpoint_dir, and a script or a job of Local continues from it under the same --job_name and "
            f"--checkpoint_dir; to begin anew, move {checkpoint_dir} away or name another --checkpoint_dir",
        )
        self.damaged = tuple(damaged)

    def __str__(self) -> str:
        return "\n".join([self.what, *self.damaged, f"  → {self.hint}"])


def directory_of(checkpoint_dir: AnyPath, number: int) -> AnyPath:
    """Return the directory of the checkpoint with a number."""
    return checkpoint_dir / f"{PREFIX}{number}"


def versions(checkpoint_dir: AnyPath) -> list[AnyPath]:
    """Return the directories of checkpoints, complete or not, oldest first."""
    try:
        found = {path.name.removeprefix(PREFIX): path for path in checkpoint_dir.iterdir() if _has_number(path.name)}
    except FileNotFoundError:
        return []
    return [found[number] for number in sorted(found, key=int)]


def complete(checkpoint_dir: AnyPath) -> list[AnyPath]:
    """Return the directories of complete checkpoints, oldest first."""
    return [path for path in versions(checkpoint_dir) if is_complete(path)]


def is_complete(directory: AnyPath) -> bool:
    """Return whether a directory is a checkpoint; its files may still be damaged.

    Raises:
        OSError, StorageError: it cannot be read.
    """
    manifest = directory / MANIFEST
    if not isinstance(manifest, Path):
        return manifest.exists()
    try:
        manifest.stat()  # not `exists`, which is False for any OSError on Python 3.14
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def begin(checkpoint_dir: AnyPath, number: int) -> AnyPath:
    """Create the empty directory of a checkpoint; remove an earlier writer's files in it.

    Raises:
        CheckpointError: it cannot be created.
    """
    directory = directory_of(checkpoint_dir, number)
    try:
        if directory.exists():
            _remove(directory)
        make_directory(directory)
    except (OSError, StorageError) as error:
        raise CheckpointError(f"the checkpoint directory {directory} cannot be created: {reason(error)}") from error
    return directory


def begin_beside(checkpoint_dir: AnyPath, number: int, is_same: Callable[[AnyPath], bool]) -> AnyPath | None:
    """Create the directory of a checkpoint that others may be writing, too, unless it is already complete.

    Args:
            is_same: Returns whether a complete checkpoint has the contents to be written; if not, it is removed first.
                A checkpoint that becomes complete later is of another writer, and has them.

    Returns:
        The directory; None if the checkpoint exists.

    Raises:
        CheckpointError: it cannot be created.
    """
    directory = directory_of(checkpoint_dir, number)
    try:
        if is_complete(directory):
            if is_same(directory):
                return None
            _remove(directory)
        make_directory(directory)
    except (OSError, StorageError) as error:
        raise CheckpointError(f"the checkpoint directory {directory} cannot be created: {reason(error)}") from error
    return directory


def commit(directory: AnyPath, manifest: Mapping[str, Any]) -> None:
    """Make a directory with all its files a checkpoint; see `committing` for arguments and errors."""
    with committing(directory, manifest):
        pass


@contextmanager
def committing(directory: AnyPath, manifest: Mapping[str, Any], tag: str = "new") -> Iterator[None]:
    """Make a directory a checkpoint when the block, which writes its files, ends.

    The manifest is allocated before: a full disk fails before any file has its final name.

    Args:
        manifest: The manifest, without its checksum.
        tag: Part of the temporary name; see `writing`.

    Raises:
        CheckpointError: the checkpoint could not be completed.
    """
    path = directory / MANIFEST
    try:
        with writing(path, tag) as file:
            file.write(json.dumps(with_checksum(manifest)).encode())
            file.flush()
            yield
    except (OSError, StorageError) as error:
        raise CheckpointError(f"the manifest {path} cannot be written: {reason(error)}") from error


def unreadable(what: str, error: OSError, hint: str) -> CheckpointError | StorageUnreachable:
    """Return the error of an unreadable file: StorageUnreachable if its volume may answer later."""
    kind = StorageUnreachable if error.errno in _OF_LOST_VOLUMES else CheckpointError
    return kind(f"{what} cannot be read: {reason(error)}", hint)


class Patience:
    """How long reads of an unreadable checkpoint are retried, from the first failure on."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None
        self._logged: tuple[str, float] = ("", 0.0)  # the reason, and when it was logged

    def is_over(self, error: StorageUnreachable) -> bool:
        """Note a failed read; return whether to give up.  The same reason is logged once per minute."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= self._patience_s:
            return True
        reason, logged_at = self._logged
        if reason != error.what or now - logged_at > _SAY_AGAIN_S:
            self._logged = error.what, now
            _log.warning("The checkpoint cannot be read now, and is asked for again: %s", error.what)
        return False


def when_reachable(read: Callable[[], T], patience_s: float = PATIENCE_S, pause_s: float = _PAUSE_S) -> T:
    """Read, and retry while storage does not answer: giving up would end the job.

    Raises:
        StorageUnreachable: it has not answered for `patience_s`.
    """
    patience = Patience(patience_s)
    while True:
        try:
            return read()
        except StorageUnreachable as error:
            if patience.is_over(error):
                raise
        time.sleep(pause_s)


def abandon(directory: AnyPath) -> None:
    """Remove the directory of an unfinished checkpoint; leave a complete one alone."""
    try:
        if not is_complete(directory):
            _remove(directory)
    except (OSError, StorageError) as error:
        _log.warning("%s cannot be removed: %s", directory, reason(error))


def abandon_beside(directory: AnyPath) -> None:
    """Remove a directory if it is empty: files in it may be another writer's."""
    try:
        remove_if_empty(directory)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", directory, reason(error))


def prune(checkpoint_dir: AnyPath, keep_max: int, newest: int | None = None) -> None:
    """Keep the newest `keep_max` complete checkpoints, at least one; 0 keeps all.

    Incomplete checkpoints older than the newest are deleted, too, and temporary files in the one before the newest,
    which killed writers have left.

    Args:
        checkpoint_dir: The directory.
        keep_max: How many to keep.
        newest: Number of the one just written.  Higher numbers are of an abandoned state, maybe because they are
            damaged: they are left alone and do not count.  None: the highest number.
    """
    try:
        found = [path for path in versions(checkpoint_dir) if newest is None or number_of(path) <= newest]
        whole = [path for path in found if is_complete(path)]
        older = found[: found.index(whole[-1])] if whole else []
        kept = whole[-keep_max:] if keep_max > 0 else whole
        for path in older:
            if path not in kept:
                _remove_old(path)
        for path in kept[-2:-1]:
            _remove_temporary(path)
    except (OSError, StorageError) as error:
        _log.warning("The old checkpoints in %s cannot be removed: %s", checkpoint_dir, reason(error))


def reason(error: OSError | ElasticDLError) -> str:
    """Return the message of an error of a file system, without the path, or of an `ElasticDLError`."""
    return error.what if isinstance(error, ElasticDLError) else error.strerror or str(error)


def _remove_old(directory: AnyPath) -> None:
    try:
        _remove(directory)
    except (OSError, StorageError, NewerFormat) as error:
        _log.warning("The old checkpoint %s cannot be removed: %s", directory, reason(error))


def _remove(directory: AnyPath) -> None:
    """Remove a checkpoint, its manifest first: then it is no longer a checkpoint if this is interrupted.

    Raises:
        OSError, StorageError: it cannot be removed.
        NewerFormat: a later version of ElasticDL wrote it.
    """
    try:
        read_manifest(directory / MANIFEST)
    except NewerFormat:
        raise
    except (OSError, CheckpointError):  # there is no manifest, or it is damaged
        pass
    remove_file(directory / MANIFEST)
    remove_directory(directory)


def _remove_temporary(directory: AnyPath) -> None:
    """Delete temporary files with names from `writing`."""
    if is_remote(str(directory)):
        return
    names = {path.name for path in directory.iterdir()}
    for name in names:
        if name.startswith(".") and name[1:].rpartition(".")[0] in names:
            remove_file(directory / name)


def number_of(directory: AnyPath) -> int:
    return int(directory.name.removeprefix(PREFIX))


def _has_number(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()
