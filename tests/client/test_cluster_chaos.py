"""`elasticdl chaos` on a job of a cluster, whose API is scripted; and the order of faults."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticdl_client.chaos import command
from elasticdl_client.chaos.faults import Fault, FaultKind, FaultPlan, Victim
from elasticdl_client.chaos.recovery import Injection, Moment
from elasticdl_client.choices import Runtime
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.explain.diagnosis import Facts
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent
from elasticdl_client.job_series import JobJournal
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.jobs import commands
from elasticdl_client.jobs.store import JobInfo, Phase
from tests.client.api_server import ApiServer, own_cluster

KILL = ("job", "--kill=worker", "--every=1s", "--for=1s", "--yes")
WORKERS = tuple(Fault(kind, "worker") for kind in (FaultKind.KILL, FaultKind.STOP))
FAULTS = (*WORKERS, Fault(FaultKind.KILL, "ps"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A job that trains, whose lost workers have successors at work after 2.5 s."""
    with own_cluster(tmp_path, monkeypatch) as server:
        for role in ("master", "worker-0", "worker-1"):
            server.add_pod(role, [])
        records = {"committed": 64, "lost": 0, "repeated": 0}
        server.status = JobStatus(
            "job", JobPhase.RUNNING, records_done=64, records_processed=64, records=records, workers_wanted=2,
            worker_seconds={"useful": 30.0, "starting": 10.0}, started_at=1.0, updated_at=2.0,
        )  # fmt: skip

        def replace_worker(name: str) -> None:
            server.history = EventHistory(
                (
                    JobEvent(1, 10.0, EventKind.POD_LOST, name.removeprefix("elasticdl-job-")),
                    JobEvent(2, 10.5, EventKind.POD_CREATED, "worker-2", cause=1),
                    JobEvent(3, 12.5, EventKind.WORKER_REGISTERED, "worker-2", cause=2),
                )
            )
            seconds = {"useful": 31.0, "starting": 10.0, "recovering": 3.0}
            server.status = replace(server.status, records_processed=100, records_done=68, worker_seconds=seconds)

        server.on_delete = replace_worker
        yield server


def test_a_worker_is_deleted_without_grace_and_its_recovery_read_from_the_events(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("chaos", [*KILL, "-o", "json"]) == 0
    [(name, options)] = server.deleted
    assert options == {"gracePeriodSeconds": 0, "preconditions": {"uid": f"uid-{name}"}}
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    seconds = {"injected": 1, "recovered": 1, "median_seconds": 2.5, "max_seconds": 2.5}
    assert (found["recovery"], found["complaints"]) == ({"kill worker": seconds}, [])
    assert found["records"] == {"lost": 0, "repeated": 0, "computed_again": 32}
    assert (found["goodput"], found["goodput_before"]) == (0.25, 0.75)
    [fault] = found["faults"]
    assert f"elasticdl-job-{fault['subject']}" == name
    assert len(printed.err.splitlines()) == 2


def test_records_that_are_lost_are_an_exit_code_and_in_the_table(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_worker = server.on_delete

    def lose(name: str) -> None:
        replace_worker(name)
        server.status = replace(server.status, records={"committed": 60, "lost": 4, "repeated": 0})

    server.on_delete = lose
    assert commands.run("chaos", [*KILL]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4].split() == ["kill", "worker", "1", "1", "2.5", "s", "2.5", "s"]
    assert printed[-3:] == [
        "records: lost 4, repeated 0, computed again 32",
        "goodput: 25 % useful, 75 % recovering (75 % useful before)",
        "job job: Running, 4 records lost",
    ]


def test_a_master_is_deleted_and_made_again_and_its_recovery_is_the_next_commit(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "elasticdl-job-master"
    labels = server.pods[name]["metadata"]["labels"]
    pod = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{"name": "main"}]}}
    server.master_pod = {"apiVersion": "v1", "kind": "Pod", **pod}
    server.on_delete = lambda _: None

    def train(_: str) -> None:
        server.history = EventHistory((JobEvent(1, 10.0, EventKind.MASTER_RESTARTED, "master"),))
        server.status = replace(server.status, generation=2, records_processed=70, records_done=70, updated_at=3.0)

    server.on_create = train
    assert commands.run("chaos", [*KILL[:1], "--kill=master", *KILL[2:], "-o", "json"]) == 0
    assert [deleted for deleted, _ in server.deleted] == [name]
    assert server.pods[name]["metadata"]["uid"] == "uid-1"
    found = json.loads(capsys.readouterr().out)
    assert found["recovery"]["kill master"]["recovered"] == 1
    assert found["faults"][0]["recovery"] == "the master has restarted, and training continues"


