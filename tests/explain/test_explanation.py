"""Diagnoses of histories that no local job makes: grouping, causes, costs, and questions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from elasticdl_client.choices import Runtime
from elasticdl_client.explain import explanation
from elasticdl_client.explain.diagnosis import Diagnosis, Facts, Trouble
from elasticdl_client.explain.explanation import Question, explain
from elasticdl_client.explain.failures import blamed, frames_of_user
from elasticdl_client.explain.slowness import HangPart, PsLoad, hang_part
from elasticdl_client.job_events import Detail, EventHistory, EventKind, JobEvent
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus, PodStatus, PsStatus, ScalingStatus, StandingWorker
from elasticdl_client.jobs import words
from elasticdl_client.jobs.store import JobInfo, Phase

NOW = 1_000_000.0
RUNNING = JobInfo(
    "digits",
    Runtime.KUBERNETES,
    Phase.RUNNING,
    JobStatus("digits", JobPhase.RUNNING, workers_alive=2),
    namespace="team",
    created_at=NOW - 900,
)


class Log:
    """Events as the core adds them, one a second."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []

    def add(self, kind: EventKind, subject: str, message: str = "", cause: int = 0, **details: Detail) -> int:
        number = len(self.events) + 1
        self.events.append(JobEvent(number, NOW - 600 + number, kind, subject, message, cause, details))
        return number

    def lose(self, subject: str, reason: str, message: str = "", exit_code: int = 137, cause: int = 0) -> int:
        return self.add(EventKind.POD_LOST, subject, message, cause, reason=reason, exit_code=exit_code)

    def replace(self, lost: int, subject: str) -> None:
        created = self.add(EventKind.POD_CREATED, subject, "", lost)
        runs = self.add(EventKind.POD_RUNNING, subject, "", created)
        self.add(EventKind.WORKER_REGISTERED, subject, "", runs)

    def facts(self, job: JobInfo = RUNNING) -> Facts:
        return Facts(job, EventHistory(tuple(self.events)), NOW)


def diagnosed(log: Log, job: JobInfo = RUNNING, question: Question | None = None) -> list[Diagnosis]:
    return list(explain(log.facts(job), question).diagnoses)


@pytest.mark.parametrize(
    ("reason", "message", "trouble"),
    [
        ("OOMKilled", "killed because memory ran out (limit 1Gi)", Trouble.OUT_OF_MEMORY),
        ("Evicted", "The node was low on resource: ephemeral-storage.", Trouble.EVICTED),
        ("Preempted", "preempted by team/high on node n7", Trouble.PREEMPTED),
        ("NodeLost", "node n7 does not answer", Trouble.NODE_LOST),
        ("Killed", "killed by SIGKILL", Trouble.KILLED),
        ("Deleted", "", Trouble.DELETED),
        ("Error", "exit code 1: ValueError: no", Trouble.PROGRAM_FAILED),
        (
            "Error",
            "exit code 1; its last lines:\n/usr/bin/python: No module named elasticdl",
            Trouble.IMAGE_WITHOUT_RUNTIME,
        ),
        ("Error", "exit code 127", Trouble.IMAGE_WITHOUT_RUNTIME),
        (
            "Error",
            "exit code 1: the caller speaks version 2 of the wire, this server version 1",
            Trouble.VERSIONS_DIFFER,
        ),
    ],
)
def test_the_end_of_a_pod_is_reported_by_its_reason_with_the_clusters_words(
    reason: str, message: str, trouble: Trouble
) -> None:
    log = Log()
    lost = log.lose("worker-1", reason, message)
    log.replace(lost, "worker-4")
    (diagnosis,) = diagnosed(log)
    assert diagnosis.trouble is trouble
    assert diagnosis.evidence["reason"] == reason
    assert message in "\n".join(diagnosis.why)
    assert "worker-4" in diagnosis.done
    assert diagnosis.cost.slot_seconds == 3.0
    assert diagnosis.advice


def test_a_server_that_was_lost_again_before_it_was_ready_did_not_fill_the_place() -> None:
    log = Log()
    first = log.lose("ps-0", "Killed")
    log.add(EventKind.POD_CREATED, "ps-0", "", first)
    second = log.lose("ps-0", "Killed")
    created = log.add(EventKind.POD_CREATED, "ps-0", "", second)
    log.add(EventKind.PS_READY, "ps-0", "", created, restored_from="version-40")
    (diagnosis,) = diagnosed(log)
    assert diagnosis.count == 2
    assert "restored from version-40" in diagnosis.done
    assert diagnosis.cost.slot_seconds == 2.0 + 2.0


def test_a_command_that_does_not_find_a_program_is_not_an_image_without_the_runtime() -> None:
    log = Log()
    log.lose("worker-0", "Error", "exit code 127", exit_code=127)
    spec = JobSpec(job_name="digits", job_command="train-it")
    (diagnosis,) = explain(log.facts(replace(RUNNING, spec=spec))).diagnoses
    assert diagnosis.trouble is Trouble.PROGRAM_FAILED


