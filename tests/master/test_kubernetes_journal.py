"""The journal in a ConfigMap: its writers, and what becomes of it when the way to the API server breaks."""

from __future__ import annotations

import base64
import os
import random
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl.master.journal import JournalWriteError, Superseded, decode
from elasticdl.master.kubernetes.journal import ConfigMapJournal
from elasticdl_client.errors import JobError
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import connect
from tests.master.actors import wait_until
from tests.master.api_proxy import ApiProxy, Fault, proxied
from tests.master.journals import JOB, ConfigMapJournals

pytestmark = pytest.mark.cluster
_RUNNING = JobStatus(JOB, phase=JobPhase.RUNNING)


@pytest.fixture
def journals() -> Iterator[ConfigMapJournals]:
    found = ConfigMapJournals()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiProxy]:
    with proxied(Path(os.environ["KUBECONFIG"]), tmp_path / "kubeconfig") as found:
        monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
        yield found


def behind_proxy(journals: ConfigMapJournals) -> ConfigMapJournal:
    """A life whose way to the server can be broken."""
    return ConfigMapJournal(connect(), journals.namespace.name, JOB)


def test_a_master_with_a_successor_is_superseded_at_its_next_write(journals: ConfigMapJournals) -> None:
    first = journals.open()
    first.save({"n": 1})
    second = journals.open()
    assert second.load() == {"n": 1}
    with pytest.raises(Superseded, match="another master has taken over"):
        first.save({"n": 2})
    with pytest.raises(Superseded):
        first.save_later({"n": 3}, _RUNNING)
    with pytest.raises(Superseded):
        first.write_status(_RUNNING)
    second.save({"n": 4})
    first.close()
    second.close()
    third = journals.open()
    assert third.load() == {"n": 4}
    third.close()


def test_a_master_finds_its_successor_by_what_it_writes_later_too(journals: ConfigMapJournals) -> None:
    first = journals.open()
    second = journals.open()

    def is_superseded() -> bool:
        try:
            first.save_later({"n": time.monotonic()}, _RUNNING)
        except Superseded:
            return True
        return False

    wait_until(is_superseded, "the first life to find out")
    second.save({"n": 1})
    first.close()
    second.close()


def test_a_change_by_another_client_costs_nothing(journals: ConfigMapJournals) -> None:
    journal = journals.open()
    journal.save({"n": 1})
    journals.patch({"metadata": {"labels": {"checked-by": "somebody"}}})
    journal.save({"n": 2})
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 2}
    journal.close()


def test_a_master_finds_out_that_it_has_a_successor_without_writing(journals: ConfigMapJournals) -> None:
    first = journals.open()
    first.save({"n": 1})
    first.check_owner()
    second = journals.open()
    with pytest.raises(Superseded, match="another master has taken over"):
        first.check_owner()
    second.check_owner()
    second.save({"n": 2})
    for journal in (first, second):
        journal.close()


def test_a_deleted_job_supersedes_its_master(journals: ConfigMapJournals) -> None:
    journal = journals.open()
    journals.namespace.core.delete_namespaced_config_map(journals.name, journals.namespace.name)
    with pytest.raises(Superseded, match="the job was deleted"):
        journal.save({"n": 1})
    with pytest.raises(Superseded, match="the job was deleted"):
        journals.open()
    journal.close()


def test_a_write_whose_answer_was_lost_is_recognised(journals: ConfigMapJournals, proxy: ApiProxy) -> None:
    journal = behind_proxy(journals)
    journal.save({"n": 1})
    proxy.fault = Fault.LOSES_ANSWERS
    with pytest.raises(JournalWriteError):
        journal.save({"n": 2})
    assert proxy.num_lost == 1
    shown = journals.namespace.core.read_namespaced_config_map(journals.name, journals.namespace.name)
    assert decode(zlib.decompress(base64.b64decode(shown.binary_data[names.JOURNAL_KEY])), "", "") == {"n": 2}
    proxy.fault = Fault.NONE
    journal.save({"n": 1})  # as it was before the write that seemed to fail
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 1}
    journal.close()


def test_an_api_server_that_is_away_costs_time_and_nothing_else(journals: ConfigMapJournals, proxy: ApiProxy) -> None:
    journal = behind_proxy(journals)
    journal.save({"n": 1})
    proxy.fault = Fault.REFUSES
    with pytest.raises(JournalWriteError, match="cannot be reached"):
        journal.save({"n": 2})
    journal.save_later({"n": 3}, _RUNNING)
    proxy.fault = Fault.NONE
    wait_until(lambda: journal.read_status() == _RUNNING, "the delayed write")
    journal.save({"n": 4})
    (outage,) = journal.take_outages()
    assert "cannot be reached" in outage.message
    journal.close()
    journal = journals.open()
    assert journal.load() == {"n": 4}
    journal.close()


def test_an_api_server_that_hangs_blocks_only_its_callers(journals: ConfigMapJournals, proxy: ApiProxy) -> None:
    journal = behind_proxy(journals)
    proxy.fault = Fault.HANGS
    began = time.monotonic()
    for n in range(50):
        journal.save_later({"n": n}, _RUNNING)
    assert time.monotonic() - began < 4  # the one that waits for the server gives up after 5 s
    with pytest.raises(JournalWriteError):
        journal.save({"n": 50})
    assert 4 < time.monotonic() - began < 25
    proxy.fault = Fault.NONE
    journal.save({"n": 51})
    journal.close()


def test_a_journal_that_no_configmap_can_hold_is_said_and_not_sent(journals: ConfigMapJournals) -> None:
    journal = journals.open()
    journal.save({"n": 1})
    snapshot = {"noise": random.Random(0).randbytes(1024 * 1024).hex()}
    with pytest.raises(JobError, match="too large for a ConfigMap") as refused:
        journal.save(snapshot)
    assert not isinstance(refused.value, JournalWriteError | Superseded)
    with pytest.raises(JobError, match="too large for a ConfigMap"):
        journal.save_later(snapshot, _RUNNING)
    journal.close()


def test_each_phase_is_reported_once_it_is_written(journals: ConfigMapJournals) -> None:
    told: list[JobPhase] = []
    journal = ConfigMapJournal(journals.namespace.connection, journals.namespace.name, JOB, told.append)
    journal.save_later({}, JobStatus(JOB))
    wait_until(lambda: told == [JobPhase.PENDING], "the first phase")
    for n in range(3):
        journal.save({"n": n}, _RUNNING)
    journal.write_status(JobStatus(JOB, phase=JobPhase.SUCCEEDED))
    assert told == [JobPhase.PENDING, JobPhase.RUNNING, JobPhase.SUCCEEDED]
    journal.close()


def test_a_phase_that_takes_long_to_tell_is_not_told_after_a_later_one(journals: ConfigMapJournals) -> None:
    told: list[JobPhase] = []
    begun, may_end = threading.Event(), threading.Event()

    def tell(phase: JobPhase) -> None:
        if phase is JobPhase.RUNNING:
            begun.set()
            may_end.wait(60)
        told.append(phase)

    journal = ConfigMapJournal(journals.namespace.connection, journals.namespace.name, JOB, tell)
    journal.save_later({}, _RUNNING)
    assert begun.wait(60)
    ending = threading.Thread(target=journal.write_status, args=(JobStatus(JOB, phase=JobPhase.SUCCEEDED),))
    ending.start()
    ending.join(2)
    may_end.set()
    ending.join()
    wait_until(lambda: len(told) == 2, "both phases")
    assert told == [JobPhase.RUNNING, JobPhase.SUCCEEDED]
    journal.close()
