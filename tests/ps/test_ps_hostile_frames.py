"""Peers that lie about sizes, stop in the middle, flood or starve a server: it serves the others, and lives."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from subprocess import PIPE

import grpc
import numpy as np
import pytest

from elasticdl.ps.tensor_sockets import CallFailed, Limits, TensorClient
from elasticdl.rpc.frames import Arrived, Frame, decode
from tests.ps.scenes import TOKEN
from tests.ps.tensor_peers import HOST, echo, head, member, reply_of, server_of, wait_for_end

NEVER = Limits(piece_s=3600.0)
SOON = Limits(piece_s=0.2)


def is_served(address: str) -> bool:
    client = TensorClient(HOST, address, TOKEN, 30)
    reply = decode(client.call("Exchange", Frame(b"", []), 30))
    client.close()
    return reply[0] == b"seen "


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_frame_larger_than_any_memory_ends_its_connection_alone(size: int) -> None:
    with server_of(echo, limits=SOON) as server, member(server) as liar:
        liar.sendall(head(size) + bytes(1000))
        wait_for_end(liar)
        assert is_served(server.address)


def test_a_frame_larger_than_the_server_takes_is_refused_with_a_reason_and_the_connection_continues() -> None:
    with server_of(echo, max_bytes=1 << 20) as server:
        client = TensorClient(HOST, server.address, TOKEN, 30)
        with pytest.raises(CallFailed, match=r"4,000,\d+ bytes is more than the 1,048,576") as failed:
            client.call("Exchange", Frame(b"", [np.zeros(1_000_000, np.float32)]), 30)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert decode(client.call("Exchange", Frame(b"", []), 30))[0] == b"seen "
        assert len(client._all) == 1
        client.close()


def test_half_sent_frames_block_no_other_client() -> None:
    with server_of(echo, max_calls=1, limits=NEVER) as server, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(member(server)).sendall(head(100_000) + bytes(50_000))
        assert is_served(server.address)


@pytest.mark.parametrize("sent", [head(100_000)[:7], head(100_000), head(100_000) + bytes(99_999)])
def test_a_peer_that_stops_in_the_middle_is_dropped_at_its_deadline_and_an_idle_one_is_not(sent: bytes) -> None:
    with server_of(echo, limits=SOON) as server, member(server) as idle, member(server) as stopped:
        stopped.sendall(sent)
        wait_for_end(stopped)
        frame = Frame(b"", []).whole()
        idle.sendall(head(len(frame)) + frame[8:] + frame[:8])
        assert reply_of(idle)[0] == 0


def test_a_peer_that_sends_byte_by_byte_is_dropped_too() -> None:
    with server_of(echo, limits=SOON) as server, member(server) as slow:
        slow.sendall(head(100_000))
        slow.settimeout(SOON.piece_s / 10)
        for _ in range(1000):
            try:
                slow.sendall(b"x")
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it is still listened to")


def test_replies_that_their_callers_do_not_fetch_hold_no_place_and_are_dropped() -> None:
    large = Frame(b"", [np.zeros(10_000_000, np.float32)])
    begun = threading.Semaphore(0)

    def exchange(request: Arrived) -> Frame:
        begun.release()
        return large if decode(request)[0] == b"large" else echo(request)

    wish = Frame(b"large", []).whole()
    with server_of(exchange, max_calls=1, limits=Limits(piece_s=1.0)) as server, ExitStack() as stack:
        stopped = [stack.enter_context(member(server)) for _ in range(3)]
        for connection in stopped:
            connection.sendall(head(len(wish)) + wish[8:] + wish[:8])
            assert begun.acquire(timeout=30)
        assert is_served(server.address)
        give_up_at = time.monotonic() + 30
        while server._connections and time.monotonic() < give_up_at:
            threading.Event().wait(0.01)
        assert not server._connections


def test_frames_beyond_the_memory_for_them_wait_until_those_before_are_dropped() -> None:
    with server_of(echo, max_bytes=3 << 20, limits=Limits(piece_s=4.0)) as server, ExitStack() as stack:
        halves = [stack.enter_context(member(server)) for _ in range(3)]
        for connection in halves:
            connection.sendall(head(1 << 20) + bytes(1000))
        while server._flow._num_bytes < 3 << 20:
            threading.Event().wait(0.001)
        client = TensorClient(HOST, server.address, TOKEN, 30)
        reply = client.call("Exchange", Frame(b"", [np.zeros(700_000, np.float32)]), 30)
        assert len(decode(reply)[1]) == 1
        assert server._flow._num_bytes <= 3 << 20
        for connection in halves:
            wait_for_end(connection)
        client.close()


def test_strangers_that_say_nothing_keep_no_member_out() -> None:
    with server_of(echo, limits=Limits(piece_s=3600.0, num_strangers=20)) as server, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((HOST, server.port), timeout=30)) for _ in range(60)]
        assert is_served(server.address)
        for connection in silent[:40]:
            wait_for_end(connection)


STARVED = """
import logging, resource, sys
from tests.ps.tensor_peers import echo, server_of

logging.basicConfig(stream=sys.stdout, format="%(message)s")
with server_of(echo) as server:
    {starve}
    print(server.address, flush=True)
    sys.stdin.read()
"""
NO_DESCRIPTORS = "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
NO_THREADS = (
    "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + (40 << 20),) * 2)"
)


@pytest.mark.parametrize(("starve", "what"), [(NO_DESCRIPTORS, "cannot accept"), (NO_THREADS, "cannot serve")])
def test_a_server_without_descriptors_or_threads_says_so_in_one_line_and_lives(starve: str, what: str) -> None:
    code = STARVED.format(starve=starve)
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        ExitStack() as strangers,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(address.split()[0])
        for _ in range(100):
            strangers.enter_context(socket.create_connection((HOST, port), timeout=30))
        line = process.stdout.readline()
        assert f"This server sheds load: {what}" in line
        strangers.close()
        assert is_served(address)
        rest, _ = process.communicate(timeout=30)
        assert (rest, process.returncode) == ("", 0)