def test_losses_alike_are_reported_once_with_the_sum_of_their_costs() -> None:
    log = Log()
    for k in range(3):
        draining = log.add(EventKind.POD_DRAINING, f"worker-{k}", "was asked to end")
        log.replace(log.lose(f"worker-{k}", "Preempted", cause=draining), f"worker-{k + 3}")
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.count, diagnosis.subjects) == (3, ("worker-2", "worker-1", "worker-0"))
    assert diagnosis.cost.slot_seconds == 9.0
    assert any("was asked to end" in line for line in diagnosis.why)
    text = explanation.text(explain(log.facts()), 100)
    assert "This happened 3 times (worker-2, worker-1 and worker-0), last at" in " ".join(text.split())


def test_a_slot_that_is_still_empty_costs_until_now() -> None:
    log = Log()
    log.lose("worker-0", "NodeLost")
    (diagnosis,) = diagnosed(log)
    assert diagnosis.cost.is_open
    assert diagnosis.cost.slot_seconds == 599.0
    ended = replace(RUNNING, phase=Phase.FAILED, status=replace(RUNNING.status, exit_code=1, updated_at=NOW - 500))
    (diagnosis,) = (one for one in diagnosed(log, ended) if one.trouble is Trouble.NODE_LOST)
    assert not diagnosis.cost.is_open
    assert diagnosis.cost.slot_seconds == 99.0


def test_a_group_and_lost_tasks_are_named_among_the_consequences() -> None:
    log = Log()
    lost = log.lose("worker-0", "Evicted")
    broken = log.add(EventKind.GROUP_BROKEN, "group-1", "worker 0 was lost", lost)
    formed = log.add(EventKind.GROUP_FORMED, "group-2", "", broken, before=4, after=3, seconds=0.19)
    log.add(EventKind.EPOCH_REOPENED, "epoch-2", "the model has lost parts of 5 tasks", formed, tasks=5)
    log.replace(lost, "worker-4")
    (diagnosis,) = diagnosed(log)
    assert "in 0.19 s with 3 members, 4 before" in diagnosis.done
    assert diagnosis.cost.tasks == 5


def test_what_the_model_has_lost_with_a_ps_costs_records() -> None:
    log = Log()
    lost = log.lose("ps-0", "Killed")
    log.add(EventKind.EPOCH_REOPENED, "epoch-2", "", lost, records=1200, tasks=5)
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.cost.repeated, diagnosis.cost.tasks, diagnosis.cost.records) == (1200, 5, 0)
    assert "1,200 records computed again" in explanation.text(explain(log.facts()), 100)


def test_what_ended_the_job_stands_before_newer_troubles() -> None:
    log = Log()
    lost = log.lose("worker-0", "Error", "exit code 1: ImportError: no module named pandas", exit_code=1)
    log.add(
        EventKind.JOB_FAILED,
        "job",
        "3 pods in a row ended by their own fault",
        lost,
        log_of="elasticdl-digits-worker-0",
    )
    log.lose("worker-1", "Deleted")
    fatal, other = diagnosed(log)
    assert (fatal.trouble, fatal.is_fatal) == (Trouble.PROGRAM_FAILED, True)
    assert "3 pods in a row" in fatal.done
    assert (other.trouble, other.is_fatal) == (Trouble.DELETED, False)


@pytest.mark.parametrize(
    ("ends", "done"),
    [
        (True, "The job was ended before anything was trained"),
        (False, "It alone did not end the job: others had trained"),
    ],
)
def test_a_model_that_one_worker_cannot_load_has_ended_the_job_or_not(ends: bool, done: str) -> None:
    log = Log()
    rejected = log.add(EventKind.MODEL_REJECTED, "worker-2", "custom_model raised OSError: no network", traceback="")
    if ends:
        log.add(EventKind.JOB_FAILED, "job", "custom_model raised OSError: no network", rejected)
    (diagnosis,) = diagnosed(log)
    assert diagnosis.done.startswith(done)


def test_a_failure_that_nothing_explains_is_reported_in_its_own_words() -> None:
    log = Log()
    log.add(EventKind.JOB_FAILED, "job", "There is no metric to evaluate.\n  → Define eval_metrics_fn.")
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.advice) == (Trouble.JOB_FAILED, "Define eval_metrics_fn.")
    status = replace(RUNNING.status, exit_code=1, message="the journal was written by another version of ElasticDL: 3")
    (diagnosis,) = diagnosed(Log(), replace(RUNNING, phase=Phase.FAILED, status=status))
    assert diagnosis.trouble is Trouble.VERSIONS_DIFFER


