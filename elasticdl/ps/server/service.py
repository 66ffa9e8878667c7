"""The calls of a PS: checks of the caller (incarnation, generation), then `ServerState`; and their gRPC handlers.

The methods of `PsService` take and return messages or frames, so they are the same with and without a network.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from elasticdl.ps.applied import MinibatchName
from elasticdl.ps.part_file import part_directory, write_part
from elasticdl.ps.server.in_flight import StateDamagedError
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.tensor_sockets import TENSOR_ADDRESS, CallFailed, TensorServer
from elasticdl.ps.wire import SERVICE, RequestError, decode_exchange, decode_initialize, decode_known_ids, reply_frame
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.frames import Frame, FrameError, Message, WireVersionError
from elasticdl.rpc.servers import Flow, raw_handlers
from elasticdl.storage.versions import PATIENCE_S, Patience
from elasticdl_client.errors import CheckpointError, ModelDefinitionError, StorageUnreachable
from elasticdl_client.storage_kinds import AnyPath

_log = logging.getLogger(__name__)

RawMethod = Callable[[Message], Frame]
Request = TypeVar("Request")
Reply = TypeVar("Reply")

_LONG_POLL_S = 1.0
_EARLIER_SAVE_S = 60.0  # how long a checkpoint waits for an earlier one, whose volume may be stuck
_NAMED_WITHIN_S = 3.0  # limit for learning a new generation of the master; a heartbeat asks for it at once
_MAX_UNSURE = 64  # threads that may wait for a name
_LEASES_AHEAD = 1024  # leases that may be newer than the master's last answer; calls under newer ones wait
_MAX_RAW_CALLS = 32  # in parallel; a rejected worker retries


class UnnamedError(Exception):
    """A call names a generation of the master, a lease or a coordinator of rounds that this PS does not know."""


@dataclass(frozen=True, slots=True)
class JobBounds:
    """Limits of every call.

    Attributes:
        checkpoint_dir: The only directory that may be written to; empty: none.
        num_epochs: 0 or less: unlimited.
    """

    checkpoint_dir: str = ""
    num_epochs: int = 0


class PsService:
    """One incarnation of one PS.

    Attributes:
        state: May be replaced until `incarnation` is set.
        incarnation: 0 until the master has assigned it and the state is restored; until then, every call is rejected.
        job: Limits that calls are checked against.
        flow: Limits the raw calls, over gRPC and sockets.
    """

    def __init__(self, ps_id: int, state: ServerState) -> None:
        self.ps_id = ps_id
        self.state = state
        self.incarnation = 0
        self.job = JobBounds()
        self.flow = Flow(_MAX_RAW_CALLS)
        self._num_pushing: int | None = None
        self._partition = pb.Partition()
        self._newest_lease = 0  # named by the master
        self._lock = threading.Lock()
        self._named = threading.Condition(self._lock)
        self._num_unsure = 0  # calls that wait for the master to name something
        self._saving = threading.Lock()
        self._patience = Patience(PATIENCE_S)

    @property
    def generation(self) -> int:
        """The newest known generation of the master."""
        return self._newest_lease >> 32

    def accept_lease(self, newest: int) -> None:
        """Set the newest lease, from the master itself: received from the address where this PS calls it.

        Callers cannot raise it: a false one would exclude the master, or the holders of its leases.
        """
        with self._lock:
            self._newest_lease = max(self._newest_lease, newest)
            self._named.notify_all()

    def _check_name(self, lease: int, epoch: int) -> None:
        """Raise if a push has an impossible name.

        Raises:
            RequestError: the job has no such epoch.
            UnnamedError: the master has not granted this lease.
        """
        if 0 < self.job.num_epochs <= epoch:
            raise RequestError(f"epoch is {epoch}, this job has {self.job.num_epochs}, counted from 0")
        self._wait_until(lambda: lease <= self._newest_lease + _LEASES_AHEAD, f"lease {lease}")

    def _check_coordinator(self, incarnation: int) -> None:
        """Raise if the coordinator of rounds is unknown; before the first partition, accept any."""
        self._wait_until(
            lambda: self._partition.version == 0 or incarnation <= _coordinator_of(self._partition),
            f"incarnation {incarnation} of PS 0",
        )

    def _wait_until(self, is_named: Callable[[], bool], what: str) -> None:
        """Wait briefly for the master to name something: other processes of the job may know it first.

        Raises:
            UnnamedError: it has not.
        """
        if is_named():
            return
        with self._lock:
            self._num_unsure += 1
            try:
                is_known = self._num_unsure <= _MAX_UNSURE and self._named.wait_for(is_named, _NAMED_WITHIN_S)
            finally:
                self._num_unsure -= 1
        if not is_known:
            raise UnnamedError(f"the master has not named {what} yet")

    @property
    def num_pushing(self) -> int | None:
        """Number of workers that hold training leases, from the master; None: not known yet."""
        return self._num_pushing

    @num_pushing.setter
    def num_pushing(self, number: int) -> None:
        if number != self._num_pushing:
            self._num_pushing = number
            self.state.wake()

    @property
    def is_master_awaited(self) -> bool:
        """Whether calls wait for the master's next answer: it may close a round, or name a lease."""
        return self._num_unsure > 0 or self.state.is_round_waiting

    @property
    def partition(self) -> pb.Partition:
        """The newest known partition; version 0 if there is none."""
        return self._partition

    def accept_partition(self, message: pb.Partition) -> None:
        """Accept a partition from the master; ignore one that is older than the known one."""
        with self._lock:
            if message.version <= self._partition.version:
                return
            self._partition = message
            self._named.notify_all()
        self.state.accept_coordinator(_coordinator_of(message))

    def load(self) -> pb.PsLoad:
        """Return the counts of this PS since its start."""
        return self.state.load_message()

    def initialize(self, frame: Message) -> Frame:
        """Handle the raw method Initialize.

        Raises:
            CheckpointError: another job's checkpoint has not been readable for half an hour.
        """
        call = decode_initialize(frame)
        refusal = self._refusal(call.header.incarnation, call.header.partition_version)
        if refusal is not None:
            return reply_frame(refusal)
        try:
            self.state.initialize(call)
        except StorageUnreachable as error:
            if self._patience.is_over(error):
                raise CheckpointError(error.what, error.hint) from error
            raise
        return reply_frame(pb.ExchangeReply(status=pb.OK))

    def exchange(self, frame: Message) -> Frame:
        """Handle the raw method Exchange."""
        with self.state.load.call(len(frame)):
            call = decode_exchange(frame)
            refusal = self._refusal(call.incarnation, call.partition_version)
            if refusal is not None:
                return reply_frame(refusal)
            if call.push is not None:
                self._check_name(call.push.header.lease, call.push.header.epoch)
            if call.rounds is not None:
                self._check_coordinator(call.rounds.coordinator)
            done = self.state.exchange(call)
            reply = pb.ExchangeReply(
                status=done.status,
                version=done.version,
                repeated_push=done.repeated_push,
                applied_round=done.applied_round,
            )
            if done.status == pb.LEASE_REFUSED and call.push is not None:
                reply.reason = f"lease {call.push.header.lease} of task {call.push.header.task} has a successor"
            encoded = reply_frame(reply, done.arrays, call.wire_type)
            self.state.load.sent(len(encoded))
            return encoded

    def known_ids(self, frame: Message) -> Frame:
        """Handle the raw method KnownIds."""
        header = decode_known_ids(frame)
        refusal = self._refusal(header.incarnation, header.partition_version)
        if refusal is not None:
            return reply_frame(refusal)
        ids = self.state.known_ids(header.table)
        if ids is None:
            return reply_frame(pb.ExchangeReply(status=pb.UNINITIALIZED))
        return reply_frame(pb.ExchangeReply(status=pb.OK), [ids])

    def task_standing(self, request: pb.TaskStandingRequest) -> pb.TaskStandingReply:
        """Return the applied minibatches of a task; older leases of it are rejected from now on."""
        refusal = self._refusal(request.incarnation, request.partition_version)
        if refusal is not None:
            return pb.TaskStandingReply(status=refusal.status, partition=_partition_in(refusal))
        self._check_name(request.lease, request.epoch)
        applied = self.state.standing(request.lease, request.epoch, request.task)
        if applied is None:
            return pb.TaskStandingReply(status=pb.LEASE_REFUSED)
        return pb.TaskStandingReply(status=pb.OK, applied=applied)

    def close_round(self, request: pb.CloseRoundRequest) -> pb.CloseRoundReply:
        """Confirm a minibatch that every PS holds; wait briefly until its round is closed.

        Raises:
            RequestError: this is not PS 0, or updates are not made in rounds.
        """
        if self.ps_id != 0 or not self.state.is_synchronous:
            raise RequestError("rounds are closed by PS 0, with --use_async=false")
        refusal = self._refusal(request.incarnation, request.partition_version)
        if refusal is not None:
            return pb.CloseRoundReply(status=refusal.status, partition=_partition_in(refusal))
        self._check_name(request.lease, request.name.epoch)
        name = MinibatchName(request.name.epoch, request.name.task, request.name.n)
        confirmed = self.state.confirm(
            request.lease, name, request.pulled_version, request.known_round, lambda: self._num_pushing, _LONG_POLL_S
        )
        rounds = pb.Rounds(coordinator=self.incarnation, rounds=confirmed.rounds)
        return pb.CloseRoundReply(
            status=confirmed.status, wait=confirmed.wait, rounds=rounds if confirmed.rounds else None
        )

    def read_applied_set(self, request: pb.PsQuestion) -> pb.AppliedSetReply:
        """Return the applied set, to the master."""
        refusal = self._refusal_of_master(request.generation, request.incarnation)
        if refusal is not None:
            return pb.AppliedSetReply(status=refusal)
        applied, initialized, version = self.state.applied()
        return pb.AppliedSetReply(status=pb.OK, applied=applied, initialized=initialized, version=version)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest) -> pb.SaveCheckpointReply:
        """Write this PS's part of a checkpoint, for the master, in the calling thread.

        Raises:
            RequestError: the directory is not a checkpoint of this job, or the job has another number of PS.
        """
        refused = self._refused_save(request)
        if refused is not None:
            return refused
        if not self._saving.acquire(timeout=_EARLIER_SAVE_S):
            return pb.SaveCheckpointReply(status=pb.OK, error="it still writes its part of an earlier checkpoint")
        try:
            refused = self._refused_save(request)  # a new master may use the directory by now
            return self._save(self._directory_of(request), request.num_ps) if refused is None else refused
        finally:
            self._saving.release()

    def _refused_save(self, request: pb.SaveCheckpointRequest) -> pb.SaveCheckpointReply | None:
        refusal = self._refusal_of_master(request.generation, request.incarnation)
        if refusal is None:
            return None
        return pb.SaveCheckpointReply(status=refusal, error="the call was for another run of this PS or master")

    def _directory_of(self, request: pb.SaveCheckpointRequest) -> AnyPath:
        num_ps = len(self._partition.ps)  # 0: not known yet
        if num_ps not in (0, request.num_ps):
            raise RequestError(f"SaveCheckpointRequest.num_ps is {request.num_ps}, this job has {num_ps}")
        try:
            return part_directory(request.directory, self.job.checkpoint_dir)
        except CheckpointError as error:
            raise RequestError(f"SaveCheckpointRequest.{error.what}") from error

    def _save(self, directory: AnyPath, num_ps: int) -> pb.SaveCheckpointReply:
        snapshot = self.state.snapshot()
        if snapshot is None:
            return pb.SaveCheckpointReply(status=pb.UNINITIALIZED, error="this PS holds no parameters yet")
        try:
            written = write_part(directory, self.ps_id, num_ps, self.incarnation, snapshot)
        except CheckpointError as error:
            _log.error("%s", error)
            return pb.SaveCheckpointReply(status=pb.OK, error=error.what)
        finally:
            snapshot.close()
        _log.info("Saved the checkpoint part %s/%s, %d bytes", directory, written.file, written.size_bytes)
        return pb.SaveCheckpointReply(
            status=pb.OK, file=written.file, size_bytes=written.size_bytes, crc32=written.crc32
        )

    def _refusal(self, incarnation: int, partition_version: int) -> pb.ExchangeReply | None:
        """Return the rejection of a call to another incarnation, or with an old partition; None: accepted."""
        known = self._partition
        newer = known if known.version > partition_version else None
        if self._is_another(incarnation):
            reason = f"PS {self.ps_id} has incarnation {self.incarnation}, the call was for {incarnation}"
            return pb.ExchangeReply(status=pb.WRONG_INCARNATION, reason=reason, partition=newer)
        if newer is not None:
            reason = f"the partition has version {known.version}, the call was by {partition_version}"
            return pb.ExchangeReply(status=pb.OLD_PARTITION, reason=reason, partition=newer)
        return None

    def _is_another(self, incarnation: int) -> bool:
        return self.incarnation == 0 or incarnation != self.incarnation

    def _refusal_of_master(self, generation: int, incarnation: int) -> pb.PsStatus | None:
        self._wait_until(lambda: generation <= self.generation, f"generation {generation}")
        if generation < self.generation:
            return pb.OLD_GENERATION
        return pb.WRONG_INCARNATION if self._is_another(incarnation) else None


