"""When checkpoints of a model that lives in the workers are written, however often their group changes."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.activities import Activity, ActivityClock
from elasticdl.ps.applied import MinibatchName
from elasticdl.storage import versions
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica
from elasticdl.worker.checkpoint import Checkpoint, CheckpointKind, HangLimits, StateCheckpoints, read_from
from elasticdl.worker.ledger import UNKNOWN, Ledger
from elasticdl_client.checkpoint_manifest import NewerFormat, read_manifest, with_checksum
from elasticdl_client.errors import CheckpointError, StorageUnreachable
from elasticdl_client.storage_kinds import AnyPath
from elasticdl_client.trained_model import look_at
from tests.storage.lost_files import lost, lost_until_asked_again, not_connected

EVERY = 10
T = TypeVar("T")


class Weights:
    """A framework with a state."""

    def state(self) -> dict[str, Any]:
        return {"w": np.ones(2, np.float32)}

    def load_state(self, state: dict[str, Any]) -> None:
        assert list(state) == ["w"]


def checkpoints_in(directory: Path, limits: HangLimits | None = None) -> StateCheckpoints:
    kind = CheckpointKind("job", "AllreduceStrategy", "model.npz", {})
    return StateCheckpoints(str(directory), kind, limits=limits)


def writer_in(directory: Path, limits: HangLimits | None = None) -> CheckpointWriter:
    checkpoints = checkpoints_in(directory, limits)
    framework: Any = Weights()
    return CheckpointWriter(Replica(framework, checkpoints, "", ActivityClock()), checkpoints, EVERY)


def ledger_of(count: int) -> Ledger:
    ledger = Ledger(steps=count)
    for n in range(count):
        ledger.applied.add(MinibatchName(0, 0, n))
    return ledger


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_groups_that_are_shorter_than_the_time_between_two_checkpoints_do_not_put_them_off(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    for count in range(0, EVERY, 4):
        writer.begin(ledger_of(count))
        writer.save_if_due(ledger_of(count + 3))
        writer.wait()
        assert not written(tmp_path) or count + 3 >= EVERY
    assert written(tmp_path) == ["version-11"]


def test_the_last_checkpoint_is_written_although_the_last_group_made_no_step(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer.begin(ledger_of(7))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_member_that_took_the_model_over_writes_what_a_lost_member_has_not_written(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(7))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_checkpoint_that_another_member_has_written_is_left_alone(tmp_path: Path) -> None:
    moments = []
    for _ in range(2):
        writer = writer_in(tmp_path)
        writer.begin(ledger_of(7))
        writer.save_last(ledger_of(7))
        moments.append([path.stat().st_mtime_ns for path in sorted((tmp_path / "version-7").iterdir())])
    assert moments[0] == moments[1]


def test_members_that_write_the_same_checkpoint_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    arrays = {f"w{n}": np.ones(200_000, np.float32) for n in range(4)}
    for _ in range(10):
        errors: list[CheckpointError] = []
        members = [threading.Thread(target=save_or_keep, args=(tmp_path, arrays, errors)) for _ in range(3)]
        for member in members:
            member.start()
        for member in members:
            member.join()
        assert not errors
        found = checkpoints_in(tmp_path).newest()
        assert found is not None
        assert found.arrays.keys() == arrays.keys()
        assert written(tmp_path / "version-7") == ["MANIFEST.json", "model.npz"]
        (tmp_path / "version-7" / "MANIFEST.json").unlink()  # as if they had been killed before


def test_a_member_that_cannot_write_the_manifest_leaves_what_another_one_is_writing(tmp_path: Path) -> None:
    checkpoints, directory = checkpoints_in(tmp_path), tmp_path / "version-7"
    (directory / f".MANIFEST.json.{checkpoints._tag}").mkdir(parents=True)  # in the way
    (directory / ".model.npz.other").write_bytes(b"half of it")
    with pytest.raises(CheckpointError, match="manifest"):
        checkpoints.save(7, {"w": np.ones(3)}, ledger_of(7))
    assert (directory / ".model.npz.other").read_bytes() == b"half of it"
    assert not (directory / "model.npz").exists()


def test_what_a_killed_writer_leaves_in_a_complete_checkpoint_goes_with_the_next_one(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(7, {"w": np.ones(3)}, ledger_of(7))
    for name in (".model.npz.killed", ".MANIFEST.json.killed", ".nfs0001"):
        (tmp_path / "version-7" / name).write_bytes(b"half of it")
    checkpoints.save(8, {"w": np.ones(3)}, ledger_of(8))
    assert written(tmp_path / "version-7") == [".nfs0001", "MANIFEST.json", "model.npz"]


def test_a_complete_checkpoint_of_the_same_contents_is_never_removed(tmp_path: Path) -> None:
    """The member that has written it ends, and counts on it; a second look could find one completed meanwhile."""
    seen: list[list[str]] = []

    def is_same(directory: AnyPath) -> bool:
        seen.append(written(Path(str(directory))))
        return True

    assert versions.begin_beside(tmp_path, 7, is_same) == tmp_path / "version-7"
    checkpoints_in(tmp_path).save(7, {"w": np.ones(3)}, ledger_of(7))
    assert versions.begin_beside(tmp_path, 7, is_same) is None
    assert seen == [written(tmp_path / "version-7")] == [["MANIFEST.json", "model.npz"]]


def test_a_complete_checkpoint_of_other_contents_is_replaced(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpoints_in(tmp_path).save(7, {"w": np.full(3, value)}, ledger_of(7))
    found = checkpoints_in(tmp_path).newest()
    assert found is not None
    assert found.arrays["w"].tolist() == [2.0] * 3


def test_a_complete_checkpoint_that_cannot_be_compared_is_not_removed(tmp_path: Path) -> None:
    """It may be the same, and the volume may refuse what is to be written in its place."""
    checkpoints_in(tmp_path).save(7, {"w": np.ones(3)}, ledger_of(7))
    with lost(tmp_path / "version-7" / "MANIFEST.json") as is_back:
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpoints_in(tmp_path).save(7, {"w": np.ones(3)}, ledger_of(7))
        is_back()
    assert written(tmp_path / "version-7") == ["MANIFEST.json", "model.npz"]


def save_or_keep(directory: Path, arrays: dict[str, Any], errors: list[CheckpointError]) -> None:
    try:
        checkpoints_in(directory).save(7, arrays, ledger_of(7))
    except CheckpointError as error:
        errors.append(error)


def test_a_model_that_was_restored_is_not_written_again_before_a_step(tmp_path: Path) -> None:
    writer_in(tmp_path).save_last(ledger_of(7))
    before = (tmp_path / "version-7").stat().st_ino
    writer = writer_in(tmp_path)
    ledger = writer.model.start_over().ledger
    writer.begin(ledger)
    writer.save_last(ledger)
    assert (tmp_path / "version-7").stat().st_ino == before


def test_checkpoints_of_a_model_that_is_an_older_one_are_written_as_often(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer.save_last(ledger_of(25))
    writer.begin(ledger_of(5))
    writer.save_if_due(ledger_of(15))
    writer.wait()
    assert written(tmp_path) == ["version-15", "version-25"]


def test_a_checkpoint_knows_the_samples_of_its_minibatches_and_an_older_one_that_it_does_not(tmp_path: Path) -> None:
    ledger = Ledger()
    for n, num_samples in enumerate((4, 0, 3)):
        ledger.add(MinibatchName(0, 0, n), num_samples)
    writer = writer_in(tmp_path)
    writer.begin(Ledger())
    writer.save_last(ledger)
    checkpoints = checkpoints_in(tmp_path)
    framework: Any = Weights()
    restored = Replica(framework, checkpoints, "", ActivityClock()).start_over().ledger
    assert restored.num_samples == {(0, 0): 7}
    assert Ledger.from_bytes(restored.to_bytes()).num_samples == restored.num_samples
    manifest = tmp_path / "version-3" / "MANIFEST.json"
    values = json.loads(manifest.read_text())
    del values["manifest_crc32"], values["applied_runs"], values["applied_extras"]
    manifest.write_text(json.dumps(values | {"applied": [[0, 0, [], 3]]}))
    restored = Replica(framework, checkpoints, "", ActivityClock()).start_over().ledger
    restored.add(MinibatchName(0, 0, 3), 4)
    assert restored.num_samples == {(0, 0): UNKNOWN}


@pytest.mark.parametrize("is_own", [True, False])
def test_a_group_waits_for_storage_that_does_not_answer(tmp_path: Path, is_own: bool) -> None:
    clock, seen = ActivityClock(), list[Activity]()

    class Outage(StateCheckpoints):
        @property
        def place(self) -> str:
            return "s3://bucket/own"

        def newest(self) -> Checkpoint | None:
            return self._after_outage(super().newest() if is_own else None)

        def initial(self, path: str) -> Checkpoint:
            return self._after_outage(super().initial(str(tmp_path)))

        def _after_outage(self, found: T) -> T:
            if is_own or found is not None:
                seen.append(clock.read()[0])
                if len(seen) < 3:
                    raise StorageUnreachable("no answer in 180 s")
            return found

    checkpoints_in(tmp_path).save(3, Weights().state(), ledger_of(3))
    kind = CheckpointKind("job", "AllreduceStrategy", "model.npz", {})
    framework: Any = Weights()
    replica = Replica(framework, Outage(str(tmp_path), kind), "s3://bucket/other", clock)
    assert replica.start_over().ledger.steps == 3
    assert seen == [Activity.CHECKPOINT] * 3  # slow storage is no hang


class Loaded(Weights):
    """A framework that holds the values which it has loaded."""

    value: float | None = None

    def load_state(self, state: dict[str, Any]) -> None:
        self.value = float(state["w"][0])


@pytest.mark.parametrize("name", ["MANIFEST.json", "model.npz"])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_group_waits_for_a_volume_that_does_not_answer(tmp_path: Path, name: str, is_own: bool) -> None:
    for number in (3, 4):
        checkpoints_in(tmp_path).save(number, {"w": np.full(2, number)}, ledger_of(number))
    framework: Any = Loaded()
    own = checkpoints_in(tmp_path if is_own else tmp_path / "own")
    replica = Replica(framework, own, "" if is_own else str(tmp_path), ActivityClock())
    with lost_until_asked_again(tmp_path / "version-4" / name):
        restored = replica.start_over()
    assert (restored.ledger.steps, framework.value) == (4, 4)


@pytest.mark.parametrize("name", ["MANIFEST.json", "model.npz"])
def test_a_checkpoint_that_stays_unreadable_is_never_passed_over(tmp_path: Path, name: str) -> None:
    """Neither an older one is taken, nor does training begin from nothing."""
    for number in (3, 4):
        checkpoints_in(tmp_path).save(number, Weights().state(), ledger_of(number))
        with lost(tmp_path / f"version-{number}" / name) as is_back:
            for read in (checkpoints_in(tmp_path).newest, lambda: checkpoints_in(tmp_path).initial(str(tmp_path))):
                with pytest.raises(StorageUnreachable, match=f"version-{number}/{name} cannot be read: Input/output"):
                    read()
            is_back()


def test_a_directory_whose_mount_is_not_connected_is_not_an_empty_one(tmp_path: Path) -> None:
    with not_connected(tmp_path):
        for read in (checkpoints_in(tmp_path).newest, lambda: checkpoints_in(tmp_path).initial(str(tmp_path))):
            with pytest.raises(StorageUnreachable, match="not connected"):
                read()


@pytest.mark.parametrize(
    "number",
    [
        *(errno.ESHUTDOWN, errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENODEV, errno.ENXIO),
    ],
    ids=errno.errorcode.get,
)
def test_a_server_or_disk_that_is_gone_may_be_back(number: int) -> None:
    error = versions.unreadable("a checkpoint", OSError(number, os.strerror(number)), "")
    assert isinstance(error, StorageUnreachable)


def test_only_the_time_between_two_reads_of_a_volume_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    """A read that does not end is a hang; a volume that fails at once is none."""
    clock, seen = ActivityClock(), list[Activity]()
    clock.switch(Activity.JOIN)
    log = logging.getLogger("elasticdl.storage")

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(clock.read()[0])

    def read() -> int:
        seen.append(clock.read()[0])
        if len(seen) < 3:
            raise StorageUnreachable("Input/output error")
        return 7

    look = Look()
    log.addHandler(look)
    try:
        assert read_from(str(tmp_path), clock, read) == 7
    finally:
        log.removeHandler(look)
    assert seen == [Activity.JOIN, Activity.CHECKPOINT, Activity.JOIN]
    assert clock.read()[0] is Activity.JOIN


def hanging(directory: Path, number: int) -> Path:
    """Return a file that holds up each reader of the checkpoint of this number until it is opened for writing."""
    manifest = directory / f"version-{number}" / "MANIFEST.json"
    manifest.parent.mkdir()
    os.mkfifo(manifest)
    return manifest


def test_a_file_system_that_hangs_fails_checkpoints_until_it_moves_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = hanging(tmp_path, 3)
    checkpoints = checkpoints_in(tmp_path, HangLimits(warn_s=0.1, end_s=0.2))
    arrays = {"w": np.ones(2, np.float32)}
    with pytest.raises(CheckpointError, match=r"version-3: its file system hangs"):
        checkpoints.save(3, arrays, ledger_of(3))
    assert "version-3 has not moved" in caplog.text
    with pytest.raises(CheckpointError, match="an earlier write"):
        checkpoints.save(4, arrays, ledger_of(4))
    (held_up,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint-files")
    manifest.write_text("{}")
    held_up.join()
    while not checkpoints.has(5):
        with suppress(CheckpointError):  # a busy disk may take longer than the limit
            checkpoints.save(5, arrays, ledger_of(5))
    assert not (tmp_path / "version-3" / "model.npz").exists()


def test_the_last_checkpoint_fails_on_a_file_system_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = hanging(tmp_path, 12)
    writer = writer_in(tmp_path, HangLimits(warn_s=300, end_s=0.2))
    writer.begin(ledger_of(0))
    writer.save_if_due(ledger_of(12))
    writer.save_last(ledger_of(12))
    assert "hold" in writer.failure or "hangs" in writer.failure
    assert "has not moved" not in caplog.text  # for 300 s, which is longer than the limit
    manifest.write_text("{}")


def test_a_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    """Each job would keep the newest of both, and begin anew beside the other's."""
    checkpoints_in(tmp_path).save(3, Weights().state(), ledger_of(3))
    other = StateCheckpoints(str(tmp_path), CheckpointKind("other", "AllreduceStrategy", "model.npz", {}))
    of_local = StateCheckpoints(str(tmp_path), CheckpointKind("other", "Local", "local.npz", {}))
    assert other.initial(str(tmp_path)).ledger.steps == 3
    state = tmp_path / "version-3" / "model.npz"
    for content in (state.read_bytes(), b"damaged"):
        state.write_bytes(content)
        for checkpoints in (other, of_local):
            framework: Any = Weights()
            with pytest.raises(CheckpointError, match="version-3 is of job job, not other") as raised:
                Replica(framework, checkpoints, "", ActivityClock()).start_over()
            assert "--checkpoint_dir_for_init" in raised.value.hint
    assert written(tmp_path) == ["version-3"]


