"""A worker's messages to its master, over a real socket."""

from __future__ import annotations

import logging
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from elasticdl.activities import Activity, ActivityClock
from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.protocol import HEARTBEAT_S, Device, WrittenCheckpoint
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import Reporter
from elasticdl.worker.tasks import HeldLease, LeaseLost, TaskProgress, TaskStream
from elasticdl_client.errors import JobError
from tests.master.actors import wait_until
from tests.worker.counting import Numbers
from tests.worker.scripted_master import TOKEN, ScriptedMaster

AWAY_S = 2.0  # long enough that gRPC pauses between two attempts to connect


def lease(number: int, task_type: pb.TaskType = pb.TRAINING, epoch: int = 0) -> pb.Lease:
    shard = pb.ShardMessage(name="s", start=10 * number, end=10 * number + 10)
    return pb.Lease(id=100 + number, type=task_type, epoch=epoch, task=number, shard=shard)


_links: list[MasterLink] = []  # of the present test


def link(master: ScriptedMaster, token: str = TOKEN, timeout_s: float = 20.0) -> MasterLink:
    _links.append(MasterLink(master.address, token, 3, "pod", ActivityClock(), timeout_s))
    return _links[-1]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Heartbeats last as long as this process: another test's server may get the port that they are sent to."""
    yield
    while _links:
        _links.pop().heartbeat_s = 1e6


def stream(to: MasterLink, begun: list[int], shuffle: bool = False) -> TaskStream:
    def begin(held: HeldLease) -> None:
        begun.append(held.id)

    return TaskStream(to, lambda task_type: Numbers(), begin, seed=5, shuffle=shuffle, clock=ActivityClock())


