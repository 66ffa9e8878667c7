"""Restoring: into any number of PS, from the newest checkpoint that is whole, and the errors of the others."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.master import checkpoints
from elasticdl.ps.part_file import PartReader, write_part
from elasticdl.ps.partition import ALL_BUCKETS, Buckets, PartSnapshot, Piece, even_buckets
from elasticdl.ps.server.restoring import RestoredCheckpoint, open_checkpoint, restore, restore_other
from elasticdl.storage import versions
from elasticdl.storage.versions import NoneIsWhole, is_complete
from elasticdl_client.checkpoint_manifest import MANIFEST, NewerFormat, read_manifest, with_checksum
from elasticdl_client.errors import CheckpointError
from tests.ps.parts import applied_set, assert_is, commit, even_parts, flip, part, write_checkpoint


def clipped(parts: list[PartSnapshot], own: Buckets) -> list[Piece]:
    """Return the ranges of each part's one piece that `own` keeps."""
    (low, high) = own[0]
    pieces = []
    for snapshot in parts:
        ((start, end),) = snapshot.pieces[0].buckets
        if max(start, low) < min(end, high):
            pieces.append(replace(snapshot.pieces[0], buckets=((max(start, low), min(end, high)),)))
    return pieces


def assert_restores(directory: Path, parts: list[PartSnapshot], num_ps: int) -> None:
    for ps_id in range(num_ps):
        own = even_buckets(ps_id, num_ps)
        snapshot = open_checkpoint(directory, own)
        assert_is(snapshot, own, clipped(parts, own))
        snapshot.close()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 3), (3, 2), (3, 1), (2, 7), (5, 3)])
def test_any_number_of_ps_takes_over_from_any_other(tmp_path: Path, before: int, after: int) -> None:
    parts = even_parts(before)
    assert_restores(write_checkpoint(tmp_path, 3, parts), parts, after)


@settings(max_examples=15, deadline=None)
@given(before=st.integers(1, 40), after=st.integers(1, 40))
def test_the_same_with_any_numbers(tmp_path_factory: pytest.TempPathFactory, before: int, after: int) -> None:
    parts = even_parts(before)
    assert_restores(write_checkpoint(tmp_path_factory.mktemp("c"), 3, parts), parts, after)


def test_pieces_survive_a_second_change_of_number(tmp_path: Path) -> None:
    parts = even_parts(2)
    first = write_checkpoint(tmp_path, 3, parts)
    own = even_buckets(1, 3)
    snapshot = open_checkpoint(first, own)
    assert len(snapshot.pieces) == 2
    others = [part(even_buckets(k, 3), clipped(parts, even_buckets(k, 3))) for k in (0, 2)]
    second = write_checkpoint(tmp_path, 4, [others[0], snapshot, others[1]])
    snapshot.close()
    whole = open_checkpoint(second, ALL_BUCKETS)
    assert_is(whole, ALL_BUCKETS, [parts[0].pieces[0], parts[1].pieces[0]])
    whole.close()


def test_pieces_of_one_history_become_one(tmp_path: Path) -> None:
    applied = applied_set((0, 0, 4, []))
    parts = [part(even_buckets(k, 2), [Piece(even_buckets(k, 2), 4, applied)]) for k in range(2)]
    snapshot = open_checkpoint(write_checkpoint(tmp_path, 3, parts), ALL_BUCKETS)
    assert_is(snapshot, ALL_BUCKETS, [Piece(ALL_BUCKETS, 4, applied)])
    snapshot.close()


def test_a_ps_whose_buckets_do_not_lie_together_is_written_and_read(tmp_path: Path) -> None:
    scattered, rest = ((0, 100), (300, 301), (512, 1000)), ((100, 300), (301, 512), (1000, 1024))
    parts = [part(scattered), part(rest)]
    directory = write_checkpoint(tmp_path, 3, parts)
    for own in (scattered, rest, ((50, 400),), ((90, 120), (999, 1001))):
        snapshot = open_checkpoint(directory, own)
        assert_is(snapshot, own, [Piece(own, 3, parts[0].pieces[0].applied)])
        snapshot.close()