def test_a_checkpoint_of_another_strategy_is_called_so(tmp_path: Path) -> None:
    checkpoints_in(tmp_path).save(3, Weights().state(), ledger_of(3))
    of_local = StateCheckpoints(str(tmp_path), CheckpointKind("job", "Local", "local.npz", {}))
    reason = f"the checkpoint in {tmp_path / 'version-3'} is not of the strategy Local"
    with pytest.raises(versions.NoneIsWhole) as raised:
        of_local.newest()
    assert raised.value.damaged == (f"version-3: {reason}",)
    with pytest.raises(CheckpointError, match=reason):
        of_local.initial(str(tmp_path))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_whose_manifest_names_no_job_is_passed_over(tmp_path: Path, is_damaged: bool) -> None:
    checkpoints = checkpoints_in(tmp_path)
    for number in (3, 5):
        checkpoints.save(number, Weights().state(), ledger_of(number))
    manifest = tmp_path / "version-5" / "MANIFEST.json"
    values = read_manifest(manifest)
    del values["job_name"]
    manifest.write_text("{" if is_damaged else json.dumps(with_checksum(values)))
    found = checkpoints.newest()
    assert found is not None
    assert found.directory.name == "version-3"


def test_a_checkpoint_without_a_format_number_is_one_of_the_first_format(tmp_path: Path) -> None:
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(3, Weights().state(), ledger_of(3))
    manifest = tmp_path / "version-3" / "MANIFEST.json"
    values = read_manifest(manifest)
    assert values.pop("format") == 1
    manifest.write_text(json.dumps(with_checksum(values)))
    written = manifest.read_bytes()
    found = checkpoints.newest()
    assert found is not None
    assert found.ledger.steps == 3
    checkpoints.save(3, Weights().state(), ledger_of(3))
    assert manifest.read_bytes() == written, "it is the same: nothing is written"


