# ruff: noqa: N802  the methods are named by the service
"""The service `Master`: every call becomes an event, and waits for the core's answer.

It runs in the threads of the gRPC server and knows nothing of the job but its generation and specification.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from elasticdl.master import messages
from elasticdl.master.core.commands import Answer, LeaseGranted, NoLeaseNow
from elasticdl.master.core.events import CallAbandoned, Event, GroupWatched, LeaseQuestioned
from elasticdl.master.inbox import Inbox, InboxClosed
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.validation import InvalidMessage

_MAX_WAIT_S = 60.0
_ASK_S = 10.0  # seconds that the caller waits for the answer to anything but a long poll
_POLL_MARGIN_S = 0.5  # a long poll is answered this long before the caller's deadline


class MasterServicer(pb_grpc.MasterServicer):  # type: ignore[misc]
    """See proto/elasticdl.proto for what each call means."""

    def __init__(
        self, inbox: Inbox, generation: int, job_spec: str, on_model_report: Callable[[pb.ModelReport], None]
    ) -> None:
        """Make the servicer.

        Args:
            inbox: Takes the events.
            generation: Number of this generation of the master.
            job_spec: JSON, passed to workers and PS.
            on_model_report: Called with every report without an error, before its event is posted.
        """
        self._inbox = inbox
        self._generation = generation
        self._job_spec = job_spec
        self._on_model_report = on_model_report
        self._streams: set[grpc.ServicerContext] = set()  # of workers; each change is a single atomic operation

    def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: grpc.ServicerContext
    ) -> pb.RegisterWorkerReply:
        _, answer = self._ask(lambda call: messages.worker_joined(call, request), context)
        return messages.registration_reply(answer, self._generation, self._job_spec)

    def ReportModel(self, request: pb.ModelReport, context: grpc.ServicerContext) -> pb.Ack:
        try:
            messages.check_callbacks(request)
        except InvalidMessage as error:
            _refuse_invalid(error, context)
        if not request.error:
            self._on_model_report(request)
        return self._ack(lambda call: messages.model_reported(call, request), context)

    def RequestLease(self, request: pb.LeaseRequest, context: grpc.ServicerContext) -> pb.LeaseReply:
        call, answer = self._poll(lambda n: messages.lease_requested(n, request), context)
        if isinstance(answer, LeaseGranted) and not context.is_active():
            self._inbox.post(CallAbandoned(call))  # no worker will receive this lease
        return messages.lease_reply(answer, self._generation)

    def Sample(self, request: pb.SampleRequest, context: grpc.ServicerContext) -> pb.SampleReply:
        _, answer = self._poll(lambda n: messages.sample_requested(n, request), context)
        return messages.sample_reply(answer)

    def ReadyForGroup(self, request: pb.ReadyForGroupRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.ready_for_group(call, request), context)

    def WatchGroup(self, request: pb.WatchGroupRequest, context: grpc.ServicerContext) -> pb.WatchGroupReply:
        _, answer = self._poll(
            lambda n: GroupWatched(n, request.worker_id, request.incarnation, request.known_version), context
        )
        return messages.watch_reply(answer, self._generation)

    def GroupFormed(self, request: pb.GroupFormedRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.group_formed(call, request), context)

    def _poll(self, make_event: Callable[[int], Event], context: grpc.ServicerContext) -> tuple[int, Answer]:
        """Make a long poll; return its number and answer, `NoLeaseNow` shortly before the caller's deadline."""
        call, future = self._post(make_event, context)
        answer: Answer
        try:
            if not future.done():
                context.add_callback(lambda: self._abandon(call))
                concurrent.futures.wait([future], _wait_s(context) - _POLL_MARGIN_S)
                self._abandon(call)  # without effect if it is answered, or is being answered at this moment
            answer = future.result()
        except concurrent.futures.CancelledError:
            answer = NoLeaseNow()  # its time is over, or the caller has gone
        except InboxClosed:
            _refuse_closed(context)
        return call, answer

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        _, answer = self._ask(lambda call: messages.heartbeat_received(call, request), context)
        return messages.heartbeat_reply(answer, self._generation)

    def FailTask(self, request: pb.FailedTask, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.task_failed(call, request), context)

    def ReportEvaluation(self, request: pb.EvaluationReport, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.evaluation_reported(call, request), context)

    def ReportMetrics(self, request: pb.MetricsReport, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.metrics_reported(call, request), context)

    def StopTraining(self, request: pb.StopTrainingRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.training_stop_requested(call, request), context)

    def ConfirmLease(self, request: pb.LeaseQuestion, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(
            lambda call: LeaseQuestioned(call, request.worker_id, request.incarnation, request.lease), context
        )

    def ReportSession(self, request: pb.SessionReport, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.session_reported(call, request), context)

    def RegisterPs(self, request: pb.RegisterPsRequest, context: grpc.ServicerContext) -> pb.RegisterPsReply:
        _, answer = self._ask(lambda call: messages.ps_joined(call, request), context)
        return messages.ps_registration_reply(answer, self._generation, self._job_spec)

    def PsReady(self, request: pb.PsReadyRequest, context: grpc.ServicerContext) -> pb.Ack:
        return self._ack(lambda call: messages.ps_ready(call, request), context)

    def Exchange(self, stream: Iterator[pb.WorkerMessage], context: grpc.ServicerContext) -> Iterator[pb.MasterMessage]:
        self._streams.add(context)
        try:
            for message in stream:
                yield self._answer(message, context)
        finally:
            self._streams.discard(context)

    def _answer(self, message: pb.WorkerMessage, context: grpc.ServicerContext) -> pb.MasterMessage:
        call, answer = self._ask(lambda n: messages.message_received(n, message), context)
        reply = messages.message_reply(answer, self._generation)
        if reply.lease.HasField("lease") and not context.is_active():
            self._inbox.post(CallAbandoned(call))  # no worker will receive this lease
        return reply

    def close_streams(self) -> None:
        """End the streams of all workers, which do not end by themselves."""
        for context in list(self._streams):
            context.cancel()

    def _ack(self, make_event: Callable[[int], Event], context: grpc.ServicerContext) -> pb.Ack:
        return messages.ack(self._ask(make_event, context)[1], self._generation)

    def _ask(self, make_event: Callable[[int], Event], context: grpc.ServicerContext) -> tuple[int, Answer]:
        """Make a call; return its number and its answer."""
        call, future = self._post(make_event, context)
        try:
            return call, future.result(min(_ASK_S, _wait_s(context)))
        except TimeoutError:
            self._inbox.abandon(call)
            self._inbox.post(CallAbandoned(call))  # gives back a lease that it is granted, maybe at this moment
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the master is busy or cannot write its journal")
        except InboxClosed:
            _refuse_closed(context)
        raise AssertionError("abort returns")

    def _post(
        self, make_event: Callable[[int], Event], context: grpc.ServicerContext
    ) -> tuple[int, concurrent.futures.Future[Answer]]:
        try:
            return self._inbox.ask(make_event)
        except InvalidMessage as error:
            _refuse_invalid(error, context)
        except InboxClosed:
            _refuse_closed(context)

    def _abandon(self, call: int) -> bool:
        """Take a long poll back; return False if it is answered."""
        if not self._inbox.abandon(call):
            return False
        self._inbox.post(CallAbandoned(call))
        return True


def _wait_s(context: grpc.ServicerContext) -> float:
    remaining: float | None = context.time_remaining()
    return _MAX_WAIT_S if remaining is None else min(_MAX_WAIT_S, remaining)


def _refuse_invalid(error: InvalidMessage, context: Any) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort returns")


def _refuse_closed(context: Any) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the master ends")
    raise AssertionError("abort returns")
