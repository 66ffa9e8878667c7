"""The cost of an event in the core does not grow with the number of workers or tasks: counted in lines of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from core_script import Script, running
from group_script import GroupScript, standing

from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role

FEW, MANY = 10, 160
Act = Callable[[Script], e.Event]


def lines_of(script: Script, event: e.Event) -> int:
    """Lines of the core that are run for an event."""
    count = 0

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        count += what == "line"
        return trace if "/master/core/" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        script.job.handle(event, script.now)
    finally:
        sys.settrace(None)
    script.job.validate_state()
    return count


def heartbeat(script: Script) -> e.Event:
    return e.HeartbeatReceived(10_000, Role.WORKER, 3, 7)


def progress(script: Script) -> e.Event:
    return e.ProgressReported(10_000, 3, 7, script.job._work.leases.of_worker(3)[0].id, (0,))


def end_of_task(script: Script) -> e.Event:
    return e.TaskFinished(10_000, 3, 7, script.job._work.leases.of_worker(3)[0].id, 2)


def request(script: Script) -> e.Event:
    return e.LeaseRequested(10_000, 3, 7)


def loss_of_pod(script: Script) -> e.Event:
    name = script.settings.pod_name(Role.WORKER, 3)
    return e.PodChanged(name, Role.WORKER, 3, f"{name}/1", PodState.FAILED, "Killed")


def heartbeat_of_server(script: Script) -> e.Event:
    return e.HeartbeatReceived(10_000, Role.PS, 0, 1)


ACTS: list[Act] = [heartbeat, progress, end_of_task, request, loss_of_pod, heartbeat_of_server]


@pytest.mark.parametrize("act", ACTS)
def test_an_event_costs_as_much_with_many_workers_as_with_few(act: Act) -> None:
    costs = []
    for num_workers in (FEW, MANY):
        script = running(num_workers, records=100 * num_workers)
        for worker_id in range(num_workers):
            script.lease(worker_id)
        script.kill(1)  # the first task of an epoch that comes back makes an index of its tasks
        costs.append(lines_of(script, act(script)))
    assert costs[1] <= 1.2 * costs[0] + 20, costs


@pytest.mark.parametrize("act", ACTS)
def test_workers_that_hold_enough_and_ask_for_more_cost_nothing(act: Act) -> None:
    """As all do that prepare the next task: each has asked for the one after it."""
    costs = []
    for num_workers in (FEW, MANY):
        script = running(num_workers, records=100 * num_workers)
        for worker_id in range(num_workers):
            script.lease(worker_id)
            script.lease(worker_id)
            assert script.request(worker_id) is None
        script.kill(1)  # as above
        costs.append(lines_of(script, act(script)))
    assert costs[1] <= 1.2 * costs[0] + 20, costs


def test_a_task_that_comes_back_costs_as_much_with_many_tasks_as_with_few() -> None:
    costs = []
    for records in (2_000, 200_000):
        script = running(3, records=records)
        for _ in range(40):
            script.finish(script.lease(0))
        script.lease(1)
        script.lease(2)
        script.heartbeat(2, leaving=True)  # as above
        script.now += 1.0
        costs.append(lines_of(script, e.HeartbeatReceived(10_000, Role.WORKER, 1, 7, leaving=True)))
    assert costs[1] <= 1.2 * costs[0] + 20, costs


def test_workers_that_wait_cost_nothing_while_there_is_no_task_for_them() -> None:
    costs = []
    for num_workers in (FEW, MANY):
        script = running(num_workers, records=40)
        leases = [script.lease(0), script.lease(0)]
        for worker_id in range(1, num_workers):
            assert script.request(worker_id) is None
        costs.append(lines_of(script, e.ProgressReported(10_000, 0, 7, leases[0].id, (0,))))
    assert costs[1] <= 1.2 * costs[0] + 20, costs


def test_a_heartbeat_of_a_member_costs_as_much_in_a_large_group_as_in_a_small_one() -> None:
    costs = []
    for num_workers in (FEW, MANY):
        script: GroupScript = standing(num_workers)
        lease = script.ask_at_once(3).lease
        script.beat(3)
        costs.append(lines_of(script, e.LeaseQuestioned(10_000, 3, 7, lease.id)))
    assert costs[1] <= 1.2 * costs[0] + 20, costs