def test_a_checkpoint_of_a_newer_format_is_neither_passed_over_nor_removed(tmp_path: Path) -> None:
    checkpoints = StateCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}), keep=1)
    checkpoints.save(5, Weights().state(), ledger_of(5))
    manifest = tmp_path / "version-5" / "MANIFEST.json"
    manifest.write_text(json.dumps(with_checksum(read_manifest(manifest) | {"format": 2})))
    with pytest.raises(NewerFormat, match=r"version-5/MANIFEST.json has format 2; this version reads 1") as raised:
        checkpoints.newest()
    assert "the version of ElasticDL that wrote it" in raised.value.hint
    with pytest.raises(NewerFormat):
        checkpoints.initial(str(tmp_path))
    with pytest.raises(NewerFormat):
        look_at(tmp_path)
    with pytest.raises(NewerFormat):
        checkpoints.save(5, Weights().state(), ledger_of(5))
    checkpoints.save(6, Weights().state(), ledger_of(6))
    assert manifest.exists(), "its number of checkpoints is 1, and yet it stays"


@pytest.mark.parametrize("content", [b"damaged", None])
def test_a_damaged_checkpoint_is_written_anew_by_the_same_training(tmp_path: Path, content: bytes | None) -> None:
    for number in (3, 9):
        checkpoints_in(tmp_path).save(number, Weights().state(), ledger_of(number))
    state = tmp_path / "version-9" / "model.npz"
    if content is None:
        state.unlink()
    else:
        state.write_bytes(content)
    successor = checkpoints_in(tmp_path)
    restored = successor.newest()
    assert restored is not None
    assert restored.ledger.steps == 3
    successor.save(9, Weights().state(), ledger_of(9))
    newest = successor.newest()
    assert newest is not None
    assert newest.ledger.steps == 9


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newer_one(tmp_path: Path) -> None:
    """A worker that ends may still be writing one when its successor begins."""
    kind = CheckpointKind("job", "AllreduceStrategy", "model.npz", {})
    checkpoints = StateCheckpoints(str(tmp_path), kind, keep=1)
    checkpoints.save(3, Weights().state(), ledger_of(3))
    state = tmp_path / "version-3" / "model.npz"
    state.unlink()
    os.mkfifo(state)

    def save_during_read() -> None:
        with state.open("wb"):  # the reader has come to it
            checkpoints.save(4, Weights().state(), ledger_of(4))

    saving = threading.Thread(target=save_during_read, daemon=True)
    saving.start()
    found = checkpoints_in(tmp_path).newest()
    saving.join()
    assert found is not None
    assert found.ledger.steps == 4