def test_why_a_pod_waited_is_kept_after_it_ran() -> None:
    log = Log()
    created = log.add(EventKind.POD_CREATED, "worker-0")
    pending = log.add(EventKind.POD_PENDING, "worker-0", "0/2 nodes are available: 2 Insufficient cpu.", created)
    log.add(EventKind.POD_RUNNING, "worker-0", "", pending)
    log.add(
        EventKind.POD_NOT_CREATED, "elasticdl-digits-worker-1", "exceeded quota: pods, requested: pods=1, used: pods=5"
    )
    log.lose("worker-0", "Deleted")
    found = {one.trouble: one for one in diagnosed(log, question=Question(pending=True))}
    assert set(found) == {Trouble.NO_CPU, Trouble.QUOTA_EXCEEDED}
    assert found[Trouble.NO_CPU].cost.slot_seconds == 1.0
    assert not found[Trouble.NO_CPU].cost.is_open
    assert found[Trouble.QUOTA_EXCEEDED].cost.is_open
    assert found[Trouble.QUOTA_EXCEEDED].subject == "worker-1"


@pytest.mark.parametrize(("seconds", "is_trouble"), [(2, False), (20, True)])
def test_a_queue_holds_each_pod_back_for_a_moment(seconds: int, is_trouble: bool) -> None:
    log = Log()
    pending = log.add(EventKind.POD_PENDING, "worker-0", "waiting in queue team-a")
    for _ in range(seconds - 1):
        log.add(EventKind.LEASE_LOST, "worker-1")
    log.add(EventKind.POD_RUNNING, "worker-0", "", pending)
    found = [one for one in diagnosed(log) if one.trouble is Trouble.SCHEDULING_GATED]
    assert [one.cost.slot_seconds for one in found] == [seconds] * is_trouble


def test_a_worker_that_has_left_its_queue_for_a_server_waits_no_more() -> None:
    log = Log()
    pending = log.add(EventKind.POD_PENDING, "worker-0", "waiting in queue team-a")
    for _ in range(19):
        log.add(EventKind.LEASE_LOST, "worker-1")
    draining = log.add(EventKind.POD_DRAINING, "worker-0", "gives its quota to ps-0", pending)
    log.add(EventKind.POD_COMPLETED, "worker-0", "", draining)
    (found,) = diagnosed(log, question=Question(pending=True))
    assert found.trouble is Trouble.SCHEDULING_GATED
    assert (found.cost.slot_seconds, found.cost.is_open) == (21.0, False)


def test_a_blocked_pod_that_ended_the_job_is_fatal() -> None:
    log = Log()
    text = 'ImagePullBackOff: Back-off pulling image "digits:typo"'
    blocked = log.add(EventKind.POD_BLOCKED, "worker-0", text)
    log.add(EventKind.JOB_FAILED, "job", f"elasticdl-digits-worker-0 cannot start: {text}", blocked)
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.is_fatal) == (Trouble.IMAGE_NOT_FOUND, True)
    assert diagnosis.evidence["image"] == "digits:typo"


def test_a_master_that_cannot_start_is_explained_without_any_event() -> None:
    pod = PodStatus("elasticdl-digits-master", "master", "Pending", "0/1 nodes are available: 1 Insufficient memory.")
    pending = replace(RUNNING, phase=Phase.PENDING, status=replace(RUNNING.status, pods=(pod,)))
    (diagnosis,) = diagnosed(Log(), pending)
    assert (diagnosis.trouble, diagnosis.subject) == (Trouble.NO_MEMORY, "master")
    assert "--master_resource_request=memory" in diagnosis.advice


def test_where_the_time_goes_is_reported_when_it_is_much() -> None:
    servers = (PsStatus(0, busy=0.9, pushes_per_second=900.0), PsStatus(1, busy=0.1))
    seconds = {"useful": 30.0, "waiting_ps": 50.0, "input": 40.0, "starting": 500.0}
    slow = replace(RUNNING, status=replace(RUNNING.status, worker_seconds=seconds, ps=servers))
    found = {one.trouble: one for one in diagnosed(Log(), slow, Question(slow=True))}
    assert set(found) == {Trouble.INPUT_SLOW, Trouble.PS_OVERLOADED}
    assert found[Trouble.INPUT_SLOW].evidence["share"] == pytest.approx(1 / 3, abs=1e-4)
    assert found[Trouble.PS_OVERLOADED].subject == "ps-0"
    assert found[Trouble.PS_OVERLOADED].evidence["cause"] == PsLoad.HOT_ROWS
    quick = replace(RUNNING, status=replace(RUNNING.status, worker_seconds={"useful": 90.0, "input": 9.0}, ps=servers))
    assert not diagnosed(Log(), quick)


