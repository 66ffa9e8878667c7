"""A worker's stream to the master: one message at a time is in flight, and each gets one answer.

A stream that breaks, or whose answer is late, is dropped, and the next message opens another one.  Nothing is repeated
here, because only the caller knows what a repetition means.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb

_STREAM_S = 24 * 3600.0  # lifetime of a stream; then the next message opens another one


class StreamFailed(grpc.RpcError):  # type: ignore[misc]
    """A message got no answer; it is unknown whether the master has received it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@dataclass(slots=True)
class _Stream:
    """An open stream; a thread reads the answers, so that waits for them can time out."""

    requests: queue.SimpleQueue[pb.WorkerMessage | None] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[pb.MasterMessage | grpc.RpcError] = field(default_factory=queue.SimpleQueue)
    call: Any = None

    def open(self, method: Callable[..., Any], wait_for_ready: bool) -> _Stream:
        self.call = method(iter(self.requests.get, None), timeout=_STREAM_S, wait_for_ready=wait_for_ready)
        threading.Thread(target=self._read, args=(self.call,), name="answers", daemon=True).start()
        return self

    @property
    def is_broken(self) -> bool:
        """Whether it has ended while no message was in flight."""
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
    """Sends messages to the master over a stream.  Thread-safe.

    Args:
        method: `Exchange` of the stub.
        on_answer: Handles an answer, before another message is made.
    """

    def __init__(self, method: Callable[..., Any], on_answer: Callable[[pb.MasterMessage], None]) -> None:
        self._method = method
        self._on_answer = on_answer
        self._lock = threading.Lock()  # one message at a time; guards the next attribute
        self._stream: _Stream | None = None

    def exchange(
        self, message: Callable[[], pb.WorkerMessage], timeout: float, wait_for_ready: bool = False
    ) -> pb.MasterMessage:
        """Send a message and wait for its answer; raises the errors of a stub's method.

        Args:
            message: Makes the message, when no other one is in flight, so that its content is newer than theirs.
            timeout: Seconds.
            wait_for_ready: Wait for a connection, as for a stub's method.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise StreamFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "another message waits for its answer")
        try:
            request = message()
            stream, self._stream = self._stream, None  # set again if there is an answer
            if stream is not None and stream.is_broken:
                stream.close()  # otherwise gRPC's thread waits for its next request
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
            self._on_answer(answer)
            return answer
        finally:
            self._lock.release()
