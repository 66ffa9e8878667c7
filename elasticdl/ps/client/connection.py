"""A client's connection to one PS: deadlines, retries while the PS is busy, and our own exceptions.

It repeats only calls that the PS has rejected because it is busy, and so has not begun.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from elasticdl.ps.tensor_sockets import TENSOR_ADDRESS, TensorClient
from elasticdl.ps.wire import SERVICE
from elasticdl.rpc import addresses
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import is_transient, open_channel, token_metadata
from elasticdl.rpc.frames import STREAM_FROM_BYTES, Frame, Message, join
from elasticdl_client.errors import JobError

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.005
_LONGEST_BACKOFF_S = 1.0
_SLOWEST_BYTES_PER_S = 20e6  # the deadline of a large call grows with its size


class PsUnavailable(Exception):
    """A PS is down, restarting, or has another incarnation: wait for a newer partition, then repeat the call.

    Attributes:
        partition: The newer partition, if the PS has sent it.
    """

    def __init__(self, ps_id: int, reason: str, partition: pb.Partition | None = None) -> None:
        super().__init__(reason)
        self.ps_id = ps_id
        self.partition = partition


class PsConnection:
    """Calls one PS, over sockets or gRPC.  Thread-safe."""

    def __init__(self, ps_id: int, address: str, token: str, timeout_s: float, encrypts: bool = False) -> None:
        """
        Args:
            timeout_s: Deadline of a small call, and limit of retries with a busy PS, in seconds.
            encrypts: Encrypt tensors on the network.
        """
        self._ps_id = ps_id
        self._address = address
        self._timeout_s = timeout_s
        self._metadata = token_metadata(token)
        self._channel = open_channel(address)
        self._stub: Any = pb_grpc.ParameterServerStub(self._channel)  # type: ignore[no-untyped-call]
        self._methods: dict[str, Any] = {}
        self._closed = threading.Event()
        self._token = token
        self._encrypts = encrypts
        self._beginning = threading.Lock()
        self._is_begun = False
        self._sockets: TensorClient | None = None  # set once; None: tensors go over gRPC

    def close(self) -> None:
        """Close the connection; calls in flight fail with `PsUnavailable`."""
        self._closed.set()
        self._channel.close()
        if self._sockets is not None:
            self._sockets.close()

    def raw(self, method: str, frame: Frame, reply_bytes: int) -> Message:
        """Call a raw method.

        Args:
            reply_bytes: Approximate size of the reply; a large one is streamed.

        Raises:
            PsUnavailable: the PS cannot answer now.
            JobError: the PS does not understand the call.
        """
        size = max(len(frame), reply_bytes)
        timeout_s = self._timeout_s + size // STREAM_FROM_BYTES * (STREAM_FROM_BYTES / _SLOWEST_BYTES_PER_S)
        sockets = self._sockets if self._is_begun else self._begin()
        if sockets is not None:
            return self._answered(lambda: sockets.call(method, frame, timeout_s))
        if size < STREAM_FROM_BYTES:
            unary: Callable[..., bytes] = self._method(method, self._channel.unary_unary)
            message = frame.whole()
            return self._answered(lambda: unary(message, timeout=timeout_s, metadata=self._metadata))
        stream = self._method(f"{method}Stream", self._channel.stream_stream)
        return self._answered(lambda: join(stream(frame.chunks(), timeout=timeout_s, metadata=self._metadata)))

    def task_standing(self, request: pb.TaskStandingRequest) -> pb.TaskStandingReply:
        """Call `TaskStanding`.

        Raises:
            PsUnavailable, JobError: see `raw`.
        """
        reply: pb.TaskStandingReply = self._controlled(self._stub.TaskStanding, request)
        return reply

    def close_round(self, request: pb.CloseRoundRequest) -> pb.CloseRoundReply:
        """Call `CloseRound`.

        Raises:
            PsUnavailable, JobError: see `raw`.
        """
        reply: pb.CloseRoundReply = self._controlled(self._stub.CloseRound, request)
        return reply

    def _begin(self) -> TensorClient | None:
        """Choose the transport of tensors, at the first call."""
        with self._beginning:
            if not self._is_begun:
                self._sockets = self._answered(self._direct)
                self._is_begun = True
                if self._closed.is_set() and self._sockets is not None:
                    self._sockets.close()
            return self._sockets

    def _direct(self) -> TensorClient | None:
        ask: Callable[..., bytes] = self._method(TENSOR_ADDRESS, self._channel.unary_unary)
        try:
            address = ask(b"", timeout=self._timeout_s, metadata=self._metadata).decode()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            address = ""
        host, _ = addresses.parse(self._address)
        try:
            return TensorClient(host, address, self._token, self._timeout_s, self._encrypts) if address else None
        except OSError as error:
            _log.warning("PS %d is reached over gRPC alone, which is slower: port %s: %s", self._ps_id, address, error)
            return None

    def _controlled(self, method: Callable[..., Answer], request: object) -> Answer:
        return self._answered(lambda: method(request, timeout=self._timeout_s, metadata=self._metadata))

    def _method(self, name: str, make: Callable[[str], Any]) -> Any:
        method = self._methods.get(name)
        if method is None:
            method = self._methods[name] = make(f"/{SERVICE}/{name}")
        return method

    def _answered(self, call: Callable[[], Answer]) -> Answer:
        give_up_at = time.monotonic() + self._timeout_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return call()
            except ValueError as error:  # from gRPC: another thread has closed the channel
                raise PsUnavailable(self._ps_id, f"PS {self._ps_id}: {error}") from error
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > give_up_at:
                    raise self._explained(error) from error
            # Many workers were rejected together: they must not retry together.
            self._closed.wait(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _explained(self, error: grpc.RpcError) -> Exception:
        if error.code() is grpc.StatusCode.ABORTED:  # never from gRPC itself, whose texts vary
            return PsUnavailable(self._ps_id, f"PS {self._ps_id} at {self._address}: {error.details()}")
        codes = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)
        if is_transient(error) or error.code() in codes:
            said = error.code().name.lower()
            if error.code() is grpc.StatusCode.DATA_LOSS:
                said += f": {error.details()}"
            return PsUnavailable(self._ps_id, f"PS {self._ps_id} at {self._address}: {said}")
        return JobError(f"PS {self._ps_id} at {self._address} refuses a call: {error.details()}")
