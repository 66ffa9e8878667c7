"""Server side of every connection: the one place where servers are made.

Servers are synchronous with a thread pool; every call must carry the job's token.  Where the job has a certificate,
a client that does not prove itself by it is refused before it can say anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from elasticdl.rpc import addresses
from elasticdl.rpc.channels import OPTIONS
from elasticdl.rpc.flow import Flow
from elasticdl.rpc.frames import FrameError, announced_size, join_rest
from elasticdl.rpc.gate import Gate, ServerThreads
from elasticdl.rpc.job_secret import read_certificate
from elasticdl_client.errors import JobError

_SERVER_OPTIONS = (
    *(option for option in OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),  # without a call; a member's channel connects again by itself
    ("grpc.max_concurrent_streams", 256),  # of one connection
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
)


def raw_handlers(
    service: str,
    unary: Mapping[str, Callable[[bytes, grpc.ServicerContext], bytes]],
    streams: Mapping[str, Callable[[memoryview, grpc.ServicerContext], Iterator[bytes]]],
    flow: Flow,
) -> grpc.GenericRpcHandler:
    """Handlers of methods whose messages are raw bytes.

    Args:
        service: full name, such as ``elasticdl.ParameterServer``.
        unary: method name to function of (request, context).
        streams: method name to function of (frame that has come as a stream, context), which yields a stream.
        flow: of all these methods together.  A call beyond it is refused with RESOURCE_EXHAUSTED before it begins, so
            that other calls of the server find a thread.
    """

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
    """Starts a server.

    Args:
        register: adds the servicers and handlers to the server.
        host: address to listen on.
        port: 0 picks a free one.
        token: the job's.
        max_threads: calls served at once, long polls included.
        port_setting: flag or environment variable by which another port is chosen.
        max_message_bytes: a caller that sends a larger message is refused; what is larger goes as a stream.

    Returns:
        The running server and the port that it listens on.

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