def test_a_model_of_which_all_checkpoints_are_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    framework: Any = Weights()
    replica = Replica(framework, checkpoints_in(tmp_path), "", ActivityClock())
    for number in (3, 5, 7):
        checkpoints_in(tmp_path).save(number, Weights().state(), ledger_of(number))
    (tmp_path / "version-3" / "MANIFEST.json").write_text("{")
    (tmp_path / "version-5" / "model.npz").write_bytes(b"damaged")
    (tmp_path / "version-7" / "model.npz").unlink()
    with pytest.raises(versions.NoneIsWhole) as raised:
        replica.start_over()
    text = str(raised.value)
    assert [reason.split(":")[0] for reason in raised.value.damaged] == ["version-7", "version-5", "version-3"]
    assert f"version-7: {tmp_path / 'version-7' / 'model.npz'} cannot be read: No such file or directory" in text
    assert f"version-5: {tmp_path / 'version-5' / 'model.npz'} is damaged: size or checksum" in text
    assert f"version-3: {tmp_path / 'version-3' / 'MANIFEST.json'} is damaged: " in text
    assert "by --checkpoint_dir_for_init with another --checkpoint_dir" in raised.value.hint
    assert f"move {tmp_path} away" in raised.value.hint
    assert written(tmp_path) == ["version-3", "version-5", "version-7"]


