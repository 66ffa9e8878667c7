"""The data path between a worker and a parameter server, without a model, against plain TCP of the same bytes.

``python -m benchmarks.wire [--quick] [--json] [--wire_dtype=float32]``: one client, one PS in a process of its own, a
table of a million rows × 16 under Adagrad.  Rows: pulls, and push + pull in one call, of 512 and 4,096 samples × 10
ids, uniform; making ids unique, summing and gathering count.  Bulk: dense values of 16 MB pulled, and pushed + pulled.
The peer is a Python socket on the loopback interface that sends and gets as many bytes, by turns with ours, which go by
the Unix socket that a worker on the server's machine takes.  Encrypted: the same by TCP, as from another machine, in
clear and encrypted, by turns.  Control: small calls over gRPC, in clear and by TLS.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from elasticdl.frameworks.framework import Ids, ModelReport, Parameters, Table, Variable
from elasticdl.ps.client import PsClient, Pull, Push
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl_client.certificates import make_certificate

TOKEN = "benchmark"
INCARNATION = 1
NUM_ROWS = 1_000_000
DIM = 16
IDS_PER_SAMPLE = 10
BULK_FLOATS = 4_000_000
OPTIMIZER = json.dumps({"class_name": "Adagrad", "config": {"learning_rate": 0.01}})
UNIFORM = json.dumps({"class_name": "RandomUniform", "config": {"minval": -0.05, "maxval": 0.05, "seed": None}})
TABLE = Table("rows", DIM, UNIFORM)
ROWS = ModelReport((), (TABLE,), OPTIMIZER, ())
BULK = ModelReport((Variable("w", (BULK_FLOATS,), True),), (), OPTIMIZER, ())
EMPTY = np.zeros(0, np.float32)
SIZES = struct.Struct("<qq")  # of request and reply


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that is measured: one step of ours, and the bytes that it sends and gets."""

    step: Callable[[int], object]
    sent: int
    received: int


def serve_ps(by_tcp: bool = False, encrypts: bool = False) -> None:
    """A PS in this process, until its standard input ends; prints its port.

    Args:
        by_tcp: its Unix socket is not told.
    """
    from elasticdl.ps.server.service import PsService, register_service, serve_tensors
    from elasticdl.ps.server.state import ServerState
    from elasticdl.rpc.servers import serve

    keep_large_buffers()
    service = PsService(0, ServerState())
    service.incarnation = INCARNATION
    service.accept_lease(1 << 32)  # of the first generation of a master
    tensors = serve_tensors(service, "127.0.0.1", TOKEN, lambda: None, encrypts)
    address = str(tensors.port) if by_tcp else tensors.address

    def register(grpc_server: grpc.Server) -> None:
        register_service(grpc_server, service, lambda: None, address)

    server, port = serve(register, "127.0.0.1", 0, TOKEN, 64)
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


def serve_tcp() -> None:
    """Answer each request, of a fixed size, with a fixed number of bytes; print the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sizes = bytearray(SIZES.size)
            while receive(connection, memoryview(sizes)):
                request_bytes, reply_bytes = SIZES.unpack(sizes)
                request, reply = bytearray(request_bytes), bytes(reply_bytes)
                while receive(connection, memoryview(request)) and request[0] == 0:
                    connection.sendall(reply)


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill `into`; return False if the other end has closed."""
    place = 0
    while place < len(into):
        count = connection.recv_into(into[place:])
        if count == 0:
            return False
        place += count
    return True