@pytest.mark.parametrize("is_back", [True, False])
def test_servers_that_were_lost_were_not_overloaded(is_back: bool) -> None:
    log = Log()
    lost = log.lose("ps-0", "OOMKilled")
    for _ in range(28):
        log.add(EventKind.LEASE_LOST, "worker-1")
    if is_back:
        log.add(EventKind.PS_READY, "ps-0", "", log.add(EventKind.POD_CREATED, "ps-0", "", lost))
    seconds = {"useful": 30.0, "waiting_ps": 60.0}
    status = replace(RUNNING.status, worker_seconds=seconds, ps=(PsStatus(0), PsStatus(1)), workers_wanted=2)
    found = diagnosed(log, replace(RUNNING, status=status), Question(slow=True))
    assert Trouble.PS_OVERLOADED not in {one.trouble for one in found}


def test_a_checkpoint_that_a_lost_server_has_not_written_is_not_blamed_on_the_storage() -> None:
    log = Log()
    failed = "the checkpoint of version 40 in /checkpoints failed: PS 1 at 172.17.0.5:2222 does not answer: UNAVAILABLE"
    log.add(EventKind.CHECKPOINT_FAILED, "checkpoint-40", f"{failed}; there is none yet")
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.is_fatal) == (Trouble.CHECKPOINT_NOT_WRITTEN, False)
    assert "ps-1" in diagnosis.advice
    assert "mounted" not in diagnosis.advice
    assert "kept" not in diagnosis.done


@pytest.mark.parametrize(
    ("phase", "seconds", "troubles"),
    [
        (Phase.FAILED, {"input": 40.0}, set()),
        (Phase.FAILED, {"input": 40.0, "useful": 40.0}, {Trouble.INPUT_SLOW}),
        (Phase.RUNNING, {"input": 40.0}, {Trouble.INPUT_SLOW}),
    ],
)
def test_input_is_not_slow_in_a_job_that_failed_before_it_trained(
    phase: Phase, seconds: dict[str, float], troubles: set[Trouble]
) -> None:
    job = replace(RUNNING, phase=phase, status=replace(RUNNING.status, worker_seconds=seconds))
    found = {one.trouble for one in diagnosed(Log(), job, Question(slow=True))}
    assert found & {Trouble.INPUT_SLOW} == troubles


@pytest.mark.parametrize(
    ("servers", "cause"),
    [
        ((PsStatus(0, busy=0.9), PsStatus(1, busy=0.8)), PsLoad.BUSY),
        ((PsStatus(0, busy=0.9), PsStatus(1, busy=0.2)), PsLoad.HOT_ROWS),
        (
            (
                PsStatus(1, busy=0.1, received_per_second=9e3, pushes=100, received_bytes=10_000),
                PsStatus(0, busy=0.1, received_per_second=9e8, pushes=100, received_bytes=900_000_000),
            ),
            PsLoad.HOT_ROWS,
        ),
        ((PsStatus(1, busy=0.9), PsStatus(0, busy=0.1, throttled=0.8)), PsLoad.THROTTLED),
        ((PsStatus(0, busy=0.2, pushes=100, received_bytes=800_000_000),), PsLoad.BYTES),
        ((PsStatus(0, busy=0.2, pushes=4000, received_bytes=8_000_000),), PsLoad.CALLS),
    ],
)
def test_what_about_the_servers_holds_workers_up_is_reported(servers: tuple[PsStatus, ...], cause: PsLoad) -> None:
    status = replace(RUNNING.status, worker_seconds={"useful": 30.0, "waiting_ps": 50.0}, ps=servers)
    (diagnosis,) = diagnosed(Log(), replace(RUNNING, status=status))
    assert (diagnosis.trouble, diagnosis.evidence["cause"]) == (Trouble.PS_OVERLOADED, cause)
    assert diagnosis.subject == "ps-0"


def test_the_load_of_servers_of_a_job_that_has_ended_is_that_of_all_its_time() -> None:
    """In its last seconds it evaluates and exports."""
    servers = (PsStatus(0, busy_seconds=20.0), PsStatus(1, busy_seconds=80.0, pushes=9000))
    worker_seconds = {"useful": 30.0, "waiting_ps": 50.0}
    ps_seconds = {"absent": 100.0, "busy": 100.0, "idle": 100.0}
    status = replace(RUNNING.status, ps=servers, worker_seconds=worker_seconds, ps_seconds=ps_seconds)
    status = replace(status, scaling=ScalingStatus("2:16", "settled", 0.04, "parameter servers"))
    found = diagnosed(Log(), replace(RUNNING, phase=Phase.SUCCEEDED, status=status))
    (diagnosis,) = (one for one in found if one.trouble is Trouble.PS_OVERLOADED)
    (growth,) = (one for one in found if one.trouble is Trouble.GROWTH_ENDED)
    assert growth.advice.startswith(diagnosis.advice)
    assert (diagnosis.subject, diagnosis.evidence["cause"]) == ("ps-1", PsLoad.HOT_ROWS)
    assert "ps-1: 0.80 threads busy, 90 pushes/s" in diagnosis.why[0]


