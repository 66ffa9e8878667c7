"""The server side of every connection: the only place that creates servers.

Servers are synchronous, with a thread pool; every call must carry the job's token.  If the job has a certificate, a
client that does not authenticate with it is rejected before it can send anything.

`Gate`: checks the token of a call before its handler sees it, and limits the time for messages.  The token is in the
call's metadata, so a call without it is rejected before any of its message is read, by threads for that purpose only.
A member has a deadline for each message that it sends, and a message must keep the rules of `validation`.  The gate
does not know what a method does.

`Flow`: limits how many raw calls run at once, and how many bytes of their frames are in memory.  A frame reserves its
bytes before it is read, and a call takes its place when its frame is complete, so an unfinished frame blocks no other
call: it costs memory, of which there is a fixed amount, and only until its deadline.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from elasticdl.rpc import addresses
from elasticdl.rpc.channels import OPTIONS, TOKEN_KEY
from elasticdl.rpc.job_secret import read_certificate
from elasticdl.rpc.resource_use import available_bytes
from elasticdl.rpc.validation import InvalidMessage, parse
from elasticdl_client.errors import JobError

_SERVER_OPTIONS = (
    *(option for option in OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),  # without a call; a member's channel reconnects by itself
    ("grpc.max_concurrent_streams", 256),  # per connection
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)


def raw_handlers(
    service: str,
    unary: Mapping[str, Callable[[bytes, grpc.ServicerContext], bytes]],
    streams: Mapping[str, Callable[[memoryview, grpc.ServicerContext], Iterator[bytes]]],
    flow: Flow,
) -> grpc.GenericRpcHandler:
    """Return the handlers of methods whose messages are raw bytes.

    Args:
        service: Full name, such as ``elasticdl.ParameterServer``.
        unary: Functions of (request, context), by method name.
        streams: Functions of (frame received as a stream, context) that return a stream, by method name.
        flow: Limits all these methods together.  A call beyond it is rejected with RESOURCE_EXHAUSTED before it begins,
            so that other calls of the server find a thread.
    """

    from elasticdl.rpc.frames import FrameError, announced_size, join_rest  # needs NumPy, which a master may lack

    def unary_handler(function: Callable[[bytes, Any], bytes]) -> Callable[[bytes, Any], bytes]:
        def answer(request: bytes, context: Any) -> bytes:
            with flow.call(wait=False) as has_place:
                if not has_place:
                    _refuse_busy(flow, context)
                return function(request, context)

        return answer

    def stream_handler(function: Callable[[memoryview, Any], Iterator[bytes]]) -> Callable[[Any, Any], Iterator[bytes]]:
        def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            try:
                size = announced_size(requests)
                if size > flow.max_bytes:
                    limit = f"a frame of {size:,} bytes is more than the {flow.max_bytes:,} that this server takes"
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, limit)
                with flow.frame(size):
                    frame = join_rest(size, requests)
                    with flow.call(wait=False) as has_place:
                        if not has_place:
                            _refuse_busy(flow, context)
                        yield from function(frame, context)
            except FrameError as error:
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))

        return answer

    handlers = {name: grpc.unary_unary_rpc_method_handler(unary_handler(f)) for name, f in unary.items()}
    for name, function in streams.items():
        handlers[name] = grpc.stream_stream_rpc_method_handler(stream_handler(function))
    return grpc.method_handlers_generic_handler(service, handlers)


def _refuse_busy(flow: Flow, context: Any) -> None:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{flow.max_calls} calls are under way")


def serve(
    register: Callable[[grpc.Server], None],
    host: str,
    port: int,
    token: str,
    max_threads: int,
    port_setting: str = "--master_port",
    max_message_bytes: int = 64 << 20,
) -> tuple[grpc.Server, int]:
    """Start a server.

    Args:
        register: Adds the servicers and handlers to the server.
        host: Address to listen on.
        port: 0: a free port.
        token: The token of the job.
        max_threads: Calls served at once, with long polls.
        port_setting: Flag or environment variable that sets the port, for errors.
        max_message_bytes: A larger message is rejected; larger data is streamed.

    Returns:
        The running server, and its port.

    Raises:
        JobError: the port is in use.
    """
    options = [*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    server = grpc.server(ServerThreads(max_threads), interceptors=[Gate(token)], options=options)
    register(server)
    try:
        bound = _bind(server, addresses.written(host, port))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise JobError(
            f"cannot listen on {addresses.written(host, port)}: {_why_not(host, port)}",
            f"choose another {port_setting}, or end the process that has it",
        )
    server.start()
    return server, bound


def _bind(server: grpc.Server, address: str) -> int:
    found = read_certificate()
    if found is None:
        return int(server.add_insecure_port(address))
    pair = (found.key, found.certificate)
    credentials = grpc.ssl_server_credentials([pair], found.authority, require_client_auth=True)
    return int(server.add_secure_port(address, credentials))


def _why_not(host: str, port: int) -> str:
    try:
        addresses.listen(host, port, 1).close()
    except OSError as error:
        return error.strerror or str(error)
    return "the port was in use a moment ago"


_log = logging.getLogger(__name__)

MESSAGE_S = 10.0
"""How long a call may wait for its caller's next message."""

_REFUSING_THREADS = 2
_COMPLAINT_S = 60.0  # between two equal log lines


