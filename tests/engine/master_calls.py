"""The network between simulated workers and the core: late, lost and cut off calls, and answers that are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from elasticdl.master import messages
from elasticdl.master.core import events as e
from elasticdl.master.core.commands import JobOver, LeaseGranted, MessageAnswer, NoLeaseNow
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.master_stream import StreamFailed
from tests.engine.scheduler import Lock, Process, Scheduler, SimulatedThread

_MARGIN_S = 0.5  # before the deadline of a long poll the master answers it
_ASK_S = 10.0

Make = Callable[[int, Any], e.Event]
EVENTS: dict[str, Make] = {
    "RegisterWorker": messages.worker_joined,
    "ReportModel": messages.model_reported,
    "RequestLease": messages.lease_requested,
    "Sample": messages.sample_requested,
    "ReadyForGroup": messages.ready_for_group,
    "WatchGroup": lambda call, m: e.GroupWatched(call, m.worker_id, m.incarnation, m.known_version),
    "GroupFormed": messages.group_formed,
    "Heartbeat": messages.heartbeat_received,
    "Exchange": messages.message_received,
    "FailTask": messages.task_failed,
    "ReportEvaluation": messages.evaluation_reported,
    "ConfirmLease": lambda call, m: e.LeaseQuestioned(call, m.worker_id, m.incarnation, m.lease),
}
LONG_POLLS = ("RequestLease", "Sample", "WatchGroup")


class Core(Protocol):
    """The simulated master."""

    generation: int
    job_spec: str

    def ask(self, make: Callable[[int], e.Event], handler: Callable[[Any], None]) -> int:
        """Tell the core of a call; its number."""
        ...

    def give_up(self, call: int) -> bool:
        """Forget a call; False: it is answered."""
        ...

    def tell(self, event: e.Event) -> None: ...


@dataclass(eq=False)
class Call:
    """A call of a worker.

    Attributes:
        number: at the core; 0: it has not arrived.
        result: a message, or the error.
    """

    process: Process
    method: str
    generation: int
    number: int = 0
    result: Any = None
    caller: SimulatedThread | None = None


@dataclass(eq=False)
class MasterCalls:
    """All calls under way.

    Attributes:
        is_down: there is no master now.
        cut: processes that cannot reach it.
        share_lost: of the answers.
        late_s: how late the late ones are, at most.
    """

    scheduler: Scheduler
    core: Core
    is_down: bool = False
    cut: set[Process] = field(default_factory=set)
    share_lost: float = 0.0
    share_late: float = 0.3
    late_s: float = 0.01
    _under_way: list[Call] = field(default_factory=list)

    def call(self, process: Process, method: str, request: Any, timeout_s: float) -> Any:
        """As a method of a stub.

        Raises:
            RpcError: there is no answer.
        """
        scheduler = self.scheduler
        call = Call(process, method, self.core.generation, caller=scheduler.running)
        self._under_way.append(call)
        if self.is_down:
            self._later(lambda: self._fail(call))
        elif process not in self.cut:
            self._later(lambda: self._arrive(call, request, timeout_s))
        end = scheduler.now + timeout_s
        try:
            while call.result is None and scheduler.now < end:
                scheduler.wait(end - scheduler.now)
        finally:
            self._under_way.remove(call)
            if call.result is None:
                self._forget(call)
        if call.result is None:
            raise StreamFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def die(self, process: Process) -> None:
        """A process has ended: the master sees its connections close."""
        self.cut.discard(process)

    def go_down(self) -> None:
        """The master is killed: its calls fail."""
        self.is_down = True
        for call in self._under_way:
            self._fail(call)

    def _later(self, do: Callable[[], None]) -> None:
        seed = self.scheduler.random
        delay_s = seed.random() * self.late_s if seed.random() < self.share_late else 0.0
        self.scheduler.at(delay_s, do)

    def _arrive(self, call: Call, request: Any, timeout_s: float) -> None:
        if call not in self._under_way or call.result is not None:
            return
        if self.is_down or call.process in self.cut:
            self._fail(call)
            return
        if call.method in LONG_POLLS:
            self.scheduler.at(max(0.05, timeout_s - _MARGIN_S), lambda: self._end_poll(call))
        call.generation = self.core.generation
        make = EVENTS[call.method]
        handler = lambda answer: self._answered(call, answer)  # noqa: E731
        self.core.ask(lambda number: make(self._numbered(call, number), request), handler)

    @staticmethod
    def _numbered(call: Call, number: int) -> int:
        call.number = number
        return number

    def _answered(self, call: Call, answer: Any) -> None:
        reply = self._reply(call.method, answer)
        if call not in self._under_way:
            if isinstance(answer.lease if isinstance(answer, MessageAnswer) else answer, LeaseGranted):
                self.core.tell(e.CallAbandoned(call.number))
            return
        if self.scheduler.random.random() < self.share_lost or call.process in self.cut:
            self._later(lambda: self._fail(call))
        else:
            self._later(lambda: self._resolve(call, reply))

    def _end_poll(self, call: Call) -> None:
        waits = call in self._under_way and call.result is None and call.generation == self.core.generation
        if waits and not self.is_down and self.core.give_up(call.number):
            self.core.tell(e.CallAbandoned(call.number))
            self._answered(call, NoLeaseNow())

    def _forget(self, call: Call) -> None:
        """Its caller waits no longer."""
        if call.number and call.generation == self.core.generation and not self.is_down:
            number = call.number
            if self.core.give_up(number):
                self.scheduler.at(0.0, lambda: self.core.tell(e.CallAbandoned(number)))

    def _resolve(self, call: Call, result: Any) -> None:
        if call.result is None and call.caller is not None:
            call.result = result
            self.scheduler.wake(call.caller)

    def _fail(self, call: Call) -> None:
        self._resolve(call, StreamFailed(grpc.StatusCode.UNAVAILABLE, "the connection was closed"))

    def _reply(self, method: str, answer: Any) -> Any:
        generation = self.core.generation
        match method:
            case "RegisterWorker":
                return messages.registration_reply(answer, generation, self.core.job_spec)
            case "RequestLease":
                return messages.lease_reply(answer, generation)
            case "Sample":
                return messages.sample_reply(answer)
            case "WatchGroup":
                return messages.watch_reply(answer, generation)
            case "Heartbeat":
                return messages.heartbeat_reply(answer, generation)
            case "Exchange":
                return messages.message_reply(answer, generation)
        assert not isinstance(answer, JobOver)
        return messages.ack(answer, generation)


class Channel:
    """The parts of a simulated worker's stub."""

    def __init__(self, calls: MasterCalls, process: Process) -> None:
        self._calls = calls
        self._process = process

    def unary_unary(self, path: str, **serializers: Any) -> Callable[..., Any]:
        method = path.rsplit("/", 1)[1]

        def call(request: Any, timeout: float, wait_for_ready: bool = False) -> Any:
            return self._calls.call(self._process, method, request, timeout)

        return call

    def stream_stream(self, path: str, **serializers: Any) -> Channel:
        return self


class Stream:
    """Stands for `MasterStream`: one message at a time is under way."""

    def __init__(self, channel: Channel, on_answer: Callable[[pb.MasterMessage], None]) -> None:
        self._lock = Lock(channel._calls.scheduler)
        self._on_answer = on_answer
        self._call = lambda method, request, timeout: channel._calls.call(channel._process, method, request, timeout)

    def exchange(
        self, message: Callable[[], pb.WorkerMessage], timeout: float, wait_for_ready: bool = False
    ) -> pb.MasterMessage:
        with self._lock:
            reply: pb.MasterMessage = self._call("Exchange", message(), timeout)
            self._on_answer(reply)
        return reply
