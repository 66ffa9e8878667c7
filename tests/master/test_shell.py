"""The shell's loop: calls that arrive together are journalled together, before they take effect."""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase
from elasticdl.data import factory
from elasticdl.master import shell
from elasticdl.master.checkpoints import PsCalls
from elasticdl.master.core.commands import Answer, EndJob, PsAdmitted, SaveCheckpoint
from elasticdl.master.core.events import CheckpointSaved, Event, JournalDelayed, LeaseQuestioned, PodsListed, PsJoined
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import DataKind
from elasticdl.master.effects import Effects, Listing, pod_changed
from elasticdl.master.inbox import Inbox
from elasticdl.master.journal import JournalWriteError, Outage, Outages, Superseded
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.master.shell import Shell
from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from tests.master.actors import wait_until
from tests.master.directory_cluster import DirectoryCluster

_NUM_PS = 50
_SETTINGS = JobSettings("digits", num_workers=1, num_ps=_NUM_PS, lease_timeout=600.0)  # its servers send no heartbeats


class MemoryJournal:
    """`Journal` that keeps every snapshot; `fault` is raised instead while it is set."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.later: list[dict[str, Any]] = []
        self.status: JobStatus | None = None
        self.fault: Exception | None = None
        self.num_refused = 0
        self.num_unknown_owners = 0  # of the next questions who owns the job
        self.outages = Outages()

    def load(self) -> dict[str, Any] | None:
        return self.saved[-1] if self.saved else None

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        if self.fault is not None:
            self.num_refused += 1
            self.outages.failed(str(self.fault))
            raise self.fault
        self.outages.written()
        self.saved.append(snapshot)
        self.status = status or self.status

    def save_later(self, snapshot: dict[str, Any], status: JobStatus) -> None:
        self.later.append(snapshot)
        self.status = status

    def read_status(self) -> JobStatus | None:
        return self.status

    def write_status(self, status: JobStatus) -> None:
        self.status = status

    def check_owner(self) -> None:
        if self.num_unknown_owners:
            self.num_unknown_owners -= 1
            raise JournalWriteError("no answer")

    def take_outages(self) -> list[Outage]:
        return self.outages.take()

    def close(self) -> None:
        pass


class Life:
    """A shell around a job of many servers; it runs once `start` is called."""

    def __init__(self, directory: Path) -> None:
        flags = {"job_name": "digits", "model_def": "m.f", "training_data": "d", "num_ps_pods": _NUM_PS}
        flags["checkpoint_dir"] = str(directory / "checkpoints")
        spec = JobSpec.from_flags("train", {**flags, "runtime": "local", "num_workers": 1})
        self.cluster = DirectoryCluster(directory / "pods")
        self.inbox = Inbox()
        self.journal = MemoryJournal()
        specs = PodSpecs(spec, "python", "127.0.0.1:1")
        self.effects = Effects(spec, self.cluster, specs, PsCalls("token", 1), self.inbox)
        state = {"job_name": "digits", "started_at": 0.0, "generation": 1}
        job = Job(_SETTINGS)
        self.shell = Shell(job, self.effects, self.journal, state, patience_s=60.0)
        self.error: BaseException | None = None
        self.outcome: EndJob | None = None
        self._thread = threading.Thread(target=self._run)

    def resume(self, core: dict[str, Any]) -> None:
        """Make it the next generation, from the core's part of a journal."""
        state = {"job_name": "digits", "started_at": 0.0, "generation": 2}
        job = Job.restore(_SETTINGS, core, 2, time.monotonic())
        self.shell = Shell(job, self.effects, self.journal, state, patience_s=60.0)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the run."""
        self._thread.join(60)

    def _run(self) -> None:
        try:
            self.outcome = self.shell.run()
        except Exception as error:  # noqa: BLE001  looked at by the test
            self.error = error

    def end(self) -> None:
        self.shell.request_leave()
        if self._thread.is_alive():
            self._thread.join(60)
        self.inbox.close()
        self.effects.close()
        self.cluster.close()

    def ask(self, ps_id: int, on_answer: Callable[[int], None] = lambda ps_id: None) -> Future[Answer]:
        def make(call: int) -> Event:
            return PsJoined(call, ps_id, f"elasticdl-digits-ps-{ps_id}", f"host:{ps_id}", nonce=ps_id + 1)

        future = self.inbox.ask(make)[1]
        future.add_done_callback(lambda _: on_answer(ps_id))
        return future


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    found = Life(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_events_have_the_time_of_the_wall_as_it_is_by_then(life: Life) -> None:
    life.start()  # with the core's clock as it began, the epoch is at the start of the machine
    wait_until(lambda: bool(life.journal.later), "the first tick")
    life.inbox.post(JournalDelayed("full", 1.0))
    wait_until(lambda: len(life.shell.history.events) > 1, "the event")
    assert abs(life.shell.history.events[-1].at - time.time()) < 60.0


def test_what_has_come_in_together_is_journalled_once_and_before_it_is_answered(life: Life) -> None:
    early: list[int] = []

    def check(ps_id: int) -> None:
        snapshot = life.journal.load()
        if snapshot is None or not snapshot["core"]["servers"][ps_id][0]:
            early.append(ps_id)

    futures = [life.ask(ps_id, check) for ps_id in range(_NUM_PS)]
    life.start()
    assert [future.result(60) for future in futures] == [PsAdmitted(1)] * _NUM_PS
    assert early == []
    assert len(life.journal.saved) <= 5  # the pods that are wanted, that the first ones run, and the 50 answers


def test_pods_are_created_after_the_journal_knows_them(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.journal.fault = JournalWriteError("no space")
    life.start()
    wait_until(lambda: life.journal.num_refused > 2, "the journal to be tried")
    assert life.cluster.list() == []
    life.journal.fault = None
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    assert caplog.messages.count("no space") == 1  # an outage of hours does not fill the log
    assert len(life.journal.saved[0]["core"]["pods"]["records"]) == _NUM_PS + 1


def test_a_checkpoint_is_written_though_the_journal_is_away(life: Life) -> None:
    """Who owns the job is not known then: it is the master that runs, which the API server does not hear."""
    life.journal.num_unknown_owners = 2
    life.shell._execute(SaveCheckpoint(7, (), "print"))
    saved = life.inbox.next(60.0)
    assert isinstance(saved, CheckpointSaved)
    assert life.journal.num_unknown_owners == 0


def test_a_list_that_was_taken_before_the_last_creation_says_nothing(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    pods = {pod.uid for pod in life.cluster.list()}
    life.inbox.post(Listing(PodsListed(()), life.effects.num_creations - 1))
    life.ask(0).result(60)  # the list has been looked at
    assert life.effects.num_creations == _NUM_PS + 1
    assert {pod.uid for pod in life.cluster.list()} == pods
    life.inbox.post(Listing(PodsListed(()), life.effects.num_creations))
    wait_until(lambda: life.effects.num_creations > _NUM_PS + 1, "successors: in that list all are missing")


def test_a_master_that_is_asked_to_leave_writes_the_journal_and_ends_no_pod(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    wait_until(lambda: len(life.journal.saved[-1]["core"]["pods"]["has_run"]) == 2, "that pods of both roles run")
    num_saved = len(life.journal.saved)
    life.end()
    assert life.error is None
    assert len(life.journal.saved) == num_saved + 1
    assert life.journal.saved[-1]["core"]["ending"] is None
    assert len(life.cluster.list()) == _NUM_PS + 1


def test_a_time_without_journal_is_an_event_afterwards(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    life.journal.fault = JournalWriteError("the API server does not answer")
    future = life.ask(0)
    wait_until(lambda: life.journal.num_refused > 0, "a write that fails")
    life.journal.fault = None
    future.result(60)

    def delays() -> list[object]:
        return [
            one for one in life.journal.later[-1]["core"]["events"]["events"] if one[2] == EventKind.JOURNAL_DELAYED
        ]

    wait_until(lambda: bool(life.journal.later) and bool(delays()), "the event")
    assert len(delays()) == 1
    assert "the API server does not answer" in str(delays())


def test_what_a_pod_has_said_at_its_end_is_written_down_without_secrets() -> None:
    said = "exit code 1; its last lines:\nno answer of postgres://me:geheim@db/train, token=geheim"
    pod = Pod("elasticdl-digits-worker-0", Role.WORKER, 0, "u", PodPhase.FAILED, message=said)
    changed = pod_changed(PodEvent(EventType.MODIFIED, pod))
    assert changed is not None
    assert changed.message.startswith("exit code 1; its last lines:\nno answer of postgres://me:")
    assert "geheim" not in changed.message


def test_that_a_job_has_ended_is_written_with_all_that_has_happened(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    life.shell.request_stop("enough")
    life.join()
    assert life.outcome is not None
    assert life.journal.load()["core"]["ending"] is not None  # type: ignore[index]
    assert life.journal.status is not None
    assert life.journal.status.exit_code is None
    assert life.journal.status.phase in (JobPhase.PENDING, JobPhase.RUNNING)
    end = dataclasses.replace(life.shell.status(), phase=JobPhase.FAILED, exit_code=1)
    life.journal.fault = JournalWriteError("the disk is full")
    life.shell.write_end(end)
    assert life.journal.status == end
    life.journal.fault = None
    life.shell.write_end(end)
    assert life.journal.saved[-1]["ended"][0] == 1


def test_a_master_that_was_lost_while_the_job_ended_sees_its_last_pods_end(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "_LAST_PODS_S", 600.0)  # however slow the machine is
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    life.ask(0).result(60)
    (server,) = [pod for pod in life.cluster.list() if (pod.role, pod.index) == (Role.PS, 0)]
    life.shell.request_stop("enough")
    wait_until(lambda: life.cluster.list() == [server], "the end of those that do not end by themselves")
    core = life.journal.saved[-1]["core"]
    life.shell.request_leave()
    life.join()
    assert life.cluster.list() == [server]
    successor = Life(tmp_path)
    successor.resume(core)
    try:
        successor.start()
        wait_until(lambda: successor.shell._outcome is not None, "the job to be over")
        ended = dataclasses.replace(server, phase=PodPhase.SUCCEEDED, exit_code=0)
        life.cluster.put(ended)
        successor.join()
        assert successor.outcome is not None
        assert successor.cluster.list() == [ended]  # it was not deleted
    finally:
        successor.end()


def test_a_call_is_answered_in_its_own_thread_while_no_other_works(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    answered: list[threading.Thread] = []

    def beat(call: int) -> Event:
        return LeaseQuestioned(call, worker_id=7, incarnation=1, lease=1)

    def ask() -> None:
        future = life.inbox.ask(beat)[1]
        assert future.done() or future.result(60)
        answered.append(threading.current_thread())

    def is_answered_at_once() -> bool:
        future = life.inbox.ask(beat)[1]
        is_done = future.done()
        future.result(60)
        return is_done

    wait_until(is_answered_at_once, "a moment in which the loop is idle")
    askers = [threading.Thread(target=ask) for _ in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert len(answered) == len(askers)  # all are answered, by any thread


def test_a_call_whose_answer_must_be_journalled_does_not_wait_for_the_disk_itself(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    life.journal.fault = JournalWriteError("no space")
    futures = [life.ask(ps_id) for ps_id in range(3)]  # each returns at once
    wait_until(lambda: life.journal.num_refused > 1, "the journal to be tried")
    assert not any(future.done() for future in futures)
    life.journal.fault = None
    assert [future.result(60) for future in futures] == [PsAdmitted(1)] * 3


def test_a_superseded_master_answers_no_call(life: Life) -> None:
    life.start()
    wait_until(lambda: len(life.cluster.list()) == _NUM_PS + 1, "all pods")
    life.journal.fault = Superseded("another master has taken over")
    future = life.ask(0)
    wait_until(lambda: life.error is not None, "the end of the life")
    assert isinstance(life.error, Superseded)
    assert not future.done()


def test_data_that_a_restarted_master_cannot_read_is_read_again_ever_more_rarely(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 8

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")  # of a read, which names no file

    monkeypatch.setattr(factory, "open_source", fail)
    monkeypatch.setattr(life.effects, "_is_closed", Closing())
    life.effects.verify_shards(DataKind.TRAINING, [])
    wait_until(lambda: len(pauses) == 8, "the master to be closed")
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