class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
    """The interceptor of a server: checks tokens, deadlines and messages."""

    def __init__(self, token: str, message_s: float = MESSAGE_S) -> None:
        self._token = token.encode()
        self._overdue = _Overdue(message_s)
        self._handlers: dict[str, Any] = {}  # by method
        self._refusal = _refusal(ThreadPoolExecutor(_REFUSING_THREADS, thread_name_prefix="rpc-refuse"))

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        self._overdue.end_calls()
        for key, value in details.invocation_metadata:
            if key == TOKEN_KEY and hmac.compare_digest(value.encode(), self._token):
                handler = self._handlers.get(details.method)
                if handler is None and (handler := continuation(details)) is not None:
                    handler = self._handlers[details.method] = self._guarded(handler)
                return handler
        return self._refusal

    def _guarded(self, handler: Any) -> Any:
        """Return a handler that checks messages and their deadlines, and calls the given one."""
        message_type = getattr(handler.request_deserializer, "__self__", None)  # None: raw bytes
        if handler.request_streaming:

            def answer_stream(messages: Iterator[Any], context: Any) -> Any:
                watched = self._overdue.watched(messages, context)
                if message_type is not None:
                    watched = (_valid(message_type, message, context) for message in watched)
                return handler.stream_stream(watched, context)

            return grpc.stream_stream_rpc_method_handler(answer_stream, None, handler.response_serializer)
        function = handler.unary_unary

        def answer(messages: Iterator[bytes], context: Any) -> Any:
            message = self._overdue.next_of(messages, context)
            if message is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
                raise AssertionError("abort returns")
            return function(message if message_type is None else _valid(message_type, message, context), context)

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)


def _valid(message_type: Any, data: bytes, context: Any) -> Any:
    try:
        return parse(message_type, data)
    except InvalidMessage as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _refusal(threads: ThreadPoolExecutor) -> Any:
    """Return the handler that rejects any call: as a handler of streams it need not wait for a message."""

    def refuse(_messages: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry the job's token")

    refuse.experimental_thread_pool = threads  # type: ignore[attr-defined]  # gRPC's name; leaves members' threads free
    return grpc.stream_stream_rpc_method_handler(refuse)


class _Overdue:
    """Calls that wait for their caller's next message.

    Deadlines are checked whenever a new call comes: before that, no other call needs their threads.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._waiting: dict[Any, float] = {}  # deadline by context of a call; the oldest first

    def next_of(self, messages: Iterator[Any], context: Any) -> Any:
        """Return the next message; None at the end."""
        self._waiting[context] = time.monotonic() + self._within_s
        try:
            return next(messages, None)
        finally:
            del self._waiting[context]

    def watched(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        """Yield the messages, each with a deadline."""
        while (message := self.next_of(messages, context)) is not None:
            yield message

    def end_calls(self) -> None:
        """Cancel the calls that are past their deadline."""
        if not self._waiting:
            return
        now = time.monotonic()
        for context, until in list(self._waiting.items()):
            if until > now:
                return
            context.cancel()


class ServerThreads(ThreadPoolExecutor):
    """A server's threads: if the system refuses more, the existing ones do the work."""

    def __init__(self, max_threads: int) -> None:
        super().__init__(max_threads, thread_name_prefix="rpc")
        self._lacks_threads_since = float("-inf")
        self._lock = threading.Lock()
        first: Future[None] = self.submit(lambda: None)  # start one thread while there are some
        first.result()

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()  # type: ignore[misc]  # what has been submitted is queued by now
        except RuntimeError as error:
            now = time.monotonic()
            with self._lock:
                is_due = now - self._lacks_threads_since >= _COMPLAINT_S
                if is_due:
                    self._lacks_threads_since = now
            if is_due:
                _log.error("This server sheds load: %s. Calls wait for the %d that it has.", error, len(self._threads))


_LEAST_BYTES = 1 << 30


class Flow:
    """Limits the raw calls of one server, over all its transports.  Thread-safe.

    Attributes:
        max_calls: Most calls that run at once.
        max_bytes: Most bytes of all frames together, and so of one frame.
    """

    def __init__(self, max_calls: int, max_bytes: int = 0) -> None:
        """
        Args:
            max_bytes: 0: half of the memory that is free now, but at least 1 GiB.
        """
        self.max_calls = max_calls
        self.max_bytes = max_bytes or max(_LEAST_BYTES, available_bytes() // 2)
        self._changed = threading.Condition()
        self._num_calls = 0
        self._num_bytes = 0

    @contextmanager
    def frame(self, size: int) -> Iterator[Held]:
        """Wait until `size` bytes (at most `max_bytes`) are free, and reserve them for the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes + size <= self.max_bytes)
            self._num_bytes += size
        held = Held(self, size)
        try:
            yield held
        finally:
            held.become(0)

    @contextmanager
    def call(self, wait: bool) -> Iterator[bool]:
        """Take a place among the running calls for the block; yield whether there is one.

        Args:
            wait: Wait for a place; else yield False if there is none.
        """
        with self._changed:
            has_place = self._changed.wait_for(self._has_place, None if wait else 0)
            self._num_calls += has_place
        try:
            yield has_place
        finally:
            with self._changed:
                self._num_calls -= has_place
                self._changed.notify_all()

    def _has_place(self) -> bool:
        """Return whether a call may start: not while replies that were not fetched fill the memory."""
        return self._num_calls < self.max_calls and self._num_bytes <= self.max_bytes

    def change(self, size_bytes: int) -> None:
        """Change the count by a number of bytes; do not wait."""
        with self._changed:
            self._num_bytes += size_bytes
            if size_bytes < 0:
                self._changed.notify_all()


class Held:
    """The reserved bytes of one call."""

    __slots__ = ("_flow", "_size")

    def __init__(self, flow: Flow, size: int) -> None:
        self._flow = flow
        self._size = size

    def become(self, size: int) -> None:
        """Change the reservation to `size` bytes: the reply takes the place of the request."""
        self._flow.change(size - self._size)
        self._size = size
