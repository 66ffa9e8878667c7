"""A failure in a task fails that task and leaves the worker running."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.framework import MetricState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.evaluation import EvaluationWork
from elasticdl.worker.loop import WorkerLoop
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter, TaskFailures
from elasticdl.worker.tasks import OwnValues, TaskStream
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import DataError
from tests.worker.counting import Counting, Numbers, lease
from tests.worker.scripted_master import TOKEN, ScriptedMaster

ways = pytest.mark.parametrize("at_once", [False, True], ids=["one-by-one", "between-steps"])


class Metric:
    """A metric of the user's whose result cannot be computed."""

    def __init__(self, on_update: Callable[[], object]) -> None:
        self._on_update = on_update

    def update(self, *minibatch: Any) -> None:
        self._on_update()

    def states(self) -> list[MetricState]:
        return []

    def results(self, states: Any) -> Mapping[str, float]:
        raise ZeroDivisionError("no samples")


@pytest.fixture
def master() -> Any:
    made = ScriptedMaster()
    yield made
    made.stop()


def run(
    master: ScriptedMaster,
    at_once: bool,
    numbers: Numbers | None = None,
    loses: int = 0,
    on_update: Callable[[], object] = lambda: None,
) -> MasterLink:
    """Evaluate until there is no more lease.

    Args:
        at_once: between the steps of a group.
        loses: this lease is lost at its first minibatch.
        on_update: called with each minibatch.
    """
    clock = ActivityClock()
    link = MasterLink(master.address, TOKEN, 0, "pod", clock, 20.0)
    model: Any = Counting()
    model.evaluation = lambda: Metric(lambda: (link.leases.revoke((loses,)), on_update()))
    tasks = TaskStream(
        link, lambda task_type: numbers or Numbers(), lambda held: None, seed=1, shuffle=False, clock=clock
    )
    work = EvaluationWork(TaskFailures(link, Reporter(link, 10)), model, OwnValues(), lambda held, results: None)
    loop = WorkerLoop(tasks, work, Termination(clock))
    if at_once:
        loop.run_at_once(pb.EVALUATION)
    else:
        loop.run()
    return link


@ways
def test_a_metric_without_a_result_fails_its_evaluation(master: ScriptedMaster, at_once: bool) -> None:
    master.leases.append(pb.Lease(id=7, type=pb.EVALUATION, merged=[pb.MetricState(name="m")]))
    link = run(master, at_once)
    (failed,) = master.hears("FailTask")
    assert (failed.lease, failed.error) == (7, "ZeroDivisionError: no samples")
    assert link.leases.held() == []


@ways
def test_records_that_cannot_be_read_fail_their_evaluation(master: ScriptedMaster, at_once: bool) -> None:
    master.leases += [lease(0, task_type=pb.EVALUATION), lease(1, task_type=pb.EVALUATION)]
    run(master, at_once, Numbers(torn={0}))
    (failed,) = master.hears("FailTask")
    assert (failed.error, failed.details, failed.minibatch) == ("the records from 0 on are torn", "", -1)
    (reported,) = master.hears("ReportEvaluation")
    assert reported.lease == 1001


@ways
def test_data_that_fail_while_they_are_used_are_named_in_the_log(
    master: ScriptedMaster, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    updates = itertools.count()

    def fail() -> None:
        if next(updates):
            raise DataError("there is no memory for them")

    master.leases.append(lease(0, task_type=pb.EVALUATION))
    run(master, at_once, on_update=fail)
    (failed,) = master.hears("FailTask")
    assert (failed.error, failed.minibatch) == ("there is no memory for them", 1)
    assert 'raise DataError("there is no memory for them")' in failed.details  # the line of the user's code
    assert [failed.error in record.message for record in caplog.records if record.levelname == "ERROR"] == [True]


@ways
def test_an_evaluation_whose_lease_is_lost_has_not_failed(master: ScriptedMaster, at_once: bool) -> None:
    master.leases += [lease(0, task_type=pb.EVALUATION), lease(1, task_type=pb.EVALUATION)]
    link = run(master, at_once, loses=1000)
    (reported,) = master.hears("ReportEvaluation")
    assert reported.lease == 1001
    assert not [name for name, _ in master.told if name == "FailTask"]
    assert link.leases.held() == []