def test_an_api_server_that_was_away_is_reported_afterwards() -> None:
    log = Log()
    text = "the journal could not be written for 20.1 s: The API server of the cluster cannot be reached."
    log.add(EventKind.JOURNAL_DELAYED, "master", text, seconds=20.1)
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.evidence["seconds"]) == (Trouble.API_SERVER_AWAY, 20.1)
    (diagnosis,) = diagnosed(log, replace(RUNNING, runtime=Runtime.LOCAL))
    assert diagnosis.trouble is Trouble.JOURNAL_NOT_WRITTEN


def test_a_throttled_straggler_is_distinguished_from_a_slow_one() -> None:
    log = Log()
    log.add(EventKind.WORKER_SLOW, "worker-0", "", ratio=2.1, throttled=0.4)
    log.add(EventKind.WORKER_SLOW, "worker-1", "", ratio=1.8, throttled=0.0)
    assert {one.trouble: one.subject for one in diagnosed(log)} == {
        Trouble.WORKER_THROTTLED: "worker-0",
        Trouble.WORKER_SLOW: "worker-1",
    }


def test_a_hang_is_reported_with_its_stack_and_successor() -> None:
    log = Log()
    message = "in one minibatch for 61 s (input), at /zoo/model.py:7 in feed"
    at = "/zoo/model.py:7 in feed"
    hung = log.add(EventKind.WORKER_HUNG, "worker-0", message, activity="input", where=at, stacks="MainThread\n  feed")
    given_up = log.add(EventKind.POD_GIVEN_UP, "worker-0", "it is stuck", hung)
    log.replace(given_up, "worker-2")
    message = "in a collective of a group that is over for 30 s (world)"
    log.add(EventKind.WORKER_HUNG, "worker-1", message, activity="world", where="")
    silent = log.add(EventKind.WORKER_HUNG, "worker-3", "silent for 12 s: stopped by a signal", state="T", where="")
    log.add(EventKind.LEASE_LOST, "worker-3", "lease 7 was not renewed in time", silent)
    found = {one.trouble: one for one in diagnosed(log)}
    assert set(found) == {Trouble.CODE_HANGS, Trouble.COLLECTIVE_HANGS, Trouble.WORKER_SILENT}
    assert found[Trouble.CODE_HANGS].evidence["where"] == at
    assert any("feed" in line for line in found[Trouble.CODE_HANGS].why)
    assert "worker-2" in found[Trouble.CODE_HANGS].done
    assert found[Trouble.WORKER_SILENT].evidence["state"] == "T"
    assert found[Trouble.WORKER_SILENT].count == 1


def test_a_silent_process_is_distinguished_from_one_that_hangs_and_both_are_named() -> None:
    log = Log()
    log.add(EventKind.WORKER_HUNG, "worker-0", "process 1: silent for 12 s: stopped by a signal", where="")
    at = "/zoo/model.py:7 in <module>"
    message = f"process 2: starting for 601 s (start), at {at}"
    log.add(EventKind.WORKER_HUNG, "worker-1", message, activity="start", where=at, stacks="MainThread\n  <module>")
    found = {one.trouble: one for one in diagnosed(log)}
    assert any("process 1" in line for line in found[Trouble.WORKER_SILENT].why)
    assert "process 2" in found[Trouble.CODE_HANGS].seen


OURS = "/venv/lib/python3.12/site-packages/elasticdl"
LOOP = f"  {OURS}/worker/loop.py:3 in run"
WAIT = "  /usr/lib/python3.12/threading.py:327 in Condition.wait"


@pytest.mark.parametrize(
    ("where", "stacks", "part"),
    [
        ("/zoo/m.py:9 in parse", [[WAIT, "  /zoo/m.py:9 in parse", "  /zoo/m.py:4 in feed"]], HangPart.FEED),
        (
            "/zoo/m.py:9 in Net.call",
            [["  /zoo/m.py:9 in Net.call", LOOP]],
            HangPart.MODEL,
        ),
        ("/zoo/m.py:9 in my_loss", [["  /zoo/m.py:9 in my_loss"]], HangPart.LOSS),
        ("/zoo/m.py:9 in Log.on_epoch_end", [["  /zoo/m.py:9 in Log.on_epoch_end"]], HangPart.CALLBACK),
        ("/zoo/m.py:9 in Images.__getitem__", [["  /zoo/m.py:9 in Images.__getitem__"]], HangPart.DATASET),
        ("/zoo/m.py:9 in main", [["  /zoo/m.py:9 in main", f"  {OURS}/api/data.py:3 in run"]], HangPart.CODE),
        ("/zoo/m.py:9 in main", [[WAIT, f"  {OURS}/data/csv.py:3 in read", "  /zoo/m.py:9 in main"]], HangPart.READING),
        ("", [[WAIT, LOOP], [f"  {OURS}/data/csv.py:3 in read"]], HangPart.READING),
        (
            "",
            [[WAIT, f"  {OURS}/collective/formed_group.py:3 in finish", LOOP]],
            HangPart.COLLECTIVE,
        ),
        ("", [[WAIT, LOOP]], HangPart.RUNTIME),
        ("", [], HangPart.UNKNOWN),
    ],
)
def test_a_hang_is_blamed_on_the_part_that_its_stack_ends_in(
    where: str, stacks: list[list[str]], part: HangPart
) -> None:
    text = "\n".join(f"thread t{k}:\n" + "\n".join(frames) for k, frames in enumerate(stacks))
    assert hang_part(where, text, {"my_loss": Trouble.LOSS_RAISED}) is part


