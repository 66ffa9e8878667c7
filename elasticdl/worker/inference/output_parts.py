"""Parts: the output of tasks, one file a task, each whole and each once, and the result of all of them at the end.

A job that makes one pass over its data and keeps something of each task uses this:

* `writing(held)` gives the name of a file of the lease's own.  When the block ends, the master is asked whether the
  lease still counts, and only then the file becomes ``part-<task>.<extension>``.  So a task that is done twice, by a
  worker that was lost and by its successor, leaves one file, and a killed worker leaves none under a part's name.
  In storage the file is written on this machine and published whole: an upload that was begun is no file.
* the master grants one TRAIN_END lease when every task is finished, if the job's settings say `has_last_task`
  (master/settings.py).  Its worker finds all parts in `finished()`, in the order of the data, may put them
  together into one file with `writing_file(held, path)`, and removes what killed workers have left with `sweep()`.

See `worker/inference/prediction.py` for a job that does so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticdl.storage.paths import (
    PARTS,
    UNFINISHED_PARTS,
    RemotePath,
    read_in_order,
    remove_directory,
    remove_matching,
    sync_directory,
)
from elasticdl.worker.input.batches import LeaseLost
from elasticdl.worker.leases import HeldLease
from elasticdl_client.storage_kinds import AnyPath

_PREFIX = "part-"


class Parts:
    """The parts of one job in one directory that all of its workers see, also in storage."""

    def __init__(self, directory: AnyPath, extension: str, confirm: Callable[[int], bool]) -> None:
        """
        Args:
            extension: of the files, without a dot.
            confirm: `MasterLink.confirm`: whether a lease still counts.
        """
        self._directory = directory
        self._extension = extension
        self._confirm = confirm

    @contextmanager
    def writing(self, held: HeldLease) -> Iterator[Path]:
        """The path of a file to be written in the block; one that is not written leaves no part.

        Raises:
            LeaseLost: another worker has the task by now.
            StorageError: the part cannot be published.
        """
        with self.writing_named(held, part_name(held, self._extension)) as temporary:
            yield temporary

    @contextmanager
    def writing_named(self, held: HeldLease, name: str) -> Iterator[Path]:
        """The same for a file of another name beside the parts."""
        with self.writing_file(held, self._directory / name) as temporary:
            yield temporary

    @contextmanager
    def writing_file(self, held: HeldLease, final: AnyPath) -> Iterator[Path]:
        """The same for any file."""
        with confirmed_file(held, final, self._confirm) as temporary:
            yield temporary

    def finished(self) -> list[AnyPath]:
        """All parts, in the order of the data."""
        suffix = f".{self._extension}"
        found = [file for file in self._files() if file.name.startswith(_PREFIX) and file.suffix == suffix]
        return sorted(found, key=lambda part: (len(part.name), part.name))

    def names(self) -> list[str]:
        """Of all parts, in the order of the data."""
        return [part.name for part in self.finished()]

    def contents(self) -> Iterator[bytes]:
        """Yield the bytes of all parts, in the order of the data."""
        return read_in_order(self._directory, self.names())

    def sweep(self) -> None:
        """Removes what was begun and has not become a part; only when every task is finished."""
        remove_matching(self._directory, UNFINISHED_PARTS)

    def remove(self) -> None:
        """Removes all of them, what was begun, and the directory if nothing else is in it; only after the job."""
        remove_matching(self._directory, PARTS)
        if not self._files():
            remove_directory(self._directory)

    def _files(self) -> list[AnyPath]:
        return list(self._directory.iterdir()) if self._directory.is_dir() else []


def part_name(held: HeldLease, extension: str) -> str:
    """The name of the part of a lease's task."""
    return f"{_PREFIX}{held.lease.task:05d}.{extension}"


@contextmanager
def confirmed_file(held: HeldLease, final: AnyPath, confirm: Callable[[int], bool]) -> Iterator[Path]:
    """A file of the lease's own, which becomes `final` when the block has ended and the lease is confirmed.

    Raises:
        LeaseLost: the lease does not count any more; `final` is not touched.
        StorageError: it cannot be published.
    """
    if isinstance(final, RemotePath):
        with tempfile.TemporaryDirectory(prefix="elasticdl-part-") as directory:
            temporary = Path(directory, final.name)
            yield temporary
            if not confirm(held.id):
                raise LeaseLost
            if temporary.exists():
                final.storage.publish(final.url, temporary)
        return
    final = Path(str(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{held.id}.{final.name}")
    try:
        yield temporary
        if not confirm(held.id):
            raise LeaseLost
        if temporary.exists():
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, final)
            sync_directory(final.parent)
    finally:
        temporary.unlink(missing_ok=True)