def _coordinator_of(partition: pb.Partition) -> int:
    """Return the incarnation of PS 0, which closes rounds."""
    return min(partition.ps, key=lambda ps: ps.ps_id).incarnation


def _partition_in(refusal: pb.ExchangeReply) -> pb.Partition | None:
    return refusal.partition if refusal.HasField("partition") else None


class _ControlCalls(pb_grpc.ParameterServerServicer):
    """The gRPC handlers of the methods with protobuf messages."""

    def __init__(self, service: PsService, answer: _Answer) -> None:
        self._service = service
        self._answer = answer

    def TaskStanding(self, request: pb.TaskStandingRequest, context: Any) -> pb.TaskStandingReply:  # noqa: N802
        return self._answer(self._service.task_standing, request, context)

    def CloseRound(self, request: pb.CloseRoundRequest, context: Any) -> pb.CloseRoundReply:  # noqa: N802
        return self._answer(self._service.close_round, request, context)

    def ReadAppliedSet(self, request: pb.PsQuestion, context: Any) -> pb.AppliedSetReply:  # noqa: N802
        return self._answer(self._service.read_applied_set, request, context)

    def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointReply:  # noqa: N802
        return self._answer(self._service.save_checkpoint, request, context)


def register_service(
    server: grpc.Server, service: PsService, on_damage: Callable[[], None], tensor_address: str = ""
) -> None:
    """Add all methods to a gRPC server.

    Args:
        on_damage: Called when the state is damaged; the process must end.
        tensor_address: Address of the `TensorServer` of the same service; empty: there is none.
    """
    answer = _Answer(service, on_damage)
    methods = _raw_methods(service)

    def unary(method: RawMethod) -> Callable[[bytes, Any], bytes]:
        return lambda frame, context: answer(method, frame, context).whole()

    def streamed(method: RawMethod) -> Callable[[memoryview, Any], Iterator[bytes]]:
        return lambda frame, context: answer(method, frame, context).chunks()

    unaries = {name: unary(method) for name, method in methods.items()}
    unaries[TENSOR_ADDRESS] = lambda _frame, _context: tensor_address.encode()
    streams = {f"{name}Stream": streamed(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((raw_handlers(SERVICE, unaries, streams, service.flow),))
    control = _ControlCalls(service, answer)
    pb_grpc.add_ParameterServerServicer_to_server(control, server)  # type: ignore[no-untyped-call]


def serve_tensors(
    service: PsService, host: str, token: str, on_damage: Callable[[], None], encrypts: bool = False
) -> TensorServer:
    """Serve the raw methods over sockets; the caller must close the server.

    Args:
        on_damage: See `register_service`.
        encrypts: Encrypt the network traffic.
    """
    answer = _Answer(service, on_damage)

    def direct(method: RawMethod) -> Callable[[Message], Frame]:
        return lambda frame: answer(method, frame, _Direct)

    methods = {name: direct(method) for name, method in _raw_methods(service).items()}
    return TensorServer(host, token, methods, service.flow, encrypts=encrypts)


def _raw_methods(service: PsService) -> dict[str, RawMethod]:
    return {"Initialize": service.initialize, "Exchange": service.exchange, "KnownIds": service.known_ids}


class _Direct:
    """The gRPC context of a call over a socket."""

    @staticmethod
    def abort(code: grpc.StatusCode, details: str) -> None:
        raise CallFailed(code, details)


class _Answer:
    """Calls a method, and converts its errors to gRPC status codes."""

    def __init__(self, service: PsService, on_damage: Callable[[], None]) -> None:
        self._service = service
        self._on_damage = on_damage

    def __call__(self, method: Callable[[Request], Reply], request: Request, context: Any) -> Reply:
        try:
            return method(request)
        except WireVersionError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        except FrameError as error:
            context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            raise
        except (RequestError, ModelDefinitionError, CheckpointError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        except UnnamedError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise
        except StorageUnreachable as error:  # its hint applies only after giving up
            context.abort(grpc.StatusCode.ABORTED, error.what)
            raise
        except MemoryError:  # an update that was applied in part raises StateDamagedError instead
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is out of memory")
            raise
        except StateDamagedError as error:
            context.abort(grpc.StatusCode.INTERNAL, str(error))
            raise
        finally:
            if self._service.state.is_damaged:
                self._on_damage()
