"""The calls that a PS answers: who may call (incarnation, generation), then `PsState`; and their gRPC handlers.

The methods of `PsService` take and return messages or frames, so that they are the same with and without a network.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from elasticdl.ps.checkpoint import Part, write_part
from elasticdl.ps.load import Load
from elasticdl.ps.state import PsState, StateDamagedError
from elasticdl.ps.wire import (
    SERVICE,
    RequestError,
    decode_exchange,
    decode_initialize,
    decode_known_ids,
    encode_reply,
)
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.frames import FrameError, chunks, join
from elasticdl.rpc.servers import raw_handlers
from elasticdl_client.errors import CheckpointError, ModelDefinitionError

_log = logging.getLogger(__name__)

RawMethod = Callable[[bytes], bytes]


class PsService:
    """One life of one PS.

    Attributes:
        incarnation: 0 until the master has named it and the state is restored; every call is refused until then.
    """

    def __init__(self, ps_id: int, state: PsState) -> None:
        self.ps_id = ps_id
        self.state = state
        self.incarnation = 0
        self.load_counters = Load()
        self._num_pushing: int | None = None
        self._partition = pb.Partition()
        self._partition_lock = threading.Lock()
        self._generation = 0
        self._generation_lock = threading.Lock()
        self._saving = threading.Lock()

    @property
    def num_pushing(self) -> int | None:
        """Workers that hold training leases, as the master has said it; None: it has not."""
        return self._num_pushing

    @num_pushing.setter
    def num_pushing(self, number: int) -> None:
        self._num_pushing = number

    @property
    def is_round_waiting(self) -> bool:
        """Whether a round is open that may close as soon as fewer workers push."""
        return False

    @property
    def partition(self) -> pb.Partition:
        """The newest one known; version 0: none."""
        return self._partition

    def accept_partition(self, message: pb.Partition) -> None:
        """From the master: who holds what.  An older one than is known is ignored."""
        with self._partition_lock:
            if message.version > self._partition.version:
                self._partition = message

    def load(self) -> pb.PsLoad:
        """What this PS has done in this life."""
        return self.load_counters.message(0, 0)

    @property
    def generation(self) -> int:
        """The newest life of the master that this PS knows of."""
        return self._generation

    def accept_generation(self, generation: int) -> bool:
        """Notes a newer generation; False: this one has a successor."""
        with self._generation_lock:
            if generation < self._generation:
                return False
            self._generation = generation
            return True

    def initialize(self, frame: bytes) -> bytes:
        """Raw method Initialize."""
        call = decode_initialize(frame)
        if self._is_another(call.header.incarnation):
            return self._wrong_incarnation(call.header.incarnation)
        self.state.initialize(call)
        return encode_reply(pb.ExchangeReply(status=pb.OK))

    def exchange(self, frame: bytes) -> bytes:
        """Raw method Exchange."""
        call = decode_exchange(frame)
        if self._is_another(call.incarnation):
            return self._wrong_incarnation(call.incarnation)
        done = self.state.exchange(call)
        reply = pb.ExchangeReply(status=done.status, version=done.version, repeated_push=done.repeated_push)
        if done.status == pb.LEASE_REFUSED and call.push is not None:
            reply.reason = f"lease {call.push.header.lease} of task {call.push.header.task} has a successor"
        return encode_reply(reply, done.arrays)

    def known_ids(self, frame: bytes) -> bytes:
        """Raw method KnownIds."""
        header = decode_known_ids(frame)
        if self._is_another(header.incarnation):
            return self._wrong_incarnation(header.incarnation)
        ids = self.state.known_ids(header.table)
        if ids is None:
            return encode_reply(pb.ExchangeReply(status=pb.UNINITIALIZED))
        return encode_reply(pb.ExchangeReply(status=pb.OK), [ids])

    def task_standing(self, request: pb.TaskStandingRequest) -> pb.TaskStandingReply:
        """Where a task stands; older leases of it are refused from now on."""
        if self._is_another(request.incarnation):
            return pb.TaskStandingReply(status=pb.WRONG_INCARNATION)
        applied = self.state.standing(request.lease, request.epoch, request.task)
        if applied is None:
            return pb.TaskStandingReply(status=pb.LEASE_REFUSED)
        return pb.TaskStandingReply(status=pb.OK, applied=applied)

    def read_applied_set(self, request: pb.PsQuestion) -> pb.AppliedSetReply:
        """From the master: which names the values here hold."""
        refusal = self._refusal_of_master(request.generation, request.incarnation)
        if refusal is not None:
            return pb.AppliedSetReply(status=refusal)
        applied, initialized, version = self.state.applied()
        return pb.AppliedSetReply(status=pb.OK, applied=applied, initialized=initialized, version=version)

    def save_checkpoint(self, request: pb.SaveCheckpointRequest) -> pb.SaveCheckpointReply:
        """From the master: writes this PS's part, in the calling thread."""
        refusal = self._refusal_of_master(request.generation, request.incarnation)
        if refusal is not None:
            return pb.SaveCheckpointReply(status=refusal, error="the call was for another life of this PS or master")
        with self._saving:
            snapshot = self.state.snapshot()
            if snapshot is None:
                return pb.SaveCheckpointReply(status=pb.UNINITIALIZED, error="this PS holds no parameters yet")
            part = Part(self.ps_id, request.num_ps, self.incarnation, *snapshot)
            try:
                written = write_part(Path(request.directory), part)
            except CheckpointError as error:
                _log.error("%s", error)
                return pb.SaveCheckpointReply(status=pb.OK, error=error.what)
        _log.info("Saved the checkpoint part %s/%s, %d bytes", request.directory, written.file, written.size_bytes)
        return pb.SaveCheckpointReply(
            status=pb.OK, file=written.file, size_bytes=written.size_bytes, crc32=written.crc32
        )

    def _is_another(self, incarnation: int) -> bool:
        return self.incarnation == 0 or incarnation != self.incarnation

    def _wrong_incarnation(self, incarnation: int) -> bytes:
        reason = f"PS {self.ps_id} has incarnation {self.incarnation}, the call was for {incarnation}"
        return encode_reply(pb.ExchangeReply(status=pb.WRONG_INCARNATION, reason=reason))

    def _refusal_of_master(self, generation: int, incarnation: int) -> pb.PsStatus | None:
        if not self.accept_generation(generation):
            return pb.OLD_GENERATION
        return pb.WRONG_INCARNATION if self._is_another(incarnation) else None


