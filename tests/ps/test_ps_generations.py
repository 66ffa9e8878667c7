"""Which life of the master a PS believes in: the one that it has asked itself, whatever its callers say."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from elasticdl.ps.applied import AppliedSet
from elasticdl.ps.client import LeaseRefused, PsUnavailable
from elasticdl.ps.server import service as services
from elasticdl.ps.server.service import JobBounds
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.ps.wire import ExchangeCall, RequestError
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.frames import Frame
from elasticdl_client.errors import JobError
from tests.ps.scenes import TOKEN, make_push, ps_cluster, whole_pull

FAR = (1 << 31) - 1


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_NAMED_WITHIN_S", 0.2)


def test_a_generation_that_the_master_has_not_named_is_refused_and_excludes_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ps_cluster(1) as cluster, caplog.at_level(logging.INFO):
        (service,) = cluster.services
        service.accept_lease(3 << 32)
        with connect(cluster.partition.ps[0].address, TOKEN) as channel:
            stub: Any = pb_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as refused:
                stub.ReadAppliedSet(pb.PsQuestion(generation=FAR, incarnation=10), timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.RpcError) as malformed:
                stub.ReadAppliedSet(pb.PsQuestion(generation=1 << 60, incarnation=10), timeout=10)
            assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert stub.ReadAppliedSet(pb.PsQuestion(generation=3, incarnation=10), timeout=10).status == pb.OK
        assert not [record for record in caplog.records if record.exc_info]


def test_a_lease_of_a_future_generation_fences_no_worker() -> None:
    with ps_cluster(1) as cluster:
        (service,) = cluster.services
        service.accept_lease(3 << 32)
        for call in (
            lambda: cluster.client.standing(FAR << 32, 0, 0),
            lambda: cluster.client.exchange(make_push(0, lease=FAR << 32), None),
        ):
            with pytest.raises(PsUnavailable):
                call()
        cluster.client.exchange(make_push(0, lease=(3 << 32) + 5), None)
        with pytest.raises(LeaseRefused):
            cluster.client.exchange(make_push(1, lease=(3 << 32) + 4), None)


def test_a_call_of_the_next_master_waits_until_that_has_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_NAMED_WITHIN_S", 30.0)
    with ps_cluster(1) as cluster, ThreadPoolExecutor(1) as threads:
        (service,) = cluster.services
        asked = threads.submit(service.read_applied_set, pb.PsQuestion(generation=2, incarnation=10))
        give_up_at = time.monotonic() + 30
        while not service.is_master_awaited and time.monotonic() < give_up_at:
            threading.Event().wait(0.001)
        service.accept_lease(2 << 32)
        assert asked.result(30).status == pb.OK
        assert not service.is_master_awaited


def test_a_lease_far_beyond_the_newest_that_the_master_has_granted_fences_no_worker() -> None:
    with ps_cluster(1) as cluster:
        (service,) = cluster.services
        newest = (3 << 32) + 70
        service.accept_lease(newest)
        far = newest + services._LEASES_AHEAD + 1
        for call in (
            lambda: cluster.client.standing(far, 0, 0),
            lambda: cluster.client.exchange(make_push(0, lease=(3 << 32) + 0xFFFFFFFF), None),
        ):
            with pytest.raises(PsUnavailable):
                call()
        cluster.client.exchange(make_push(0, lease=newest - 5), None)  # the holder is not shut out
        service.accept_lease(newest + 1)
        cluster.client.exchange(make_push(1, lease=far), None)


def test_an_epoch_that_the_job_has_not_is_refused() -> None:
    with ps_cluster(1) as cluster:
        (service,) = cluster.services
        service.job = JobBounds(num_epochs=2)
        for epoch in (2, 1 << 24):
            with pytest.raises(JobError, match="this job has 2, counted from 0"):
                cluster.client.exchange(make_push(0, epoch=epoch), None)
            with pytest.raises(RequestError):
                service.task_standing(pb.TaskStandingRequest(incarnation=10, lease=1, epoch=epoch))
        cluster.client.exchange(make_push(0, epoch=1), None)
        assert [task.epoch for task in service.state.applied()[0].tasks] == [1]


def test_a_coordinator_that_the_partition_does_not_name_shuts_no_round_out() -> None:
    updates = UpdateSettings(use_async=False, grads_to_wait=1)
    with ps_cluster(2, updates=updates) as cluster:
        first, second = cluster.services
        forged = ExchangeCall(11, None, None, 1, pb.Rounds(coordinator=1 << 60, rounds=[pb.Round(number=1 << 60)]))
        second.state.exchange(forged)  # before it knows any partition
        for service in cluster.services:
            service.accept_partition(cluster.partition)
        header = pb.ExchangeHeader(incarnation=11, partition_version=1, rounds=forged.rounds)
        with pytest.raises(services.UnnamedError):
            second.exchange(Frame(header.SerializeToString(), []).whole())
        push = make_push(0)
        cluster.client.exchange(push, None)
        first.num_pushing = 1
        cluster.client.close_round(push, lambda: None)
        cluster.client.exchange(None, whole_pull())  # carries the round
        assert [applied_names(service) for service in (first, second)] == [1, 1]


def applied_names(service: services.PsService) -> int:
    return AppliedSet.from_message(service.state.applied()[0]).num_names