def test_what_never_became_a_checkpoint_or_is_half_removed_is_no_damaged_one(tmp_path: Path) -> None:
    framework: Any = Weights()
    replica = Replica(framework, checkpoints_in(tmp_path / "checkpoints"), "", ActivityClock())
    assert replica.start_over().ledger.steps == 0
    versions.begin(tmp_path / "checkpoints", 3)
    (tmp_path / "checkpoints" / "version-3" / ".model.npz.1").write_bytes(b"half of it")
    checkpoints_in(tmp_path / "checkpoints").save(2, Weights().state(), ledger_of(2))
    (tmp_path / "checkpoints" / "version-2" / "MANIFEST.json").unlink()  # as pruning begins
    assert replica.start_over().ledger.steps == 0


def test_a_damaged_checkpoint_does_not_push_out_those_of_the_model_that_was_restored(tmp_path: Path) -> None:
    kind = CheckpointKind("job", "AllreduceStrategy", "model.npz", {})
    for number in (3, 9):
        checkpoints_in(tmp_path).save(number, Weights().state(), ledger_of(number))
    (tmp_path / "version-9" / "model.npz").write_bytes(b"damaged")
    for number in (5, 7):
        StateCheckpoints(str(tmp_path), kind, keep=1).save(number, Weights().state(), ledger_of(number))
        found = checkpoints_in(tmp_path).newest()
        assert found is not None
        assert found.ledger.steps == number
    assert written(tmp_path) == ["version-7", "version-9"]