class _ControlCalls(pb_grpc.ParameterServerServicer):
    """gRPC's way to the methods whose messages are protobuf."""

    def __init__(self, service: PsService) -> None:
        self._service = service

    def TaskStanding(self, request: pb.TaskStandingRequest, context: Any) -> pb.TaskStandingReply:  # noqa: N802
        return self._service.task_standing(request)

    def ReadAppliedSet(self, request: pb.PsQuestion, context: Any) -> pb.AppliedSetReply:  # noqa: N802
        return self._service.read_applied_set(request)

    def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointReply:  # noqa: N802
        return self._service.save_checkpoint(request)


def register_service(server: grpc.Server, service: PsService, on_damage: Callable[[], None]) -> None:
    """Adds all methods to a server.

    Args:
        on_damage: called when the state is worth nothing any more; the process must end.
    """
    methods = {"Initialize": service.initialize, "Exchange": service.exchange, "KnownIds": service.known_ids}

    def guarded(method: RawMethod) -> Callable[[bytes, Any], bytes]:
        def answer(frame: bytes, context: Any) -> bytes:
            try:
                return _answer(method, frame, context)
            finally:
                if service.state.is_damaged:
                    on_damage()

        return answer

    def streamed(method: RawMethod) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        def answer(parts: Iterator[bytes], context: Any) -> Iterator[bytes]:
            yield from chunks(guarded(method)(join(parts), context))

        return answer

    unary = {name: guarded(method) for name, method in methods.items()}
    streams = {f"{name}Stream": streamed(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((raw_handlers(SERVICE, unary, streams),))
    pb_grpc.add_ParameterServerServicer_to_server(_ControlCalls(service), server)  # type: ignore[no-untyped-call]


def _answer(method: RawMethod, frame: bytes, context: Any) -> bytes:
    try:
        return method(frame)
    except FrameError as error:
        context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        raise
    except (RequestError, ModelDefinitionError) as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise
    except StateDamagedError as error:
        context.abort(grpc.StatusCode.INTERNAL, str(error))
        raise
