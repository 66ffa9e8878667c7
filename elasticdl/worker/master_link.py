"""The worker's side of every conversation with the master.

It registers (again, at every new generation of the master), keeps leases alive by heartbeats, and repeats calls until
the master has answered or has been gone for too long.  It decides nothing about the work itself.

`MasterStream` carries heartbeats, progress and the ends of tasks, all that there are at a moment in one message.  One
message is under way at a time.  A stream that breaks, or whose answer is late, is given up, and the next message opens
another; nothing is repeated here, because only the caller knows what that means.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import grpc

from elasticdl.frameworks.devices import DeviceMeter
from elasticdl.frameworks.framework import NO_SURPLUS, Surplus
from elasticdl.protocol import HEARTBEAT_S, REPORT_S, Device
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import MasterGone, connect, is_transient
from elasticdl.rpc.resource_use import cpu_use, used_share
from elasticdl.worker import child_stacks, stacks
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.tasks import HeldLease, LeaseBook, TaskProgress
from elasticdl.worker.termination import FAREWELL_S
from elasticdl_client.errors import JobError
from elasticdl_client.secret_values import hide_in_ends

_CALL_TIMEOUT_S = 10.0
_LONG_POLL_S = 20.0
_RETRY_S = 0.3
_END_S = 30.0  # the master may be starting again
_MOST_OF_ERROR = 100_000  # characters
_RATE_S = 0.5  # between two looks at the learning rate

Answer = TypeVar("Answer")
_log = logging.getLogger("elasticdl.worker")


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
        self._generation = 0  # of the master that this worker has registered with
        self._stub: Any = pb_grpc.MasterStub(connect(address, token))
        self._stream = MasterStream(self._stub.Exchange, self._on_heartbeat)
        self._address = address
        self._master_timeout_s = master_timeout_s
        self._registration = threading.Lock()
        self._partition = pb.Partition()
        self._partition_changed = threading.Condition()
        self._applied: Callable[[], pb.AppliedSet | None] = lambda: None
        self._granted = (0, 0)
        self._standing: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
        self._optimizer_share: Callable[[], float] = lambda: 0.0
        self._rate: Callable[[], float | None] = lambda: None
        self._told_rate = (-_RATE_S, 0.0)  # when, what
        self._device: Callable[[], Device | None] = lambda: None
        self._stacks: pb.Stacks | None = None  # for the next heartbeat
        self._is_taking_stacks = False
        self._checkpoint_request = 0  # of the master, as it was seen last
        self._save: Callable[[], None] = lambda: None
        self._beat_at_once = threading.Event()
        self._beaten_at = float("inf")  # when the newest heartbeat was made; infinite: they have not begun
        self._is_ending = False
        self.num_registrations = 0
        self.heartbeat_s, self.report_s = HEARTBEAT_S, REPORT_S  # until the master says how many workers there are
        self.tasks_ahead = 0  # that input processes of its own make ready

    def carry_ledger(self, applied: Callable[[], pb.AppliedSet | None]) -> None:
        """Local strategy: what to tell the master of the model's own ledger when registering."""
        self._applied = applied

    def carry_standing(self, standing: Callable[[], tuple[int, float]]) -> None:
        """AllReduce: set the values of heartbeats: (version of the present group, seconds inside the collective)."""
        self._standing = standing

    def carry_optimizer_share(self, share: Callable[[], float]) -> None:
        """AllReduce with shards: set the provider of the share of the optimizer's state that this worker holds."""
        self._optimizer_share = share

    def announce_end(self) -> None:
        """AllReduce: tell the master at once that SIGTERM has come; from any thread."""
        self._is_ending = True
        self._beat_at_once.set()

    def carry_rate(self, rate: Callable[[], float | None]) -> None:
        """Set the provider of the learning rate in reports of progress."""
        self._rate = rate

    def carry_device(self, meter: DeviceMeter) -> None:
        """Log the device that the model is on, and set what heartbeats say of it."""
        _log.info("The model is on %s", meter.text)
        self._device = meter.last

    def register(self) -> pb.RegisterWorkerReply:
        """Report that this worker is alive, and its leases.

        Raises:
            JobError: the master has replaced this worker, or cannot be reached.
        """
        with self._registration:
            reply: pb.RegisterWorkerReply = self.call(
                self._stub.RegisterWorker,
                lambda: pb.RegisterWorkerRequest(
                    worker_id=self.worker_id,
                    incarnation=self._incarnation,
                    pod_name=self._pod_name,
                    held=self.leases.messages(),
                    applied=self._applied(),
                ),
            )
        if not reply.accepted:
            raise JobError(f"the master does not accept worker {self.worker_id}: {reply.reason}")
        self.num_registrations += 1
        self._generation = reply.generation
        self.learn_partition(reply.partition)
        return reply

    def start_heartbeat(self) -> None:
        """From now on a thread of its own says what this worker does, as often as the master wants."""
        child_stacks.watch()
        self._beaten_at = float("-inf")
        threading.Thread(target=self._beat_for_ever, name="heartbeat", daemon=True).start()

    def _told(self, method: Callable[..., Any], message: Any) -> pb.Ack:
        known = self._generation
        ack: pb.Ack = self.call(method, lambda: message)
        if not ack.accepted and ack.generation > known:  # a new generation of the master must learn it first
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
        """Makes a call until it is answered.

        Args:
            method: of the stub.
            request: makes the request, anew for every attempt.
            timeout_s: of an attempt.
            patience_s: the master may be gone for so long; None: for `--master_timeout`.

        Raises:
            MasterGone: it has been gone for longer.
        """
        patience_s = self._master_timeout_s if patience_s is None else patience_s
        gone_since: float | None = None
        limit_s = timeout_s
        while True:
            try:
                # A call that waits for the connection makes gRPC look after it at once.
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
        """See `LeaseSource`."""
        held: HeldLease | None = None
        is_answered = False
        while not is_answered:
            is_answered, held = self.poll_lease(_LONG_POLL_S)
        return held

    def poll_lease(self, timeout_s: float) -> tuple[bool, HeldLease | None]:
        """Waits at most that long; whether there is an answer, and the task, or None when the job is over."""
        reply: pb.LeaseReply = self.call(
            self._stub.RequestLease,
            lambda: pb.LeaseRequest(worker_id=self.worker_id, incarnation=self._incarnation, ahead=self.tasks_ahead),
            timeout_s,
        )
        answer = reply.WhichOneof("answer")
        if answer == "unknown":
            self.register()
        return answer in ("lease", "end"), self.leases.add(reply.lease) if answer == "lease" else None

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        """See `LeaseSource`."""
        reply: pb.LeaseReply = self.call(
            self._stub.RequestLease,
            lambda: pb.LeaseRequest(worker_id=self.worker_id, incarnation=self._incarnation, at_once=True, only=only),
        )
        return self.leases.add(reply.lease) if reply.WhichOneof("answer") == "lease" else None

    def is_over(self) -> bool:
        """Whether there is no more work for this worker; asks for none."""
        reply: pb.LeaseReply = self.call(
            self._stub.RequestLease,
            lambda: pb.LeaseRequest(
                worker_id=self.worker_id, incarnation=self._incarnation, at_once=True, only=pb.EVALUATION
            ),
        )
        return bool(reply.WhichOneof("answer") == "end")

    def sample(self) -> pb.SampleReply:
        """AllReduce: records to compile a step on; waits until the master knows the data."""
        pause = threading.Event()
        while True:
            reply: pb.SampleReply = self.call(
                self._stub.Sample,
                lambda: pb.SampleRequest(worker_id=self.worker_id, incarnation=self._incarnation),
            )
            if not reply.wait:
                return reply
            pause.wait(_RETRY_S)

    def ready_for_world(self, address: str, left: int, reason: str) -> pb.Ack:
        """AllReduce: this worker stands outside of every group; see the message."""
        message = pb.ReadyForWorldRequest(
            worker_id=self.worker_id, incarnation=self._incarnation, address=address, left=left, reason=reason
        )
        return self._told(self._stub.ReadyForWorld, message)

    def watch_world(self, known_version: int) -> pb.WatchWorldReply:
        """AllReduce: waits a while for a group newer than the known one."""
        reply: pb.WatchWorldReply = self.call(
            self._stub.WatchWorld,
            lambda: pb.WatchWorldRequest(
                worker_id=self.worker_id, incarnation=self._incarnation, known_version=known_version
            ),
            _LONG_POLL_S,
        )
        return reply

    def world_formed(self, version: int, applied: pb.AppliedSet, steps: int, restored_from: str, engine: str) -> pb.Ack:
        """AllReduce, rank 0: report what the model holds with which the group continues."""
        message = pb.WorldFormedRequest(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            version=version,
            applied=applied,
            steps=steps,
            restored_from=restored_from,
            engine=engine,
        )
        return self._told(self._stub.WorldFormed, message)

    def is_me(self, member: pb.WorldMember) -> bool:
        """Whether a member of a group is this process."""
        return member.worker_id == self.worker_id and member.incarnation == self._incarnation

    def report_model(self, report: pb.ModelReport) -> pb.Ack:
        report.worker_id, report.incarnation = self.worker_id, self._incarnation
        report.error, report.error_details = _sendable(report.error), _sendable(report.error_details)
        return self._told(self._stub.ReportModel, report)

    def report_session(self, event: pb.SessionEvent) -> pb.Ack:
        """TensorFlow's chief: report an event of the model."""
        message = pb.SessionReport(worker_id=self.worker_id, incarnation=self._incarnation, event=event)
        return self._told(self._stub.ReportSession, message)

    def report_progress(
        self, lease: int, committed: list[int], loss: float | None, skipped: Sequence[int] = (), not_finite: str = ""
    ) -> pb.Ack:
        return self._report([pb.TaskReport(progress=self._progress(lease, committed, loss, skipped, not_finite))])[0]

    def _progress(
        self, lease: int, committed: list[int], loss: float | None, skipped: Sequence[int] = (), not_finite: str = ""
    ) -> pb.ProgressReport:
        return pb.ProgressReport(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            lease=lease,
            committed=committed,
            loss=loss or 0.0,
            has_loss=loss is not None,
            skipped=skipped,
            not_finite=not_finite,
            learning_rate=self._learning_rate(),
        )

    def _learning_rate(self) -> float:
        """As it was a moment ago; 0: not known, or no number: the loss will say so."""
        if time.monotonic() - self._told_rate[0] >= _RATE_S:
            rate = self._rate() or 0.0
            self._told_rate = (time.monotonic(), rate if math.isfinite(rate) else 0.0)
        return self._told_rate[1]

    def finish(self, lease: int, num_minibatches: int, surplus: Surplus = NO_SURPLUS, not_exported: str = "") -> pb.Ack:
        """Report the end of a task; `not_exported`: why it has written no model."""
        finished = self._finished(lease, num_minibatches, surplus, not_exported)
        return self._report([pb.TaskReport(finished=finished)])[0]

    def _finished(self, lease: int, num_minibatches: int, surplus: Surplus, not_exported: str = "") -> pb.FinishedTask:
        return pb.FinishedTask(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            lease=lease,
            num_minibatches=num_minibatches,
            surplus=_message(surplus),
            not_exported=not_exported,
        )

    def report(self, progress: Sequence[TaskProgress]) -> Sequence[pb.Ack]:
        """See `ProgressLink`."""
        return self._report([self._task_report(one) for one in progress])

    def _task_report(self, progress: TaskProgress) -> pb.TaskReport:
        if progress.num_minibatches is None:
            return pb.TaskReport(progress=self._progress(progress.lease, progress.committed, progress.loss))
        return pb.TaskReport(finished=self._finished(progress.lease, progress.num_minibatches, progress.surplus))

    def _report(self, reports: Sequence[pb.TaskReport]) -> Sequence[pb.Ack]:
        known = self._generation
        acks = self._exchange(reports)
        if not acks[-1].accepted and acks[-1].generation > known:  # a new generation of the master must learn it first
            if acks[-1].generation > self._generation:
                self.register()
            acks = [*acks[:-1], *self._exchange(reports[len(acks) - 1 :])]
        return acks

    def _exchange(self, reports: Sequence[pb.TaskReport]) -> Sequence[pb.Ack]:
        """Report by the stream, with a heartbeat that would be due before the next report."""

        def message() -> pb.WorkerMessage:
            is_due = self._until_beat_s() <= min(self.report_s, self.heartbeat_s / 2)
            return pb.WorkerMessage(heartbeat=self._heartbeat() if is_due else None, reports=reports)

        answer: pb.MasterMessage = self.call(self._stream.exchange, lambda: message)
        self._register_if_unknown(answer)
        return answer.acks

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack:
        message = pb.FailedTask(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            lease=lease,
            minibatch=minibatch,
            error=_sendable(error),
            details=_sendable(details),
            bad_records=bad_records,
        )
        return self._told(self._stub.FailTask, message)

    def report_evaluation(
        self, lease: int, states: list[pb.MetricState], results: dict[str, float], surplus: Surplus = NO_SURPLUS
    ) -> pb.Ack:
        message = pb.EvaluationReport(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            lease=lease,
            states=states,
            results=results,
            surplus=_message(surplus),
        )
        return self._told(self._stub.ReportEvaluation, message)

    def report_metrics(self, step: int, metrics: Mapping[str, float]) -> pb.Ack:
        """A script: report the metrics of its own evaluation."""
        message = pb.MetricsReport(
            worker_id=self.worker_id, incarnation=self._incarnation, step=step, metrics=dict(metrics)
        )
        return self._told(self._stub.ReportMetrics, message)

    def stop_training(self, reason: str) -> pb.Ack:
        """A script: hand out nothing but started tasks."""
        message = pb.StopTrainingRequest(worker_id=self.worker_id, incarnation=self._incarnation, reason=reason)
        return self._told(self._stub.StopTraining, message)

    def confirm(self, lease: int) -> bool:
        """Whether the master still counts `lease` as this worker's."""
        question = pb.LeaseQuestion(worker_id=self.worker_id, incarnation=self._incarnation, lease=lease)
        return self._told(self._stub.ConfirmLease, question).accepted

    def drop_ended_leases(self) -> None:
        """Revoke the held leases that the master does not count as this worker's any more."""
        self.leases.revoke([held.id for held in self.leases.held() if not self.confirm(held.id)])

    def say_farewell(self) -> None:
        """Report that a terminating worker holds nothing any more.  Best effort: the master may be away."""
        self.leases.revoke([held.id for held in self.leases.held()])
        try:
            self._beat_once(is_leaving=True)
        except (MasterGone, grpc.RpcError) as error:
            _log.warning("Could not notify the master that worker %d leaves: %s", self.worker_id, error)

    def report_time(self) -> None:
        """The last word of a worker whose work is done: how its time went since the last heartbeat."""
        try:
            self._beat_once()
        except (MasterGone, grpc.RpcError) as error:
            _log.debug("Could not report the last second to the master: %s", error)

    def report_end(self) -> None:
        """Report that a script ends by itself, so that its silence does not count while others of its pod work."""
        try:
            self._beat_once(has_ended=True, patience_s=_END_S)
        except (MasterGone, grpc.RpcError) as error:
            _log.warning("Could not notify the master that worker %d has ended its script: %s", self.worker_id, error)

    def _beat_once(self, is_leaving: bool = False, has_ended: bool = False, patience_s: float = FAREWELL_S) -> None:
        """One heartbeat whose answer says nothing new.

        Raises:
            MasterGone: the master is not there.
        """
        activity, seconds = self.clock.read()
        message = pb.HeartbeatRequest(
            role=pb.WORKER,
            id=self.worker_id,
            incarnation=self._incarnation,
            activity=activity,
            seconds=seconds,
            leaving=is_leaving,
            ended=has_ended,
        )
        self.call(self._stub.Heartbeat, lambda: message, FAREWELL_S, patience_s)

    def partition(self, newer_than: int = 0, timeout_s: float | None = None) -> pb.Partition:
        """Waits until a complete partition newer than a version is known; after the time-out the one known now."""
        with self._partition_changed:
            self._partition_changed.wait_for(lambda: self._partition.version > newer_than, timeout_s)
            return self._partition

    def has_rest_of(self, epoch: int, newest_lease: int) -> bool:
        """With a fixed global batch: whether the leases up to this one hold the rest of an epoch."""
        whole_epochs, newest_granted = self._granted
        return epoch < whole_epochs and newest_granted <= newest_lease

    def learn_partition(self, partition: pb.Partition) -> None:
        """Of the master or of a PS; older ones are ignored."""
        with self._partition_changed:
            if partition.version > self._partition.version:
                self._partition = partition
                self._partition_changed.notify_all()

    def on_checkpoint_request(self, save: Callable[[], None]) -> None:
        """Sets what is called, from any thread, when the master asks for a checkpoint of the model."""
        self._save = save

    def _beat_for_ever(self) -> None:
        while True:
            self._beat_at_once.clear()
            try:
                answer = self._stream.exchange(lambda: pb.WorkerMessage(heartbeat=self._heartbeat()), _CALL_TIMEOUT_S)
                self._register_if_unknown(answer)
            except grpc.RpcError as error:
                if not is_transient(error):
                    raise
                _log.debug("no heartbeat: %s", error.code())
            while not self._beat_at_once.wait(max(0.0, self._until_beat_s())) and self._until_beat_s() > 0:
                pass  # one went with a report

    def _until_beat_s(self) -> float:
        return self._beaten_at + self.heartbeat_s - time.monotonic()

    def _heartbeat(self) -> pb.HeartbeatRequest:
        self._beaten_at = time.monotonic()
        activity, seconds = self.clock.read()
        world_version, waiting_seconds = self._standing()
        taken, self._stacks = self._stacks, None
        return pb.HeartbeatRequest(
            role=pb.WORKER,
            id=self.worker_id,
            incarnation=self._incarnation,
            positions=self.leases.positions(),
            activity=activity,
            seconds=seconds,
            partition_version=self._partition.version,
            world_version=world_version,
            waiting_seconds=waiting_seconds,
            memory_share=used_share(),
            stacks=taken,
            cpu=cpu_use(),
            device=_device_message(self._device()),
            optimizer_share=self._optimizer_share(),
            ending=self._is_ending,
        )

    def _register_if_unknown(self, answer: pb.MasterMessage) -> None:
        if answer.HasField("heartbeat") and not answer.heartbeat.known:
            self.register()

    def _on_heartbeat(self, reply: pb.HeartbeatReply) -> None:
        """Take a reply in, in the thread that sent the heartbeat and before the next one is made: in their order."""
        if reply.stop:
            _log.info("Worker %d leaves: the master requested a stop", self.worker_id)
            logging.shutdown()
            os._exit(0)
        if not reply.known:
            return
        if reply.checkpoint_request != self._checkpoint_request:
            self._checkpoint_request = reply.checkpoint_request
            if reply.checkpoint_request:  # 0: a master that has restarted
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
        """In a thread of its own: heartbeats must not wait for py-spy."""
        self._stacks = stacks.take(self.clock.read()[0], child_stacks.take())
        self._is_taking_stacks = False
        self._beat_at_once.set()


