"""Callers without the token, and members that stop in the middle: they block no other and cost next to nothing."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import grpc
import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc import servers
from elasticdl.rpc.channels import OPTIONS, connect, token_metadata
from elasticdl.rpc.servers import serve

HOST = "127.0.0.1"
GRPC = tuple(int(part) for part in grpc.__version__.split(".")[:2])
TOKEN = "the token of this job"
METHOD = "/elasticdl.Master/ConfirmLease"
REQUEST = pb.LeaseQuestion(lease=1).SerializeToString()


class Master(pb_grpc.MasterServicer):  # type: ignore[misc]
    def ConfirmLease(self, _request: pb.LeaseQuestion, _context: Any) -> pb.Ack:  # noqa: N802
        return pb.Ack(accepted=True)


@contextmanager
def master(max_threads: int = 2) -> Iterator[int]:
    """Its port."""
    server, port = serve(lambda s: pb_grpc.add_MasterServicer_to_server(Master(), s), HOST, 0, TOKEN, max_threads)
    try:
        yield port
    finally:
        server.stop(None).wait()


def is_served(port: int) -> bool:
    with connect(f"{HOST}:{port}", TOKEN) as channel:
        stub: Any = pb_grpc.MasterStub(channel)  # type: ignore[no-untyped-call]
        return bool(stub.ConfirmLease(pb.LeaseQuestion(lease=1), timeout=30).accepted)


@contextmanager
def half_open_calls(port: int, number: int, token: str) -> Iterator[list[Any]]:
    """Calls of which nothing but the head is sent."""
    may_end = threading.Event()

    def nothing() -> Iterator[bytes]:
        may_end.wait(60)
        yield from ()

    with grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS) as channel:
        call = channel.stream_unary(METHOD)
        try:
            yield [call.future(nothing(), timeout=60, metadata=token_metadata(token)) for _ in range(number)]
        finally:
            may_end.set()


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    code: grpc.StatusCode = failed.value.code()
    return code


def test_half_open_calls_without_the_token_are_refused_at_once_and_take_no_thread_of_the_members() -> None:
    with master(max_threads=1) as port, half_open_calls(port, 100, "guessed") as calls:
        assert is_served(port)
        assert {code_of(call.result) for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}


def test_half_open_calls_of_members_end_at_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = servers.Gate
    monkeypatch.setattr(servers, "Gate", lambda token: gate(token, message_s=0.2))
    with master(max_threads=2) as port, half_open_calls(port, 2, TOKEN) as calls:
        give_up_at = time.monotonic() + 30
        with grpc.insecure_channel(f"{HOST}:{port}") as stranger:
            call = stranger.unary_unary(METHOD)
            while not all(one.done() for one in calls) and time.monotonic() < give_up_at:
                code_of(lambda: call(b"", timeout=30))  # any call finds those that are overdue
        assert {code_of(call.result) for call in calls} == {grpc.StatusCode.CANCELLED}
        assert is_served(port)


def test_a_call_without_a_message_is_refused() -> None:
    with master() as port, connect(f"{HOST}:{port}", TOKEN) as channel:
        call = channel.stream_unary(METHOD)
        metadata = token_metadata(TOKEN)
        assert code_of(lambda: call(iter(()), timeout=30, metadata=metadata)) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_method_that_does_not_exist_is_refused_to_all() -> None:
    with master() as port, connect(f"{HOST}:{port}", TOKEN) as channel:
        unknown = channel.unary_unary("/elasticdl.Master/Nothing")
        assert code_of(lambda: unknown(b"", timeout=30)) is grpc.StatusCode.UNIMPLEMENTED
        with grpc.insecure_channel(f"{HOST}:{port}") as stranger:
            unknown = stranger.unary_unary("/elasticdl.Master/Nothing")
            assert code_of(lambda: unknown(b"", timeout=30)) is grpc.StatusCode.UNAUTHENTICATED


SERVER = """
import logging, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from tests.rpc.test_strangers import master
with master() as port:
    {limit}
    print(port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def apart(limit: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The same in a process of its own."""
    command = [sys.executable, "-c", SERVER.format(limit=limit)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def peak_mib(process: subprocess.Popen[str]) -> int:
    """Return the peak memory of a process; ru_maxrss would include the memory of ours when it started that one."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def test_large_messages_are_not_read_without_the_token_nor_beyond_the_limit_with_it() -> None:
    large = bytes(200 << 20)
    with apart() as (process, port):
        with grpc.insecure_channel(f"{HOST}:{port}", options=OPTIONS) as stranger:
            call = stranger.unary_unary(METHOD)
            assert code_of(lambda: call(large, timeout=60)) is grpc.StatusCode.UNAUTHENTICATED
        assert peak_mib(process) < 200
        with connect(f"{HOST}:{port}", TOKEN) as member:
            call = member.unary_unary(METHOD)
            assert code_of(lambda: call(large, timeout=60)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert is_served(port)
        assert peak_mib(process) < (200 if GRPC >= (1, 82) else 300)  # before, gRPC reads what it then refuses
        process.communicate(timeout=60)


def test_a_server_without_descriptors_serves_the_connections_that_it_has_and_lives() -> None:
    with apart("resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))") as (process, port), ExitStack() as strangers:
        with connect(f"{HOST}:{port}", TOKEN) as member:
            call = member.unary_unary(METHOD)
            assert pb.Ack.FromString(call(REQUEST, timeout=30)).accepted
            for _ in range(100):
                strangers.enter_context(socket.create_connection((HOST, port), timeout=30))
            for _ in range(20):
                assert pb.Ack.FromString(call(REQUEST, timeout=30)).accepted
        strangers.close()
        assert is_served(port)
        out, _ = process.communicate(timeout=60)
    assert "Traceback" not in out
    assert process.returncode == 0


def test_a_server_that_gets_no_more_threads_says_so_in_one_line_and_works_with_those_it_has() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096,) * 2)"
    code = (
        "import logging, resource, sys, threading\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "from elasticdl.rpc.servers import ServerThreads\n"
        f"threads = ServerThreads(50)\n{limit}\n"
        "begun = threading.Event()\n"
        "calls = [threads.submit(begun.wait, 30)] + [threads.submit(int) for _ in range(100)]\n"
        "begun.set()\n"
        "print(sum(call.result() for call in calls))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *complaint, last = done.stdout.splitlines()
    assert last == "1"
    assert len(complaint) == 1
    assert "sheds load" in complaint[0]
    assert "Traceback" not in done.stderr


def test_a_flood_of_refusals_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with master() as port, caplog.at_level(logging.INFO), grpc.insecure_channel(f"{HOST}:{port}") as stranger:
        call = stranger.unary_unary(METHOD)
        futures = [call.future(REQUEST, timeout=30) for _ in range(200)]
        assert {code_of(future.result) for future in futures} == {grpc.StatusCode.UNAUTHENTICATED}
        assert is_served(port)
    assert not [record for record in caplog.records if record.exc_info]
