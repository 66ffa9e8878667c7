"""The connections beside gRPC: admission, answers of a call, and what happens when an end goes away."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from elasticdl.ps.client import PsClient
from elasticdl.ps.client.connection import PsConnection
from elasticdl.ps.server.service import PsService, register_service
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.tensor_sockets import CallFailed, TensorClient
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.frames import Arrived, Frame, decode
from elasticdl.rpc.handshake import connecting, shake_hands
from elasticdl.rpc.servers import serve
from tests.collective.members import until
from tests.ps.scenes import (
    ADAM,
    LAYOUT,
    NUM_NON_TRAINABLE,
    NUM_TRAINABLE,
    TABLES,
    TOKEN,
    assert_same_model,
    initial_parameters,
    make_push,
    ps_cluster,
    whole_pull,
)
from tests.ps.tensor_peers import HOST, echo, head, member, reply_of, server_of, wait_for_end


@pytest.mark.parametrize("road", [socket.AF_INET, socket.AF_UNIX])
def test_frames_come_back_whole_and_an_idle_connection_is_used_again(road: socket.AddressFamily) -> None:
    random = np.random.default_rng(1)
    with server_of(echo) as server:
        client = TensorClient(HOST, server.address if road == socket.AF_UNIX else str(server.port), TOKEN, 30)
        for sizes in ((), (0,), (1, 3), (5_000_000,), tuple(range(700))):
            sent = [random.standard_normal(size).astype(np.float32) for size in sizes]
            header, arrays = decode(client.call("Exchange", Frame(b"h", sent), 30))
            assert header == b"seen h"
            for one, other in zip(sent, arrays, strict=True):
                np.testing.assert_array_equal(one, other)
        assert [connection.family for connection in client._all] == [road]
        client.close()


@contextmanager
def other_user(code: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, which has an abstract socket `s` and the name of one."""
    head = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); name = '\\0{name}'; "
    command = [sys.executable, "-I", "-S", "-c", head + code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@only_root
def test_another_user_of_the_machine_is_not_served_at_the_unix_socket() -> None:
    with server_of(echo) as server:
        code = "s.connect(name); s.settimeout(5); print(s.recv(1) or 'refused')"  # a stranger of ours gets 10 s
        with other_user(code, server.name) as stranger:
            assert stranger.communicate(timeout=30)[0].strip() == "refused"
        with contextlib.closing(TensorClient(HOST, server.address, TOKEN, 30)) as client:
            assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "


@only_root
def test_a_client_sends_nothing_to_another_user_with_the_servers_name() -> None:
    name = f"elasticdl-test-{os.getpid()}"
    code = "s.bind(name); s.listen(); print('listens', flush=True); print(s.accept()[0].recv(99), flush=True)"
    with server_of(echo) as server, other_user(code, name) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listens\n"
        with contextlib.closing(TensorClient(HOST, f"{server.port} {name}", TOKEN, 30)) as client:
            assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
            assert [connection.family for connection in client._all] == [socket.AF_INET]
        assert stranger.stdout.readline() == "b''\n"


def test_a_client_of_another_machine_finds_no_unix_socket_and_goes_by_tcp() -> None:
    with server_of(echo) as server:
        client = TensorClient(HOST, f"{server.port} elasticdl-elsewhere", TOKEN, 30)
        assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
        assert [connection.family for connection in client._all] == [socket.AF_INET]
        client.close()


def test_calls_at_once_have_a_connection_each() -> None:
    together = threading.Barrier(4)

    def meeting(request: Arrived) -> Frame:
        together.wait(30)
        return echo(request)

    with server_of(meeting) as server, ThreadPoolExecutor(4) as threads:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        replies = list(threads.map(lambda n: client.call("Exchange", Frame(b"%d" % n, []), 30), range(4)))
        assert [decode(reply)[0] for reply in replies] == [b"seen %d" % n for n in range(4)]
        client.close()


def test_more_calls_than_places_wait() -> None:
    at_once, most = [0], [0]
    lock, may_end = threading.Lock(), threading.Semaphore(0)

    def counted(request: Arrived) -> Frame:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        assert may_end.acquire(timeout=30)
        with lock:
            at_once[0] -= 1
        return echo(request)

    with server_of(counted, max_calls=2) as server, ThreadPoolExecutor(6) as threads:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        calls = [threads.submit(client.call, "Exchange", Frame(b"x", []), 30) for _ in range(6)]
        for _ in calls:
            may_end.release()
        assert [decode(call.result())[0] for call in calls] == [b"seen x"] * 6
        assert most[0] <= 2
        client.close()


@pytest.mark.parametrize("token", ["", "the wrong one", TOKEN[:-1], TOKEN + "x"])
def test_a_wrong_token_is_refused_before_any_call(token: str) -> None:
    asked: list[Arrived] = []

    def exchange(request: Arrived) -> Frame:
        asked.append(request)
        return Frame(b"", [])

    with server_of(exchange) as server, pytest.raises(OSError, match="refused"):
        TensorClient(HOST, server.address, token, 30)
    assert not asked


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"ELDH" + bytes(64),
        struct.pack("<4sI", b"ELDT", len(TOKEN)) + TOKEN.encode(),
        struct.pack("<IIQ", 9, 0, 1 << 50),
    ],
)
@pytest.mark.parametrize("holds_token", [False, True])
def test_what_is_no_call_ends_its_connection_alone(bytes_sent: bytes, holds_token: bool) -> None:
    with server_of(echo) as server:
        with socket.create_connection((HOST, server.port), timeout=30) as stranger:
            if holds_token:
                shake_hands(stranger, connecting(TOKEN, "tensors"))
            stranger.sendall(bytes_sent)
            with contextlib.suppress(OSError):  # it was shown out already
                stranger.shutdown(socket.SHUT_WR)
            wait_for_end(stranger)
        client = TensorClient(HOST, server.address, TOKEN, 30)
        assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
        client.close()


