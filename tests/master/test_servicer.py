"""The servicer's long polls: leases granted in their last moment are delivered."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from elasticdl.master.core.commands import Answer, LeaseGranted, MessageAnswer
from elasticdl.master.core.events import CallAbandoned, MessageReceived
from elasticdl.master.core.values import Lease, TaskType
from elasticdl.master.inbox import Inbox
from elasticdl.master.servicer import MasterServicer
from elasticdl.protocol import Shard
from elasticdl.rpc import elasticdl_pb2 as pb


class SlowInbox(Inbox):
    """Answers in two steps: between them a call is neither waiting nor answered, until it is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_half_answered = threading.Event()
        self._is_given_up = threading.Event()

    def _forget(self, call: int) -> Future[Answer] | None:
        future = super()._forget(call)
        if future is None:
            self._is_given_up.set()
        else:
            self.is_half_answered.set()
            assert self._is_given_up.wait(60)
        return future


class Context:
    """Of a call whose time is over when its answer is on its way."""

    def __init__(self, inbox: SlowInbox) -> None:
        self._inbox = inbox

    def add_callback(self, callback: object) -> bool:
        return True

    def is_active(self) -> bool:
        return True

    def time_remaining(self) -> float:
        assert self._inbox.is_half_answered.wait(60)
        return 0.0


class BrokenStream:
    """The context of a stream whose worker has gone while its message was answered."""

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 60.0


def test_a_lease_whose_stream_has_broken_is_reported() -> None:
    inbox = Inbox()
    servicer = MasterServicer(inbox, 1, "{}", lambda report: None)
    message = pb.WorkerMessage(lease_request=pb.LeaseRequest(worker_id=0, incarnation=1))
    with ThreadPoolExecutor(1) as caller:
        reply = caller.submit(next, servicer.Exchange(iter((message,)), BrokenStream()))
        request = inbox.next(10)
        assert isinstance(request, MessageReceived)
        granted = LeaseGranted(Lease(5, TaskType.TRAINING, 0, 0, Shard("a", 0, 10)))
        inbox.answer(request.call, MessageAnswer((), granted))
        assert reply.result(60).lease.lease.id == 5
    assert inbox.next(10) == CallAbandoned(request.call)


def test_a_lease_that_is_granted_while_its_request_times_out_is_reported() -> None:
    inbox = SlowInbox()
    servicer = MasterServicer(inbox, 1, "{}", lambda report: None)
    with ThreadPoolExecutor(1) as caller:
        reply = caller.submit(servicer.RequestLease, pb.LeaseRequest(worker_id=0, incarnation=1), Context(inbox))
        request = inbox.next(10)
        assert request is not None
        inbox.answer(request.call, LeaseGranted(Lease(5, TaskType.TRAINING, 0, 0, Shard("a", 0, 10))))
        assert reply.result(60).lease.id == 5