def _sendable(text: str) -> str:
    """Return an error of user code as a message can hold it: without secrets, and without half a character.

    Of one that quotes a large record, both ends.
    """
    return hide_in_ends(text, _MOST_OF_ERROR).encode(errors="backslashreplace").decode()


def _device_message(device: Device | None) -> pb.Device | None:
    return None if device is None else pb.Device(**asdict(device))


def _message(surplus: Surplus) -> pb.Surplus | None:
    return pb.Surplus(count=surplus.count, made_by=surplus.made_by) if surplus.count else None


_STREAM_S = 24 * 3600.0  # then the next message opens another one


class StreamFailed(grpc.RpcError):  # type: ignore[misc]
    """A message has no answer; whether the master has received it is unknown."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass(slots=True)
class _Stream:
    """An open stream; a thread of its own reads the answers, so that waiting for one can end."""

    requests: queue.SimpleQueue[pb.WorkerMessage | None] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[pb.MasterMessage | grpc.RpcError] = field(default_factory=queue.SimpleQueue)
    call: Any = None

    def open(self, method: Callable[..., Any], wait_for_ready: bool) -> _Stream:
        self.call = method(iter(self.requests.get, None), timeout=_STREAM_S, wait_for_ready=wait_for_ready)
        threading.Thread(target=self._read, args=(self.call,), name="answers", daemon=True).start()
        return self

    @property
    def is_broken(self) -> bool:
        """It has ended while no message was under way."""
        return not self.answers.empty()

    def close(self) -> None:
        self.requests.put(None)
        self.call.cancel()

    def _read(self, answers: Iterator[pb.MasterMessage]) -> None:
        try:
            for answer in answers:
                self.answers.put(answer)
        except grpc.RpcError as error:
            self.answers.put(error)
        else:
            self.answers.put(StreamFailed(grpc.StatusCode.UNAVAILABLE, "the master has closed the stream"))


class MasterStream:
    """Safe to use from any thread.

    Args:
        method: `Exchange` of the stub.
        on_heartbeat: takes in the reply to a heartbeat, before another message is made.
    """

    def __init__(self, method: Callable[..., Any], on_heartbeat: Callable[[pb.HeartbeatReply], None]) -> None:
        self._method = method
        self._on_heartbeat = on_heartbeat
        self._lock = threading.Lock()  # one message at a time; guards the next
        self._stream: _Stream | None = None

    def exchange(
        self, message: Callable[[], pb.WorkerMessage], timeout: float, wait_for_ready: bool = False
    ) -> pb.MasterMessage:
        """Send a message and wait for its answer; raises the errors of a stub's method.

        Args:
            message: makes it when no other one is under way, so that what it says is newer than what those said.
            timeout: seconds.
            wait_for_ready: for a connection, as a stub's method.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise StreamFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "another message waits for its answer")
        try:
            request = message()
            stream, self._stream = self._stream, None  # kept if there is an answer
            if stream is not None and stream.is_broken:
                stream.close()  # else gRPC's thread waits for its next request
                stream = None
            if stream is None:
                stream = _Stream().open(self._method, wait_for_ready)
            stream.requests.put(request)
            try:
                answer = stream.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                stream.close()
                raise StreamFailed(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s") from None
            if isinstance(answer, grpc.RpcError):
                stream.close()
                raise answer
            self._stream = stream
            if answer.HasField("heartbeat"):
                self._on_heartbeat(answer.heartbeat)
            return answer
        finally:
            self._lock.release()
