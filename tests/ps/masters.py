"""A master of the tests: it does for one PS what the real one does, and waits for events instead of sleeping."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.servers import serve
from elasticdl_client.job_spec import JobSpec
from tests.ps.scenes import TOKEN

REPOSITORY = Path(__file__).resolve().parents[2]


class OnePsMaster(pb_grpc.MasterServicer):
    """Gives incarnations by nonce; everything it is told can be waited for."""

    def __init__(self, restore_from: str = "", generation: int = 1, incarnation: int = 0) -> None:
        self.restore_from = restore_from
        self.generation = generation
        self.incarnation = incarnation
        self.stop = False
        self.registrations: list[pb.RegisterPsRequest] = []
        self.readies: list[pb.PsReadyRequest] = []
        self.beats = 0
        self.farewells = 0  # heartbeats of a PS that was told to end
        self._nonce = 0
        self._changed = threading.Condition()

    def RegisterPs(self, request: pb.RegisterPsRequest, context: Any) -> pb.RegisterPsReply:  # noqa: N802
        with self._changed:
            if request.nonce != self._nonce and not request.held_incarnation:
                self.incarnation += 1
            accepted = request.held_incarnation in (0, self.incarnation)
            self._nonce = request.nonce
            self.registrations.append(request)
            self._changed.notify_all()
        return pb.RegisterPsReply(
            accepted=accepted,
            reason="" if accepted else "replaced",
            generation=self.generation,
            incarnation=self.incarnation,
            job_spec=JobSpec(num_ps_pods=1).to_json(),
            restore_from=self.restore_from,
        )

    def PsReady(self, request: pb.PsReadyRequest, context: Any) -> pb.Ack:  # noqa: N802
        with self._changed:
            self.readies.append(request)
            self._changed.notify_all()
        return pb.Ack(accepted=request.incarnation == self.incarnation, generation=self.generation)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        with self._changed:
            self.beats += 1
            self._changed.notify_all()
            known = self._nonce != 0 and request.incarnation == self.incarnation
            self.farewells += request.leaving
            return pb.HeartbeatReply(known=known, generation=self.generation, stop=self.stop)

    def wait(self, happened: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(happened, timeout=30), "the PS did not do it"

    def partition(self) -> pb.Partition:
        partition = pb.Partition(version=self.incarnation)
        partition.ps.add(ps_id=0, address=self.registrations[-1].address, incarnation=self.incarnation)
        return partition


@contextmanager
def serving(master: OnePsMaster, port: int = 0) -> Iterator[int]:
    """The master at a port, until the end of the block."""

    def register(server: grpc.Server) -> None:
        pb_grpc.add_MasterServicer_to_server(master, server)

    server, bound = serve(register, "127.0.0.1", port, TOKEN, 8)
    try:
        yield bound
    finally:
        server.stop(None).wait()


def start_ps(port: int, directory: Path, **environment: str) -> subprocess.Popen[str]:
    """``python -m elasticdl.ps`` for a master at a port."""
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    return subprocess.Popen(
        [sys.executable, "-m", "elasticdl.ps"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "MASTER_ADDR": f"127.0.0.1:{port}",
            "PS_ID": "0",
            "ELASTICDL_TOKEN_FILE": str(token_file),
            "ELASTICDL_POD_NAME": "elasticdl-test-ps-0",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
