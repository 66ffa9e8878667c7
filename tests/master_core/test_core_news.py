"""A user's view of the events of a job: the real core makes them, the client's news are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from core_script import Script, running
from group_script import standing

from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus
from elasticdl_client.news import Headline, News, is_round

STATUS = JobStatus("job", JobPhase.RUNNING, epoch=1, num_epochs=3)


class Reader:
    """The client that follows the job."""

    def __init__(self, script: Script, news: News | None = None, status: JobStatus = STATUS) -> None:
        self._script = script
        self._status = status
        self._news = news or News()
        self.read()

    def read(self) -> list[str]:
        return [line.text for line in self.headlines()]

    def headlines(self) -> list[Headline]:
        return self._news.lines(self._status, self._script.job.events)


def lose(script: Script, worker_id: int, reason: str, message: str = "", node: str = "") -> None:
    name = script.settings.pod_name(Role.WORKER, worker_id)
    gone = e.PodChanged(
        name, Role.WORKER, worker_id, f"{name}/1", PodState.FAILED, reason, 1 if reason == "Error" else None, message
    )
    script.tell(dataclasses.replace(gone, node=node))


def test_a_worker_has_joined_when_its_last_process_has() -> None:
    script = running(2, processes_per_worker=2, num_ps=0, strategy=DistributionStrategy.ALL_REDUCE)
    reader = Reader(script, status=dataclasses.replace(STATUS, processes_per_worker=2))
    script.kill(1)
    assert reader.read() == ["worker-1 lost: Killed"]
    script.pod(Role.WORKER, 2, PodState.RUNNING)
    script.worker_joins(4)
    assert reader.read() == []
    script.worker_joins(5)
    assert reader.read() == ["worker-2 (for worker-1) joined"]


@pytest.mark.parametrize(
    ("reason", "message", "node", "line"),
    [
        ("Preempted", "", "n7", "worker-1 preempted (node n7)"),
        ("Evicted", "low on memory", "n7", "worker-1 evicted (node n7): low on memory"),
        ("OOMKilled", "", "", "worker-1 ran out of memory"),
        ("Killed", "killed by SIGKILL", "", "worker-1 lost: Killed, killed by SIGKILL"),
        ("NodeLost", "", "n7", "worker-1 lost (node n7): NodeLost"),
        ("Error", "exit code 1: TypeError: no", "", "worker-1 lost: Error, exit code 1"),
    ],
)
def test_a_loss_is_one_line_with_its_cause(reason: str, message: str, node: str, line: str) -> None:
    script = running(2)
    reader = Reader(script)
    lose(script, 1, reason, message, node)
    assert reader.headlines() == [Headline(line, is_trouble=True)]
    assert reader.read() == []


def test_evaluations_that_end_at_once_are_a_line_each() -> None:
    news = News()
    ended = [JobEvent(n, 1.0, EventKind.EVALUATION_FINISHED, f"evaluation-{n}", "", 0, {"auc": n / 10}) for n in (1, 2)]
    status = dataclasses.replace(STATUS, metrics={"auc": 0.2}, metrics_step=2)
    told = ["evaluation at step 1: auc 0.1", "evaluation at step 2: auc 0.2"]
    assert [line.text for line in news.lines(status, EventHistory(tuple(ended)))] == told
    assert news.lines(status, EventHistory(tuple(ended))) == []


def test_a_successor_joins_in_the_place_of_the_lost_one() -> None:
    script = running(2)
    reader = Reader(script)
    script.kill(1)
    reader.read()
    script.worker_starts(2)
    assert reader.read() == ["worker-2 (for worker-1) joined"]


def test_the_workers_that_a_job_begins_with_are_no_news_and_those_that_come_later_are() -> None:
    script = Script(num_workers=3, min_workers=1)
    reader = Reader(script)
    script.ps_starts()
    script.worker_starts(0)
    script.data_is_known()
    script.sets_are_read({})
    assert reader.read() == []
    assert script.request(0) is not None
    script.worker_starts(1)
    script.worker_starts(2)
    assert reader.read() == ["worker-1, worker-2 joined"]


def test_many_that_join_at_once_are_counted() -> None:
    history = EventHistory(
        tuple(JobEvent(k, 1.0, EventKind.WORKER_REGISTERED, f"worker-{k}") for k in range(1, 10)), {"EpochStarted": 1}
    )
    [line] = News().lines(STATUS, history)
    assert line.text == "worker-1, worker-2, worker-3, worker-4, 5 more joined"


def test_a_change_of_the_group_stands_behind_its_cause() -> None:
    script = standing(3)
    reader = Reader(script)
    script.kill(1)
    script.all_leave(0, 2)
    script.forms()
    [line] = reader.read()
    assert line.startswith("worker-1 lost: Killed · group 3 → 2 in 0.")


def test_a_change_of_the_group_that_takes_longer_names_its_cause() -> None:
    script = standing(3)
    reader = Reader(script)
    script.kill(1)
    assert reader.read() == ["worker-1 lost: Killed"]
    script.all_leave(0, 2)
    script.forms()
    [line] = reader.read()
    assert line.startswith("group 3 → 2 in 0.")
    assert line.endswith(" s (worker-1 lost)")


def test_a_group_that_broke_for_a_silent_member_says_so_and_not_that_it_joined() -> None:
    def event(number: int, kind: EventKind, subject: str, text: str, cause: int, **details: Any) -> JobEvent:
        return JobEvent(number, 1.0, kind, subject, text, cause, details)

    joined = event(1, EventKind.WORKER_REGISTERED, "worker-1", "", 0)
    first = event(2, EventKind.GROUP_FORMED, "group-1", "", 1, before=0, after=2, seconds=0.1, workers="0 1")
    broken = event(3, EventKind.GROUP_BROKEN, "group-1", "worker 1 was silent for 5 s", 1)
    alone = event(4, EventKind.GROUP_FORMED, "group-2", "", 3, before=2, after=1, seconds=0.2, workers="0")
    again = event(5, EventKind.GROUP_FORMED, "group-3", "", 1, before=1, after=2, seconds=0.02, workers="0 1")
    news = News(STATUS, EventHistory((joined, first)))
    assert [line.text for line in news.lines(STATUS, EventHistory((joined, first, broken, alone, again)))] == [
        "group 2 → 1 in 0.20 s (worker 1 was silent for 5 s)",
        "group 1 → 2 in 0.02 s (worker-1 joined)",
    ]


def test_a_group_whose_members_missed_the_lost_one_first_has_its_cause_by_its_members() -> None:
    def event(number: int, kind: EventKind, subject: str, **details: Any) -> JobEvent:
        return JobEvent(number, 1.0, kind, subject, "", 0, details)

    first = event(1, EventKind.GROUP_FORMED, "group-1", before=0, after=3, seconds=0.1, workers="0 1 2")
    lost = event(3, EventKind.POD_LOST, "worker-1", reason="Killed")
    formed = event(4, EventKind.GROUP_FORMED, "group-2", before=3, after=2, seconds=0.02, workers="0 2")
    joined = event(5, EventKind.GROUP_FORMED, "group-3", before=2, after=3, seconds=0.02, workers="0 2 3")
    news = News(STATUS, EventHistory((first,)))
    assert [line.text for line in news.lines(STATUS, EventHistory((first, lost, formed, joined)))] == [
        "worker-1 lost: Killed · group 3 → 2 in 0.02 s",
        "group 2 → 3 in 0.02 s",
    ]


def test_a_task_that_fails_the_job_is_left_to_the_error_at_its_end() -> None:
    script = running(1, max_task_failures=2)
    reader = Reader(script)
    script.fail(script.lease(), error="ValueError: no such column")
    assert reader.read() == ["task 0 failed: ValueError: no such column"]
    script.fail(script.lease(), error="ValueError: no such column")
    assert script.job.status().phase == "Failed"
    assert reader.read() == []


def test_the_first_group_is_said_by_its_size() -> None:
    script = standing(3)
    assert [line.text for line in News().lines(STATUS, script.job.events)] == ["group of 3 workers formed"]


def test_a_server_that_is_lost_and_back_and_a_master_that_restarts_are_lines() -> None:
    script = running(1)
    reader = Reader(script)
    script.ps_dies()
    assert reader.read() == ["ps-0 lost: Killed"]
    script.ps_starts(life=2)
    assert reader.read() == ["ps-0 ready"]
    script.restart_master()
    assert reader.read() == ["the master has restarted (restart 1)"]


def test_a_resumed_job_does_not_repeat_earlier_news() -> None:
    script = running(2)
    script.kill(1)
    before = dataclasses.replace(STATUS, coverage=(EpochCoverage(1, 10, 10),), metrics={"auc": 0.5}, metrics_step=3)
    news = News(before, script.job.events)
    assert news.lines(before, script.job.events) == []
    script.worker_starts(2)
    assert [line.text for line in news.lines(before, script.job.events)] == ["worker-2 (for worker-1) joined"]


def test_what_the_model_has_lost_is_one_line_in_records() -> None:
    lost = [
        JobEvent(n, 1.0, EventKind.EPOCH_REOPENED, f"epoch-{n}", "", 0, {"records": 600, "tasks": 2}) for n in (2, 3)
    ]
    assert [line.text for line in News().lines(STATUS, EventHistory(tuple(lost)))] == [
        "epochs 2 to 3: the model has lost 1,200 records, which are computed again"
    ]


def test_reopened_epochs_are_one_line_and_other_troubles_are_named() -> None:
    def event(number: int, kind: EventKind, subject: str, message: str = "", **details: Any) -> JobEvent:
        return JobEvent(number, 1.0, kind, subject, message, 0, details)

    history = EventHistory(
        (
            event(1, EventKind.EPOCH_REOPENED, "epoch-2", "lost", tasks=3),
            event(2, EventKind.EPOCH_REOPENED, "epoch-3", "lost", tasks=4),
            event(3, EventKind.TASK_FAILED, "task-17", "ValueError: no\nmore"),
            event(4, EventKind.CHECKPOINT_FAILED, "checkpoint-120", "no space left"),
            event(5, EventKind.POD_NOT_CREATED, "worker-3", "exceeded quota"),
            event(6, EventKind.CHECKPOINT_SAVED, "checkpoint-130", "saved"),
        )
    )
    assert [line.text for line in News().lines(STATUS, history)] == [
        "epochs 2 to 3 are open again: the model has lost parts of 7 tasks",
        "task 17 failed: ValueError: no",
        "checkpoint 120 failed: no space left",
        "worker-3 cannot be created: exceeded quota",
    ]


def test_a_task_that_fails_again_in_the_same_way_is_not_printed_in_full_twice() -> None:
    causes = ("ValueError: row 7", "ValueError: row 7", "OSError: gone", "ValueError: row 7")
    events = tuple(JobEvent(k, 1.0, EventKind.TASK_FAILED, "task-1", text) for k, text in enumerate(causes, 1))
    assert [line.text for line in News().lines(STATUS, EventHistory(events))] == [
        "task 1 failed: ValueError: row 7",
        "task 1 failed again in the same way",
        "task 1 failed: OSError: gone",
        "task 1 failed again in the same way",
    ]


def test_of_a_trouble_that_repeats_by_the_hundred_few_lines_are_printed() -> None:
    history = EventHistory(tuple(JobEvent(k, 1.0, EventKind.LOSS_NOT_FINITE, "task-1", "nan") for k in range(1, 201)))
    assert len(News().lines(STATUS, history)) == 14


def test_round_numbers_are_1_2_and_5_times_a_power_of_10() -> None:
    assert [number for number in range(1, 501) if is_round(number)] == [1, 2, 5, 10, 20, 50, 100, 200, 500]
