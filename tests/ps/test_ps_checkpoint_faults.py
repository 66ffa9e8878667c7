"""Volumes that are full, read-only or stuck, writers that are killed: said, cleaned up, and the next part is whole."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elasticdl.frameworks.framework import Table
from elasticdl.master import checkpoints
from elasticdl.ps.part_file import write_part
from elasticdl.ps.partition import ALL_BUCKETS, PartSnapshot, TableChunk
from elasticdl.ps.server.restoring import open_checkpoint, restore
from elasticdl.storage import versions
from elasticdl_client.errors import CheckpointError
from tests.ps.parts import assert_is, commit, even_parts, part, write_checkpoint
from tests.storage.lost_files import lost, lost_until_asked_again

INCARNATION = 10
TEMPORARY = f".variables-0-of-1.ckpt.{INCARNATION}.tmp"


def write(directory: Path, snapshot: PartSnapshot | None = None) -> None:
    """The part of PS 0 of 1 and the manifest, in a directory that exists."""
    file = write_part(directory, 0, 1, INCARNATION, snapshot or part(ALL_BUCKETS))
    commit(directory, 3, [file])


def assert_whole(directory: Path) -> None:
    snapshot = open_checkpoint(directory, ALL_BUCKETS)
    assert_is(snapshot, ALL_BUCKETS, part(ALL_BUCKETS).pieces)
    snapshot.close()


@contextmanager
def full_device(directory: Path) -> Iterator[None]:
    """Every write to the part fails as on a full disk."""
    (directory / TEMPORARY).symlink_to("/dev/full")
    yield


@contextmanager
def full_file_system(directory: Path) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        with full_device(directory):
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextmanager
def size_limit(directory: Path) -> Iterator[None]:
    """No file may be larger than 4 KiB; the signal for it is ignored by Python."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Permissions keep all users but root out; root needs a mount."""
    directory.chmod(0o500)
    bind = [["mount", "--bind", str(directory), str(directory)], ["mount", "-o", "remount,bind,ro", str(directory)]]
    mounted = os.geteuid() == 0 and all(
        subprocess.run(it, check=False, capture_output=True).returncode == 0 for it in bind
    )
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True)
        directory.chmod(0o700)


@contextmanager
def file_in_the_way(directory: Path) -> Iterator[None]:
    directory.rmdir()
    directory.write_text("a file")
    yield
    directory.unlink()
    directory.mkdir()


@contextmanager
def directory_in_the_way(directory: Path) -> Iterator[None]:
    """Found at the last moment, when the part gets its name."""
    (directory / "variables-0-of-1.ckpt" / "something").mkdir(parents=True)
    yield
    (directory / "variables-0-of-1.ckpt" / "something").rmdir()
    (directory / "variables-0-of-1.ckpt").rmdir()


@contextmanager
def gone(directory: Path) -> Iterator[None]:
    directory.rmdir()
    yield
    directory.mkdir()


FAULTS = {
    full_device: "No space left on device",
    full_file_system: "No space left on device",
    size_limit: "File too large",
    read_only: "Read-only file system|Permission denied",
    file_in_the_way: "Not a directory",
    directory_in_the_way: "Is a directory|Directory not empty",
    gone: "No such file or directory",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_part_that_cannot_be_written_is_said_and_the_next_one_is_whole(
    tmp_path: Path, fault: Callable[[Path], AbstractContextManager[None]]
) -> None:
    directory = versions.begin(tmp_path, 3)
    with fault(directory):
        with pytest.raises(CheckpointError, match=f"variables-0-of-1.ckpt cannot be written: ({FAULTS[fault]})") as e:
            write(directory)
        assert "--checkpoint_dir" in e.value.hint
        assert not (directory / TEMPORARY).is_symlink()
        assert not (directory / TEMPORARY).exists()
        assert versions.complete(tmp_path) == []
    write(versions.begin(tmp_path, 3))
    assert_whole(directory)


def endless(started: Callable[[], None]) -> PartSnapshot:
    """A part whose table has no end."""

    def chunks() -> Iterator[TableChunk]:
        while True:
            yield TableChunk(np.zeros(10_000, np.int64), np.zeros((10_000, 8), np.float32), {})
            started()

    return replace(part(ALL_BUCKETS), tables=(Table("deep", 8, "{}"),), chunks={"deep": chunks})


_KILLED = """
import sys
from pathlib import Path
from tests.ps.test_ps_checkpoint_faults import INCARNATION, endless
from elasticdl.ps.part_file import write_part
write_part(Path(sys.argv[1]), 0, 1, INCARNATION, endless(lambda: print("written", flush=True)))
"""


def test_a_writer_that_is_killed_leaves_no_part_and_its_rest_is_removed(tmp_path: Path) -> None:
    good = write_checkpoint(tmp_path, 2, even_parts(1, 2))
    directory = versions.begin(tmp_path, 3)
    command = [sys.executable, "-c", _KILLED, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (directory / TEMPORARY).stat().st_size > 0
    assert [path.name for path in directory.iterdir()] == [TEMPORARY]
    assert checkpoints.newest(tmp_path) == good
    assert restore(directory, ALL_BUCKETS, lambda _: None).directory == good
    write(versions.begin(tmp_path, 4))
    versions.prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-4"]
    assert_whole(tmp_path / "version-4")


def test_the_same_version_is_written_over_the_rest_of_a_killed_writer(tmp_path: Path) -> None:
    directory = versions.begin(tmp_path, 3)
    (directory / TEMPORARY).write_bytes(bytes(1_000_000))
    write(directory)
    assert_whole(directory)


def test_rows_that_cannot_be_had_leave_no_file(tmp_path: Path) -> None:
    def chunks() -> Iterator[TableChunk]:
        yield TableChunk(np.zeros(10, np.int64), np.zeros((10, 8), np.float32), {})
        raise RuntimeError("the table is gone")

    with pytest.raises(RuntimeError, match="the table is gone"):
        write(tmp_path, replace(part(ALL_BUCKETS), tables=(Table("deep", 8, "{}"),), chunks={"deep": chunks}))
    assert list(tmp_path.iterdir()) == []


def test_a_stuck_volume_holds_up_its_writer_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TEMPORARY)  # opening it for writing waits for a reader
    errors: list[CheckpointError] = []

    def save() -> None:
        with pytest.raises(CheckpointError) as caught:
            write(tmp_path)
        errors.append(caught.value)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    with open(tmp_path / TEMPORARY, "rb") as reader:
        while reader.read(1 << 20):
            pass
    thread.join(20)
    assert "Invalid argument" in errors[0].what  # a pipe cannot be synced
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_whose_volume_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    for version in (3, 4):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    wanted, taken = tmp_path / "version-4", list[PartSnapshot]()
    with lost_until_asked_again(wanted / "MANIFEST.json"):
        assert restore(wanted, ALL_BUCKETS, taken.append).directory == wanted
    taken[0].close()


def test_a_checkpoint_whose_volume_is_not_back_in_time_is_passed_over(tmp_path: Path) -> None:
    for version in (3, 4):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    taken = list[PartSnapshot]()
    with lost(tmp_path / "version-4" / "MANIFEST.json"):
        restored = restore(tmp_path / "version-4", ALL_BUCKETS, taken.append, patience_s=0.0)
    assert restored.directory == tmp_path / "version-3"
    assert "cannot be read: Input/output error" in restored.damaged[0]
    taken[0].close()