def test_impossible_faults_and_missing_rights_are_named_before_the_first_fault(server: ApiServer) -> None:
    with pytest.raises(FlagError, match="--stop is for local jobs"):
        commands.run("chaos", ["job", "--stop=worker", "--yes"])
    with pytest.raises(FlagError, match="no parameter servers"):
        commands.run("chaos", ["job", "--kill=ps", "--yes"])
    with pytest.raises(FlagError, match="no terminal to ask"):
        commands.run("chaos", ["job", "--kill=worker"])
    server.allows = False
    with pytest.raises(JobError, match="delete, list pods"):
        commands.run("chaos", [*KILL])
    server.end_pods()
    with pytest.raises(JobError, match="is succeeded"):
        commands.run("chaos", [*KILL])
    assert not server.deleted


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_round_has_every_fault_once_and_a_seed_decides_on_the_order(seed: int) -> None:
    drawn = list(FaultPlan(FAULTS, 2.0, 13.0, 1.0, seed).draw())
    assert drawn == list(FaultPlan(FAULTS, 2.0, 13.0, 1.0, seed).draw())
    assert drawn != list(FaultPlan(FAULTS, 2.0, 13.0, 1.0, seed + 1).draw())
    assert len(drawn) == 7
    for begin in (0, 3):
        assert {fault for fault, _ in drawn[begin : begin + 3]} == set(FAULTS)


class Closed(io.StringIO):
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


class Stopped:
    """A job store and an injector that notes which faults are undone."""

    def __init__(self) -> None:
        self.undone: list[Victim | None] = []

    def journal(self, job: JobInfo) -> JobJournal:
        return JobJournal()

    def undo(self, fault: Fault, victim: Victim | None) -> None:
        self.undone.append(victim)


def test_all_stopped_pods_continue_though_the_reader_of_the_output_has_ended() -> None:
    stopped = Stopped()
    job = JobInfo("job", Runtime.LOCAL, Phase.RUNNING, JobStatus("job"))
    closed = Closed()
    chaos = command.Chaos(job, cast(Any, stopped), cast(Any, stopped), FaultPlan((), 1.0, 1.0, 1.0, 0), closed)
    victims = [Victim(f"worker-{number}", "pod", "worker", number, "uid") for number in range(2)]
    began = Moment.of(Facts(job, EventHistory(), 0.0))
    chaos._injections = [Injection(Fault(FaultKind.STOP, "worker"), victim, began) for victim in victims]
    with pytest.raises(BrokenPipeError):
        chaos.run()
    assert sorted(stopped.undone, key=str) == victims


class Running(Stopped):
    """A job whose one worker runs, or has been lost."""

    def __init__(self, *victims: Victim) -> None:
        super().__init__()
        self.victims = [*victims]

    def running(self, role: str) -> list[Victim]:
        return self.victims


@pytest.mark.parametrize(
    ("is_stopped", "said"),
    [
        (True, "kill worker: each running pod of this role (worker-0) is stopped by an earlier fault, skipped"),
        (False, "kill worker: no pod of this role runs now, skipped"),
    ],
)
def test_a_pod_that_is_stopped_is_not_said_to_run_no_more(is_stopped: bool, said: str) -> None:
    victim = Victim("worker-0", "pod", "worker", 0, "uid")
    injector = Running(*([victim] if is_stopped else []))
    job = JobInfo("job", Runtime.LOCAL, Phase.RUNNING, JobStatus("job"))
    out = io.StringIO()
    chaos = command.Chaos(job, cast(Any, injector), cast(Any, injector), FaultPlan((), 1.0, 1.0, 1.0, 0), out)
    began = Moment.of(Facts(job, EventHistory(), 0.0))
    chaos._injections = [Injection(Fault(FaultKind.STOP, "worker"), victim, began)]
    chaos._inject(Fault(FaultKind.KILL, "worker"), 0.0)
    assert out.getvalue().rstrip().endswith(said)
    assert len(chaos._injections) == 1


def test_the_recovery_of_a_full_disk_is_the_next_checkpoint_of_a_worker_too() -> None:
    """Of those that a worker writes there are no events."""
    job = JobInfo("job", Runtime.LOCAL, Phase.RUNNING, JobStatus("job"))
    before, after = (Facts(job, EventHistory(), now) for now in (10.0, 14.0))
    injection = Injection(Fault(FaultKind.FILL_DISK), None, Moment.of(before, 40), Moment.of(before, 40))
    assert not injection.look(after, 40)
    assert injection.look(after, 80)
    assert (injection.seconds, injection.how) == (4.0, "checkpoint-80 is complete")


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command._signals_interrupt():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
