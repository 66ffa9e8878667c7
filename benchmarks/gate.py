"""The cost of a server's gate in small calls: token, deadline of the message, rules of the message.

``python -m benchmarks.gate [--quick] [--json]``: heartbeats of a worker and of a parameter server, and questions about
a lease, from one caller to a server whose handlers do nothing, so that nothing else dilutes the figures.  The peer is
the same server with an interceptor that compares the token alone.  Both run in a process of their own and are called by
turns; compared is the processor time of both ends for a call, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc import servers
from elasticdl.rpc.channels import TOKEN_KEY, connect

TOKEN = "benchmark"
LEASE = (1 << 32) + 5
CALLS: Mapping[str, tuple[str, Any]] = {
    "worker_heartbeat": (
        "Heartbeat",
        pb.HeartbeatRequest(
            role=pb.WORKER,
            id=3,
            incarnation=1 << 61,
            positions=[pb.Position(lease=LEASE, minibatch=3), pb.Position(lease=LEASE + 1)],
            activity="computing",
            seconds={"compute": 12.5, "ps": 1.5, "input": 2.0, "idle": 0.4},
            partition_version=1 << 32,
        ),
    ),
    "ps_heartbeat": (
        "Heartbeat",
        pb.HeartbeatRequest(
            role=pb.PS,
            incarnation=1,
            activity="serving",
            partition_version=1 << 32,
            load=pb.PsLoad(
                pushes=3000,
                pulls=3000,
                rows_pushed=1 << 22,
                rows_pulled=1 << 22,
                bytes_received=1 << 40,
                bytes_sent=1 << 40,
                busy_seconds=33.5,
                staleness=[1000, 500, 3, 2],
                table_rows=1 << 20,
                table_bytes=1 << 30,
            ),
        ),
    ),
    "lease_question": ("ConfirmLease", pb.LeaseQuestion(worker_id=3, incarnation=1 << 61, lease=LEASE)),
}


class Idle(pb_grpc.MasterServicer):  # type: ignore[misc]
    """Answers at once."""

    def Heartbeat(self, _request: pb.HeartbeatRequest, _context: object) -> pb.HeartbeatReply:  # noqa: N802
        return pb.HeartbeatReply(known=True, generation=1)

    def ConfirmLease(self, _request: pb.LeaseQuestion, _context: object) -> pb.Ack:  # noqa: N802
        return pb.Ack(accepted=True, generation=1)


class TokenOnly(grpc.ServerInterceptor):  # type: ignore[misc]
    """The peer's."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        for key, value in details.invocation_metadata:
            if key == TOKEN_KEY and value == self._token:
                return continuation(details)
        raise AssertionError("the benchmark has the token")


def serve_both() -> None:
    """Both servers in this process, until its standard input ends: prints their ports, then its CPU time when asked."""

    def register(server: grpc.Server) -> None:
        pb_grpc.add_MasterServicer_to_server(Idle(), server)  # type: ignore[no-untyped-call]

    gated, gated_port = servers.serve(register, "127.0.0.1", 0, TOKEN, 8)
    servers.Gate = TokenOnly  # type: ignore[attr-defined,assignment,misc]  # nothing else of the server is another
    plain, plain_port = servers.serve(register, "127.0.0.1", 0, TOKEN, 8)
    print(gated_port, plain_port, flush=True)
    for _ in sys.stdin:
        print(cpu_s(), flush=True)
    gated.stop(None)
    plain.stop(None)


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class Pair:
    """The process of both, and stubs for each."""

    running: subprocess.Popen[str]
    gated: Any
    plain: Any

    def cpu_s(self) -> float:
        """Processor time of both ends so far."""
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write("\n")
        self.running.stdin.flush()
        return cpu_s() + float(self.running.stdout.readline())

    def cost_us(self, stub: Any, call: str, count: int) -> float:
        """Processor time of a call at both ends."""
        method, message = CALLS[call]
        function = getattr(stub, method)
        before = self.cpu_s()
        for _ in range(count):
            function(message, timeout=30)
        return (self.cpu_s() - before) / count * 1e6

    def turn(self, call: str, count: int, is_gated_first: bool) -> tuple[float, float]:
        """Measure the cost with the gate and without it, one right after the other; return both."""
        if is_gated_first:
            return self.cost_us(self.gated, call, count), self.cost_us(self.plain, call, count)
        plain = self.cost_us(self.plain, call, count)
        return self.cost_us(self.gated, call, count), plain


@contextmanager
def pair() -> Iterator[Pair]:
    argv = [sys.executable, "-m", "benchmarks.gate", "--serve"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout is not None
        ports = running.stdout.readline().split()
        with connect(f"127.0.0.1:{ports[0]}", TOKEN) as gated, connect(f"127.0.0.1:{ports[1]}", TOKEN) as plain:
            yield Pair(running, pb_grpc.MasterStub(gated), pb_grpc.MasterStub(plain))  # type: ignore[no-untyped-call]
        running.terminate()


def measure(count: int, rounds: int) -> dict[str, float]:
    """Of each call: microseconds with the gate and without it, and the median ratio of adjoining turns."""
    figures: dict[str, float] = {}
    with pair() as both:
        for call in CALLS:
            for stub in (both.gated, both.plain):
                both.cost_us(stub, call, 2 * count)
            turns = [both.turn(call, count, is_gated_first=turn % 2 == 0) for turn in range(rounds)]
            figures[f"{call}_us"] = statistics.median(gated for gated, _ in turns)
            figures[f"{call}_token_only_us"] = statistics.median(plain for _, plain in turns)
            figures[f"{call}_ratio"] = statistics.median(gated / plain for gated, plain in turns)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 20 seconds; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_both()
        return
    figures = measure(100, 30 if arguments.quick else 200)
    if arguments.json:
        print(json.dumps({"benchmark": "gate", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:12,.3f}")


if __name__ == "__main__":
    main()