def test_a_checkpoint_that_has_failed_keeps_no_model_in_memory(tmp_path: Path) -> None:
    kind = CheckpointKind("job", "AllreduceStrategy", "missing/model.npz", {})
    checkpoints = StateCheckpoints(str(tmp_path), kind)
    array = np.ones(2, np.float32)
    is_alive = weakref.ref(array)
    gc.disable()
    try:
        with suppress(CheckpointError):
            checkpoints.save(3, {"w": array}, ledger_of(3))
        del array
        assert is_alive() is None
    finally:
        gc.enable()
    assert not checkpoints.has(3)


NAMES = st.builds(MinibatchName, st.integers(0, 2), st.integers(0, 6).map(lambda task: task * 1500), st.integers(0, 4))


ADDED = st.lists(st.tuples(NAMES, st.integers(0, 9), st.booleans()), max_size=60)


@given(added=ADDED, whole=st.integers(0, 20_000))
def test_a_ledger_travels_in_runs_of_tasks_that_are_alike(
    added: list[tuple[MinibatchName, int, bool]], whole: int
) -> None:
    ledger = Ledger(steps=7, num_records=8)
    ledger.applied.fill(5, 0, whole, 3)
    ledger.num_samples.fill(5, 0, whole, 24)
    for name, num_samples, is_skipped in added:
        ledger.add(name, num_samples, is_skipped)
    back = Ledger.from_bytes(ledger.to_bytes())
    assert back.applied.has_same_names(ledger.applied)
    assert back.applied.skipped == ledger.applied.skipped
    assert (back.applied.num_names, back.applied.num_applies) == (ledger.applied.num_names, ledger.applied.num_applies)
    assert (back.num_samples, back.steps, back.num_records) == (ledger.num_samples, 7, 8)
    runs = ledger.to_manifest()["applied_runs"]
    assert sum(count for epoch, _, count, *_ in runs if epoch == 5) == whole
    assert len([epoch for epoch, *_ in runs if epoch == 5]) <= 5


