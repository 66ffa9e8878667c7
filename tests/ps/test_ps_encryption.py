"""Tensors between workers and parameter servers with --encrypt: the bytes on the wire, and a peer that spoils them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import grpc
import numpy as np
import pytest

from elasticdl.ps.client import PsClient
from elasticdl.ps.partition import even_buckets
from elasticdl.ps.server.service import PsService, register_service, serve_tensors
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.tensor_sockets import CallFailed, TensorClient, TensorServer
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import Arrived, Frame, decode
from elasticdl.rpc.servers import Flow, serve
from tests.ps.scenes import (
    ADAM,
    LAYOUT,
    TABLES,
    TOKEN,
    assert_same_model,
    initial_parameters,
    push_all,
)
from tests.ps.tensor_peers import HOST, echo
from tests.rpc.tap import Fault, tap

KNOWN = np.arange(1000, dtype=np.float32)
WORDS = b"what a worker sends"


def answer(request: Arrived) -> Frame:
    if decode(request)[0] == b"refuse":
        raise CallFailed(grpc.StatusCode.INVALID_ARGUMENT, "refused by its words")
    return echo(request)


@contextmanager
def server_of(encrypts: bool) -> Iterator[TensorServer]:
    server = TensorServer(HOST, TOKEN, {"Exchange": answer}, Flow(8, 0), encrypts=encrypts)
    try:
        yield server
    finally:
        server.close()


def client_of(port: int, encrypts: bool) -> TensorClient:
    """By TCP, as from another machine."""
    return TensorClient(HOST, str(port), TOKEN, 30, encrypts)


def ask(client: TensorClient, *arrays: np.ndarray) -> list[np.ndarray]:
    header, answer = decode(client.call("Exchange", Frame(WORDS, arrays), 30))
    assert header == b"seen " + WORDS
    return answer


@pytest.mark.parametrize("encrypts", [False, True])
def test_tensors_stand_on_the_wire_in_clear_or_not_at_all(encrypts: bool) -> None:
    with server_of(encrypts) as server, tap(server.port) as wire:
        with contextlib.closing(client_of(wire.port, encrypts)) as client:
            np.testing.assert_array_equal(ask(client, KNOWN)[0], KNOWN)
        assert len(wire.seen) > 2 * KNOWN.nbytes
        for known in (WORDS, KNOWN.tobytes(), KNOWN[500:502].tobytes()):
            assert (known in wire.seen) is not encrypts
        assert TOKEN.encode() not in wire.seen


def test_calls_of_every_size_come_through_unchanged() -> None:
    sizes = [0, 1, 30_000, 33_000, 131_072, 131_073, 4_000_001]
    with server_of(True) as server, contextlib.closing(client_of(server.port, True)) as client:
        for size in sizes:
            sent = [np.arange(size, dtype=np.float32), np.arange(size // 7, dtype=np.int64)]
            for found, expected in zip(ask(client, *sent), sent, strict=True):
                np.testing.assert_array_equal(found, expected)
        with pytest.raises(CallFailed, match="refused by its words"):
            client.call("Exchange", Frame(b"refuse", [KNOWN]), 30)
        ask(client, KNOWN)


@pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "from the server"])
@pytest.mark.parametrize("fault", Fault)
def test_a_spoilt_stream_ends_the_call_and_names_the_peer(
    fault: Fault, to_server: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with server_of(True) as server, tap(server.port) as wire:
        wire.fault, wire.to_server = fault, to_server
        with contextlib.closing(client_of(wire.port, True)) as client:
            array = np.arange(200_000, dtype=np.float32)  # several records in each direction
            with pytest.raises(CallFailed) as failed:
                ask(client, array)
            if to_server and fault is not Fault.CUT:
                assert "changed, repeated, left out or moved on its way" in caplog.text
                assert HOST in caplog.text
            if not to_server and fault is not Fault.CUT:
                assert failed.value.code() is grpc.StatusCode.DATA_LOSS
                assert f"{HOST}:{wire.port} has sent a record that was changed" in failed.value.details()
            np.testing.assert_array_equal(ask(client, array)[0], array)  # by a new connection


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_client_of_the_other_kind_is_refused_in_words(encrypts: bool) -> None:
    with server_of(not encrypts) as server:
        words = "does not encrypt what it sends" if encrypts else "encrypts what it sends"
        with pytest.raises(ConnectionError, match=f"the other end {words}"):
            client_of(server.port, encrypts)
        client_of(server.port, not encrypts).close()


def test_the_unix_socket_of_a_neighbour_is_taken_in_clear() -> None:
    with server_of(True) as server:
        with contextlib.closing(TensorClient(HOST, server.address, TOKEN, 30, True)) as client:
            ask(client, KNOWN)
            assert client._free[0].records is None


@contextmanager
def model_by_tcp(encrypts: bool, client_encrypts: bool) -> Iterator[PsClient]:
    service = PsService(0, ServerState(None, even_buckets(0, 1)))
    service.incarnation = 10
    tensors = serve_tensors(service, HOST, TOKEN, lambda: None, encrypts)
    register = partial(register_service, service=service, on_damage=lambda: None, tensor_address=str(tensors.port))
    server, port = serve(register, HOST, 0, TOKEN, 8)
    partition = pb.Partition(version=1, ps=[pb.PsAddress(address=f"{HOST}:{port}", incarnation=10)])
    client = PsClient(partition, LAYOUT, TOKEN, timeout_s=20, encrypts=client_encrypts)
    client.initialize(initial_parameters(), TABLES, ADAM, 7)
    push_all(client, range(10))
    try:
        yield client
    finally:
        client.close()
        server.stop(None).wait()
        tensors.close()


def test_a_model_has_the_same_bits_with_encryption_as_without(caplog: pytest.LogCaptureFixture) -> None:
    with model_by_tcp(True, True) as encrypted, model_by_tcp(False, False) as clear:
        assert_same_model(encrypted, clear)
        assert "over gRPC alone" not in caplog.text


def test_a_worker_that_does_not_encrypt_reaches_no_tensor_socket_that_does(caplog: pytest.LogCaptureFixture) -> None:
    """The rest is gRPC, which has the job's certificate wherever a job has --encrypt."""
    with model_by_tcp(True, False):
        assert "PS 0 is reached over gRPC alone" in caplog.text
        assert "the other end encrypts what it sends (--encrypt), and this one does not" in caplog.text
