"""The user wants more workers, or fewer, while the job runs."""

from __future__ import annotations

import pytest
from core_script import Like, Script, running, train_all
from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind, JobEvent
from elasticdl_client.job_status import JobStatus, UncreatedPods
from elasticdl_client.news import News


def events(script: Script, *kinds: EventKind) -> list[JobEvent]:
    return [one for one in script.job.events.events if one.kind in kinds]


def wanted(script: Script) -> int:
    return script.job.status().workers_wanted


def slot_seconds(script: Script) -> float:
    return round(sum(script.job.status(script.now).worker_seconds.values()), 6)


def created(script: Script) -> list[tuple[int, int]]:
    """The ids and slots of the workers that the newest event has made."""
    return [(one.index, one.slot) for one in script.told(c.CreatePod) if one.role is Role.WORKER]


def deleted(script: Script) -> list[str]:
    return [one.name for one in script.told(c.DeletePod)]


def worker_ends(script: Script, worker_id: int) -> None:
    """A worker that was asked to end says so, and has ended."""
    script.heartbeat(worker_id, leaving=True)
    script.kill(worker_id, "Killed")


def test_new_workers_are_created_at_once_and_the_others_stay_as_they_are() -> None:
    script = running(2)
    script.tell(e.ScaleRequested(4))
    assert script.commands[0] == c.Persist()
    assert created(script) == [(2, 2), (3, 3)]
    assert deleted(script) == []
    assert wanted(script) == 4


def test_the_youngest_workers_finish_their_minibatch_and_leave_for_good() -> None:
    script = running(4)
    lease = script.lease(3)
    script.tell(e.ScaleRequested(2))
    assert script.commands[0] == c.Persist()
    assert deleted(script) == ["elasticdl-j-worker-3", "elasticdl-j-worker-2"]
    assert script.progress(lease, 0, worker_id=3) == c.Accepted(1)  # a started lease counts
    worker_ends(script, 3)
    worker_ends(script, 2)
    assert created(script) == []
    assert script.lease(0).task == lease.task
    assert wanted(script) == script.job.status().workers_alive == 2
    assert events(script, EventKind.POD_LOST) == []
    assert script.job.status().pods_lost == {}
    assert [one.subject for one in events(script, EventKind.POD_COMPLETED)] == ["worker-3", "worker-2"]


def test_the_number_that_is_wanted_already_changes_nothing() -> None:
    script = running(2)
    script.tell(e.ScaleRequested(2))
    assert script.commands == []
    assert events(script, EventKind.JOB_SCALED) == []


def test_a_worker_that_waits_for_room_goes_before_one_that_trains() -> None:
    script = running(3)
    script.kill(1)  # its successor, worker 3, finds no room
    script.tell(e.PodNotCreated(script.settings.pod_name(Role.WORKER, 3), "exceeded quota"))
    script.tell(e.ScaleRequested(2))
    assert deleted(script) == []
    script.pass_time(120, alive=(0, 2))
    assert created(script) == []
    script.tell(e.ScaleRequested(3))
    assert created(script) == [(4, 1)]


def test_a_pod_without_a_process_goes_before_one_with_a_younger_slot() -> None:
    script = running(3)
    script.kill(0)
    script.pod(Role.WORKER, 3, PodState.PENDING)
    script.tell(e.ScaleRequested(2))
    assert deleted(script) == ["elasticdl-j-worker-3"]
    script.pod(Role.WORKER, 3, PodState.DELETED)
    assert created(script) == []


def test_a_worker_that_is_released_has_a_successor_only_if_it_is_wanted_again() -> None:
    script = running(2)
    script.tell(e.ScaleRequested(1))
    script.tell(e.ScaleRequested(2))
    assert created(script) == [(2, 1)]
    worker_ends(script, 1)
    assert created(script) == []


def test_a_creation_that_fails_is_not_tried_again_for_a_worker_that_is_not_wanted_any_more() -> None:
    script = running(1)
    script.tell(e.ScaleRequested(2))
    script.tell(e.ScaleRequested(1))
    script.tell(e.PodNotCreated(script.settings.pod_name(Role.WORKER, 1), "exceeded quota"))
    script.pass_time(120, alive=(0,))
    assert script.told(c.CreatePod) == []
    assert script.job.status().not_created == ()


