"""Checkpoints in storage: those of a worker's model and of parameter servers, uploads that are killed among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elasticdl.master import checkpoints
from elasticdl.ps.part_file import part_directory
from elasticdl.ps.partition import even_buckets
from elasticdl.ps.server.restoring import open_checkpoint, restore
from elasticdl.storage import versions
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of
from elasticdl.storage.paths import RemotePath, on_this_machine, path_of, place_below, read_in_order, writing
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, StorageError, StorageFileMissing
from elasticdl_client.storage_kinds import AnyPath
from elasticdl_client.trained_model import ModelKind, look_at
from tests.ps.parts import assert_is, even_parts, write_checkpoint
from tests.storage.faulty_proxy import Fault, FaultyProxy

SAVE = """
import sys
import numpy as np
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
kept = StateCheckpoints(sys.argv[1], CheckpointKind("job", "AllreduceStrategy", "model.npz", {}), keep=2)
kept.save(int(sys.argv[2]), {"w": np.arange(3.0)}, Ledger(steps=int(sys.argv[2])))
"""


@pytest.fixture
def url(proxy: FaultyProxy, tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}/c"


def state_checkpoints(directory: str, keep: int = 2) -> StateCheckpoints:
    return StateCheckpoints(directory, CheckpointKind("job", "AllreduceStrategy", "model.npz", {}), keep)


def save(kept: StateCheckpoints, number: int) -> None:
    ledger = Ledger(steps=number)
    ledger.applied.fill(0, 0, 1, number)
    kept.save(number, {"w": np.arange(number)}, ledger)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_path_of_storage_answers_as_one_of_a_file_system(proxy: FaultyProxy, tmp_path: Path, is_remote: bool) -> None:
    directory: AnyPath = path_of(f"s3://bucket/{tmp_path.name}/d/" if is_remote else str(tmp_path / "d"))
    assert not directory.exists()
    versions.begin(directory, 1)
    with writing(directory / "version-1" / "a.bin") as file:
        file.write(b"0123456789")
    with pytest.raises(ZeroDivisionError), writing(directory / "version-1" / "b.bin") as file:
        file.write(b"%d" % (1 // 0))
    found = directory / "version-1" / "a.bin"
    assert (found.name, found.suffix, found.parent) == ("a.bin", ".bin", directory / "version-1")
    assert (found.exists(), found.is_file(), found.is_dir()) == (True, True, False)
    assert (found.parent.exists(), found.parent.is_file(), found.parent.is_dir()) == (True, False, True)
    assert list(found.parent.iterdir()) == [found]
    assert found.read_bytes() == b"0123456789"
    with found.open("rb") as opened:
        opened.seek(-3, os.SEEK_END)
        assert opened.read() == b"789"
    with on_this_machine(directory) as local:
        assert (local / "version-1" / "a.bin").read_bytes() == b"0123456789"
    missing = directory / "none"
    assert [missing.exists(), missing.is_file(), missing.is_dir()] == [False] * 3
    with pytest.raises(FileNotFoundError):
        missing.read_bytes()
    with pytest.raises(FileNotFoundError):
        missing.open("rb")
    versions.abandon(directory / "version-1")
    assert not found.exists()


def test_a_name_in_storage_leads_nowhere_out_of_its_copy(tmp_path: Path) -> None:
    for name in ("../a", "a/../../b", "..", "/etc/a"):
        with pytest.raises(StorageError, match="leads out of its directory"):
            place_below(tmp_path, name)
    for name in ("a/b", "a..b/..c", "a b%2F.."):
        assert place_below(tmp_path, name) == tmp_path / name


def test_a_file_that_is_missing_where_files_are_read_in_order_is_named(url: str, proxy: FaultyProxy) -> None:
    storage_of(url).publish(f"{url}/a", b"first")
    contents = read_in_order(path_of(url), ["a", "b"])
    with pytest.raises(StorageFileMissing, match="/c/b does not exist"):
        list(contents)


def test_a_workers_checkpoint_is_read_back_and_old_ones_go(url: str, proxy: FaultyProxy) -> None:
    kept = state_checkpoints(url)
    assert kept.newest() is None
    for number in (1, 9, 10):
        save(kept, number)
    assert [path.name for path in versions.versions(path_of(url))] == ["version-9", "version-10"]
    assert [path.name for path in RemotePath(f"{url}/version-1").iterdir()] == []
    puts = [one.path.rpartition("/")[2] for one in proxy.requests if one.method == "PUT"]
    assert puts == ["model.npz", "MANIFEST.json"] * 3
    found = kept.newest()
    assert found is not None
    assert (str(found.directory), found.ledger.steps) == (f"{url}/version-10", 10)
    np.testing.assert_array_equal(found.arrays["w"], np.arange(10))
    assert found.ledger.applied.num_names == 10
    assert state_checkpoints("").initial(f"{url}/version-9").ledger.steps == 9
    assert state_checkpoints("").initial(url).ledger.steps == 10
    assert look_at(path_of(url)).kind is ModelKind.STATE
    storage_of(url).publish(f"{url}/version-10/model.npz", b"other bytes")
    older = kept.newest()
    assert older is not None
    assert older.ledger.steps == 9
    assert look_at(path_of(url)).path == path_of(f"{url}/version-9")


def test_a_writer_that_is_killed_before_the_manifest_leaves_the_checkpoint_before_it(
    url: str, proxy: FaultyProxy
) -> None:
    kept = state_checkpoints(url)
    save(kept, 1)
    proxy.fault_of = lambda request: Fault.HELD if request.method == "PUT" and "MANIFEST" in request.path else None
    writing = subprocess.Popen([sys.executable, "-c", SAVE, url, "2"], env={**os.environ})
    try:
        proxy.held.wait(60)
        assert proxy.held.is_set()
    finally:
        writing.send_signal(signal.SIGKILL)
        writing.wait()
    proxy.fault_of = lambda request: None
    assert RemotePath(f"{url}/version-2/model.npz").exists()
    assert [path.name for path in versions.complete(path_of(url))] == ["version-1"]
    found = kept.newest()
    assert found is not None
    assert found.ledger.steps == 1
    save(kept, 3)
    assert [path.name for path in versions.versions(path_of(url))] == ["version-1", "version-3"]


def test_a_checkpoint_that_storage_refuses_is_an_error_and_goes_with_the_next_one(
    url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = FsspecStorage("s3", RetryPolicy(3.0, 0.01, 0.02, 0.05))
    monkeypatch.setattr("elasticdl.storage.paths.storage_of", lambda url: quick)
    kept = state_checkpoints(url)
    save(kept, 1)
    proxy.fault_of = lambda request: Fault.UNAVAILABLE if request.method == "PUT" and "MANIF" in request.path else None
    with pytest.raises(CheckpointError, match=r"version-2/MANIFEST.json cannot be written: .* could not be reached"):
        save(kept, 2)
    assert [path.name for path in versions.complete(path_of(url))] == ["version-1"]
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    with pytest.raises(CheckpointError, match="cannot be created"):
        save(kept, 3)
    with pytest.raises(StorageError, match="could not be reached"):  # none is not the same as not known
        kept.newest()
    proxy.fault_of = lambda request: None
    save(kept, 4)
    assert [path.name for path in versions.versions(path_of(url))] == ["version-1", "version-4"]


def test_any_number_of_parameter_servers_takes_over_from_storage(url: str, proxy: FaultyProxy) -> None:
    parts = even_parts(2)
    older, newer = (write_checkpoint(path_of(url), number, parts) for number in (3, 4))
    assert checkpoints.newest(path_of(url)) == newer
    assert checkpoints.initial(path_of(url)) == newer
    assert checkpoints.read(newer).num_ps == 2
    assert look_at(path_of(url)).kind is ModelKind.SERVERS
    proxy.once_each(Fault.UNAVAILABLE, Fault.TOO_SHORT, Fault.CUT_OFF)
    for ps_id in range(2):
        own = even_buckets(ps_id, 2)
        snapshot = open_checkpoint(newer, own, verified=True)
        assert_is(snapshot, own, parts[ps_id].pieces)
        snapshot.close()
    damage(newer / "variables-0-of-2.ckpt")
    own = even_buckets(0, 2)
    restored = restore(newer, own, lambda snapshot: assert_is(snapshot, own, parts[0].pieces))
    assert restored.directory == older
    assert "variables-0-of-2.ckpt is damaged" in restored.damaged[0]
    storage_of(url).delete(f"{url}/version-3/MANIFEST.json")
    with pytest.raises(versions.NoneIsWhole):
        restore(newer, own, lambda snapshot: assert_is(snapshot, own, parts[0].pieces))


def damage(path: AnyPath) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    storage_of(str(path)).publish(str(path), bytes(content))


def test_a_checkpoint_lacks_a_part_that_was_never_written(url: str, proxy: FaultyProxy) -> None:
    good = write_checkpoint(path_of(url), 3, even_parts(2))
    bad = write_checkpoint(path_of(url), 4, even_parts(2))
    storage_of(url).delete(f"{bad}/variables-1-of-2.ckpt")
    assert checkpoints.newest(path_of(url)) == good
    with pytest.raises(CheckpointError, match=r"variables-1-of-2\.ckpt is missing"):
        checkpoints.read(bad)


def test_a_server_writes_its_part_into_a_version_of_this_jobs_directory_alone(url: str, proxy: FaultyProxy) -> None:
    assert part_directory(f"{url}/version-3", f"{url}/") == path_of(f"{url}/version-3")
    for named in (f"{url}/version-x", f"{url}/../version-3", f"{url}x/version-3", "/tmp/version-3", ""):
        with pytest.raises(CheckpointError, match="no version-<N>"):
            part_directory(named, url)
    write_checkpoint(path_of(url), 3, even_parts(1))
    with pytest.raises(CheckpointError, match="is complete"):
        part_directory(f"{url}/version-3", url)
    with pytest.raises(CheckpointError, match="version-3 the newest"):
        checkpoints.check_unused(path_of(url), DistributionStrategy.PARAMETER_SERVER, "digits")
