"""The stream of a worker: one at a time, given up when an answer is late, opened again by the next message."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.worker.master_link import MasterStream
from tests.master.actors import MasterJob, running, wait_until
from tests.worker.scripted_master import TOKEN, ScriptedMaster


def beat(worker_id: int = 0, incarnation: int = 5) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(role=pb.WORKER, id=worker_id, incarnation=incarnation)


def stream_to(master: ScriptedMaster) -> MasterStream:
    return MasterStream(pb_grpc.MasterStub(connect(master.address, TOKEN)).Exchange)


@pytest.fixture
def master() -> Iterator[ScriptedMaster]:
    scripted = ScriptedMaster()
    yield scripted
    scripted.stop()


def test_messages_of_all_kinds_are_answered_in_order_on_one_stream(master: ScriptedMaster) -> None:
    stream = stream_to(master)
    for n in range(3):
        assert stream.heartbeat(beat(), 30).known
        assert stream.report_progress(pb.ProgressReport(lease=n, committed=[n]), 30).model_version == 100
    assert stream.finish_task(pb.FinishedTask(lease=2), 30).accepted
    assert [method for method, _ in master.told] == ["Heartbeat", "ReportProgress"] * 3 + ["FinishTask"]
    assert master.num_streams == 1


def test_a_message_whose_answer_is_late_is_given_up_and_the_next_one_is_answered(master: ScriptedMaster) -> None:
    stream, may_answer = stream_to(master), threading.Event()
    assert stream.heartbeat(beat(), 30).known
    master.on_call = lambda method: may_answer.wait(60)
    with pytest.raises(grpc.RpcError) as late:
        stream.heartbeat(beat(), 0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    may_answer.set()
    assert stream.report_progress(pb.ProgressReport(lease=7), 30).accepted
    assert master.num_streams == 2


def test_a_message_that_waits_for_another_ones_answer_ends_at_its_own_deadline(master: ScriptedMaster) -> None:
    stream, may_answer = stream_to(master), threading.Event()
    master.on_call = lambda method: may_answer.wait(60)
    first = threading.Thread(target=stream.heartbeat, args=(beat(), 60))
    first.start()
    assert master.is_called.wait(60)
    with pytest.raises(grpc.RpcError) as late:
        stream.report_progress(pb.ProgressReport(lease=7), 0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    may_answer.set()
    first.join(60)
    master.on_call = lambda method: None
    assert stream.heartbeat(beat(), 30).known


def test_a_stream_that_has_ended_between_two_messages_fails_neither(master: ScriptedMaster) -> None:
    stream = stream_to(master)
    assert stream.heartbeat(beat(), 30).known
    master.stop()
    next_life = ScriptedMaster(port=master.port)
    try:
        wait_until(lambda: stream._stream is not None and stream._stream.is_broken, "the end of the stream", 30)
        assert stream.heartbeat(beat(), 30, wait_for_ready=True).known
        assert len(next_life.hears("Heartbeat")) == 1
    finally:
        next_life.stop()


def test_a_message_without_a_call_and_one_that_breaks_a_rule_end_their_stream_alone(master: ScriptedMaster) -> None:
    stub = pb_grpc.MasterStub(connect(master.address, TOKEN))
    bad = pb.WorkerMessage(finished=pb.FinishedTask(lease=-1))
    for message, why in ((pb.WorkerMessage(), "holds no call"), (bad, "FinishedTask.lease is -1")):
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Exchange(iter((message,)), timeout=30))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in str(refused.value.details()).replace("WorkerMessage.finished", "FinishedTask")
    assert master.told == []
    assert stream_to(master).heartbeat(beat(), 30).known


def test_a_worker_and_its_stream_outlive_stops_and_a_kill_of_the_master(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, distribution_strategy="Local", num_ps_pods=0)) as job:
        worker = job.worker()
        assert worker.register().accepted
        assert worker.report_model().accepted
        stream, lease = MasterStream(worker.stub.Exchange), worker.lease()
        beat_of_worker = beat(worker.id, worker.incarnation)
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as late:
            stream.heartbeat(beat_of_worker, 0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        os.kill(job.process.pid, signal.SIGCONT)
        assert stream.heartbeat(beat_of_worker, 30).known
        job.kill()
        with pytest.raises(grpc.RpcError) as gone:
            stream.heartbeat(beat_of_worker, 0.5)
        assert gone.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        job.start()
        assert not stream.heartbeat(beat_of_worker, 60, wait_for_ready=True).known
        assert worker.register(held=((lease, ()),)).accepted
        report = pb.ProgressReport(
            worker_id=worker.id, incarnation=worker.incarnation, lease=lease.id, committed=[0, 1]
        )
        assert stream.report_progress(report, 30).model_version == 2
        assert stream.report_progress(report, 30).model_version == 2
        task = pb.FinishedTask(worker_id=worker.id, incarnation=worker.incarnation, lease=lease.id, num_minibatches=2)
        assert stream.finish_task(task, 30).accepted
        worker.model[lease.epoch, lease.task] = {0, 1}
        worker.train_all()
        assert job.wait() == 0, job.log()
        assert "records 64, committed 64, repeated 0, lost 0" in job.log()