def test_only_parts_that_hold_something_of_ours_are_looked_at(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 3, even_parts(2))
    (directory / "variables-1-of-2.ckpt").unlink()
    open_checkpoint(directory, even_buckets(0, 2)).close()
    with pytest.raises(CheckpointError, match=r"variables-1-of-2\.ckpt cannot be read: No such file"):
        open_checkpoint(directory, ALL_BUCKETS)


def take(own: Buckets) -> tuple[list[PartSnapshot], Callable[[PartSnapshot], None]]:
    """A state that reads all rows and keeps what it is given."""
    taken: list[PartSnapshot] = []

    def take_it(snapshot: PartSnapshot) -> None:
        for chunks in snapshot.chunks.values():
            assert all(len(chunk.ids) == len(chunk.rows) for chunk in chunks())
        taken.append(snapshot)

    return taken, take_it


def damage_rows(directory: Path) -> None:
    path = directory / "variables-0-of-1.ckpt"
    with PartReader(path) as reader:
        position = reader.index.tables[1].blocks[-1].offset
    flip(path, position)


def truncate(directory: Path) -> None:
    path = directory / "variables-0-of-1.ckpt"
    path.write_bytes(path.read_bytes()[:-1])


def remove_part(directory: Path) -> None:
    (directory / "variables-0-of-1.ckpt").unlink()


def damage_manifest(directory: Path) -> None:
    flip(directory / "MANIFEST.json", 0)


def empty_manifest(directory: Path) -> None:
    (directory / "MANIFEST.json").write_text("{}")


def partial_manifest(directory: Path) -> None:
    manifest = json.loads((directory / "MANIFEST.json").read_text())
    manifest["parts"][0]["buckets"] = [[0, 512]]
    del manifest["crc32"]  # as an earlier version wrote it
    (directory / "MANIFEST.json").write_text(json.dumps(manifest))


DAMAGES = {
    damage_rows: "the checksum of the block at",
    truncate: "bytes, the manifest says",
    remove_part: "variables-0-of-1.ckpt cannot be read: No such file",
    damage_manifest: "MANIFEST.json is damaged",
    empty_manifest: "MANIFEST.json is damaged: it has no 'format'",
    partial_manifest: "do not hold every bucket once",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_next_older_checkpoint_is_taken_if_the_newest_is_damaged(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for version in (8, 9, 20):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    damage(tmp_path / "version-20")
    (tmp_path / "version-15").mkdir()  # no manifest: no checkpoint
    taken, take_it = take(ALL_BUCKETS)
    restored = restore(tmp_path / "version-20", ALL_BUCKETS, take_it)
    assert restored.directory == tmp_path / "version-9"
    (reason,) = restored.damaged
    assert reason.startswith("version-20: ")
    assert DAMAGES[damage] in reason
    (snapshot,) = taken
    assert_is(snapshot, ALL_BUCKETS, even_parts(1, 9)[0].pieces)
    snapshot.close()


def test_a_checkpoint_of_a_newer_format_gives_no_way_to_an_older_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3, even_parts(1))
    newer = write_checkpoint(tmp_path, 4, even_parts(1))
    manifest = newer / MANIFEST
    values = read_manifest(manifest)
    tmp_path.joinpath("version-4", MANIFEST).write_text(json.dumps(with_checksum(values | {"format": 3})))
    for wanted in newer, tmp_path / "version-2":
        with pytest.raises(NewerFormat, match="has format 3; this version reads 2"):
            restore(wanted, ALL_BUCKETS, lambda snapshot: None)
    with pytest.raises(NewerFormat):
        checkpoints.initial(tmp_path)
    gone = str(tmp_path / "version-2")
    assert checkpoints.still_there(gone) == gone, "the server that restores it ends the job"
    with pytest.raises(NewerFormat):
        versions.begin(tmp_path, 4)
    assert is_complete(newer)


def test_each_checkpoint_that_is_passed_over_is_said(tmp_path: Path) -> None:
    for version in (8, 9, 20):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    damage_rows(tmp_path / "version-20")
    remove_part(tmp_path / "version-9")
    restored = restore(tmp_path / "version-20", ALL_BUCKETS, lambda _: None)
    assert restored.directory == tmp_path / "version-20"  # its rows have not been read
    _, take_it = take(ALL_BUCKETS)
    restored = restore(tmp_path / "version-20", ALL_BUCKETS, take_it)
    assert restored.directory == tmp_path / "version-8"
    assert [reason.split(":")[0] for reason in restored.damaged] == ["version-20", "version-9"]
    damage_rows(tmp_path / "version-8")
    with pytest.raises(NoneIsWhole, match="can be restored") as error:
        restore(tmp_path / "version-20", ALL_BUCKETS, take_it)
    assert [reason.split(":")[0] for reason in error.value.damaged] == ["version-20", "version-9", "version-8"]
    assert "repair one: a new job with --model_def" in error.value.hint
    assert f"move {tmp_path} away" in error.value.hint


def test_a_checkpoint_that_was_pruned_meanwhile_has_a_newer_one_beside_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 30, even_parts(1, 30))
    _, take_it = take(ALL_BUCKETS)
    restored = restore(tmp_path / "version-20", ALL_BUCKETS, take_it)
    assert restored.directory == tmp_path / "version-30"
    assert "version-20/MANIFEST.json cannot be read: No such file" in restored.damaged[0]


