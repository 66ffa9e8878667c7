"""The worker's side of all communication with the master.

It registers (again with every new generation of the master), keeps leases alive by heartbeats, and repeats calls until
the master answers or has been away for too long.  It decides nothing about the work itself.

Heartbeats, progress, ends of tasks and requests for the next task go over a `MasterStream`; all that are pending at a
moment go in one message.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import grpc

from elasticdl.activities import ActivityClock
from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.frameworks.framework import NO_SURPLUS, Surplus
from elasticdl.protocol import HEARTBEAT_S, REPORT_S, Device, WrittenCheckpoint
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import MasterGone, connect, is_transient
from elasticdl.rpc.master_stream import MasterStream
from elasticdl.rpc.resource_use import cpu_use, used_share
from elasticdl.worker import stacks
from elasticdl.worker.tasks import HeldLease, LeaseBook, TaskProgress
from elasticdl.worker.termination import FAREWELL_S
from elasticdl_client.errors import JobError
from elasticdl_client.secret_values import hide_in_ends

_CALL_TIMEOUT_S = 10.0
_LONG_POLL_S = 20.0
_RETRY_S = 0.3
_END_S = 30.0  # the master may be restarting
_MOST_OF_ERROR = 100_000  # characters
_KEPT_TRIES = 8  # attempts to write checkpoints, to be reported to a new generation of the master
_RATE_S = 0.5  # between two reads of the learning rate


class _Signed(Protocol):
    """A message that identifies its sender."""

    worker_id: int
    incarnation: int


Answer = TypeVar("Answer")
Message = TypeVar("Message", bound=_Signed)
_log = logging.getLogger("elasticdl.worker")


@dataclass(slots=True)
class _CheckpointTry:
    """An attempt to write a checkpoint.

    Attributes:
        number: Number of the attempt in this process, from 1.
        written: Its outcome.
        known_generation: Newest generation of the master that has answered a heartbeat with this attempt; 0: none.
    """

    number: int
    written: WrittenCheckpoint
    known_generation: int = 0

    def message(self) -> pb.WrittenCheckpoint:
        directory, error = _sendable(self.written.directory), _sendable(self.written.error)
        version = self.written.version
        return pb.WrittenCheckpoint(version=version, directory=directory, error=error, attempt=self.number)


class _LeaseRequests:
    """Numbers the requests for leases, and tracks which are in flight.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_begun = 0
        self._under_way: dict[object, int] = {}

    def begin(self, request: object) -> tuple[int, int]:
        """Number a request, or a new attempt at it; return this number and the oldest one in flight."""
        with self._lock:
            self._num_begun += 1
            self._under_way[request] = self._num_begun
            return self._num_begun, min(self._under_way.values())

    def end(self, request: object) -> None:
        """Note that a request was answered; the lease in the answer, if any, must be held by now."""
        with self._lock:
            self._under_way.pop(request, None)


