"""The client side of every connection: the only place that creates channels.

A channel sends the job's token with each call, and keeps itself alive.  If the job has a certificate, the channel is
encrypted, and both ends prove with it that they belong to the job.  Every call needs a deadline (``timeout=``).  This
module never retries, because only the caller knows what a repeated call means.

`read_master_timeout_s`: how long a PS or worker continues without its master; after that it raises `MasterGone`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from elasticdl.rpc.job_secret import read_certificate
from elasticdl_client.errors import JobError
from elasticdl_client.kubernetes.names import TLS_NAME

TOKEN_KEY = "elasticdl-token"

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the limit of one attempt, which takes long on a busy machine
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel does not share the backoff of failed ones
)


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc,type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc,type-arg]
):
    """Adds the token to the metadata of every call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def _with_token(self, details: Any) -> _CallDetails:
        if details.timeout is None:
            raise AssertionError(f"{details.method} called without a deadline")
        metadata = [*(details.metadata or ()), (TOKEN_KEY, self._token)]
        return _CallDetails(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(details), request_iterator)


def connect(address: str, token: str) -> grpc.Channel:
    """Return a channel to ``host:port``, without waiting: the first call connects it."""
    return grpc.intercept_channel(open_channel(address), _TokenInterceptor(token))


def open_channel(address: str) -> grpc.Channel:
    """Like `connect`, for callers that pass `token_metadata` to every call as ``metadata=``: slightly faster."""
    found = read_certificate()
    if found is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(found.authority, found.key, found.certificate)
    name = ("grpc.ssl_target_name_override", TLS_NAME)  # the certificate names the job, not the address
    return grpc.secure_channel(address, credentials, options=(*OPTIONS, name))


def token_metadata(token: str) -> Sequence[tuple[str, str]]:
    return ((TOKEN_KEY, token),)


def is_transient(error: grpc.RpcError) -> bool:
    """Return whether a retry may succeed: the peer is down, restarting or slow, and has not judged the call."""
    return error.code() in (  # type: ignore[no-any-return]
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )


MASTER_TIMEOUT_VARIABLE = "ELASTICDL_MASTER_TIMEOUT_S"
_MASTER_TIMEOUT_S = 300.0


class MasterGone(JobError):
    """The master has not answered for too long; the process must end."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(
            f"the master at {address} has not answered for {timeout_s:g} s (--master_timeout)",
            "its log says why it ended; `elasticdl resume JOB` starts it again, and the job continues",
        )


def read_master_timeout_s() -> float:
    """Return the seconds from the environment, or the default.

    Raises:
        JobError: the variable is not a positive number.
    """
    text = os.environ.get(MASTER_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else _MASTER_TIMEOUT_S
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise JobError(f"{MASTER_TIMEOUT_VARIABLE}={text} is not a number of seconds")
    return seconds
