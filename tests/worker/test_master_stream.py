"""The stream of a worker: one at a time, given up when an answer is late, opened again by the next message."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.master_stream import MasterStream
from tests.master.actors import MasterJob, running, wait_until
from tests.worker.scripted_master import TOKEN, ScriptedMaster


def beat(worker_id: int = 0, incarnation: int = 5) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(role=pb.WORKER, id=worker_id, incarnation=incarnation)


def progress(lease: int = 7, **fields: Any) -> pb.TaskReport:
    return pb.TaskReport(progress=pb.ProgressReport(lease=lease, **fields))


def is_known(stream: MasterStream, timeout_s: float = 30, wait_for_ready: bool = False, **fields: int) -> bool:
    message = pb.WorkerMessage(heartbeat=beat(**fields))
    return stream.exchange(lambda: message, timeout_s, wait_for_ready).heartbeat.known


def acks(stream: MasterStream, *reports: pb.TaskReport, timeout_s: float = 30) -> Sequence[pb.Ack]:
    return stream.exchange(lambda: pb.WorkerMessage(reports=reports), timeout_s).acks


def stream_to(
    master: ScriptedMaster, on_answer: Callable[[pb.MasterMessage], None] = lambda answer: None
) -> MasterStream:
    return MasterStream(pb_grpc.MasterStub(connect(master.address, TOKEN)).Exchange, on_answer)


@pytest.fixture
def master() -> Iterator[ScriptedMaster]:
    scripted = ScriptedMaster()
    yield scripted
    scripted.stop()


def test_messages_of_all_kinds_are_answered_in_order_on_one_stream(master: ScriptedMaster) -> None:
    stream = stream_to(master)
    for n in range(3):
        assert is_known(stream)
        assert [ack.model_version for ack in acks(stream, progress(n, committed=[n]))] == [100]
    message = pb.WorkerMessage(
        heartbeat=beat(), reports=[progress(2), pb.TaskReport(finished=pb.FinishedTask(lease=2))]
    )
    answer = stream.exchange(lambda: message, 30)
    assert (answer.heartbeat.known, [ack.accepted for ack in answer.acks]) == (True, [True, True])
    expected = ["Heartbeat", "progress"] * 3 + ["Heartbeat", "progress", "finished"]
    assert [method for method, _ in master.told] == expected
    assert master.num_streams == 1


def test_a_message_whose_answer_is_late_is_given_up_and_the_next_one_is_answered(master: ScriptedMaster) -> None:
    stream, may_answer = stream_to(master), threading.Event()
    assert is_known(stream)
    master.on_call = lambda method: may_answer.wait(60)
    with pytest.raises(grpc.RpcError) as late:
        is_known(stream, 0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    may_answer.set()
    assert acks(stream, progress())[0].accepted
    assert master.num_streams == 2


def test_a_message_that_waits_for_another_ones_answer_ends_at_its_own_deadline(master: ScriptedMaster) -> None:
    stream, may_answer = stream_to(master), threading.Event()
    master.on_call = lambda method: may_answer.wait(60)
    first = threading.Thread(target=is_known, args=(stream, 60))
    first.start()
    assert master.is_called.wait(60)
    with pytest.raises(grpc.RpcError) as late:
        acks(stream, progress(), timeout_s=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    may_answer.set()
    first.join(60)
    master.on_call = lambda method: None
    assert is_known(stream)


def test_a_heartbeats_reply_is_taken_in_before_another_message_is_made(master: ScriptedMaster) -> None:
    late: list[grpc.RpcError] = []

    def on_answer(answer: pb.MasterMessage) -> None:
        if not late:
            other = threading.Thread(target=lambda: late.append(error_of(stream)))
            other.start()
            other.join()

    def error_of(stream: MasterStream) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as error:
            acks(stream, progress(), timeout_s=0.1)
        return error.value

    stream = stream_to(master, on_answer)
    assert is_known(stream)
    assert [error.code() for error in late] == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert [method for method, _ in master.told] == ["Heartbeat"]
    assert acks(stream, progress())[0].accepted


def senders() -> set[int]:
    """gRPC's threads that take the requests of streams."""
    stacks = {ident: traceback.walk_stack(top) for ident, top in sys._current_frames().items()}
    return {
        ident
        for ident, stack in stacks.items()
        if any(frame.f_code.co_name == "consume_request_iterator" for frame, _ in stack)
    }


def test_a_stream_that_has_ended_between_two_messages_fails_neither(master: ScriptedMaster) -> None:
    stream, before = stream_to(master), senders()
    assert is_known(stream)
    master.stop()
    next_life = ScriptedMaster(port=master.port)
    try:
        wait_until(lambda: stream._stream is not None and stream._stream.is_broken, "the end of the stream", 30)
        assert is_known(stream, wait_for_ready=True)
        assert len(next_life.hears("Heartbeat")) == 1
        wait_until(lambda: len(senders() - before) == 1, "the end of gRPC's thread for the first stream", 30)
    finally:
        next_life.stop()


