"""A master on a real socket that gives scripted answers and keeps all calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from elasticdl.protocol import HEARTBEAT_S, REPORT_S
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.servers import serve

TOKEN = "a token of the tests"
Reply = TypeVar("Reply")


def before_the_deadline(context: grpc.ServicerContext) -> float:
    """Seconds for which a call may wait so that its answer is still heard."""
    left: float = context.time_remaining()
    return max(0.0, left - 0.5)


class ScriptedMaster(pb_grpc.MasterServicer):
    """Grants the given leases in order, then says that the job is over, or lets workers wait."""

    def __init__(self, *leases: pb.Lease, port: int = 0, ends: bool = True, token: str = TOKEN) -> None:
        self.leases = deque(leases)
        self.told: list[tuple[str, Any]] = []
        self.known = True
        self.generation = 1
        self.revoked: list[int] = []
        self.checkpoint_request = 0
        self.heartbeat_seconds = self.report_seconds = 0.0
        self.accepts = True
        self.num_streams = 0
        self.messages: list[pb.WorkerMessage] = []  # of all streams
        self.is_called = threading.Event()  # at the beginning of a call
        self.on_call: Callable[[str], object] = lambda method: None  # before the answer
        self.changed = threading.Condition()
        self._ends = ends
        self._stopped = threading.Event()
        self._server, self.port = serve(
            lambda server: pb_grpc.add_MasterServicer_to_server(self, server), "127.0.0.1", port, token, 16
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._stopped.set()
        self._server.stop(0).wait()

    def hears(self, method: str, times: int = 1, timeout_s: float = 60.0) -> list[Any]:
        """Waits for a number of calls of a method; their requests."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self._of(method)) >= times, timeout_s), self.told
            return self._of(method)

    def grants_all(self, timeout_s: float = 60.0) -> None:
        """Waits until all its leases are granted."""
        with self.changed:
            assert self.changed.wait_for(lambda: not self.leases, timeout_s), self.leases

    def _grant(self) -> pb.LeaseReply:
        """The next of its leases; the caller holds `changed`."""
        self.changed.notify_all()
        return pb.LeaseReply(lease=self.leases.popleft())

    def _of(self, method: str) -> list[Any]:
        return [request for name, request in self.told if name == method]

    def _note(self, method: str, request: Any) -> pb.Ack:
        return self._keep(method, request, self._ack)

    def _keep(self, method: str, request: Any, answer: Callable[[], Reply]) -> Reply:
        """Keeps a call and makes its answer in one go: a test that hears of a call changes the later answers alone."""
        self.is_called.set()
        self.on_call(method)
        with self.changed:
            self.told.append((method, request))
            self.changed.notify_all()
            return answer()

    def _ack(self) -> pb.Ack:
        reason = "" if self.accepts else "as the test wants"
        return pb.Ack(accepted=self.accepts, reason=reason, generation=self.generation, model_version=100)

    def RegisterWorker(self, request: Any, context: grpc.ServicerContext) -> pb.RegisterWorkerReply:  # noqa: N802
        return self._keep("RegisterWorker", request, self._registered)

    def _registered(self) -> pb.RegisterWorkerReply:
        self.known = True
        return pb.RegisterWorkerReply(accepted=True, generation=self.generation, job_spec="{}")

    def RequestLease(self, request: Any, context: grpc.ServicerContext) -> pb.LeaseReply:  # noqa: N802
        reply = self._keep("RequestLease", request, self._lease_now)
        if reply.wait and not request.at_once:
            self._stopped.wait(before_the_deadline(context))
        return reply

    def _lease_now(self) -> pb.LeaseReply:
        if self.leases:
            return self._grant()
        return pb.LeaseReply(end=True) if self._ends else pb.LeaseReply(wait=True)

    def Heartbeat(self, request: Any, context: grpc.ServicerContext) -> pb.HeartbeatReply:  # noqa: N802
        return self._keep("Heartbeat", request, self._beaten)

    def _beaten(self) -> pb.HeartbeatReply:
        return pb.HeartbeatReply(
            known=self.known,
            generation=self.generation,
            revoked=self.revoked,
            checkpoint_request=self.checkpoint_request,
            heartbeat_seconds=self.heartbeat_seconds or (0.01 if self.report_seconds else HEARTBEAT_S),
            report_seconds=self.report_seconds or REPORT_S,
        )

    def FailTask(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("FailTask", request)

    def Exchange(self, messages: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        with self.changed:
            self.num_streams += 1
        for message in map(self._noted, messages):
            reply = pb.MasterMessage()
            if message.HasField("heartbeat"):
                reply.heartbeat.CopyFrom(self.Heartbeat(message.heartbeat, context))
            for report in message.reports:
                kind = report.WhichOneof("report")
                reply.acks.append(self._note(kind, getattr(report, kind)))
                if not reply.acks[-1].accepted:
                    break
            if message.HasField("lease_request"):
                reply.lease.CopyFrom(self._keep("RequestLease", message.lease_request, self._lease_now))
            yield reply

    def _noted(self, message: pb.WorkerMessage) -> pb.WorkerMessage:
        with self.changed:
            self.messages.append(message)
        return message

    def ReportModel(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("ReportModel", request)

    def ReportEvaluation(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("ReportEvaluation", request)

    def ReportSession(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("ReportSession", request)

    def ReportMetrics(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("ReportMetrics", request)

    def ConfirmLease(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("ConfirmLease", request)