def test_a_group_in_which_all_wait_is_reported_without_a_culprit() -> None:
    log = Log()
    broken = log.add(EventKind.GROUP_BROKEN, "group-3", "all members waited for 6 s in one collective", waited=6.1)
    log.add(EventKind.GROUP_FORMED, "group-4", "", broken, before=4, after=4, seconds=0.2)
    log.add(EventKind.GROUP_BROKEN, "group-4", "worker 1 was asked to end")
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.subjects) == (Trouble.COLLECTIVE_HANGS, ("group-3",))
    assert diagnosis.evidence["waited"] == 6.1
    assert "with 4 members" in diagnosis.done


def test_an_epoch_is_asked_for_by_its_number_or_its_time() -> None:
    log = Log()
    log.add(EventKind.EPOCH_STARTED, "epoch-1")
    log.lose("worker-0", "Killed")
    log.add(EventKind.EPOCH_COVERED, "epoch-1")
    log.add(EventKind.EPOCH_STARTED, "epoch-2")
    log.add(EventKind.TASK_FAILED, "task-3", "KeyError: 'image'", worker=1, epoch=2, traceback="")
    first = diagnosed(log, question=Question(epoch=1))
    assert [one.trouble for one in first] == [Trouble.KILLED]
    assert [one.subject for one in diagnosed(log, question=Question(epoch=2))] == ["task-3"]
    assert [one.subject for one in diagnosed(log, question=Question(pod="worker-1"))] == ["task-3"]


@pytest.mark.parametrize(
    ("error", "functions", "trouble"),
    [
        ("/zoo/m.py: feed(dataset, 'training', metadata) raised ValueError: no", (), Trouble.FEED_RAISED),
        ("/zoo/m.py: Net.call raised TypeError: no", (), Trouble.MODEL_RAISED),
        ("/zoo/m.py: callbacks() raised TypeError: no", (), Trouble.CALLBACK_RAISED),
        ("ValueError: no", ("train", "my_loss"), Trouble.LOSS_RAISED),
        ("ValueError: no", ("forward", "helper"), Trouble.MODEL_RAISED),
        ("ValueError: no", ("on_epoch_end", "write"), Trouble.CALLBACK_RAISED),
        ("ValueError: no", ("main",), Trouble.CODE_RAISED),
        ("RecordIO file /data/a, byte 17: the chunk is damaged", (), Trouble.BAD_RECORD),
        ("/data/a cannot be opened: No such file or directory", (), Trouble.DATA_GONE),
        ("The model is not exported to /m: No space left on device /.", (), Trouble.DISK_FULL),
        ("OSError: [Errno 28] No space left on device", ("main",), Trouble.DISK_FULL),
    ],
)
def test_an_error_is_blamed_on_the_part_that_it_came_from(
    error: str, functions: tuple[str, ...], trouble: Trouble
) -> None:
    frames = "".join(f'  File "/zoo/m.py", line {k}, in {name}\n    x()\n' for k, name in enumerate(functions, 1))
    traceback = f"Traceback (most recent call last):\n{frames}{error}\n" if functions else ""
    assert blamed(error, traceback, {"my_loss": Trouble.LOSS_RAISED}) is trouble


def test_frames_of_libraries_and_of_a_later_exception_are_not_the_users() -> None:
    traceback = (
        'Traceback (most recent call last):\n  File "/zoo/m.py", line 3, in feed\n    a[9]\nIndexError: 9\n\n'
        "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        '  File "/app/elasticdl/worker/loop.py", line 9, in run\n    b()\n  File "/zoo/m.py", line 8, in batches\n'
    )
    (frame,) = frames_of_user(traceback)
    assert (frame.path, frame.line, frame.function, frame.code) == ("/zoo/m.py", 3, "feed", "a[9]")


def test_events_that_are_not_kept_are_said_to_be_missing() -> None:
    facts = Facts(RUNNING, EventHistory((), {"PodLost": 3, "PodCreated": 4}), NOW)
    assert "7 older events of the job are not kept any more" in explanation.text(explain(facts), 100)