@contextmanager
def nobody_at(port: int) -> Iterator[None]:
    """A client of the port of a master that is away is refused, and no other server gets it meanwhile."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", port))
        yield


@pytest.fixture
def master() -> Iterator[ScriptedMaster]:
    scripted = ScriptedMaster(lease(0), lease(1), lease(3, pb.EVALUATION), lease(2))
    yield scripted
    scripted.stop()


def test_a_call_without_the_token_is_refused(master: ScriptedMaster) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        link(master, token="another").register()
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_an_error_with_half_a_character_is_reported(master: ScriptedMaster) -> None:
    worker = link(master)
    half = "no label: \ud83d"  # as JSON with a cut emoji gives it
    worker.fail(100, 0, half, half, [])
    told = dict(master.told)
    assert (told["FailTask"].error, told["FailTask"].details) == ("no label: \\ud83d", "no label: \\ud83d")


def test_of_an_error_with_a_large_record_both_ends_are_reported(master: ScriptedMaster) -> None:
    link(master).fail(100, 0, f"no image: {'0' * 1_000_000}, in train.csv", "", [])
    error = dict(master.told)["FailTask"].error
    assert error.startswith("no image: 0")
    assert error.endswith("0, in train.csv")
    assert len(error) < 110_000


def test_a_learning_rate_that_is_no_number_ends_no_worker(master: ScriptedMaster) -> None:
    worker = link(master)
    worker.carry_rate(lambda: math.nan)
    assert worker.report([TaskProgress(100, [0], math.nan)])[0].accepted


def test_a_master_that_stays_away_is_given_up(master: ScriptedMaster) -> None:
    worker = link(master, timeout_s=0.5)
    master.stop()
    with pytest.raises(JobError, match="has not answered"):
        worker.register()


def test_a_report_waits_for_the_masters_next_life(master: ScriptedMaster) -> None:
    worker = link(master)
    worker.register()
    reporter = Reporter(worker, log_loss_steps=10)
    master.stop()
    reporter.committed(7, 0, 0.5)
    reporter.finished(7, 1)
    next_life = ScriptedMaster(port=master.port)
    try:
        reporter.drain()
        assert [list(report.committed) for report in next_life.hears("progress")] == [[0]]
        assert [report.num_minibatches for report in next_life.hears("finished")] == [1]
    finally:
        next_life.stop()


def seconds_of_attempts(port: int, number: int) -> float:
    """For how long a client of a master that is away tries to connect this many times."""
    with socket.create_server(("127.0.0.1", port)) as place:
        began = time.monotonic()
        for _ in range(number):
            place.accept()[0].close()
        return time.monotonic() - began


@pytest.mark.parametrize(("call", "method"), [(["lease"], "RequestLease"), ([], "Heartbeat")])
def test_the_masters_next_life_is_found_at_once(call: list[str], method: str) -> None:
    """gRPC would pause ever longer between two attempts: eight of them take 43 s by its own settings, here 4 s."""
    master = ScriptedMaster(ends=False)
    argv = [sys.executable, "-m", "tests.worker.lone_link", master.address, *call]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as worker:
        try:
            master.hears(method)
            master.stop()
            assert seconds_of_attempts(master.port, 8) < 20.0
            next_life = ScriptedMaster(port=master.port, ends=False)
            try:
                next_life.hears(method)
            finally:
                next_life.stop()
        finally:
            worker.kill()


def test_an_unknown_worker_registers_again_with_what_it_holds(master: ScriptedMaster) -> None:
    worker = link(master)
    worker.register()
    tasks = stream(worker, [])
    next(tasks.records(pb.TRAINING))
    worker.leases.commit(100, (0, 2))
    master.known = False
    worker.start_heartbeat()
    again = master.hears("RegisterWorker", times=2)[1]
    assert [(held.lease.id, list(held.committed)) for held in again.held] == [(100, [0, 2])]


def test_a_task_is_open_from_its_grant_to_its_end(master: ScriptedMaster) -> None:
    master.leases.append(lease(0))
    clock, worker = ActivityClock(), link(master)
    tasks = TaskStream(worker, lambda task_type: Numbers(), lambda held: None, seed=5, shuffle=False, clock=clock)
    held = tasks.peek()
    assert held is not None
    with clock.during(Activity.INPUT), clock.without_task():
        assert clock.read()[0] is Activity.INPUT
        tasks.close(held)
        assert clock.read()[0] is Activity.IDLE
        tasks.reopen([held])
        assert clock.read()[0] is Activity.INPUT


def test_a_revoked_lease_is_marked_and_forgotten(master: ScriptedMaster) -> None:
    worker = link(master)
    held = worker.leases.add(lease(0))
    master.revoked = [held.id]
    worker.start_heartbeat()
    master.hears("Heartbeat", times=2)
    assert held.revoked
    assert worker.leases.held() == []


def test_a_request_for_a_checkpoint_is_passed_on_once(master: ScriptedMaster) -> None:
    worker, asked = link(master), threading.Semaphore(0)
    worker.on_checkpoint_request(asked.release)
    master.checkpoint_request = 1
    worker.start_heartbeat()
    master.hears("Heartbeat", times=3)
    assert asked.acquire(blocking=False)
    assert not asked.acquire(blocking=False)


def test_each_attempt_at_a_checkpoint_is_told_until_the_master_has_answered(master: ScriptedMaster) -> None:
    worker, attempts = link(master), [WrittenCheckpoint(3, "/c/version-3")]
    worker.heartbeat_s = 0.1
    worker.carry_checkpoints(lambda: attempts[-1])
    worker.start_heartbeat()
    first, second = master.hears("Heartbeat", times=2)[:2]
    assert first.checkpoint == pb.WrittenCheckpoint(version=3, directory="/c/version-3", attempt=1)
    assert not second.HasField("checkpoint")
    attempts.append(WrittenCheckpoint(4, error="no space \udcff"))
    more = master.hears("Heartbeat", times=len(master.hears("Heartbeat")) + 3)[2:]
    told = [one.checkpoint for one in more if one.HasField("checkpoint")]
    assert told == [pb.WrittenCheckpoint(version=4, error="no space \\udcff", attempt=2)]


def test_the_newest_attempt_at_a_checkpoint_is_repeated_to_each_generation_of_the_master(
    master: ScriptedMaster,
) -> None:
    worker, written = link(master), WrittenCheckpoint(3, "/c/version-3")

    def told() -> list[pb.WrittenCheckpoint]:
        return [one.checkpoint for one in master.hears("Heartbeat") if one.HasField("checkpoint")]

    worker.carry_checkpoints(lambda: written)
    master.heartbeat_seconds = 0.05
    worker.register()
    worker.start_heartbeat()
    assert not master.hears("Heartbeat", times=2)[1].HasField("checkpoint")
    master.generation = 2
    worker.register()
    wait_until(lambda: len(told()) == 2, "the attempt again", 60)
    master.hears("Heartbeat", times=len(master.told) + 3)
    assert told() == [pb.WrittenCheckpoint(version=3, directory="/c/version-3", attempt=1)] * 2


def test_an_attempt_that_a_killed_master_forgot_is_repeated_beside_a_newer_one(master: ScriptedMaster) -> None:
    worker, attempts = link(master), [WrittenCheckpoint(3, error="no space")]

    def told() -> list[int]:
        return [one.checkpoint.attempt for one in master.hears("Heartbeat") if one.HasField("checkpoint")]

    worker.carry_checkpoints(lambda: attempts[-1])
    master.heartbeat_seconds = 0.05
    worker.register()
    worker.start_heartbeat()
    wait_until(lambda: told() == [1], "the first attempt", 60)
    attempts.append(WrittenCheckpoint(4, "/c/version-4"))
    wait_until(lambda: told() == [1, 2], "the second attempt", 60)
    master.generation = 2
    worker.register()
    wait_until(lambda: told() == [1, 2, 1, 2], "both again, in order", 60)
    master.hears("Heartbeat", times=len(master.told) + 3)
    assert told() == [1, 2, 1, 2]


def test_attempts_that_several_threads_look_at_are_numbered_once(master: ScriptedMaster) -> None:
    """A terminating worker says farewell in one thread, beside the heartbeats of another."""
    worker, attempts = link(master), [WrittenCheckpoint(1, "/c/version-1")]
    worker.carry_checkpoints(lambda: attempts[-1])

    def look() -> list[tuple[int, int]]:
        found = []
        for version in range(2, 3000):
            found += [(one.number, id(one.written)) for one in worker._unreported_tries()]
            attempts.append(WrittenCheckpoint(version, f"/c/version-{version}"))
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            begun = [threads.submit(look) for _ in range(4)]
            seen = {pair for one in begun for pair in one.result()}
    finally:
        sys.setswitchinterval(interval)
    assert len({number for number, _ in seen}) == len(seen)
    assert len({written for _, written in seen}) == len(seen)


def test_heartbeats_say_how_much_of_its_device_a_worker_uses_and_its_log_which_it_is(
    master: ScriptedMaster, caplog: pytest.LogCaptureFixture
) -> None:
    worker, seconds = link(master), iter((0.0, 0.5, 1.5, 1.5))
    readings = iter((2 << 30, 3 << 30))
    meter = DeviceMeter("cuda:0 (H100)", lambda: Device("cuda:0", "H100", next(readings), 80 << 30), seconds.__next__)
    worker.start_heartbeat()
    assert not master.hears("Heartbeat")[0].HasField("device")  # there is no model yet
    with caplog.at_level(logging.INFO, "elasticdl.worker"):
        worker.carry_device(meter)
    assert "The model is on cuda:0 (H100)" in caplog.messages
    first = master.hears("Heartbeat", times=len(master.hears("Heartbeat")) + 2)[-1].device
    assert (first.name, first.kind, first.used_bytes, first.total_bytes) == ("cuda:0", "H100", 2 << 30, 80 << 30)
    meter.sample()  # half a second later: too early
    assert meter.last() == Device("cuda:0", "H100", 2 << 30, 80 << 30)
    meter.sample()
    assert meter.last() == Device("cuda:0", "H100", 3 << 30, 80 << 30)


def test_records_come_in_order_of_grant_and_stop_at_another_type(master: ScriptedMaster) -> None:
    begun: list[int] = []
    tasks = stream(link(master), begun)
    assert [(task.lease, task.records[0]) for task in tasks.records(pb.TRAINING)] == [(100, b"0"), (101, b"10")]
    assert begun == [100, 101]
    assert tasks.peek().id == 100  # type: ignore[union-attr]


def test_what_a_thrown_away_pipeline_had_drawn_is_drawn_again(master: ScriptedMaster) -> None:
    tasks = stream(link(master), [])
    thrown_away = tasks.records(pb.TRAINING)
    next(thrown_away), next(thrown_away)
    first = tasks.peek()
    assert first is not None
    tasks.close(first)
    assert [task.lease for task in tasks.records(pb.TRAINING)] == [101]


def test_shuffled_records_depend_on_the_name_of_the_task_alone(master: ScriptedMaster) -> None:
    one = next(stream(link(master), [], shuffle=True).records(pb.TRAINING))
    other_master = ScriptedMaster(lease(0))
    other = next(stream(link(other_master), [], shuffle=True).records(pb.TRAINING))
    other_master.stop()
    assert list(one.records) == list(other.records) != sorted(one.records)
    assert sorted(one.records) == [str(number).encode() for number in range(10)]


def test_a_lease_lost_before_its_first_minibatch_gets_no_records(master: ScriptedMaster) -> None:
    def begin(held: HeldLease) -> None:
        raise LeaseLost

    worker = link(master)
    tasks = TaskStream(worker, lambda task_type: Numbers(), begin, seed=5, shuffle=False, clock=ActivityClock())
    assert list(next(tasks.records(pb.TRAINING)).records) == []
    assert worker.leases.held() == []


def test_a_worker_speaks_as_often_as_the_master_says(master: ScriptedMaster) -> None:
    """The second minibatch comes with the third, after a pause that is longer than this test; the end comes at once."""
    master.report_seconds = 1e6
    worker = link(master)
    worker.start_heartbeat()
    master.hears("Heartbeat", times=5)
    reporter = Reporter(worker, log_loss_steps=1)
    for minibatch in range(3):
        reporter.committed(7, minibatch, 0.1)
        if not minibatch:
            master.hears("progress")
    reporter.finished(7, 3)
    master.hears("finished")
    assert [list(report.committed) for report in master.hears("progress")] == [[0], [1, 2]]
    master.report_seconds = 0.0  # the heartbeats continue for as long as this process: no more than they need
    master.hears("Heartbeat", times=len(master.hears("Heartbeat")) + 2)
    assert worker.heartbeat_s == HEARTBEAT_S


def test_all_that_comes_up_while_the_master_answers_goes_in_one_message(master: ScriptedMaster) -> None:
    may_answer = threading.Event()
    master.on_call = lambda method: may_answer.wait(60)
    reporter = Reporter(link(master), log_loss_steps=1)
    reporter.committed(7, 0, 0.1)
    assert master.is_called.wait(60)
    reporter.committed(7, 1, 0.2)
    reporter.finished(7, 2)
    reporter.committed(8, 0, 0.3)
    may_answer.set()
    reporter.drain(60)
    told = [(method, request.lease) for method, request in master.told]
    assert told == [("progress", 7), ("progress", 7), ("finished", 7), ("progress", 8)]
    assert [len(message.reports) for message in master.messages] == [1, 3]


def test_what_follows_a_refused_report_is_reported_after_it(master: ScriptedMaster) -> None:
    """The master does not take the end of a task whose minibatches it has refused: the worker looks at that first."""
    worker = link(master)
    worker.register()
    master.is_called.clear()
    refused, good = worker.leases.add(lease(0)), worker.leases.add(lease(1))
    may_answer = threading.Event()
    master.on_call = lambda method: may_answer.wait(60)
    reporter = Reporter(worker, log_loss_steps=1)
    reporter.committed(good.id, 0, 0.1)
    assert master.is_called.wait(60)
    reporter.committed(refused.id, 0, 0.1)
    reporter.committed(good.id, 1, 0.1)
    master.on_call = lambda method: setattr(master, "accepts", len(master.told) != 2)
    may_answer.set()
    reporter.drain(60)
    assert [request.lease for _, request in master.told[1:]] == [good.id, refused.id, good.id]
    assert [len(message.reports) for message in master.messages] == [1, 2, 1]
    assert (refused.revoked, good.revoked) == (True, False)


def test_a_heartbeat_that_is_due_before_the_next_report_goes_with_this_one(master: ScriptedMaster) -> None:
    master.heartbeat_seconds = master.report_seconds = 1e6
    worker = link(master)
    worker.start_heartbeat()
    master.hears("Heartbeat")
    wait_until(lambda: worker.heartbeat_s == 1e6, "the pace that the master wants", 60)
    progress = TaskProgress(worker.leases.add(lease(0)).id, [0])
    worker.report([progress])
    worker.heartbeat_s = 0.0
    worker.report([progress])
    worker.report([progress])
    assert worker.heartbeat_s == 1e6
    with_heartbeat = [message.HasField("heartbeat") for message in master.messages[1:]]
    assert with_heartbeat == [False, True, False]


@pytest.fixture
def waiting() -> Iterator[ScriptedMaster]:
    """A master that has two leases, and lets workers wait for others."""
    scripted = ScriptedMaster(lease(0), lease(1), ends=False)
    scripted.heartbeat_seconds = scripted.report_seconds = 1e6
    yield scripted
    scripted.stop()


def with_two_leases(master: ScriptedMaster) -> tuple[MasterLink, list[HeldLease]]:
    """A worker that holds them, and the master has no other one for now."""
    worker = link(master)
    held = [worker.request_lease(), worker.request_lease()]
    assert len(master.messages) == 1  # it holds nothing: a long poll; it holds a lease: a message
    return worker, [one for one in held if one is not None]


def test_the_report_of_a_tasks_end_brings_the_next_lease(waiting: ScriptedMaster) -> None:
    worker, held = with_two_leases(waiting)
    with ThreadPoolExecutor(1) as input_thread:
        for number in (2, 3):
            next_lease = input_thread.submit(worker.request_lease)
            if number == 2:
                waiting.hears("RequestLease", times=3)  # a message asks whether there are more
            wait_until(lambda: worker._wants_lease and worker._enough == 2, "a request that goes with messages", 60)
            waiting.leases.append(lease(number))
            worker.report([TaskProgress(held[number - 2].id, [], num_minibatches=0)])
            worker.leases.remove(held[number - 2].id)
            granted = next_lease.result(60)
            assert granted is not None
            held.append(granted)
    assert [one.id for one in held] == [100, 101, 102, 103]
    kinds = [(len(message.reports), message.HasField("lease_request")) for message in waiting.messages]
    assert kinds == [(0, True), (0, True), (1, True), (1, True)]


def test_a_task_whose_end_brings_no_lease_makes_the_worker_ask_and_one_without_tasks_waits_at_the_master(
    waiting: ScriptedMaster,
) -> None:
    worker, held = with_two_leases(waiting)
    with ThreadPoolExecutor(1) as input_thread:
        next_lease = input_thread.submit(worker.request_lease)
        waiting.hears("RequestLease", times=3)
        worker.leases.remove(held[0].id)  # of an evaluation, which is reported by a call
        waiting.hears("RequestLease", times=4)
        assert len(waiting.messages) == 3
        waiting.on_call = lambda method: waiting.leases.append(lease(2)) if len(waiting.told) == 5 else None
        worker.leases.revoke([held[1].id])
        granted = next_lease.result(60)
    assert granted is not None
    assert granted.id == 102
    assert len(waiting.messages) == 4  # the last one that asks; then it is a long poll
    assert not worker._wants_lease


def test_a_lease_that_comes_as_the_worker_wakes_is_the_last_that_it_asks_for(waiting: ScriptedMaster) -> None:
    worker, held = with_two_leases(waiting)
    wait_for_end = worker.leases.wait_for_end

    def wait(num_ended: int, has_come: Callable[[], bool], timeout_s: float) -> None:
        worker.leases.remove(held[0].id)
        wait_for_end(num_ended, has_come, timeout_s)
        ask_now = worker._ask_now

        def ask_later(goes_on: bool) -> None:
            waiting.leases.append(lease(2))
            worker.report([TaskProgress(held[1].id, [0])])
            ask_now(goes_on)

        worker._ask_now = ask_later  # type: ignore[method-assign]

    worker.leases.wait_for_end = wait  # type: ignore[method-assign]
    granted = worker.request_lease()
    assert granted is not None
    assert granted.id == 102
    waiting.leases.append(lease(3))
    worker.report([TaskProgress(held[1].id, [1])])
    assert not waiting.messages[-1].HasField("lease_request")
    assert [one.id for one in worker.leases.held()] == [101, 102]


def test_a_worker_that_holds_a_lease_hears_of_the_jobs_end_by_its_heartbeat(waiting: ScriptedMaster) -> None:
    worker, _ = with_two_leases(waiting)
    with ThreadPoolExecutor(1) as input_thread:
        next_lease = input_thread.submit(worker.request_lease)
        waiting.hears("RequestLease", times=3)
        waiting._ends = True
        worker.start_heartbeat()
        assert next_lease.result(60) is None


def test_a_worker_that_holds_a_lease_notes_that_its_master_has_gone(waiting: ScriptedMaster) -> None:
    worker, _ = with_two_leases(waiting)
    worker._master_timeout_s = 0.5
    worker.start_heartbeat()
    with ThreadPoolExecutor(1) as input_thread:
        next_lease = input_thread.submit(worker.request_lease)
        waiting.hears("RequestLease", times=3)
        waiting.stop()
        worker.heartbeat_s = HEARTBEAT_S
        worker._beat_at_once.set()
        with pytest.raises(JobError, match="has not answered"):
            next_lease.result(60)


def test_each_request_for_a_lease_says_what_the_worker_holds_and_whose_answer_it_waits_for(
    waiting: ScriptedMaster,
) -> None:
    worker, held = with_two_leases(waiting)
    is_waiting, may_answer = threading.Event(), threading.Event()

    def answer_late(method: str) -> None:
        if method == "RequestLease" and not is_waiting.is_set():
            is_waiting.set()
            assert may_answer.wait(60)

    waiting.on_call = answer_late
    progress = TaskProgress(held[1].id, [0])
    with ThreadPoolExecutor(1) as evaluating:
        asking = evaluating.submit(worker.lease_at_once, pb.EVALUATION)
        assert is_waiting.wait(60)
        worker._wants_lease = True
        worker.report([progress])
        may_answer.set()
        assert asking.result(60) is None
    worker.leases.remove(held[0].id)
    worker.report([progress])
    requests = sorted(waiting.hears("RequestLease"), key=lambda request: int(request.number))
    expected = [(1, 1, []), (2, 2, [100]), (3, 3, [100, 101]), (4, 3, [100, 101]), (5, 5, [101])]
    assert [(one.number, one.oldest, list(one.held)) for one in requests] == expected


def test_a_request_that_is_repeated_waits_for_no_answer_to_an_earlier_attempt(waiting: ScriptedMaster) -> None:
    worker, _ = with_two_leases(waiting)
    may_answer = threading.Event()
    waiting.on_call = lambda method: may_answer.wait(60)
    worker._wants_lease = True
    with pytest.raises(grpc.RpcError):
        worker._stream.exchange(lambda: worker._message((), 0.0), 0.3)
    may_answer.set()
    worker._stream.exchange(lambda: worker._message((), 0.0), 60)
    oldest = {one.number: one.oldest for one in waiting.hears("RequestLease")}
    assert oldest[4] == 4  # whether or not the third has reached the master


def test_a_worker_that_a_new_master_does_not_know_registers_when_it_asks(waiting: ScriptedMaster) -> None:
    worker, _ = with_two_leases(waiting)
    worker._on_answer(pb.MasterMessage())
    worker._register_if_unknown(pb.MasterMessage(lease=pb.LeaseReply(unknown="register first")))
    assert len(waiting.hears("RegisterWorker")[0].held) == 2


def test_a_refused_report_ends_the_lease(master: ScriptedMaster) -> None:
    worker = link(master)
    held = worker.leases.add(lease(0))
    master.accepts = False
    reporter = Reporter(worker, log_loss_steps=1)
    reporter.committed(held.id, 0, 0.1)
    reporter.drain()
    assert held.revoked


def test_a_report_that_comes_before_the_worker_to_the_masters_next_life_ends_no_lease(master: ScriptedMaster) -> None:
    """A master that was killed has forgotten what it granted in its last second, until the holder brings it."""
    worker = link(master)
    worker.register()
    held = worker.leases.add(lease(0))
    master.generation, master.accepts = 2, False
    master.on_call = lambda called: setattr(master, "accepts", master.accepts or called == "RegisterWorker")
    reporter = Reporter(worker, log_loss_steps=1)
    reporter.committed(held.id, 0, 0.1)
    reporter.drain()
    assert not held.revoked
    assert [called for called, _ in master.told[1:]] == ["progress", "RegisterWorker", "progress"]
    brought = master.hears("RegisterWorker", times=2)[1].held
    assert [(one.lease.id, list(one.committed)) for one in brought] == [(held.id, [0])]


def test_a_new_channel_is_not_held_back_by_one_to_a_server_that_had_the_same_port(master: ScriptedMaster) -> None:
    old = pb_grpc.MasterStub(connect(master.address, TOKEN))
    master.stop()
    with nobody_at(master.port), pytest.raises(grpc.RpcError):
        old.Heartbeat(pb.HeartbeatRequest(role=pb.WORKER), timeout=AWAY_S, wait_for_ready=True)
    successor = ScriptedMaster(port=master.port)
    new = pb_grpc.MasterStub(connect(successor.address, TOKEN))
    assert new.Heartbeat(pb.HeartbeatRequest(role=pb.WORKER), timeout=20).known
    successor.stop()


@pytest.mark.parametrize(
    ("method", "tell"),
    [
        ("ReportModel", lambda worker: worker.report_model(pb.ModelReport())),
        ("ReportSession", lambda worker: worker.report_session(pb.SAVED)),
        ("ReportMetrics", lambda worker: worker.report_metrics(1, {"accuracy": 0.5})),
    ],
)
def test_a_master_that_began_anew_hears_of_the_worker_and_then_what_it_has_to_say(
    master: ScriptedMaster, method: str, tell: Callable[[MasterLink], pb.Ack]
) -> None:
    master.accepts = False
    master.on_call = lambda called: setattr(master, "accepts", master.accepts or called == "RegisterWorker")
    assert tell(link(master)).accepted
    assert [called for called, _ in master.told] == [method, "RegisterWorker", method]


def test_the_last_words_of_a_worker_say_how_its_time_went(master: ScriptedMaster) -> None:
    worker = link(master)
    worker.register()
    worker.report_time()
    worker.say_farewell()
    done, leaving = (request for name, request in master.told if name == "Heartbeat")
    assert (done.leaving, leaving.leaving) == (False, True)
    assert 0.0 < done.seconds["start"] < leaving.seconds["start"]


def test_a_worker_that_is_done_does_not_wait_for_a_master_that_is_away() -> None:
    scripted = ScriptedMaster()
    worker = link(scripted)
    worker.register()
    scripted.stop()
    worker.report_time()  # gives up by itself
