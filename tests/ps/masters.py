"""A master of the tests: it does for one PS what the real one does, and waits for events instead of sleeping."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from elasticdl.master import checkpoints
from elasticdl.master.checkpoints import Manifest, PsPart
from elasticdl.ps.client import PsClient
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.servers import serve
from elasticdl_client.job_spec import JobSpec
from tests.ps.scenes import LAYOUT, TOKEN

REPOSITORY = Path(__file__).resolve().parents[2]
_RARELY = """
import sys
from elasticdl.ps.server import master_link
from elasticdl.ps.server import process
master_link._HEARTBEAT_S = 3600.0
sys.exit(process.main())
"""


class OnePsMaster(pb_grpc.MasterServicer):
    """Gives incarnations by nonce; everything it is told can be waited for."""

    def __init__(self, checkpoint_dir: Path | str = "", generation: int = 1, incarnation: int = 0) -> None:
        self.restore_from = ""
        self.parameters_only = False
        self.spec = JobSpec(num_ps_pods=1, checkpoint_dir=str(checkpoint_dir))
        self.num_pushing = 0
        self.generation = generation
        self.incarnation = incarnation
        self.stop = False
        self.registrations: list[pb.RegisterPsRequest] = []
        self.readies: list[pb.PsReadyRequest] = []
        self.beats = 0
        self.heard = pb.HeartbeatRequest()  # the newest heartbeat
        self.is_partition_told = False
        self.farewells = 0  # heartbeats of a PS that was asked to end
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
            job_spec=self.spec.to_json(),
            restore_from=self.restore_from,
            parameters_only=self.parameters_only,
        )

    def PsReady(self, request: pb.PsReadyRequest, context: Any) -> pb.Ack:  # noqa: N802
        with self._changed:
            self.readies.append(request)
            self._changed.notify_all()
            return pb.Ack(accepted=request.incarnation == self.incarnation, generation=self.generation)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        with self._changed:
            self.beats += 1
            self.heard = request
            self._changed.notify_all()
            known = self._nonce != 0 and request.incarnation == self.incarnation
            self.farewells += request.leaving
            return pb.HeartbeatReply(
                known=known,
                generation=self.generation,
                stop=self.stop,
                num_pushing=self.num_pushing,
                partition=self.partition() if self.is_partition_told else None,
            )

    def wait(self, happened: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(happened, timeout=90), "the PS did not do it"

    def partition(self) -> pb.Partition:
        partition = pb.Partition(version=self.incarnation)
        partition.ps.add(ps_id=0, address=self.registrations[-1].address, incarnation=self.incarnation)
        return partition


@contextmanager
def serving(master: OnePsMaster, port: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
    """The master at a port, until the end of the block."""

    def register(server: grpc.Server) -> None:
        pb_grpc.add_MasterServicer_to_server(master, server)

    server, bound = serve(register, host, port, TOKEN, 8)
    try:
        yield bound
    finally:
        server.stop(None).wait()


def start_ps(port: int, directory: Path, beats_rarely: bool = False, **environment: str) -> subprocess.Popen[str]:
    """``python -m elasticdl.ps`` for a master at a port.

    Args:
        beats_rarely: heartbeats come when there is something to tell, and otherwise not within a test.
    """
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    return subprocess.Popen(
        [sys.executable, *(["-c", _RARELY] if beats_rarely else ["-m", "elasticdl.ps"])],
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


def start(
    stack: ExitStack, port: int, directory: Path, beats_rarely: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """The same, killed at the end of the stack."""
    process = start_ps(port, directory, beats_rarely, **environment)

    def end() -> None:
        with process:
            process.kill()

    stack.callback(end)
    return process


def connected(stack: ExitStack, master: OnePsMaster) -> PsClient:
    """A client of the PS that has registered last."""
    client = PsClient(master.partition(), LAYOUT, TOKEN)
    stack.callback(client.close)
    return client


def save(master: OnePsMaster, directory: Path) -> pb.SaveCheckpointReply:
    """A checkpoint of the one PS in a new directory, committed if it could be written."""
    directory.mkdir()
    return save_into(master, directory)


def save_into(master: OnePsMaster, directory: Path) -> pb.SaveCheckpointReply:
    with connect(master.registrations[-1].address, TOKEN) as channel:
        request = pb.SaveCheckpointRequest(
            generation=master.generation, incarnation=master.incarnation, directory=str(directory), num_ps=1
        )
        reply: pb.SaveCheckpointReply = pb_grpc.ParameterServerStub(channel).SaveCheckpoint(request, timeout=20)
    if not reply.error:
        part = PsPart(0, reply.file, reply.size_bytes, reply.crc32, master.incarnation, ((0, 1024),))
        checkpoints.commit(directory, Manifest("digits", "f", 1, 7, 1, (part,)))
    return reply