def test_a_thousand_idle_strangers_keep_no_client_out_and_hold_few_threads() -> None:
    with server_of(echo) as server, contextlib.ExitStack() as strangers:
        for number in range(1000):
            strangers.enter_context(socket.create_connection((HOST, server.port), timeout=30))
            if number % 250 == 0:
                client = TensorClient(HOST, str(server.port), TOKEN, 30)
                assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
                client.close()
        until(lambda: sum(thread.name == "tensor" for thread in threading.enumerate()) <= 64)
        with contextlib.closing(TensorClient(HOST, str(server.port), TOKEN, 30)) as client:
            assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "


def test_a_frame_of_nothing_but_its_prefix_is_read_to_its_end() -> None:
    sizes: list[int] = []

    def exchange(request: Arrived) -> Frame:
        sizes.append(len(request))
        return Frame(b"", [])

    with server_of(exchange) as server, member(server) as connection:
        for _ in range(2):
            connection.sendall(head(8) + bytes(8))
            assert reply_of(connection)[0] == 0
    assert sizes == [8, 8]


def test_the_deadline_of_one_call_is_not_that_of_the_next() -> None:
    with server_of(echo) as server:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        for timeout_s in (30, 7.5, 30):
            client.call("Exchange", Frame(b"", []), timeout_s)
            (connection,) = client._all
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                assert struct.unpack("@ll", connection.getsockopt(socket.SOL_SOCKET, option, 16)) == (30, 0)
        client.close()


def test_refusals_and_bugs_of_the_server_reach_the_caller_and_the_connection_continues() -> None:
    errors: list[Exception] = [CallFailed(grpc.StatusCode.DATA_LOSS, "bits"), KeyError("a bug")]

    def failing(request: Arrived) -> Frame:
        if errors:
            raise errors.pop(0)
        return echo(request)

    with server_of(failing) as server:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        for code, text in ((grpc.StatusCode.DATA_LOSS, "bits"), (grpc.StatusCode.UNKNOWN, "a bug")):
            with pytest.raises(CallFailed, match=text) as failed:
                client.call("Exchange", Frame(b"", []), 30)
            assert failed.value.code() is code
        assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
        assert len(client._all) == 1
        client.close()


def test_a_call_without_an_answer_ends_at_its_deadline() -> None:
    may_end = threading.Event()

    def late(request: Arrived) -> Frame:
        assert may_end.wait(30)
        return echo(request)

    with server_of(late) as server:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        with pytest.raises(CallFailed) as failed:
            client.call("Exchange", Frame(b"first", []), 0.05)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        may_end.set()
        assert decode(client.call("Exchange", Frame(b"second", []), 30))[0] == b"seen second"
        client.close()


@pytest.mark.parametrize("who", ["server", "client"])
def test_calls_under_way_fail_when_an_end_closes(who: str) -> None:
    began, may_end = threading.Event(), threading.Event()

    def waiting(request: Arrived) -> Frame:
        began.set()
        assert may_end.wait(30)
        return echo(request)

    with server_of(waiting) as server, ThreadPoolExecutor(1) as threads:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        call = threads.submit(client.call, "Exchange", Frame(b"", []), 30)
        assert began.wait(30)
        server.close() if who == "server" else client.close()
        with pytest.raises(CallFailed) as failed:
            call.result(30)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(CallFailed):
            client.call("Exchange", Frame(b"", []), 30)
        may_end.set()
        client.close()


def test_a_ps_whose_second_port_is_out_of_reach_is_asked_over_grpc(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        service = PsService(0, ServerState())
        service.incarnation = 10
        closed_port = str(unused.getsockname()[1])
        server, port = serve(lambda s: register_service(s, service, lambda: None, closed_port), HOST, 0, TOKEN, 8)
        partition = pb.Partition(version=1, ps=[pb.PsAddress(address=f"{HOST}:{port}", incarnation=10)])
        client = PsClient(partition, LAYOUT, TOKEN, timeout_s=20)
        client.initialize(initial_parameters(), TABLES, ADAM, 7)
        client.exchange(make_push(0), None)
        assert "over gRPC alone" in caplog.text
        with ps_cluster(1) as direct:
            direct.client.exchange(make_push(0), None)
            assert_same_model(client, direct.client)
        client.close()
        server.stop(None).wait()


def test_a_client_uses_the_direct_road_where_there_is_one() -> None:
    with ps_cluster(2) as cluster:
        pulled = cluster.client.exchange(make_push(0), whole_pull())
        assert pulled.parameters is not None
        assert len(pulled.parameters.trainable) == NUM_TRAINABLE
        assert len(pulled.parameters.non_trainable) == NUM_NON_TRAINABLE
        for connection in cluster.client._connections:
            assert isinstance(connection, PsConnection)
            assert connection._sockets is not None