@contextmanager
def process(role: str, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """This module in another process, with more variables; its port."""
    argv = [sys.executable, "-m", "benchmarks.wire", f"--serve={role}"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    ) as running:
        assert running.stdout is not None
        try:
            yield int(running.stdout.readline())
        finally:
            running.terminate()


@contextmanager
def client(layout: ModelReport, wire_dtype: str, role: str = "ps") -> Iterator[PsClient]:
    """A client of a PS of its own that holds the model."""
    with process(role) as port:
        partition = pb.Partition(version=1)
        partition.ps.add(ps_id=0, address=f"127.0.0.1:{port}", incarnation=INCARNATION)
        made = PsClient(partition, layout, TOKEN, wire_dtype=wire_dtype, encrypts=role == "encrypted")
        size = sum(int(np.prod(variable.shape)) for variable in layout.variables)
        made.initialize(Parameters(np.zeros(size, np.float32), EMPTY), layout.tables, OPTIMIZER, 1)
        yield made
        made.close()


class Tcp:
    """The peer: one connection, request and reply."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def measure(self, exchange: Exchange, seconds: float) -> float:
        """Steps per second."""
        self._connection.sendall(SIZES.pack(exchange.sent, exchange.received))
        request, reply = bytearray(exchange.sent), memoryview(bytearray(exchange.received))

        def step(_: int) -> None:
            self._connection.sendall(request)
            receive(self._connection, reply)

        rate = rate_of(step, seconds)
        request[0] = 1  # the last one
        self._connection.sendall(request)
        return rate


def rate_of(step: Callable[[int], object], seconds: float) -> float:
    """Steps per second after a warm-up."""
    for n in range(3):
        step(n)
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        step(count)
        count += 1
    return count / elapsed


def float_bytes(wire_dtype: str) -> int:
    return 4 if wire_dtype == "float32" else 2


def row_exchanges(ps: PsClient, samples: int, wire_dtype: str) -> dict[str, Exchange]:
    """Of minibatches of `samples`: pull, and push + pull."""
    random = np.random.default_rng(samples)
    size = samples * IDS_PER_SAMPLE
    batches: list[Ids] = [random.integers(0, NUM_ROWS, size).astype(np.int64) for _ in range(50)]
    gradients = random.standard_normal((size, DIM)).astype(np.float32)
    num_unique = int(statistics.mean(len(np.unique(ids)) for ids in batches))
    minibatch = iter(range(1 << 62))

    def copy_of(n: int) -> Ids:  # as in a job, where no array comes twice but in the push after its pull
        return batches[n % len(batches)].copy()

    def pull(n: int) -> None:
        ps.exchange(None, Pull(dense=False, ids={TABLE.name: copy_of(n)}))

    latest = [copy_of(0)]

    def push_pull(n: int) -> None:
        pushed, latest[0] = latest[0], copy_of(n + 1)
        push = Push(1, 0, 0, next(minibatch), EMPTY, EMPTY, {TABLE.name: (pushed, gradients)})
        ps.exchange(push, Pull(dense=False, ids={TABLE.name: latest[0]}))

    ids_bytes, row_bytes = 8 * num_unique, float_bytes(wire_dtype) * DIM * num_unique
    return {
        "pull": Exchange(pull, ids_bytes, row_bytes),
        "push_pull": Exchange(push_pull, 2 * ids_bytes + row_bytes, row_bytes),
    }


def bulk_exchanges(ps: PsClient, wire_dtype: str) -> dict[str, Exchange]:
    """Of 16 MB of dense values."""
    gradient = np.zeros(BULK_FLOATS, np.float32)
    size = float_bytes(wire_dtype) * BULK_FLOATS
    minibatch = iter(range(1 << 62))

    def push_pull(_: int) -> None:
        ps.exchange(Push(1, 0, 0, next(minibatch), gradient, EMPTY), Pull(dense=True))

    return {
        "pull": Exchange(lambda _: ps.exchange(None, Pull(dense=True)), 64, size),
        "push_pull": Exchange(push_pull, size, size),
    }


@contextmanager
def control_call(directory: Path | None) -> Iterator[Callable[[int], object]]:
    """A small call to a PS of its own; by TLS, where there is a directory for the secret of its job."""
    secret: dict[str, str] = {}
    if directory is not None:
        secret = {TOKEN_FILE_VARIABLE: str(directory / "token")}
        for name, text in make_certificate().items():
            (directory / name).write_text(text)
    with process("ps", secret) as port:
        os.environ.update(secret)
        channel = connect(f"127.0.0.1:{port}", TOKEN)
        for name in secret:
            del os.environ[name]
        stub = pb_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]
        question = pb.PsQuestion(generation=1, incarnation=INCARNATION)
        with channel:
            yield lambda _: stub.ReadAppliedSet(question, timeout=30)


def measure_control(seconds: float, rounds: int) -> dict[str, float]:
    """Return calls per second of one caller, without and with TLS."""
    with tempfile.TemporaryDirectory() as directory, control_call(None) as clear, control_call(Path(directory)) as tls:
        turns = [(rate_of(clear, seconds), rate_of(tls, seconds)) for _ in range(rounds)]
    return {
        "control_calls_per_s": statistics.median(turn[0] for turn in turns),
        "control_tls_calls_per_s": statistics.median(turn[1] for turn in turns),
        "control_ratio_of_tls": statistics.median(turn[1] / turn[0] for turn in turns),
    }


def fill(ps: PsClient) -> None:
    """Create all rows."""
    for ids in np.array_split(np.arange(NUM_ROWS, dtype=np.int64), 50):
        ps.exchange(None, Pull(dense=False, ids={TABLE.name: ids}))


def exchanges(rows: PsClient, bulk: PsClient, wire_dtype: str) -> dict[str, tuple[Exchange, int]]:
    """All that is measured, and the samples of each; 0: dense values."""
    found = {
        f"{name}_{samples}": (exchange, samples)
        for samples in (512, 4096)
        for name, exchange in row_exchanges(rows, samples, wire_dtype).items()
    }
    return found | {f"{name}_bulk": (exchange, 0) for name, exchange in bulk_exchanges(bulk, wire_dtype).items()}


def measure_encryption(seconds: float, rounds: int, wire_dtype: str) -> dict[str, float]:
    """Medians of several turns: steps per second by TCP, without and with encryption."""
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        kinds = []
        for role in ("tcp_ps", "encrypted"):
            rows, bulk = (stack.enter_context(client(layout, wire_dtype, role)) for layout in (ROWS, BULK))
            fill(rows)
            kinds.append(exchanges(rows, bulk, wire_dtype))
        for name in kinds[0]:
            turns = [[rate_of(kind[name][0].step, seconds) for kind in kinds] for _ in range(rounds)]
            figures[f"{name}_tcp_steps_per_s"] = statistics.median(turn[0] for turn in turns)
            figures[f"{name}_encrypted_speed"] = statistics.median(turn[1] / turn[0] for turn in turns)
    return figures


def measure(seconds: float, rounds: int, wire_dtype: str) -> dict[str, float]:
    """Medians of several turns: steps per second, GB/s both ways together, ratio to TCP."""
    figures: dict[str, float] = {}
    with process("tcp") as port, client(ROWS, wire_dtype) as rows, client(BULK, wire_dtype) as bulk:
        tcp = Tcp(port)
        fill(rows)
        for name, (exchange, samples) in exchanges(rows, bulk, wire_dtype).items():
            turns = [(rate_of(exchange.step, seconds), tcp.measure(exchange, seconds)) for _ in range(rounds)]
            ours = statistics.median(turn[0] for turn in turns)
            size = exchange.sent + exchange.received
            figures[f"{name}_steps_per_s"] = ours
            if samples:
                figures[f"{name}_samples_per_s"] = ours * samples
            figures[f"{name}_gb_per_s"] = ours * size / 1e9
            figures[f"{name}_tcp_gb_per_s"] = statistics.median(turn[1] for turn in turns) * size / 1e9
            figures[f"{name}_ratio_to_tcp"] = statistics.median(turn[0] / turn[1] for turn in turns)
    return figures


ROLES: Mapping[str, Callable[[], None]] = {
    "ps": serve_ps,
    "tcp_ps": partial(serve_ps, by_tcp=True),
    "encrypted": partial(serve_ps, by_tcp=True, encrypts=True),
    "tcp": serve_tcp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 20 seconds; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--wire_dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--serve", choices=list(ROLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        ROLES[arguments.serve]()
        return
    keep_large_buffers()
    seconds, rounds = (0.5, 3) if arguments.quick else (2.0, 5)
    figures = measure(seconds, rounds, arguments.wire_dtype)
    figures |= measure_encryption(seconds, rounds, arguments.wire_dtype)
    figures |= measure_control(seconds, rounds)
    if arguments.json:
        described = {"benchmark": "wire", "quick": arguments.quick, "wire_dtype": arguments.wire_dtype}
        print(json.dumps({**described, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:14,.2f}")


if __name__ == "__main__":
    main()
