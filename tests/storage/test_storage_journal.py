"""The journal in storage: its claims, and what becomes of it when requests fail; its contract is in tests/master."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticdl.master import checkpoints, storage_journal
from elasticdl.master.core import commands
from elasticdl.master.core.values import PsAddress
from elasticdl.master.effects import Crashed, Effects
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import JournalWriteError, ResumedElsewhere, Superseded, save_patiently
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.storage import versions
from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy, storage_of
from elasticdl.storage.paths import path_of
from elasticdl_client.errors import JobError, StorageError
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.storage_kinds import AnyPath
from tests.master.actors import wait_until
from tests.master.directory_cluster import DirectoryCluster
from tests.master.journals import StorageJournals
from tests.ps.parts import even_parts, write_checkpoint
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request

_RUNNING = JobStatus("digits", phase=JobPhase.RUNNING)
HERE, ELSEWHERE = "a" * 16, "b" * 16


def journals(proxy: FaultyProxy, tmp_path: Path, place: str = HERE, name: str = "one") -> StorageJournals:
    return StorageJournals(f"s3://bucket/{tmp_path.name}", tmp_path / name, place)


def is_snapshot(request: Request) -> bool:
    return request.method == "PUT" and "/journal/" in request.path and "." in request.path.rpartition("/")[2]


def is_list(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.path


def test_a_master_with_a_successor_is_superseded_at_its_next_write(proxy: FaultyProxy, tmp_path: Path) -> None:
    first = journals(proxy, tmp_path).open()
    assert first.load() is None
    first.save({"n": 1})
    second = journals(proxy, tmp_path, name="two").open()
    assert second.load() == {"n": 1}
    with pytest.raises(Superseded, match="another master has taken over"):
        first.save({"n": 2})
    with pytest.raises(Superseded):
        first.save_later({"n": 3}, _RUNNING)
    first.close()
    second.save({"n": 4})
    second.close()
    third = journals(proxy, tmp_path).open()
    assert third.load() == {"n": 4}
    third.close()


def test_a_master_that_was_paused_in_a_checkpoint_commits_nothing_over_its_successors(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    checkpoint_dir = f"s3://bucket/{tmp_path.name}/checkpoints"
    journal, successor = journals(proxy, tmp_path).open(), journals(proxy, tmp_path, name="two").open()
    journal.load()
    journal.check_owner()
    parts = even_parts(1)

    class Paused(checkpoints.PsCalls):
        """Servers that have written their parts when the successor has taken over and written the same version."""

        def save_parts(self, ps: Sequence[PsAddress], directory: AnyPath) -> tuple[checkpoints.PsPart, ...]:
            successor.load()
            write_checkpoint(path_of(checkpoint_dir), 7, parts)
            return ()

    flags = {"job_name": "digits", "model_def": "m.f", "training_data": "d", "checkpoint_dir": checkpoint_dir}
    spec = JobSpec.from_flags("train", {**flags, "runtime": "local"})
    inbox, specs = Inbox(), PodSpecs(spec, "python", "127.0.0.1:1")
    effects = Effects(spec, DirectoryCluster(tmp_path / "pods"), specs, Paused("token", 1), inbox)
    effects.save_checkpoint(commands.SaveCheckpoint(7, (), "print"), {}, journal.check_owner)
    item = inbox.next(60.0)
    assert isinstance(item, Crashed)
    assert isinstance(item.error, Superseded)  # with which the loop ends
    assert checkpoints.read(versions.directory_of(path_of(checkpoint_dir), 7)).num_ps == 1
    effects.save_checkpoint(commands.SaveCheckpoint(7, (), "print"), {}, journal.check_owner)
    assert isinstance(inbox.next(60.0), Crashed)  # before it has removed the parts of the successor
    assert checkpoints.newest(path_of(checkpoint_dir)) is not None
    effects.close()
    for one in (journal, successor):
        one.close()


def test_a_place_that_has_lost_the_job_never_claims_it_again(proxy: FaultyProxy, tmp_path: Path) -> None:
    here = journals(proxy, tmp_path)
    first = here.open()
    first.load()
    first.save({"n": 1}, _RUNNING)
    second = journals(proxy, tmp_path, ELSEWHERE, "two").open()
    assert second.load() == {"n": 1}
    assert second.read_status() == _RUNNING  # the one in storage
    wait_until(lambda: _is_superseded(first), "the first master to find out by what it writes later")
    failed = JobStatus("digits", phase=JobPhase.FAILED, exit_code=3)
    first.write_status(failed)
    first.close()
    with pytest.raises(ResumedElsewhere, match="resumed elsewhere") as caught:
        here.open().load()
    assert f"elasticdl resume --job_dir={here.job_dir}" in caught.value.hint
    second.save({"n": 2})
    second.close()
    third = journals(proxy, tmp_path, ELSEWHERE, "three").open()
    assert third.load() == {"n": 2}
    assert third.read_status() == _RUNNING  # not the status of the place that has lost
    third.close()


def _is_superseded(journal: storage_journal.StorageJournal, error: type[Superseded] = ResumedElsewhere) -> bool:
    try:
        journal.save_later({"n": 2}, _RUNNING)
    except error:
        return True
    return False


def test_a_master_that_lost_the_journal_of_its_runtime_is_superseded_here_too(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    shown = StorageJournals(f"s3://bucket/{tmp_path.name}/shown", tmp_path / "one")
    of_runtime = shown.open()
    of_runtime.load()
    journal = storage_journal.StorageJournal(f"s3://bucket/{tmp_path.name}", HERE, of_runtime)
    journal.load()
    shown.directory = tmp_path / "two"
    shown.directory.mkdir()
    successor = shown.open()
    successor.load()
    wait_until(lambda: _is_superseded(journal, Superseded), "the master to find out")
    journal.close()
    successor.close()


def test_a_snapshot_that_a_successor_may_not_have_read_is_not_acknowledged(proxy: FaultyProxy, tmp_path: Path) -> None:
    first = journals(proxy, tmp_path).open()
    first.load()
    first.save({"n": 1})
    second = journals(proxy, tmp_path, name="two").open()
    loaded = []

    def fault_of(request: Request) -> None:
        if is_snapshot(request):  # before it is passed on
            proxy.fault_of = lambda request: None
            loaded.append(second.load())

    proxy.fault_of = fault_of
    with pytest.raises(Superseded):
        first.save({"n": 2})
    assert loaded == [{"n": 1}]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        (is_snapshot, Fault.UNAVAILABLE),
        (is_snapshot, Fault.STALLED),
        *((is_list, fault) for fault in Fault if fault is not Fault.HELD),
    ],
)
def test_a_write_that_fails_is_an_outage_and_succeeds_when_it_is_repeated(
    proxy: FaultyProxy,
    tmp_path: Path,
    which: Callable[[Request], bool],
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    journal.load()
    journal.save({"n": 1})
    proxy.fault_of = lambda request: fault if which(request) else None
    with monkeypatch.context() as patch:  # not while a busy machine makes the client, in a longer time
        patch.setattr(journal._storage, "_policy", RetryPolicy(request_s=4.0, total_s=0.0))
        with pytest.raises(JournalWriteError, match="cannot be written"):
            journal.save({"n": 2})
    assert journal.take_outages() == []
    proxy.fault_of = lambda request: None
    journal.save({"n": 2})
    (outage,) = journal.take_outages()
    assert outage.seconds > 0
    journal.close()
    faults = [Fault.UNAVAILABLE, None, Fault.CUT_OFF, None, Fault.TOO_SHORT]
    proxy.fault_of = lambda request: faults.pop() if faults and (is_list(request) or request.range) else None
    journal = found.open()
    assert journal.load() == {"n": 2}
    journal.close()


def test_the_snapshot_before_is_read_where_the_newest_is_damaged(
    proxy: FaultyProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    for n in (1, 2):
        journal.save({"n": n})
    journal.close()
    found.put(b"cut")
    journal = found.open()
    assert journal.load() == {"n": 1}
    assert "is damaged" in caplog.text
    journal.close()


def test_two_snapshots_are_kept_and_of_each_place_one_claim(proxy: FaultyProxy, tmp_path: Path) -> None:
    for n, place in enumerate([HERE, HERE, ELSEWHERE, ELSEWHERE]):
        found = journals(proxy, tmp_path, place, place)
        journal = found.open()
        journal.load()
        for one in range(4):
            journal.save({"n": [n, one]})
        journal.save_later({"n": [n, 4]}, _RUNNING)
        wait_until(lambda: len(found.names()) == (3 if place == HERE else 4), "old objects to be deleted")  # noqa: B023
        journal.close()
    assert [name.split("-")[1].partition(".")[0] for name in found.names()] == [HERE] + 3 * [ELSEWHERE]


def test_people_find_status_and_events_in_the_journal_of_the_runtime(proxy: FaultyProxy, tmp_path: Path) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    core = {"accounting": {"began_at": 7.0}, "ledger": ["only masters read it"] * 100}
    journal.save({"core": core}, _RUNNING)
    shown = (found.directory / "journal.json").read_bytes()
    assert JobJournal.read(shown).began_at == 7.0
    assert b"only masters" not in shown
    assert journal.read_status() == _RUNNING
    assert JobStatus.from_json(_read(f"{found.job_dir}/status.json")) == _RUNNING
    journal.close()


def _read(url: str) -> str:
    storage = storage_of(url)
    return storage.read(url, 0, storage.stat(url).size_bytes).decode()


@pytest.mark.parametrize("seed", range(3))
def test_a_successor_reads_all_that_was_acknowledged(proxy: FaultyProxy, tmp_path: Path, seed: int) -> None:
    """Masters of several places begin and write at any time, in spite of their successors, and requests fail."""
    choice = random.Random(seed)
    masters: list[storage_journal.StorageJournal] = []
    acknowledged, n = 0, 0

    def fault_of(request: Request) -> Fault | None:
        return choice.choice([Fault.UNAVAILABLE, Fault.CUT_OFF]) if choice.random() < 0.05 else None

    proxy.fault_of = fault_of
    for number in range(60):
        if not masters or choice.random() < 0.15:
            place = choice.choice([HERE, f"{number:016x}"])
            journal = journals(proxy, tmp_path, place, f"{number}").open()
            try:
                loaded = journal.load()
            except Superseded:
                journal.close()
                continue
            assert (loaded or {"n": 0})["n"] >= acknowledged
            masters.append(journal)
        n += 1
        master = choice.choice(masters[-3:])
        try:
            master.save({"n": n})
        except (Superseded, JournalWriteError):
            continue
        assert master is masters[-1]
        acknowledged = n
    for journal in masters:
        journal.close()


def test_a_job_that_has_not_begun_fails_where_its_storage_refuses_and_waits_where_it_is_away(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = journals(proxy, tmp_path)
    journal, away = found.open(), FsspecStorage("s3", RetryPolicy(total_s=0.0))
    monkeypatch.setattr(storage_journal, "storage_of", lambda url: away)
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    with pytest.raises(JournalWriteError):  # the next generation tries again
        journal.load()
    proxy.fault_of = lambda request: None
    monkeypatch.setattr(away._file_system, "_ls", _refused)
    with pytest.raises(StorageError, match="no permission") as caught:
        journal.load()
    assert "--envs" in caught.value.hint
    journal.save({"n": 1}, _RUNNING)
    with pytest.raises(JournalWriteError):  # it has begun: credentials may be renewed
        journal.load()
    journal.close()


async def _refused(*_arguments: object, **_named: object) -> None:
    raise PermissionError("Access Denied")


def test_people_read_that_a_running_job_waits_for_its_storage_and_why(proxy: FaultyProxy, tmp_path: Path) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    journal.load()
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    with pytest.raises(JournalWriteError):
        save_patiently(journal, {"n": 1}, None, 4.0, threading.Event())
    assert journal.read_status() is None  # a job that has not begun: a refusal now ends it
    proxy.fault_of = lambda request: None
    journal.save({"n": 1}, _RUNNING)
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    journal.save_later({"n": 2}, _RUNNING)
    wait_until(lambda: bool(_shown(found).message), "the outage to be shown")
    assert _shown(found).phase is JobPhase.RUNNING
    assert found.job_dir in _shown(found).message
    assert "503" in _shown(found).message or "Slow Down" in _shown(found).message
    proxy.fault_of = lambda request: None
    wait_until(lambda: _shown(found) == _RUNNING, "its end to be shown")
    proxy.fault_of = lambda request: Fault.UNAVAILABLE
    with pytest.raises(JournalWriteError):
        save_patiently(journal, {"n": 3}, None, 5.0, threading.Event())
    assert _shown(found).message
    journal.close()


def _shown(found: StorageJournals) -> JobStatus:
    return JobStatus.from_json((found.directory / "status.json").read_text())


def test_a_job_whose_directory_was_removed_does_not_begin_again(proxy: FaultyProxy, tmp_path: Path) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    journal.load()
    journal.save({"n": 1}, _RUNNING)
    journal.close()
    storage = storage_of(found.job_dir)
    for url in [f"{found.job_dir}/status.json", *(f"{found.job_dir}/journal/{name}" for name in found.names())]:
        storage.delete(url)
    journal = found.open()
    with pytest.raises(JobError, match="was removed") as caught:
        journal.load()
    assert not isinstance(caught.value, Superseded)  # the job fails, instead of a master after the other
    journal.write_status(JobStatus("digits", phase=JobPhase.FAILED, exit_code=1))
    assert storage.list(found.job_dir) == []
    journal.close()


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_master_whose_directory_is_removed_notices_it_at_its_next_write(
    proxy: FaultyProxy, tmp_path: Path, with_snapshot: bool
) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    journal.load()
    journal.save({"n": 1}, _RUNNING)
    storage = storage_of(found.job_dir)
    for url in [f"{found.job_dir}/status.json", *(f"{found.job_dir}/journal/{name}" for name in found.names())]:
        storage.delete(url)
    with pytest.raises(JobError, match="was removed while the job ran") as caught:
        journal.save({"n": 2 if with_snapshot else 1})
    assert not isinstance(caught.value, Superseded)  # the job fails, and no master elsewhere is named
    with pytest.raises(JobError, match="was removed"):
        journal.save_later({"n": 3}, _RUNNING)
    failed = JobStatus("digits", phase=JobPhase.FAILED, exit_code=1)
    journal.write_status(failed)
    assert journal.read_status() == failed
    assert storage.list(found.job_dir) == []
    journal.close()


def test_a_master_whose_directory_was_removed_leaves_the_objects_of_a_job_that_began_there_since(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    found = journals(proxy, tmp_path, "f" * 16)
    journal = found.open()
    journal.load()
    journal.save({"n": 1}, _RUNNING)
    storage = storage_of(found.job_dir)
    for url in [f"{found.job_dir}/status.json", *(f"{found.job_dir}/journal/{name}" for name in found.names())]:
        storage.delete(url)
    other = journals(proxy, tmp_path, "0" * 16, "two").open()  # its claim, the first again, is the lower one
    other.load()
    with pytest.raises(JobError, match="was removed while the job ran"):
        journal.save({"n": 2})
    other.save({"n": 1}, _RUNNING)
    for one in (journal, other):
        one.close()


def test_snapshots_that_are_saved_at_once_are_deleted_without_the_thread(proxy: FaultyProxy, tmp_path: Path) -> None:
    found = journals(proxy, tmp_path)
    journal = found.open()
    journal.load()
    for n in range(30):
        journal.save({"n": n})
        assert len(found.names()) <= 12
    journal.close()
    journal = found.open()
    assert journal.load() == {"n": 29}
    journal.close()


def test_a_bucket_that_refuses_to_delete_is_reported_once(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_storage: FsspecStorage, url: str) -> None:
        raise StorageError(f"{url} cannot be deleted: access denied")

    monkeypatch.setattr(FsspecStorage, "delete", refuse)
    journal = journals(proxy, tmp_path).open()
    journal.load()
    for n in range(14):
        journal.save({"n": n})
    journal.close()
    assert caplog.text.count("cannot be deleted: s3://") == 1


def test_a_master_that_fails_before_its_first_snapshot_leaves_the_job_to_be_resumed(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    first = journals(proxy, tmp_path).open()
    first.load()
    first.save({"n": 1}, _RUNNING)
    second = journals(proxy, tmp_path, ELSEWHERE, "two").open()
    second.load()
    failed = JobStatus("digits", phase=JobPhase.FAILED, exit_code=1)  # a package is missing there
    second.write_status(failed)
    assert second.read_status() == failed
    assert JobStatus.from_json(_read(f"s3://bucket/{tmp_path.name}/status.json")) == _RUNNING
    second.save({"n": 2})
    second.write_status(failed)
    assert JobStatus.from_json(_read(f"s3://bucket/{tmp_path.name}/status.json")) == failed
    for journal in (first, second):
        journal.close()
