"""The gate of a server: what a call must show before its handler sees it, and how long it may take to do so.

The token stands in a call's metadata, so a call without it is refused before anything of its message is read, by
threads that do nothing else.  A member has a deadline for each message that it sends, and a message must keep the rules
of `validation`.  Nothing here knows what a method does.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from elasticdl.rpc.channels import TOKEN_KEY
from elasticdl.rpc.validation import InvalidMessage, parse

_log = logging.getLogger(__name__)

MESSAGE_S = 10.0
"""How long a call may wait for its caller's next message."""

_REFUSING_THREADS = 2
_COMPLAINT_S = 60.0  # between two log lines that say the same


class Gate(grpc.ServerInterceptor):  # type: ignore[misc]
    """One server's."""

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
        """The same, for messages that come in time and keep all rules."""
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
    """Of any call: as a handler of streams it need not wait for a message."""

    def refuse(_messages: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry the job's token")

    refuse.experimental_thread_pool = threads  # type: ignore[attr-defined]  # gRPC's name; members' threads stay theirs
    return grpc.stream_stream_rpc_method_handler(refuse)


class _Overdue:
    """Calls that wait for their caller's next message.

    They are looked at whenever a new call comes: before that no other call needs the threads that they hold.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._waiting: dict[Any, float] = {}  # a call's context, and until when; the oldest first

    def next_of(self, messages: Iterator[Any], context: Any) -> Any:
        """The next message; None: there is none."""
        self._waiting[context] = time.monotonic() + self._within_s
        try:
            return next(messages, None)
        finally:
            del self._waiting[context]

    def watched(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        """The same messages."""
        while (message := self.next_of(messages, context)) is not None:
            yield message

    def end_calls(self) -> None:
        """Cancels those whose time is over."""
        if not self._waiting:
            return
        now = time.monotonic()
        for context, until in list(self._waiting.items()):
            if until > now:
                return
            context.cancel()


class ServerThreads(ThreadPoolExecutor):
    """A server's threads: where the system gives no more of them, those that are there do the work."""

    def __init__(self, max_threads: int) -> None:
        super().__init__(max_threads, thread_name_prefix="rpc")
        self._lacks_threads_since = float("-inf")
        self._lock = threading.Lock()
        first: Future[None] = self.submit(lambda: None)  # before there are no more
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