def test_a_message_without_a_call_and_one_that_breaks_a_rule_end_their_stream_alone(tmp_path: Path) -> None:
    bad = pb.WorkerMessage(reports=[pb.TaskReport(finished=pb.FinishedTask(lease=-1))])
    cases = (
        (pb.WorkerMessage(), "holds neither a heartbeat nor a report nor a request"),
        (pb.WorkerMessage(heartbeat=beat(), reports=[pb.TaskReport()]), "TaskReport: it holds no report"),
        (bad, "WorkerMessage.reports[0].finished.lease is -1"),
    )
    with running(MasterJob(tmp_path, distribution_strategy="Local", num_ps_pods=0)) as job:
        worker = job.worker()
        assert worker.register().accepted
        stream = MasterStream(worker.stub.Exchange, lambda reply: None)
        own = {"worker_id": worker.id, "incarnation": worker.incarnation}
        assert is_known(stream, **own)
        for message, why in cases:
            with pytest.raises(grpc.RpcError) as refused:
                list(worker.stub.Exchange(iter((message,)), timeout=30))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert why in str(refused.value.details())
        assert is_known(stream, **own)


def test_the_real_master_answers_the_parts_of_a_message_up_to_a_refused_one(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, distribution_strategy="Local", num_ps_pods=0)) as job:
        worker = job.worker()
        assert worker.register().accepted
        assert worker.report_model().accepted
        stream, lease = MasterStream(worker.stub.Exchange, lambda reply: None), worker.lease()
        own = {"worker_id": worker.id, "incarnation": worker.incarnation}
        first, late = (progress(lease.id, committed=[n], **own) for n in range(2))
        message = pb.WorkerMessage(heartbeat=beat(**own), reports=[first, progress(1, **own), late])
        answer = stream.exchange(lambda: message, 30)
        assert answer.heartbeat.known
        assert [(ack.accepted, ack.model_version) for ack in answer.acks] == [(True, 1), (False, 0)]
        assert [ack.model_version for ack in acks(stream, late)] == [2]


def test_the_real_master_grants_a_lease_with_the_answer_to_the_report_that_makes_room(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, distribution_strategy="Local", num_ps_pods=0)) as job:
        worker = job.worker()
        own = {"worker_id": worker.id, "incarnation": worker.incarnation}
        stream, request = MasterStream(worker.stub.Exchange, lambda answer: None), pb.LeaseRequest(**own)
        asking = pb.WorkerMessage(lease_request=request)
        assert stream.exchange(lambda: asking, 30).lease.unknown == "register first"
        assert worker.register().accepted
        assert stream.exchange(lambda: asking, 30).lease.wait  # the data are not known: it waits for nothing
        assert worker.report_model().accepted
        leases = [worker.lease(), worker.lease()]
        assert stream.exchange(lambda: asking, 30).lease.wait
        ended = pb.TaskReport(finished=pb.FinishedTask(lease=leases[0].id, num_minibatches=2, **own))
        reports = [progress(leases[0].id, committed=[0, 1], **own), ended]
        answer = stream.exchange(lambda: pb.WorkerMessage(reports=reports, lease_request=request), 30)
        assert [ack.accepted for ack in answer.acks] == [True, True]
        assert answer.lease.lease.task not in [lease.task for lease in leases]


def test_a_worker_and_its_stream_outlive_stops_and_a_kill_of_the_master(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, distribution_strategy="Local", num_ps_pods=0)) as job:
        worker = job.worker()
        assert worker.register().accepted
        assert worker.report_model().accepted
        stream, lease = MasterStream(worker.stub.Exchange, lambda reply: None), worker.lease()
        own = {"worker_id": worker.id, "incarnation": worker.incarnation}
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGSTOP)
        os.waitpid(job.process.pid, os.WUNTRACED)  # each thread stops by itself
        with pytest.raises(grpc.RpcError) as late:
            is_known(stream, 0.5, **own)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        os.kill(job.process.pid, signal.SIGCONT)
        assert is_known(stream, **own)
        job.kill()
        with pytest.raises(grpc.RpcError) as gone:
            is_known(stream, 0.5, **own)
        assert gone.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        job.start()
        assert not is_known(stream, 60, wait_for_ready=True, **own)
        assert worker.register(held=((lease, ()),)).accepted
        report = progress(lease.id, committed=[0, 1], **own)
        assert [ack.model_version for ack in acks(stream, report)] == [2]
        task = pb.TaskReport(finished=pb.FinishedTask(lease=lease.id, num_minibatches=2, **own))
        for _ in range(2):  # the answer may be lost
            assert [(ack.accepted, ack.model_version) for ack in acks(stream, report, task)] == [(True, 2), (True, 2)]
        worker.model[lease.epoch, lease.task] = {0, 1}
        worker.train_all()
        assert job.wait() == 0, job.log()
        assert "records 64, committed 64, repeated 0, lost 0" in job.log()