def test_the_status_names_the_newest_pod_that_the_api_server_refuses_until_it_is_there_or_not_wanted() -> None:
    script = running(1)
    script.tell(e.ScaleRequested(4))
    names = [script.settings.pod_name(Role.WORKER, index) for index in (1, 2, 3)]
    for number, name in enumerate(names):
        script.tell(e.PodNotCreated(name, f"exceeded quota {number}\nlimited: pods=1"))
    assert script.job.status().not_created == (
        UncreatedPods("worker", 3, names[2], "exceeded quota 2 limited: pods=1"),
    )
    script.pass_time(5, alive=(0,))  # tried again, and not answered yet
    assert script.told(c.CreatePod)
    script.tell(e.PodNotCreated(names[0], "exceeded quota 3"))
    assert script.job.status().not_created == (UncreatedPods("worker", 3, names[0], "exceeded quota 3"),)
    script.pod(Role.WORKER, 1, PodState.PENDING)
    assert [(one.count, one.name) for one in script.job.status().not_created] == [(2, names[2])]
    script.tell(e.ScaleRequested(2))
    script.tell(e.PodNotCreated(names[1], "exceeded quota"))
    script.tell(e.PodNotCreated(names[2], "exceeded quota"))
    assert script.job.status().not_created == ()


def test_slots_have_time_exactly_while_they_are_wanted() -> None:
    script = running(2)
    script.now = 3.0
    script.tell(e.ScaleRequested(4))
    script.now = 5.5
    script.tell(e.ScaleRequested(1))
    script.now = 9.0
    script.tell(e.ScaleRequested(3))
    script.now = 10.0
    script.tell(e.Tick())
    assert slot_seconds(script) == 2 * 3.0 + 4 * 2.5 + 1 * 3.5 + 3 * 1.0
    script.restart_master()
    assert slot_seconds(script) == 22.5


def test_the_next_life_of_the_master_wants_as_many_and_deletes_leaving_workers_again() -> None:
    script = running(3)
    script.tell(e.ScaleRequested(1))
    script.restart_master()
    names = [script.settings.pod_name(Role.WORKER, index) for index in range(3)]
    pods = [e.PodChanged(one, Role.WORKER, index, f"{one}/1", PodState.RUNNING) for index, one in enumerate(names)]
    script.tell(e.PodsListed(tuple(pods)))
    assert deleted(script) == names[1:]
    assert created(script) == []
    script.tell(e.ScaleRequested(1))
    assert script.commands == []
    assert isinstance(script.worker_joins(2), c.Refused)
    assert wanted(script) == 1


def test_a_job_that_was_never_scaled_follows_the_flag_of_the_present_life() -> None:
    script = running(2)
    assert script.job.snapshot()["pods"]["slots"] is None
    script.tell(e.ScaleRequested(3))
    assert script.job.snapshot()["pods"]["slots"] == [0, 1, 2]


def test_a_job_without_workers_waits_and_continues() -> None:
    script = running(2)
    script.tell(e.ScaleRequested(0))
    for worker_id in (1, 0):
        worker_ends(script, worker_id)
    script.pass_time(700)
    status = script.job.status()
    assert (status.workers_wanted, status.workers_alive, status.phase) == (0, 0, "Running")
    assert status.message.startswith("paused: ")
    assert not any(isinstance(one, c.EndJob) for one in script.history)
    script.tell(e.ScaleRequested(1))
    assert created(script) == [(2, 0)]
    script.worker_starts(2)
    train_all(script, 2)
    assert script.job.status().phase == "Succeeded"


def test_a_job_of_scripts_is_not_done_because_the_others_are_not_wanted() -> None:
    script = running(3, runs_command=True, num_ps=0)
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED, "Completed")
    script.tell(e.ScaleRequested(2))
    assert deleted(script) == []  # the slot of the one that is done is given up first
    script.tell(e.ScaleRequested(1))
    assert deleted(script) == ["elasticdl-j-worker-2"]
    worker_ends(script, 2)
    assert script.job.status().phase == "Running"
    script.tell(e.ScaleRequested(2))
    assert created(script) == [(3, 0)]


def test_the_end_of_a_job_is_not_scaled() -> None:
    script = running(1)
    script.tell(e.StopRequested("Ctrl-C"))
    script.tell(e.ScaleRequested(3))
    assert script.told(c.CreatePod) == []
    assert wanted(script) == 1


