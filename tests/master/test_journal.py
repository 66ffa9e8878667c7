"""The file journal: whole after any crash, for one master alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl.master.file_journal import FileJournal
from elasticdl.master.journal import JournalWriteError, Superseded
from elasticdl_client.errors import JobError
from tests.master.actors import REPOSITORY
from tests.master.small_disk import small_disk

pytestmark = pytest.mark.ci

_SAVE_FOR_EVER = """
import sys
from pathlib import Path
from elasticdl.master.file_journal import FileJournal
journal, n = FileJournal(Path(sys.argv[1])), 0
while True:
    n += 1
    journal.save({"n": n, "filler": [n] * 20_000})
    print(n, flush=True)
"""


def test_what_is_saved_is_loaded_and_a_new_job_has_nothing(tmp_path: Path) -> None:
    with FileJournal(tmp_path) as journal:
        assert journal.load() is None
        journal.save({"a": [1, 2]})
        journal.save({"a": [1, 2, 3]})
    with FileJournal(tmp_path) as journal:
        assert journal.load() == {"a": [1, 2, 3]}


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "snapshot": {}}', "\x00\x01"])
def test_a_damaged_journal_is_an_error_never_a_fresh_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.json").write_text(text)
    with FileJournal(tmp_path) as journal:
        with pytest.raises(JobError, match="is damaged"):
            journal.load()


def test_a_full_disk_keeps_the_journal_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=256) as disk, FileJournal(disk) as journal:
        journal.save({"n": 1})
        with pytest.raises(JournalWriteError, match="No space left"):
            journal.save({"n": 2, "filler": "x" * 1_000_000})
        assert journal.load() == {"n": 1}
        journal.save({"n": 3})
        assert journal.load() == {"n": 3}