def test_the_time_of_a_pod_that_waits_for_one_thing_after_another_is_reported_once() -> None:
    log = Log()
    for message in ("0/3 nodes are available: 3 Insufficient cpu.", "0/3 nodes are available: 2 Insufficient cpu."):
        log.add(EventKind.POD_PENDING, "worker-0", message, reason="Unschedulable")
        for _ in range(9):
            log.add(EventKind.LEASE_LOST, "worker-1")
    log.add(EventKind.POD_RUNNING, "worker-0")
    (waiting,) = [one for one in diagnosed(log) if one.trouble is Trouble.NO_CPU]
    assert (waiting.count, waiting.cost.slot_seconds, waiting.cost.is_open) == (2, 20.0, False)


@pytest.mark.parametrize(("tasks", "fixed_global_batch", "is_too_many"), [(20, 0, False), (3, 0, True), (3, 64, False)])
def test_workers_are_compared_with_the_tasks_of_an_epoch_not_with_those_that_an_early_end_has_left(
    tasks: int, fixed_global_batch: int, is_too_many: bool
) -> None:
    log = Log()
    for epoch in (1, 2, 3):
        log.add(EventKind.EPOCH_STARTED, f"epoch-{epoch}", records=20 * tasks, tasks=tasks)
    log.add(EventKind.TRAINING_STOPPED, "job", "no better for 2 epochs")
    status = replace(RUNNING.status, workers_wanted=4, num_epochs=100, tasks_total=3 * tasks, tasks_done=3 * tasks)
    spec = replace(JobSpec(job_name="digits"), fixed_global_batch=fixed_global_batch)
    found = explain(log.facts(replace(RUNNING, status=status, spec=spec))).diagnoses
    assert [one.evidence["tasks"] for one in found] == ([tasks] if is_too_many else [])


@pytest.mark.parametrize(
    ("bottleneck", "cure"),
    [
        ("parameter servers", "For 8 workers take --num_ps_pods=4."),
        ("input", "RecordIO"),
        ("tasks", "--num_minibatches_per_task"),
    ],
)
def test_a_bottleneck_that_ends_the_growth_by_gain_is_named_with_its_cure(bottleneck: str, cure: str) -> None:
    status = replace(RUNNING.status, workers_wanted=4, ps_wanted=2)
    status = replace(status, scaling=ScalingStatus("2:16", "settled", 0.04, bottleneck))
    (found,) = diagnosed(Log(), replace(RUNNING, status=status), Question(slow=True))
    assert found.trouble is Trouble.GROWTH_ENDED
    assert found.evidence == {"bottleneck": bottleneck, "gain": 0.04, "workers": 4}
    assert cure in found.advice


@pytest.mark.parametrize("bottleneck", ["", "room"])
def test_a_job_that_grows_or_waits_for_room_has_met_no_bottleneck(bottleneck: str) -> None:
    status = replace(RUNNING.status, scaling=ScalingStatus("2:16", "growing", 0.9, bottleneck))
    assert diagnosed(Log(), replace(RUNNING, status=status)) == []


def test_routine_that_is_not_kept_any_more_is_not_missed() -> None:
    routine = {"EpochCovered": 4000, "EvaluationFinished": 900}
    facts = Facts(RUNNING, EventHistory((), routine), NOW)
    assert explain(facts).summed_up == 0
    facts = Facts(RUNNING, EventHistory((), {**routine, "PodLost": 3, "TaskFailed": 2}), NOW)
    assert explain(facts).summed_up == 5


def test_a_job_that_lost_its_master_is_not_said_to_have_been_asked_to_end() -> None:
    note = "Its master's pod is gone, and the job has not ended."
    (diagnosis,) = diagnosed(Log(), replace(RUNNING, phase=Phase.STOPPED, note=note))
    assert diagnosis.trouble is Trouble.STOPPED
    assert diagnosis.seen.startswith("The job has stopped before its end")
    assert diagnosis.why == (note,)


@pytest.mark.parametrize("log", ["", "the last line before the kernel ended it"])
def test_a_master_that_memory_ends_again_and_again_is_not_one_whose_program_fails(log: str) -> None:
    message = "CrashLoopBackOff: back-off 40s restarting failed container; before: OOMKilled, exit code 137"
    pods = (PodStatus("elasticdl-digits-master", "master", "Running", message),)
    job = replace(RUNNING, status=replace(RUNNING.status, pods=pods))
    (diagnosis,) = explain(replace(Log().facts(job), master_log=log)).diagnoses
    assert diagnosis.trouble is Trouble.OUT_OF_MEMORY
    assert "--master_resource_limit=memory" in diagnosis.advice


def test_every_diagnosis_can_be_written_as_yaml() -> None:
    log = Log()
    log.add(EventKind.WORKER_HUNG, "worker-1", "no progress for 60 s", activity="world", stacks="")
    plain = explain(log.facts()).to_plain()
    assert yaml.safe_load(words.structured(plain, "yaml"))["troubles"][0]["evidence"]["part"] == HangPart.COLLECTIVE