def test_a_checkpoint_of_an_earlier_version_has_a_row_of_each_task() -> None:
    rows = [[0, 0, [5, 7], 3, 24], [0, 1, [], 2], [1, 0, [0, 2]]]
    ledger = Ledger.from_manifest({"steps": 9, "num_records": 10, "num_applies": 11, "applied": rows})
    of_tasks = {(0, 0): (3, [5, 7], 24), (0, 1): (2, [], UNKNOWN), (1, 0): (1, [2], UNKNOWN)}
    for (epoch, task), (watermark, extras, num_samples) in of_tasks.items():
        known = ledger.applied.of_task(epoch, task)
        assert (known.watermark, list(known.extras)) == (watermark, extras)
        assert ledger.num_samples[epoch, task] == num_samples
    assert (ledger.applied.num_names, ledger.applied.num_applies, ledger.steps) == (9, 11, 9)


def test_the_last_checkpoint_is_tried_again_if_the_one_before_has_failed(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.write_text("no directory")
    writer = writer_in(place)
    writer.begin(ledger_of(0))
    writer.save_if_due(ledger_of(EVERY))
    writer.wait()
    assert writer.is_behind(ledger_of(EVERY))
    assert not writer.is_due(ledger_of(EVERY))
    place.unlink()
    writer.save_last(ledger_of(EVERY))
    assert not writer.is_behind(ledger_of(EVERY))
    assert written(place) == [f"version-{EVERY}"]


def test_a_checkpoint_that_any_error_has_stopped_does_not_count_as_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    others: Any = {"strange": np.array([object()])}
    writer.save(ledger_of(EVERY), others, is_last=True)
    assert writer.failure.startswith(("TypeError: ", "ValueError: "))  # by the version of NumPy
    assert writer.is_behind(ledger_of(EVERY))
    assert [record.exc_info is not None for record in caplog.records] == [True]
    writer.save_last(ledger_of(EVERY))
    assert f"version-{EVERY}" in written(tmp_path)


def test_a_checkpoint_that_is_asked_for_is_written_after_the_next_step(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer._checkpoints.request()
    writer.save_if_due(ledger_of(1))
    writer.wait()
    writer.save_if_due(ledger_of(2))
    writer.wait()
    assert written(tmp_path) == ["version-1"]


class HeldCheckpoints(StateCheckpoints):
    """On a slow disk: nothing is written until `may_write` is set."""

    may_write = threading.Event()

    def save(self, *of_checkpoint: Any) -> None:
        assert self.may_write.wait(60)
        super().save(*of_checkpoint)


class RacedWriter(CheckpointWriter):
    """Another thread begins the last checkpoint when the one before is written; that ends when it is awaited."""

    num_waits = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.num_waits += 1
        if self.num_waits > 2:
            HeldCheckpoints.may_write.set()
        super().wait(timeout_s)
        if self.num_waits == 1:
            self.save(ledger_of(7), {})


def test_a_last_checkpoint_that_another_thread_has_begun_is_waited_for(tmp_path: Path) -> None:
    HeldCheckpoints.may_write.clear()
    checkpoints = HeldCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    writer = RacedWriter(Replica(framework, checkpoints, "", ActivityClock()), checkpoints, EVERY)
    writer.begin(ledger_of(0))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_last_checkpoint_that_takes_too_long_is_not_waited_for_and_written_once(tmp_path: Path) -> None:
    HeldCheckpoints.may_write.clear()
    checkpoints = HeldCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    writer = CheckpointWriter(Replica(framework, checkpoints, "", ActivityClock()), checkpoints, EVERY)
    writer.begin(ledger_of(0))
    for _ in range(2):
        writer.save_last(ledger_of(7), within_s=0.05)
        assert written(tmp_path) == []
    checkpoints.may_write.set()
    writer.wait()
    assert written(tmp_path) == ["version-7"]
