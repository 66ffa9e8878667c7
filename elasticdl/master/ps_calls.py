"""The master's calls to the parameter servers: applied sets and checkpoint parts, of all of them in parallel.

It decides nothing; a PS that is silent, newer or older than thought is a reason in the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from elasticdl.master import messages
from elasticdl.master.checkpoints import PsPart
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import PsAddress
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl_client.errors import CheckpointError, ElasticDLError
from elasticdl_client.storage_kinds import AnyPath

_QUESTION_TIMEOUT_S = 10.0
_SAVE_TIMEOUT_S = 1800.0  # some 200 GB on a slow disk; a PS that dies ends its call at once
_MAX_AT_ONCE = 32

Answer = TypeVar("Answer")


class PsUnreachable(ElasticDLError):
    """A PS did not answer, or is another one than the master thinks; asking again later may succeed."""


class PsCalls:
    """Connections to all PS, kept by address.  Safe to use from any thread."""

    def __init__(self, token: str, generation: int) -> None:
        self._token = token
        self._generation = generation
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def read_applied_sets(self, ps: Sequence[PsAddress]) -> dict[int, CommittedSet]:
        """By PS id.

        Raises:
            PsUnreachable: of some PS.
        """

        def read(address: PsAddress) -> CommittedSet:
            question = pb.PsQuestion(generation=self._generation, incarnation=address.incarnation)
            reply = self._call(address, "ReadAppliedSet", question, _QUESTION_TIMEOUT_S)
            return messages.applied_set(reply.applied)

        return dict(zip((address.ps_id for address in ps), self._all(read, ps), strict=True))

    def save_parts(self, ps: Sequence[PsAddress], directory: AnyPath) -> tuple[PsPart, ...]:
        """Lets every PS write its part of a checkpoint into a directory that exists.

        Raises:
            CheckpointError: a PS could not write.
            PsUnreachable: of some PS.
        """

        def save(address: PsAddress) -> PsPart:
            request = pb.SaveCheckpointRequest(
                generation=self._generation,
                incarnation=address.incarnation,
                directory=str(directory),
                num_ps=len(ps),
            )
            reply = self._call(address, "SaveCheckpoint", request, _SAVE_TIMEOUT_S)
            if reply.error:
                raise CheckpointError(f"PS {address.ps_id} could not write its part: {reply.error}")
            buckets = tuple((owned.start, owned.end) for owned in address.buckets)
            return PsPart(address.ps_id, reply.file, reply.size_bytes, reply.crc32, address.incarnation, buckets)

        return tuple(self._all(save, ps))

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _call(self, address: PsAddress, method: str, request: Any, timeout_s: float) -> Any:
        stub = pb_grpc.ParameterServerStub(self._channel(address.address))
        try:
            reply = getattr(stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise PsUnreachable(
                f"PS {address.ps_id} at {address.address} does not answer: {error.code().name}"
            ) from error
        if reply.status != pb.OK:
            raise PsUnreachable(f"PS {address.ps_id} refuses: {pb.PsStatus.Name(reply.status)}")
        return reply

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect(address, self._token)
            return self._channels[address]

    @staticmethod
    def _all(call: Callable[[PsAddress], Answer], ps: Sequence[PsAddress]) -> list[Answer]:
        with ThreadPoolExecutor(max(1, min(_MAX_AT_ONCE, len(ps))), thread_name_prefix="ps-call") as threads:
            return list(threads.map(call, ps))
