"""`elasticdl.api.data` while leases are taken back and granted at the same moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import grpc
import pytest

from elasticdl.activities import ActivityClock
from elasticdl.api.data import DataShardService
from elasticdl.api.session import AloneLink, ScriptSession
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.tasks import HeldLease, LeaseBook
from elasticdl_client.job_spec import JobSpec
from tests.worker.counting import lease
from tests.worker.scripted_master import TOKEN, ScriptedMaster

pytestmark = pytest.mark.estimator_too
LONG_S = 20.0


class TakenBack(LeaseBook):
    """The heartbeat hears that the first lease was taken back when all of its minibatches were listed."""

    def __init__(self) -> None:
        super().__init__()
        self._num_looks = 0

    def get(self, lease_id: int) -> HeldLease | None:
        held = super().get(lease_id)
        if held is not None and held.record_numbers:
            self._num_looks += 1
            if self._num_looks == 2:
                self.revoke([lease_id])
                return None
        return held


def test_a_task_that_is_taken_back_as_it_is_fetched_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link(AloneLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.leases = TakenBack()

    monkeypatch.setattr("elasticdl.api.data.AloneLink", Link)
    data = DataShardService(batch_size=4, dataset_size=8, num_minibatches_per_shard=1)
    shard = data.fetch_shard()
    assert shard is not None
    assert len(shard.indices) == 4
    assert data.fetch_shard() is None
    assert data.report_batch_done(4)  # of the task that was given, not of the one that was taken back


def test_two_threads_may_fetch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    class Link(AloneLink):
        def request_lease(self) -> HeldLease | None:
            is_asked.set()
            assert may_answer.wait(LONG_S)
            return super().request_lease()

    monkeypatch.setattr("elasticdl.api.data.AloneLink", Link)
    data = DataShardService(batch_size=4, dataset_size=8, num_minibatches_per_shard=1)
    with ThreadPoolExecutor(2) as threads:
        fetched = [threads.submit(data.fetch_shard)]
        assert is_asked.wait(LONG_S)
        fetched.append(threads.submit(data.fetch_shard))
        wait(fetched[1:], 0.1)  # were it to fail, then at once
        may_answer.set()
        shards = [one.result(LONG_S) for one in fetched]
    assert sorted(index for shard in shards if shard is not None for index in shard.indices) == list(range(8))


class Planned(ScriptedMaster):
    """Says what the data are."""

    def RegisterWorker(self, request: Any, context: grpc.ServicerContext) -> pb.RegisterWorkerReply:  # noqa: N802
        reply = super().RegisterWorker(request, context)
        plan = pb.Plan(minibatch_size=2, num_minibatches_per_task=2, num_epochs=1, num_records=104, num_minibatches=52)
        reply.plan.CopyFrom(plan)
        return reply


def test_a_lease_that_is_granted_while_tensorflows_chief_tells_of_a_restored_model_is_kept() -> None:
    """The master hands the tasks out anew before its answer has come."""
    master = Planned(lease(0), lease(1))
    link = MasterLink(master.address, TOKEN, 0, "pod", ActivityClock(), LONG_S)
    data = DataShardService(batch_size=2, dataset_size=104, session=ScriptSession(link, JobSpec(), ActivityClock()))
    drawn = data.minibatches()
    first = next(drawn)
    given: list[Any] = []

    def grant(method: str) -> None:
        if method == "ReportSession":
            given.extend([next(other), next(other), next(other)])

    other = data.minibatches()
    on_call: Callable[[str], object] = grant
    master.on_call = on_call
    data.report_session(pb.RESTORED)
    late = given[-1]
    assert (first.lease, late.lease) == (1000, 1001)
    assert not data.holds(first)
    assert not data.done(first)
    assert data.holds(late)
    assert not data.done(late)
    assert data.done(next(other))
    data.close()
    assert [report.lease for report in master.hears("finished")] == [1001]
    master.stop()


def test_flags_of_the_job_that_the_script_contradicts_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    master = Planned()
    link = MasterLink(master.address, TOKEN, 0, "pod", ActivityClock(), LONG_S)
    spec = JobSpec(num_epochs=3, minibatch_size=2)
    with caplog.at_level(logging.WARNING, "elasticdl"):
        data = DataShardService(2, 1, 104, session=ScriptSession(link, spec, ActivityClock()))
    data.close()
    master.stop()
    assert caplog.messages == ["--num_epochs=3 has no effect: the script says 1"]