def test_an_impossible_number_is_an_event_once_in_all_lives_of_the_master() -> None:
    script = running(1)
    for _ in range(2):
        script.tell(e.ScaleRefused("'many' is not a number of workers."))
    script.restart_master()
    script.tell(e.ScaleRefused("'many' is not a number of workers."))
    assert len(events(script, EventKind.SCALE_REFUSED)) == 1
    script.tell(e.ScaleRequested(2))
    script.tell(e.ScaleRefused("'many' is not a number of workers."))
    assert len(events(script, EventKind.SCALE_REFUSED)) == 2
    assert wanted(script) == 2


def test_what_follows_from_the_users_number_names_it_as_its_cause() -> None:
    script = running(2)
    news, status = News(), JobStatus("j")
    news.lines(status, script.job.events)
    script.tell(e.ScaleRequested(3))
    script.pod(Role.WORKER, 2, PodState.PENDING)
    script.tell(e.ScaleRequested(1))
    worker_ends(script, 1)
    assert [line.text for line in news.lines(status, script.job.events)] == [
        "scaled: workers 2 → 3",
        "scaled: workers 3 → 1",
        "worker-2 is not wanted any more",
        "worker-1 is not wanted any more",
    ]
    grown, shrunk = events(script, EventKind.JOB_SCALED)
    assert [(one.subject, one.details) for one in (grown, shrunk)] == [
        ("user", {"before": 2, "after": 3}),
        ("user", {"before": 3, "after": 1}),
    ]
    new = next(one for one in events(script, EventKind.POD_CREATED) if one.subject == "worker-2")
    assert new.cause == grown.number
    draining = events(script, EventKind.POD_DRAINING)
    assert [(one.subject, one.cause) for one in draining] == [
        ("worker-2", shrunk.number),
        ("worker-1", shrunk.number),
    ]
    completed = events(script, EventKind.POD_COMPLETED)
    assert [(one.subject, one.cause) for one in completed] == [("worker-1", draining[1].number)]


# Groups -----------------------------------------------------------------------------------------------------------


def leaves(script: GroupScript, worker_id: int) -> None:
    script.beat(worker_id, leaving=True)
    script.kill(worker_id, "Killed")


def test_a_group_grows_with_the_users_number_and_waits_for_all_wanted_workers() -> None:
    script = standing(2)
    script.tell(e.ScaleRequested(4))
    assert created(script) == [(2, 2), (3, 3)]
    script.successor_starts(2)
    assert script.members == (0, 1)  # another one may be ready a moment later
    script.successor_starts(3)
    assert script.members == (0, 1, 2, 3)


def test_a_group_shrinks_to_its_oldest_members_and_keeps_the_model() -> None:
    script = standing(3)
    script.tell(e.ScaleRequested(1))
    assert deleted(script) == ["elasticdl-j-worker-2", "elasticdl-j-worker-1"]
    for worker_id in (2, 1):
        leaves(script, worker_id)
    script.all_leave(0)
    script.moment()
    assert script.members == (0,)
    assert script.planned.members[0].is_source


def test_a_member_of_the_group_stays_before_an_older_worker_that_is_not_in_it() -> None:
    script = standing(3)
    script.kill(0)  # its successor, worker 3, comes late
    script.all_leave(1, 2)
    script.moment()
    script.forms()
    script.worker_starts(3)
    script.tell(e.ScaleRequested(2))
    assert deleted(script) == ["elasticdl-j-worker-3"]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_member_goes_before_a_younger_one_that_is_seen(silent: int) -> None:
    script = standing(3)
    script.silence(6, silent)
    script.tell(e.ScaleRequested(2))
    assert script.told(c.DeletePod) == [Like(c.DeletePod, name=f"elasticdl-j-worker-{silent}")]


def test_no_rate_is_measured_over_a_time_in_which_the_master_was_stopped() -> None:
    script = running(1, max_workers=4, records=40_000, num_minibatches_per_task=1000)
    lease, committed = script.lease(0), iter(range(1000))
    for second in range(60):
        script.now += 90.0 if second == 40 else 1.0
        for _ in range(90 if second == 40 else 1):  # of reports that wait for the master, too
            script.progress(lease, next(committed))
        script.heartbeat(0, (lease.id,), seconds={"compute": script.now})
        script.tell(e.Tick())
    points = script.job.snapshot()["autoscaler"]["curve"]["points"]
    rates = [rate for _, _, samples in points for rate, *_ in samples]
    assert len(rates) >= 10
    assert max(rates) < 20.0
