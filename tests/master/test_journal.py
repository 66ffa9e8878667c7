"""The journal: whole after any crash, for one master alone; all adapters keep the same contract."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl.master import local_environment
from elasticdl.master.journal import JournalWriteError, Superseded
from elasticdl.master.local_environment import FileJournal
from elasticdl.storage.paths import make_directory, sync_directory
from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobPhase, JobStatus
from tests.master.actors import REPOSITORY, is_root, wait_until
from tests.master.journals import ConfigMapJournals, FileJournals, Journals, StorageJournals
from tests.master.small_disk import small_disk
from tests.storage.conftest import proxy, s3_port  # noqa: F401  fixtures

_SAVE_FOR_EVER = """
import sys
from pathlib import Path
from elasticdl.master.local_environment import FileJournal
journal, n = FileJournal(Path(sys.argv[1])), 0
while True:
    n += 1
    journal.save({"n": n, "filler": [n] * 20_000})
    print(n, flush=True)
"""
_ANOTHER_USER = 65534
_RUNNING = JobStatus("digits", phase=JobPhase.RUNNING, records_done=7)


@pytest.fixture(params=["file", "storage", pytest.param("map", marks=pytest.mark.cluster)])
def journals(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journals]:
    found: Journals
    match request.param:
        case "file":
            found = FileJournals(tmp_path)
        case "storage":
            request.getfixturevalue("proxy")
            found = StorageJournals(f"s3://bucket/{tmp_path.name}", tmp_path)
        case _:
            found = ConfigMapJournals()
    try:
        yield found
    finally:
        found.close()


def test_what_is_saved_is_loaded_and_a_new_job_has_nothing(journals: Journals) -> None:
    journal = journals.open()
    assert journal.load() is None
    assert journal.read_status() is None
    journal.save({"a": [1, 2]})
    journal.save({"a": [1, 2, 3]}, _RUNNING)
    assert journal.read_status() == _RUNNING
    journal.close()
    journal = journals.open()
    assert journal.load() == {"a": [1, 2, 3]}
    assert journal.read_status() == _RUNNING
    journal.close()


def test_what_is_saved_later_is_there_soon_and_the_newest_wins(journals: Journals) -> None:
    journal = journals.open()
    for n in range(100):
        journal.save_later({"n": n}, JobStatus("digits", records_done=n))
    wait_until(lambda: journal.read_status() == JobStatus("digits", records_done=99), "the newest status")
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 99}
    journal.close()


def test_what_was_to_be_saved_later_never_replaces_what_was_saved_after_it(journals: Journals) -> None:
    journal = journals.open()
    for n in range(0, 60, 2):
        journal.save_later({"n": n}, _RUNNING)
        journal.save({"n": n + 1})
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 59}
    assert journal.read_status() == _RUNNING
    journal.close()


def test_a_status_is_not_replaced_by_one_that_was_to_be_saved_before_it(journals: Journals) -> None:
    journal = journals.open()
    for n in range(2):  # the second one waits
        journal.save_later({"n": n}, _RUNNING)
    failed = JobStatus("digits", phase=JobPhase.FAILED, exit_code=1)
    journal.write_status(failed)
    journal.save({"n": 2})
    assert journal.read_status() == failed
    journal.close()


def test_a_status_alone_leaves_the_snapshot_as_it_is(journals: Journals) -> None:
    journal = journals.open()
    journal.save({"n": 1}, _RUNNING)
    failed = JobStatus("digits", phase=JobPhase.FAILED, message="it cannot be run", exit_code=1)
    journal.write_status(failed)
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 1}
    assert journal.read_status() == failed
    journal.close()


def test_the_journal_of_another_version_is_refused_by_its_format(journals: Journals) -> None:
    journals.damage(b'{"format": 1, "snapshot": {}}')
    journal = journals.open()
    with pytest.raises(JobError, match="written by another version of ElasticDL: its format is 1") as caught:
        journal.load()
    assert "the version that began it" in caught.value.hint
    journal.close()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b"\x00\x01"])
def test_a_damaged_journal_is_an_error_never_a_fresh_start(journals: Journals, data: bytes) -> None:
    journals.damage(data)
    journal = journals.open()
    with pytest.raises(JobError, match="is damaged"):
        journal.load()
    journal.close()


def test_a_kill_in_the_middle_of_saves_leaves_the_last_or_the_next_snapshot(tmp_path: Path) -> None:
    last = 0
    for kill_after in (1, 3, 7, 12):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(kill_after):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        last = int(said[-1]) if said else last
        with FileJournal(tmp_path) as journal:
            snapshot = journal.load()
        assert snapshot is not None
        assert snapshot["n"] in (last, last + 1)
        assert snapshot["filler"] == [snapshot["n"]] * 20_000


def test_a_second_master_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with FileJournal(tmp_path):
        with pytest.raises(Superseded, match="another master"):
            FileJournal(tmp_path)
    FileJournal(tmp_path).close()


def test_a_full_disk_keeps_the_journal_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=256) as disk, FileJournal(disk) as journal:
        journal.save({"n": 1}, _RUNNING)
        with pytest.raises(JournalWriteError, match="No space left"):
            journal.save({"n": 2, "filler": "x" * 1_000_000}, dataclasses.replace(_RUNNING, records_processed=8))
        assert journal.load() == {"n": 1}
        assert journal.read_status() == _RUNNING  # a crash now would take the records back
        assert journal.take_outages() == []
        journal.save({"n": 3})
        assert journal.load() == {"n": 3}
        (outage,) = journal.take_outages()
        assert outage.message.startswith("No space left on device")
        assert outage.seconds > 0
        assert journal.take_outages() == []


def test_a_failed_write_that_took_effect_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with FileJournal(tmp_path) as journal:
        journal.save({"n": 1})
        with monkeypatch.context() as broken:
            broken.setattr(local_environment, "sync_directory", refuse)
            with pytest.raises(JournalWriteError, match="Input/output error"):
                journal.save({"n": 2})
        journal.save({"n": 1})
        assert journal.load() == {"n": 1}


def test_a_full_disk_is_one_warning_until_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", size_kib=256) as disk, FileJournal(disk) as journal:
        for size, num_warnings in ((1_000_000, 1), (1_000_001, 1), (1, 1), (1_000_000, 2)):
            journal.save_later({"filler": "x" * size}, _RUNNING)
            assert len(caplog.records) == num_warnings


def test_a_file_system_that_syncs_no_directories_is_good_enough() -> None:
    sync_directory(Path("/proc"))  # it is one, as are older CIFS and shared folders of VirtualBox


def test_a_directory_that_may_be_passed_through_alone_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("own")
    own.mkdir()
    tmp_path.chmod(0o311)
    with as_user(own):
        with pytest.raises(PermissionError):
            os.listdir()
        make_directory(own)
        make_directory(own / "checkpoints")
    tmp_path.chmod(0o700)


@contextlib.contextmanager
def as_user(directory: Path) -> Iterator[None]:
    """Give root's process the rights of another user, the owner of a directory."""
    if not is_root():
        yield
        return
    os.chown(directory, _ANOTHER_USER, _ANOTHER_USER)
    os.seteuid(_ANOTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_status_that_a_read_only_file_system_refuses_ends_no_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with FileJournal(tmp_path) as journal:
        with monkeypatch.context() as read_only:
            read_only.setattr(local_environment, "open", refuse, raising=False)
            read_only.setattr(Path, "unlink", refuse)
            journal.write_status(_RUNNING)
        assert journal.read_status() is None
        journal.write_status(_RUNNING)
        assert journal.read_status() == _RUNNING