class MasterLink:
    """One worker's connection to the master of its job."""

    def __init__(
        self, address: str, token: str, worker_id: int, pod_name: str, clock: ActivityClock, master_timeout_s: float
    ) -> None:
        self.worker_id = worker_id
        self.leases = LeaseBook()
        self.clock = clock
        self._pod_name = pod_name
        self._incarnation = secrets.randbits(62)
        self._generation = 0  # generation of the master that this worker has registered with
        self._stub: Any = pb_grpc.MasterStub(connect(address, token))
        self._stream = MasterStream(self._stub.Exchange, self._on_answer)
        self._wants_lease = False  # each message requests one
        self._enough = 0  # number of held leases at which the master granted no more
        self._requests = _LeaseRequests()
        self._is_cut_off = False  # a heartbeat was not answered
        self._drawn: deque[HeldLease | None] = deque()  # leases in answers; None: the job is over
        self._address = address
        self._master_timeout_s = master_timeout_s
        self._registration = threading.Lock()
        self._partition = pb.Partition()
        self._partition_changed = threading.Condition()
        self._applied: Callable[[], pb.AppliedSet | None] = lambda: None
        self._restored = ("", 0)
        self._granted = (0, 0)
        self._standing: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._optimizer_share: Callable[[], float] = lambda: 0.0
        self._rate: Callable[[], float | None] = lambda: None
        self._last_rate = (-_RATE_S, 0.0)  # time, value
        self._device: Callable[[], Device | None] = lambda: None
        self._stacks: pb.Stacks | None = None  # for the next heartbeat
        self._is_taking_stacks = False
        self._checkpoint_request = 0  # the master's newest request known here
        self._save: Callable[[], None] = lambda: None
        self._newest_try: Callable[[], WrittenCheckpoint | None] = lambda: None
        self._sent_try: _CheckpointTry | None = None  # sent with the newest heartbeat
        self._tries: deque[_CheckpointTry] = deque(maxlen=_KEPT_TRIES)
        self._num_tries = 0
        self._tries_lock = threading.Lock()  # the farewell is sent by the termination thread
        self._beat_at_once = threading.Event()
        self._beaten_at = float("inf")  # time of the newest heartbeat; inf: not started
        self._is_ending = False
        self.num_registrations = 0
        self.heartbeat_s, self.report_s = HEARTBEAT_S, REPORT_S  # until the master sends others
        self.tasks_ahead = 0  # tasks that this worker's input processes prepare ahead

    def carry_ledger(
        self, applied: Callable[[], pb.AppliedSet | None], restored_from: str = "", restored_records: int = 0
    ) -> None:
        """Set the contents of registrations that concern a model with its own ledger.

        Args:
            applied: Returns the minibatches in the model; None: there is no ledger yet.
            restored_from: Directory of the checkpoint that the model began with; empty: initial values.
            restored_records: Records of an epoch of that checkpoint's data; 0 if not known.
        """
        self._applied = applied
        self._restored = (restored_from, restored_records)

    def carry_standing(self, standing: Callable[[], tuple[int, float]]) -> None:
        """AllReduce: set the provider of (version of the current group, seconds inside the collective)."""
        self._standing = standing

    def carry_optimizer_share(self, share: Callable[[], float]) -> None:
        """AllReduce with shards: set the provider of the fraction of the optimizer's state held here."""
        self._optimizer_share = share

    def carry_checkpoints(self, newest_try: Callable[[], WrittenCheckpoint | None]) -> None:
        """Set the provider of the newest attempt to write a checkpoint; it returns a new object for each attempt."""
        self._newest_try = newest_try

    def _unreported_tries(self) -> list[_CheckpointTry]:
        """Return the attempts not yet reported to this generation of the master, oldest first.

        An answered heartbeat counts for its generation only: a master killed right after may not have stored them.
        """
        with self._tries_lock:
            newest = self._newest_try()
            if newest is not None and (not self._tries or newest is not self._tries[-1].written):
                self._num_tries += 1
                self._tries.append(_CheckpointTry(self._num_tries, newest))
            return [one for one in self._tries if one.known_generation < max(self._generation, 1)]

    def announce_end(self) -> None:
        """AllReduce: report to the master at once that SIGTERM has come.  Thread-safe."""
        self._is_ending = True
        self._beat_at_once.set()

    def carry_rate(self, rate: Callable[[], float | None]) -> None:
        """Set the provider of the learning rate in reports of progress."""
        self._rate = rate

    def carry_device(self, meter: DeviceMeter) -> None:
        """Log the device that the model is on, and report its measurements in heartbeats."""
        _log.info("The model is on %s", meter.text)
        self._device = meter.last

    def register(self) -> pb.RegisterWorkerReply:
        """Register this worker and its held leases with the master.

        Raises:
            JobError: the master has replaced this worker, or cannot be reached.
        """
        with self._registration:
            reply: pb.RegisterWorkerReply = self.call(
                self._stub.RegisterWorker,
                lambda: self._signed(
                    pb.RegisterWorkerRequest(
                        pod_name=self._pod_name,
                        held=self.leases.messages(),
                        applied=self._applied(),
                        restored_from=self._restored[0],
                        restored_records=self._restored[1],
                    )
                ),
            )
        if not reply.accepted:
            raise JobError(f"the master does not accept worker {self.worker_id}: {reply.reason}")
        self.num_registrations += 1
        self._generation = reply.generation
        self.learn_partition(reply.partition)
        return reply

    def start_heartbeat(self) -> None:
        """Start the thread that sends heartbeats."""
        stacks.watch()
        self._beaten_at = float("-inf")
        threading.Thread(target=self._beat_until_end, name="heartbeat", daemon=True).start()

    def _signed(self, message: Message) -> Message:
        message.worker_id, message.incarnation = self.worker_id, self._incarnation
        return message

    def _send(self, method: Callable[..., Any], message: _Signed) -> pb.Ack:
        """Sign and send a message; register again and repeat it if the master has a new generation."""
        self._signed(message)
        known = self._generation
        ack: pb.Ack = self.call(method, lambda: message)
        if not ack.accepted and ack.generation > known:  # a new generation of the master does not know this worker
            self.register()
            ack = self.call(method, lambda: message)
        return ack

    def call(
        self,
        method: Callable[..., Answer],
        request: Callable[[], Any],
        timeout_s: float = _CALL_TIMEOUT_S,
        patience_s: float | None = None,
    ) -> Answer:
        """Make a call, and repeat it until it is answered.

        Args:
            method: The method of the stub.
            request: Makes the request; called for every attempt.
            timeout_s: Limit of one attempt.
            patience_s: How long the master may be away; None: `--master_timeout`.

        Raises:
            MasterGone: it has been away for longer.
        """
        patience_s = self._master_timeout_s if patience_s is None else patience_s
        gone_since: float | None = None
        limit_s = timeout_s
        while True:
            try:
                # A call that waits for the connection makes gRPC reconnect at once.
                return method(request(), timeout=limit_s, wait_for_ready=gone_since is not None)
            except grpc.RpcError as error:
                if not is_transient(error):
                    raise
                gone_since = gone_since or time.monotonic()
                limit_s = min(timeout_s, max(_RETRY_S, gone_since + patience_s - time.monotonic()))
                if time.monotonic() - gone_since > patience_s:
                    raise MasterGone(self._address, patience_s) from error
                threading.Event().wait(_RETRY_S)

    def request_lease(self) -> HeldLease | None:
        """See `LeaseSource`; one request at a time.

        A worker mostly gets its next lease when one of its leases ends.  So requests go along with messages that are
        sent anyway, and the report of the end returns the next lease.  A worker without leases waits at the master.
        """
        asks_now = False
        while not self._drawn:
            num_ended, num_held = self.leases.num_ended, len(self.leases.held())
            if num_held == 0 and not self._wants_lease:
                is_answered, held = self.poll_lease(_LONG_POLL_S)
                if is_answered:
                    return held
                continue
            if asks_now or num_held == 1 or num_held != self._enough:
                self._ask_now(goes_on=num_held > 0)
            else:
                self._wants_lease = True
            if num_held and not self._drawn:
                self._enough = num_held
                self.leases.wait_for_end(num_ended, lambda: bool(self._drawn) or self._is_cut_off, _LONG_POLL_S)
                asks_now = True
        self._wants_lease = False
        return self._drawn.popleft()

    def _ask_now(self, goes_on: bool) -> None:
        """Send a message that requests a lease; if `goes_on`, all later messages request one, too."""

        def message() -> pb.WorkerMessage:
            self._wants_lease = True
            asking = self._message((), self.heartbeat_s / 2)
            self._wants_lease = goes_on
            return asking

        self._is_cut_off = False
        answer: pb.MasterMessage = self.call(self._stream.exchange, lambda: message)
        self._register_if_unknown(answer)

    def poll_lease(self, timeout_s: float) -> tuple[bool, HeldLease | None]:
        """Request a lease for at most `timeout_s`.

        Returns:
            Whether there is an answer; and the lease, None if the job is over.
        """
        answer, held = self._request_by_call(timeout_s, ahead=self.tasks_ahead)
        if answer == "unknown":
            self.register()
        return answer in ("lease", "end"), held

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        """See `LeaseSource`."""
        return self._request_by_call(_CALL_TIMEOUT_S, at_once=True, only=only)[1]

    def _request_by_call(self, timeout_s: float, **fields: Any) -> tuple[str | None, HeldLease | None]:
        """Return the kind of the answer, and its lease, which is held from now on."""
        request = object()
        try:
            reply: pb.LeaseReply = self.call(
                self._stub.RequestLease, lambda: self._lease_request(request, **fields), timeout_s
            )
            answer = reply.WhichOneof("answer")
            return answer, self.leases.add(reply.lease) if answer == "lease" else None
        finally:
            self._requests.end(request)

    def _lease_request(self, request: object, **fields: Any) -> pb.LeaseRequest:
        number, oldest = self._requests.begin(request)
        held = [one.id for one in self.leases.held()]  # read after `begin`: requests before `oldest` add no more leases
        return self._signed(pb.LeaseRequest(number=number, oldest=oldest, held=held, **fields))

    def is_over(self) -> bool:
        """Return whether the job has no more work for this worker, without requesting any."""
        request = self._signed(pb.LeaseRequest(at_once=True, only=pb.EVALUATION))
        reply: pb.LeaseReply = self.call(self._stub.RequestLease, lambda: request)
        return bool(reply.WhichOneof("answer") == "end")

    def sample(self, of_validation: bool = False) -> pb.SampleReply:
        """Return records to compile a step on (AllReduce), or to try metrics on; wait until the master knows the data.

        Args:
            of_validation: Return records to try metrics on; an empty shard if another worker does that.
        """
        request = self._signed(pb.SampleRequest(of_validation=of_validation))
        pause = threading.Event()
        while True:
            reply: pb.SampleReply = self.call(self._stub.Sample, lambda: request)
            if not reply.wait:
                return reply
            pause.wait(_RETRY_S)

    def ready_for_group(self, address: str, left: int, reason: str) -> pb.Ack:
        """AllReduce: report that this worker is outside of every group; see the message."""
        message = pb.ReadyForGroupRequest(address=address, left=left, reason=reason)
        return self._send(self._stub.ReadyForGroup, message)

    def watch_group(self, known_version: int) -> pb.WatchGroupReply:
        """AllReduce: wait (long poll) for a group newer than the known one."""
        request = self._signed(pb.WatchGroupRequest(known_version=known_version))
        reply: pb.WatchGroupReply = self.call(self._stub.WatchGroup, lambda: request, _LONG_POLL_S)
        return reply

    def group_formed(self, version: int, applied: pb.AppliedSet, steps: int, restored_from: str, engine: str) -> pb.Ack:
        """AllReduce, rank 0: report that a group has formed, and what its model holds."""
        message = pb.GroupFormedRequest(
            version=version, applied=applied, steps=steps, restored_from=restored_from, engine=engine
        )
        return self._send(self._stub.GroupFormed, message)

    def is_me(self, member: pb.GroupMember) -> bool:
        """Return whether a member of a group is this process."""
        return member.worker_id == self.worker_id and member.incarnation == self._incarnation

    def report_model(self, report: pb.ModelReport) -> pb.Ack:
        report.error, report.error_details = _sendable(report.error), _sendable(report.error_details)
        return self._send(self._stub.ReportModel, report)

    def report_session(self, event: pb.SessionEvent) -> pb.Ack:
        """Report an event of the model, as TensorFlow's chief."""
        return self._send(self._stub.ReportSession, pb.SessionReport(event=event))

    def report_not_finite(self, lease: int, what: str, skipped: Sequence[int] = ()) -> pb.Ack:
        """Report a loss or gradient that is not finite, and the minibatches that are skipped for it."""
        report = pb.ProgressReport(lease=lease, skipped=skipped, not_finite=what, learning_rate=self._learning_rate())
        return self._report([pb.TaskReport(progress=self._signed(report))])[0]

    def _learning_rate(self) -> float:
        """Return the recent learning rate; 0 if it is not known or not finite: the loss will show the latter."""
        if time.monotonic() - self._last_rate[0] >= _RATE_S:
            rate = self._rate() or 0.0
            self._last_rate = (time.monotonic(), rate if math.isfinite(rate) else 0.0)
        return self._last_rate[1]

    def finish(self, lease: int, num_minibatches: int, not_exported: str = "") -> pb.Ack:
        """Report the end of a task; `not_exported` says why it has written no model."""
        finished = pb.FinishedTask(lease=lease, num_minibatches=num_minibatches, not_exported=not_exported)
        return self._report([pb.TaskReport(finished=self._signed(finished))])[0]

    def report(self, progress: Sequence[TaskProgress]) -> Sequence[pb.Ack]:
        """See `ProgressLink`."""
        return self._report([self._task_report(one) for one in progress])

    def _task_report(self, progress: TaskProgress) -> pb.TaskReport:
        if progress.num_minibatches is None:
            report = pb.ProgressReport(
                lease=progress.lease,
                committed=progress.committed,
                loss=progress.loss or 0.0,
                has_loss=progress.loss is not None,
                learning_rate=self._learning_rate(),
            )
            return pb.TaskReport(progress=self._signed(report))
        finished = pb.FinishedTask(
            lease=progress.lease, num_minibatches=progress.num_minibatches, surplus=_message(progress.surplus)
        )
        return pb.TaskReport(finished=self._signed(finished))

    def _report(self, reports: Sequence[pb.TaskReport]) -> Sequence[pb.Ack]:
        known = self._generation
        acks = self._exchange(reports)
        if not acks[-1].accepted and acks[-1].generation > known:  # a new generation of the master
            if acks[-1].generation > self._generation:
                self.register()
            acks = [*acks[:-1], *self._exchange(reports[len(acks) - 1 :])]
        return acks

    def _exchange(self, reports: Sequence[pb.TaskReport]) -> Sequence[pb.Ack]:
        """Report over the stream; add a heartbeat if one is due before the next report."""
        answer: pb.MasterMessage = self.call(
            self._stream.exchange,
            lambda: lambda: self._message(reports, min(self.report_s, self.heartbeat_s / 2)),
        )
        self._register_if_unknown(answer)
        return answer.acks

    def _message(self, reports: Sequence[pb.TaskReport], within_s: float) -> pb.WorkerMessage:
        """Make a message while no other is in flight; add a heartbeat if one is due within `within_s`."""
        self._requests.end(self._stream)  # the request in the last message is answered or given up
        ends_task = any(report.HasField("finished") for report in reports)  # the job may end with it
        is_due = self._until_beat_s() <= within_s or (ends_task and bool(self._unreported_tries()))
        return pb.WorkerMessage(
            heartbeat=self._heartbeat() if is_due else None,
            reports=reports,
            lease_request=self._lease_request(self._stream, ahead=self.tasks_ahead) if self._wants_lease else None,
        )

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack:
        message = pb.FailedTask(
            lease=lease,
            minibatch=minibatch,
            error=_sendable(error),
            details=_sendable(details),
            bad_records=bad_records,
        )
        return self._send(self._stub.FailTask, message)

    def report_evaluation(
        self, lease: int, states: list[pb.MetricState], results: dict[str, float], surplus: Surplus = NO_SURPLUS
    ) -> pb.Ack:
        message = pb.EvaluationReport(lease=lease, states=states, results=results, surplus=_message(surplus))
        return self._send(self._stub.ReportEvaluation, message)

    def report_metrics(self, step: int, metrics: Mapping[str, float]) -> pb.Ack:
        """Report the metrics of a script's own evaluation."""
        return self._send(self._stub.ReportMetrics, pb.MetricsReport(step=step, metrics=dict(metrics)))

    def stop_training(self, reason: str) -> pb.Ack:
        """End the training for a script or a callback: the master grants only tasks that were already started."""
        return self._send(self._stub.StopTraining, pb.StopTrainingRequest(reason=reason))

    def confirm(self, lease: int) -> bool:
        """Return whether the master still counts `lease` as this worker's."""
        return self._send(self._stub.ConfirmLease, pb.LeaseQuestion(lease=lease)).accepted

    def drop_ended_leases(self) -> None:
        """Revoke the held leases that the master no longer counts as this worker's."""
        self.leases.revoke([held.id for held in self.leases.held() if not self.confirm(held.id)])

    def say_farewell(self) -> None:
        """Revoke all leases, and report that this worker terminates.  Best effort: the master may be away."""
        self.leases.revoke([held.id for held in self.leases.held()])
        try:
            self._beat_once(is_leaving=True)
        except (MasterGone, grpc.RpcError) as error:
            _log.warning("Could not notify the master that worker %d leaves: %s", self.worker_id, error)

    def report_time(self) -> None:
        """Report how the time since the last heartbeat was used, when the work is done."""
        try:
            self._beat_once()
        except (MasterGone, grpc.RpcError) as error:
            _log.debug("Could not report the last second to the master: %s", error)

    def report_end(self) -> None:
        """Report that a script has ended: its silence is no failure while other processes of its pod work."""
        try:
            self._beat_once(has_ended=True, patience_s=_END_S)
        except (MasterGone, grpc.RpcError) as error:
            _log.warning("Could not notify the master that worker %d has ended its script: %s", self.worker_id, error)

    def _beat_once(self, is_leaving: bool = False, has_ended: bool = False, patience_s: float = FAREWELL_S) -> None:
        """Send one heartbeat, and ignore its answer.

        Raises:
            MasterGone: the master is away.
        """
        activity, seconds = self.clock.read()
        tries = self._unreported_tries()
        message = pb.HeartbeatRequest(
            role=pb.WORKER,
            id=self.worker_id,
            incarnation=self._incarnation,
            activity=activity,
            seconds=seconds,
            leaving=is_leaving,
            ended=has_ended,
            checkpoint=tries[-1].message() if tries else None,
        )
        self.call(self._stub.Heartbeat, lambda: message, FAREWELL_S, patience_s)

    def partition(self, newer_than: int = 0, timeout_s: float | None = None) -> pb.Partition:
        """Wait for a partition newer than a version and return it; after the time-out return the known one."""
        with self._partition_changed:
            self._partition_changed.wait_for(lambda: self._partition.version > newer_than, timeout_s)
            return self._partition

    def has_rest_of(self, epoch: int, newest_lease: int) -> bool:
        """Return whether the leases up to this one contain the rest of an epoch (fixed global batch)."""
        whole_epochs, newest_granted = self._granted
        return epoch < whole_epochs and newest_granted <= newest_lease

    def learn_partition(self, partition: pb.Partition) -> None:
        """Store a partition from the master or a PS, unless it is older than the known one."""
        with self._partition_changed:
            if partition.version > self._partition.version:
                self._partition = partition
                self._partition_changed.notify_all()

    def on_checkpoint_request(self, save: Callable[[], None]) -> None:
        """Set the callback for the master's request to write a checkpoint; it may be called by any thread."""
        self._save = save

    def _beat_until_end(self) -> None:
        while True:
            self._beat_at_once.clear()
            try:
                answer = self._stream.exchange(lambda: self._message((), math.inf), _CALL_TIMEOUT_S)
                self._register_if_unknown(answer)
            except grpc.RpcError as error:
                if not is_transient(error):
                    raise
                self._is_cut_off = True
                self.leases.wake()
                _log.debug("no heartbeat: %s", error.code())
            while not self._beat_at_once.wait(max(0.0, self._until_beat_s())) and self._until_beat_s() > 0:
                pass  # a heartbeat went with a report

    def _until_beat_s(self) -> float:
        return self._beaten_at + self.heartbeat_s - time.monotonic()

    def _heartbeat(self) -> pb.HeartbeatRequest:
        self._beaten_at = time.monotonic()
        activity, seconds = self.clock.read()
        group_version, waiting_seconds = self._standing()
        taken, self._stacks = self._stacks, None
        self._sent_try = next(iter(self._unreported_tries()), None)
        return pb.HeartbeatRequest(
            role=pb.WORKER,
            id=self.worker_id,
            incarnation=self._incarnation,
            positions=self.leases.positions(),
            activity=activity,
            seconds=seconds,
            partition_version=self._partition.version,
            group_version=group_version,
            waiting_seconds=waiting_seconds,
            memory_share=used_share(),
            stacks=taken,
            cpu=cpu_use(),
            device=_device_message(self._device()),
            optimizer_share=self._optimizer_share(),
            ending=self._is_ending,
            checkpoint=self._sent_try.message() if self._sent_try is not None else None,
        )

    def _register_if_unknown(self, answer: pb.MasterMessage) -> None:
        is_unknown = answer.HasField("heartbeat") and not answer.heartbeat.known
        if is_unknown or answer.lease.WhichOneof("answer") == "unknown":
            self.register()

    def _on_answer(self, answer: pb.MasterMessage) -> None:
        """Handle an answer, in the thread that sent the message, before the next message is made: so in order."""
        if answer.HasField("heartbeat"):
            self._on_heartbeat(answer.heartbeat)
        if (kind := answer.lease.WhichOneof("answer")) in ("lease", "end"):
            self._wants_lease = False
            self._drawn.append(self.leases.add(answer.lease.lease) if kind == "lease" else None)
            self.leases.wake()
        self._requests.end(self._stream)

    def _on_heartbeat(self, reply: pb.HeartbeatReply) -> None:
        if reply.stop:
            _log.info("Worker %d leaves: the master requested a stop", self.worker_id)
            logging.shutdown()
            os._exit(0)
        if not reply.known:
            return
        if self._sent_try is not None:
            self._sent_try.known_generation = reply.generation
            if reply.generation >= self._generation and self._unreported_tries():
                self._beat_at_once.set()
        if reply.checkpoint_request != self._checkpoint_request:
            self._checkpoint_request = reply.checkpoint_request
            if reply.checkpoint_request:  # 0: the master has restarted
                self._save()
        if reply.wants_stacks and not self._is_taking_stacks:
            self._is_taking_stacks = True
            threading.Thread(target=self._take_stacks, name="stacks", daemon=True).start()
        self._granted = (reply.whole_epochs, reply.newest_lease)
        if reply.heartbeat_seconds > 0:
            self.heartbeat_s, self.report_s = reply.heartbeat_seconds, reply.report_seconds
        for held in self.leases.revoke(reply.revoked):
            _log.info("Lease %d (%s) was taken back by the master", held.id, held.task_name)
        self.learn_partition(reply.partition)

    def _take_stacks(self) -> None:
        """Take the stacks for the next heartbeat, in a thread of its own: heartbeats must not wait for py-spy."""
        self._stacks = stacks.take(self.clock.read()[0])
        self._is_taking_stacks = False
        self._beat_at_once.set()


def _sendable(text: str) -> str:
    """Return an error of user code in a form that a message can hold: without secrets and unpaired surrogates.

    Of a text that is too long, for example because it quotes a large record, keep both ends.
    """
    return hide_in_ends(text, _MOST_OF_ERROR).encode(errors="backslashreplace").decode()


def _device_message(device: Device | None) -> pb.Device | None:
    return None if device is None else pb.Device(**asdict(device))


def _message(surplus: Surplus) -> pb.Surplus | None:
    return pb.Surplus(count=surplus.count, made_by=surplus.made_by) if surplus.count else None
