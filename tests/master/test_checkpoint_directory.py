"""The checkpoint directory: valid checkpoints, those that are kept, and the error when it is full."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from elasticdl.master import checkpoints
from elasticdl.master.checkpoints import Manifest, PsCalls, PsPart, PsUnreachable
from elasticdl.master.core.values import PsAddress
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.servers import serve
from elasticdl.storage import versions
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, StorageUnreachable
from tests.master.actors import END_OF_PART, MasterJob, running, wait_until
from tests.master.small_disk import small_disk

PART = PsPart(0, "ps-0", 12 + len(END_OF_PART), 0, 1, ((0, 1024),))


def write(checkpoint_dir: Path, version: int) -> Path:
    directory = versions.begin(checkpoint_dir, version)
    (directory / "ps-0").write_bytes(b"twelve bytes" + END_OF_PART)
    checkpoints.commit(directory, Manifest("digits", "f", version, 0, 1, (PART,)))
    return directory


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = checkpoints.read(write(tmp_path, 3))
    assert (manifest.format, manifest.model_version, manifest.parts) == (2, 3, (PART,))


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    good = write(tmp_path, 3)
    (versions.begin(tmp_path, 20) / "ps-0").write_bytes(b"1")
    assert versions.complete(tmp_path) == [good]
    assert checkpoints.newest(tmp_path) == good
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoints.read(tmp_path / "version-20")


def lose_the_part(directory: Path) -> None:
    (directory / "ps-0").unlink()


def cut_the_part(directory: Path) -> None:
    (directory / "ps-0").write_bytes(b"1")


def wipe_the_part(directory: Path) -> None:
    """Of the right size, but never brought to the disk."""
    (directory / "ps-0").write_bytes(bytes(PART.size_bytes))


def cut_the_manifest(directory: Path) -> None:
    path = directory / "MANIFEST.json"
    path.write_bytes(path.read_bytes()[:-20])


def write_the_manifest_of_the_first_format(directory: Path) -> None:
    (directory / "MANIFEST.json").write_text('{"format": 1, "parts": []}')


DAMAGES = {
    lose_the_part: "ps-0 is missing, its manifest says 36 bytes",
    cut_the_part: "ps-0 is 1 bytes, its manifest says 36 bytes",
    wipe_the_part: "ps-0 is damaged: it does not end like a part",
    cut_the_manifest: "MANIFEST.json is damaged",
    write_the_manifest_of_the_first_format: "has format 1; this version reads 2",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    good, bad = write(tmp_path, 9), write(tmp_path, 10)
    damage(bad)
    assert checkpoints.newest(tmp_path) == good
    assert f"{bad} is skipped: " in caplog.text
    assert DAMAGES[damage] in caplog.text
    with pytest.raises(CheckpointError, match=re.escape(DAMAGES[damage])):
        checkpoints.initial(bad)
    assert checkpoints.initial(good) == good
    assert checkpoints.initial(tmp_path) == good


def test_a_directory_of_versions_without_a_whole_one_is_no_beginning(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoints.initial(tmp_path)
    versions.begin(tmp_path, 3)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoints.initial(tmp_path)
    cut_the_part(write(tmp_path, 4))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        checkpoints.initial(tmp_path)


@pytest.mark.parametrize(("keep_max", "kept"), [(0, [1, 9, 10, 11]), (1, [11]), (2, [10, 11]), (9, [1, 9, 10, 11])])
def test_the_newest_are_kept_by_number(tmp_path: Path, keep_max: int, kept: list[int]) -> None:
    for version in (9, 10, 11, 1):
        write(tmp_path, version)
    versions.prune(tmp_path, keep_max)
    assert [path.name for path in versions.complete(tmp_path)] == [f"version-{version}" for version in kept]
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_an_incomplete_newer_directory_does_not_push_out_a_complete_one(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    versions.begin(tmp_path, 2)
    versions.prune(tmp_path, 1)
    assert versions.complete(tmp_path) == [good]


def test_what_never_became_a_checkpoint_is_removed_once_there_is_a_newer_one(tmp_path: Path) -> None:
    for version in (1, 3, 5):
        (versions.begin(tmp_path, version) / ".variables-0-of-1.ckpt.1.tmp").write_bytes(b"1")
    versions.prune(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 3  # without a checkpoint it is unknown which one is being written
    write(tmp_path, 2)
    write(tmp_path, 4)
    versions.prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-4", "version-5"]


def test_a_manifest_that_cannot_be_looked_at_is_not_a_missing_one(tmp_path: Path) -> None:
    """ELOOP stands for EIO: `Path.exists` is False for the one on every Python, for the other from 3.14."""
    for version in (1, 2):
        write(tmp_path, version)
    manifest = tmp_path / "version-1" / checkpoints.MANIFEST
    manifest.unlink()
    manifest.symlink_to(manifest)
    with pytest.raises(OSError, match="symbolic links"):
        versions.is_complete(manifest.parent)
    versions.prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-1", "version-2"]


def test_a_full_disk_is_said_with_the_last_good_checkpoint_and_training_continues_to_its_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=64) as disk:
        flags = {"num_ps_pods": 1, "checkpoint_steps": 2, "checkpoint_dir": str(disk / "checkpoints")}
        with running(MasterJob(tmp_path, max_task_failures=1, **flags)) as job:
            ps, worker = job.ps(), job.worker()
            ps.join()
            worker.register()
            worker.report_model()
            lease = worker.lease()
            for n in range(2):
                ps.apply(lease, n)
            worker.progress(lease, 0, 1)
            worker.finish(lease)
            wait_until(lambda: "Checkpoint of version 2 saved" in job.log(), "the first checkpoint")
            ps.part = bytes(1_000_000)
            worker.train_all(ps.apply)
            ps.leave()
            assert job.wait() == 1, job.log()
            log = job.log()
            assert "No space left on device" in log
            assert "The last checkpoint was not written" in log
            assert f"the last good one is {disk / 'checkpoints' / 'version-2'}" in log
            assert [path.name for path in (disk / "checkpoints").iterdir()] == ["version-2"]


def test_a_directory_with_checkpoints_of_an_earlier_job_is_refused(tmp_path: Path) -> None:
    servers, all_reduce = DistributionStrategy.PARAMETER_SERVER, DistributionStrategy.ALL_REDUCE
    checkpoints.check_unused(tmp_path / "nothing", servers, "digits")
    versions.begin(tmp_path, 2)
    checkpoints.check_unused(tmp_path, servers, "digits")
    newest = write(tmp_path, 500)
    for strategy in (servers, all_reduce):
        with pytest.raises(CheckpointError, match="version-500 the newest") as caught:
            checkpoints.check_unused(tmp_path, strategy, "digits")
        assert (f"--checkpoint_dir_for_init={newest}" in caught.value.hint) is (strategy is servers)


def test_a_job_of_local_continues_from_its_own_checkpoints_and_from_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kind = CheckpointKind("digits", DistributionStrategy.LOCAL.value, "local.npz", {})
    StateCheckpoints(str(tmp_path), kind).save(7, {"w": np.zeros(2)}, Ledger())
    local = DistributionStrategy.LOCAL
    checkpoints.check_unused(tmp_path, local, "digits")
    assert f"continues from the checkpoints of the job digits in {tmp_path}, version-7 the newest" in caplog.text
    others = [(strategy, "digits") for strategy in DistributionStrategy if strategy is not local]
    for strategy, job_name in ((local, "letters"), *others):
        with pytest.raises(CheckpointError, match="holds the checkpoints of an earlier job") as caught:
            checkpoints.check_unused(tmp_path, strategy, job_name)
        assert "--checkpoint_dir_for_init" not in caught.value.hint  # no training begins with one of Local
    write(tmp_path, 500)  # of parameter servers, which no worker takes over
    with pytest.raises(CheckpointError, match="version-500 the newest"):
        checkpoints.check_unused(tmp_path, local, "digits")


def test_a_checkpoint_that_a_late_journal_names_may_have_been_pruned(tmp_path: Path) -> None:
    old, new = write(tmp_path, 10), write(tmp_path, 20)
    assert checkpoints.still_there(str(old)) == str(old)
    versions.prune(tmp_path, 1)
    assert checkpoints.still_there(str(old)) == str(new)
    assert checkpoints.still_there("") == ""


def test_a_checkpoint_that_cannot_be_looked_at_stays_the_newest(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    directory = str(tmp_path / "checkpoints" / "version-1")
    assert checkpoints.still_there(directory) == directory


def test_a_version_that_is_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    directory = write(tmp_path, 10)
    assert versions.begin(tmp_path, 10) == directory
    assert versions.complete(tmp_path) == []
    assert list(directory.iterdir()) == []


def test_a_checkpoint_directory_that_cannot_be_looked_at_ends_no_master(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with running(MasterJob(tmp_path, num_ps_pods=1, checkpoint_steps=2, checkpoint_dir=str(directory))) as job:
        ps, worker = job.ps(), job.worker()
        ps.join()
        worker.register()
        worker.report_model()
        lease = worker.lease()
        directory.touch()
        for n in range(2):
            ps.apply(lease, n)
        worker.progress(lease, 0, 1)
        worker.finish(lease)
        wait_until(lambda: "the last good one is unknown" in job.log(), "the failure of the checkpoint", 10.0)
        assert "Not a directory" in job.log()
        assert job.journal()["generation"] == 1


def test_the_address_of_a_lost_server_is_not_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lost:
        address = PsAddress(0, f"127.0.0.1:{lost.getsockname()[1]}", 1)
        dropping = threading.Thread(target=lambda: lost.accept()[0].close())
        dropping.start()
        with pytest.raises(PsUnreachable):
            PsCalls("token", 1).read_applied_sets([address])
        dropping.join()
        lost.settimeout(2.0)  # a channel that is kept tries it every half a second
        with pytest.raises(TimeoutError):
            lost.accept()


class SlowServer(pb_grpc.ParameterServerServicer):
    """Says nothing of its applied set but how many seconds it has for it."""

    def ReadAppliedSet(self, request: pb.PsQuestion, context: grpc.ServicerContext) -> pb.AppliedSetReply:  # noqa: N802
        return pb.AppliedSetReply(applied=pb.AppliedSet(num_applies=int(context.time_remaining())))


def test_a_server_with_millions_of_tasks_has_minutes_to_list_them() -> None:
    server, port = serve(
        lambda one: pb_grpc.add_ParameterServerServicer_to_server(SlowServer(), one), "127.0.0.1", 0, "token", 4
    )
    found = PsCalls("token", 1).read_applied_sets([PsAddress(0, f"127.0.0.1:{port}", 1)])
    server.stop(0.0).wait()
    assert found[0].num_applies > 200


def test_storage_that_does_not_answer_is_waited_for_but_not_without_end() -> None:
    tries = 0

    def read() -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StorageUnreachable("no answer in 30 s")
        return tries

    assert versions.when_reachable(read, pause_s=0.0) == 3
    tries = 0
    with pytest.raises(StorageUnreachable):
        versions.when_reachable(read, patience_s=0.0)
    assert tries == 1


def test_the_reason_for_waiting_is_logged_again_only_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    reasons = iter(["no answer", "no answer", "no answer", "refused"])

    def read() -> bool:
        for reason in reasons:
            raise StorageUnreachable(reason)
        return True

    assert versions.when_reachable(read, pause_s=0.0)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["no answer", "refused"]