class LostPath(type(Path())):  # type: ignore[misc]
    """On a volume that fails with EIO until the log says that it is asked again.

    Attributes:
        lost: paths of files that cannot be opened, and of directories that cannot be listed.
    """

    lost: ClassVar[set[str]] = set()

    def open(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().open(*args, **kwargs)

    def iterdir(self) -> Iterator[Path]:
        self._check()
        return super().iterdir()  # type: ignore[no-any-return]

    def _check(self) -> None:
        if str(self) in self.lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def losing(path: Path, returns: bool = True) -> Iterator[None]:
    class Mended(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if returns and "Input/output error" in record.getMessage():
                LostPath.lost.clear()

    handler, log = Mended(), logging.getLogger("elasticdl.storage")
    LostPath.lost.add(str(path))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        LostPath.lost.clear()


def test_the_list_of_older_checkpoints_is_waited_for(tmp_path: Path) -> None:
    for version in (8, 9):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    damage_rows(tmp_path / "version-9")
    _, take_it = take(ALL_BUCKETS)
    with losing(tmp_path):
        restored = restore(LostPath(tmp_path) / "version-9", ALL_BUCKETS, take_it)
    assert restored.directory == tmp_path / "version-8"


def test_older_checkpoints_that_cannot_be_listed_are_said(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 9, even_parts(1, 9))
    damage_rows(tmp_path / "version-9")
    _, take_it = take(ALL_BUCKETS)
    with losing(tmp_path, returns=False), pytest.raises(NoneIsWhole) as raised:
        restore(LostPath(tmp_path) / "version-9", ALL_BUCKETS, take_it, patience_s=0.0)
    newest, older = raised.value.damaged
    assert "version-9" in newest
    assert f"{tmp_path} cannot be read: Input/output error" in older


def test_a_part_with_a_bad_sector_is_not_waited_for_as_long_as_a_volume(tmp_path: Path) -> None:
    for version in (8, 9):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    _, take_it = take(ALL_BUCKETS)
    wanted = LostPath(tmp_path) / "version-9"
    with losing(wanted / "variables-0-of-1.ckpt", returns=False):
        restored = restore(wanted, ALL_BUCKETS, take_it, sector_patience_s=0.0)
    assert restored.directory == tmp_path / "version-8"
    assert "variables-0-of-1.ckpt cannot be read: Input/output error" in restored.damaged[0]
    with losing(wanted / "variables-0-of-1.ckpt"):
        assert restore(wanted, ALL_BUCKETS, take_it).directory == wanted
    with losing(wanted / "MANIFEST.json"):
        assert restore(wanted, ALL_BUCKETS, take_it, sector_patience_s=0.0).directory == wanted


def test_a_part_with_a_bad_sector_is_waited_for_like_a_volume_where_no_other_checkpoint_is_left(tmp_path: Path) -> None:
    wanted = LostPath(write_checkpoint(tmp_path, 9, even_parts(1, 9)))
    _, take_it = take(ALL_BUCKETS)
    with losing(wanted / "variables-0-of-1.ckpt"):
        assert restore(wanted, ALL_BUCKETS, take_it, sector_patience_s=0.0).directory == wanted
    write_checkpoint(tmp_path, 10, even_parts(1, 10))
    damage_rows(tmp_path / "version-10")
    with losing(wanted / "variables-0-of-1.ckpt"):
        restored = restore(LostPath(tmp_path) / "version-10", ALL_BUCKETS, take_it, sector_patience_s=0.0)
    assert restored.directory == wanted


def is_cached(path: Path) -> bool:
    """Whether the first page of a file is in the page cache; unlike a read, the question does not put it there."""
    pages = (ctypes.c_ubyte * 1)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(1), pages)
        del begin  # or the map cannot be closed
    assert not failed
    return bool(pages[0] & 1)


def test_a_manifest_in_the_page_cache_does_not_hide_a_lost_volume(tmp_path: Path) -> None:
    seen = []

    class WatchedPath(LostPath):
        """The pages of a manifest are looked at whenever it is opened to be read."""

        def read_bytes(self) -> bytes:
            seen.append(is_cached(Path(self)))
            return super().read_bytes()  # type: ignore[no-any-return]

    for version in (8, 9):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    manifest = tmp_path / "version-9" / "MANIFEST.json"
    with manifest.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(manifest):
        pytest.skip("this file system is the page cache")
    _, take_it = take(ALL_BUCKETS)
    wanted = WatchedPath(tmp_path) / "version-9"
    with losing(wanted / "variables-0-of-1.ckpt", returns=False):
        restored = restore(wanted, ALL_BUCKETS, take_it, sector_patience_s=0.0)
    assert restored.directory == tmp_path / "version-8"
    assert seen[:2] == [False, False]


def test_another_jobs_checkpoint_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    for version in (8, 9):
        write_checkpoint(tmp_path, version, even_parts(1, version))
    taken: list[PartSnapshot] = []
    wanted = tmp_path / "version-9"
    assert restore_other(wanted, even_buckets(1, 2), taken.append) == RestoredCheckpoint(wanted, ())
    taken[0].close()
    damage_rows(wanted)
    with pytest.raises(CheckpointError, match=r"version-9/variables-0-of-1\.ckpt is damaged"):
        restore_other(wanted, even_buckets(1, 2), taken.append)
    assert len(taken) == 1


def test_parts_that_are_not_of_one_model_are_refused(tmp_path: Path) -> None:
    parts = even_parts(2)
    directory = write_checkpoint(tmp_path, 3, [parts[0], replace(parts[1], seed=8)])
    with pytest.raises(CheckpointError, match="are not of one model"):
        open_checkpoint(directory, ALL_BUCKETS)


def test_a_part_under_the_wrong_name_is_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "version-3"
    directory.mkdir()
    files = [write_part(directory, k, 2, 10 + k, part) for k, part in enumerate(even_parts(2))]
    commit(directory, 3, files[::-1])
    with pytest.raises(CheckpointError, match="is not the part that its manifest names"):
        open_checkpoint(directory, ALL_BUCKETS)