def test_a_model_that_was_not_exported_is_a_trouble_of_a_job_that_has_not_failed() -> None:
    log = Log()
    why = "it needs up to 5.0 GB of memory, and there are 3.0 GB"
    log.add(EventKind.MODEL_NOT_EXPORTED, "job", f"no model is exported: {why}. The last checkpoint in /c is it.")
    (diagnosis,) = diagnosed(log)
    assert (diagnosis.trouble, diagnosis.is_fatal) == (Trouble.MODEL_NOT_EXPORTED, False)
    assert diagnosis.seen == f"The model was not exported: {why}"
    assert "--checkpoint_dir_for_init" in diagnosis.advice


@pytest.mark.parametrize(
    ("runtime", "restarts", "has_previous"),
    [(Runtime.LOCAL, 0, True), (Runtime.KUBERNETES, 2, True), (Runtime.KUBERNETES, 0, False)],
)
def test_the_log_of_a_master_that_ended_is_named_where_it_is_kept(
    runtime: Runtime, restarts: int, has_previous: bool
) -> None:
    pods = (PodStatus("elasticdl-digits-master", "master", "Running", "", restarts),)
    job = replace(RUNNING, runtime=runtime, status=replace(RUNNING.status, pods=pods))
    log = Log()
    log.add(EventKind.MASTER_RESTARTED, "master", generation=2)
    (diagnosis,) = diagnosed(log, job)
    assert ("--previous" in diagnosis.advice) is has_previous
    log.add(EventKind.JOB_RESUMED, "job", seconds=60)  # `--previous` shows the run after the restart
    (diagnosis,) = diagnosed(log, job)
    assert "--previous" not in diagnosis.advice


@pytest.mark.parametrize(
    ("message", "trouble"),
    [
        ("OOMKilled, exit code 137", Trouble.OUT_OF_MEMORY),
        ("started again; before: OOMKilled, exit code 137", Trouble.OUT_OF_MEMORY),
        ("started again; before: Error, exit code 1", Trouble.PROGRAM_FAILED),
    ],
)
def test_a_master_that_ends_again_and_again_is_explained_while_it_runs_too(message: str, trouble: Trouble) -> None:
    pods = (PodStatus("elasticdl-digits-master", "master", "Running", message, 3),)
    job = replace(RUNNING, status=replace(RUNNING.status, pods=pods))
    (diagnosis,) = diagnosed(Log(), job)
    assert diagnosis.trouble is trouble
    (diagnosis,) = explain(replace(Log().facts(job), master_log="the last line before its end")).diagnoses
    assert diagnosis.trouble is trouble
    assert "the last line before its end" in diagnosis.why[-1]
    log = Log()
    log.add(EventKind.JOB_STARTED, "job")  # it has come up: its restarts are events
    assert not diagnosed(log, job)


@pytest.mark.parametrize(("activity", "cure"), [("compile", "--step_timeout"), ("checkpoint", "--checkpoint_dir")])
def test_a_worker_that_does_the_same_for_long_is_explained_as_long_as_it_lasts(activity: str, cure: str) -> None:
    standing = (StandingWorker(1, 49.0, activity, "/zoo/m.py:31 in feed"),)
    job = replace(RUNNING, status=replace(RUNNING.status, standing=standing, updated_at=NOW))
    (diagnosis,) = diagnosed(Log(), job)
    assert (diagnosis.trouble, diagnosis.subject) == (Trouble.NO_CHANGE, "worker-1")
    assert "/zoo/m.py:31 in feed" in diagnosis.seen
    assert cure in diagnosis.advice
    assert diagnosis.cost.is_open
    (stopped,) = diagnosed(Log(), replace(job, phase=Phase.STOPPED))[1:]
    assert stopped.trouble is Trouble.NO_CHANGE
    assert not diagnosed(Log(), replace(job, phase=Phase.SUCCEEDED, status=replace(job.status, exit_code=0)))


@pytest.mark.parametrize("alive", [0, 2])
def test_what_slowed_workers_down_is_no_trouble_of_a_job_that_has_none_now(alive: int) -> None:
    status = replace(
        RUNNING.status,
        workers_alive=alive,
        workers_wanted=2,
        ps_wanted=1,
        ps=(PsStatus(0, busy=1.0),),
        worker_seconds={"useful": 20.0, "input": 40.0, "waiting_ps": 40.0},
    )
    slow = {Trouble.INPUT_SLOW, Trouble.PS_OVERLOADED}
    found = {one.trouble for one in diagnosed(Log(), replace(RUNNING, status=status))}
    assert found & slow == (slow if alive else set())
    ended = replace(RUNNING, phase=Phase.SUCCEEDED, status=replace(status, exit_code=0))
    assert {one.trouble for one in diagnosed(Log(), ended)} & slow == slow
