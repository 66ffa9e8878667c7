"""One real parameter server, `python -m elasticdl.ps`, under a master that only says yes: for benchmarks of one PS."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measured_job import ROOT, BenchmarkError
from elasticdl.master import checkpoints
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.servers import serve
from elasticdl.storage import versions
from elasticdl_client.job_spec import JobSpec

TOKEN = "the token of a benchmark"
START_S = 600.0


class _Master(pb_grpc.MasterServicer):
    def __init__(self, spec: JobSpec, restore_from: str) -> None:
        self.address = ""
        self.ready = threading.Event()
        self.error = ""
        self._spec = spec
        self._restore_from = restore_from

    def RegisterPs(self, request: pb.RegisterPsRequest, context: Any) -> pb.RegisterPsReply:  # noqa: N802
        self.address = request.address
        return pb.RegisterPsReply(
            accepted=True,
            generation=1,
            incarnation=1,
            job_spec=self._spec.to_json(),
            restore_from=self._restore_from,
        )

    def PsReady(self, request: pb.PsReadyRequest, context: Any) -> pb.Ack:  # noqa: N802
        self.error = request.error
        self.ready.set()
        return pb.Ack(accepted=True, generation=1)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        return pb.HeartbeatReply(known=True, generation=1)


@dataclass(frozen=True, slots=True)
class LonePs:
    """A running PS.

    Attributes:
        ready_s: from the start of its process until it serves.
    """

    partition: pb.Partition
    pid: int
    ready_s: float

    def memory_bytes(self) -> tuple[int, int]:
        """Resident now, and at its most."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def save(self, checkpoint_dir: Path, version: int) -> Path:
        """Write a checkpoint with its manifest."""
        directory = versions.begin(checkpoint_dir, version)
        stub = pb_grpc.ParameterServerStub(connect(self.partition.ps[0].address, TOKEN))  # type: ignore[no-untyped-call]
        request = pb.SaveCheckpointRequest(generation=1, incarnation=1, directory=str(directory), num_ps=1)
        reply = stub.SaveCheckpoint(request, timeout=START_S)
        if reply.error or reply.status != pb.OK:
            raise BenchmarkError(f"the checkpoint failed: {reply.error or pb.PsStatus.Name(reply.status)}")
        part = checkpoints.PsPart(0, reply.file, reply.size_bytes, reply.crc32, 1, ((0, 1024),))
        checkpoints.commit(directory, checkpoints.Manifest("benchmark", "", version, 0, 1, (part,)))
        return Path(str(directory))


@contextlib.contextmanager
def lone_ps(directory: Path, spec: JobSpec | None = None, restore_from: str = "") -> Iterator[LonePs]:
    """A PS until the end of the block.

    Args:
        directory: for its token and its log.
        restore_from: directory of a checkpoint.
    """
    master = _Master(spec or JobSpec(num_ps_pods=1), restore_from)
    server, port = serve(lambda it: pb_grpc.add_MasterServicer_to_server(master, it), "127.0.0.1", 0, TOKEN, 4)
    token_file = directory / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    variables = {
        "MASTER_ADDR": f"127.0.0.1:{port}",
        "PS_ID": "0",
        "ELASTICDL_TOKEN_FILE": str(token_file),
        "ELASTICDL_POD_NAME": "elasticdl-benchmark-ps-0",
    }
    began = time.monotonic()
    with (directory / "ps.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticdl.ps"], cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log
        )
    try:
        while not master.ready.wait(0.05):
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise BenchmarkError(f"the PS did not come up\n{(directory / 'ps.log').read_text()[-3000:]}")
        if master.error:
            raise BenchmarkError(f"the PS cannot restore: {master.error}")
        partition = pb.Partition(version=1)
        partition.ps.add(ps_id=0, address=master.address, incarnation=1)
        yield LonePs(partition, process.pid, time.monotonic() - began)
    finally:
        process.kill()
        process.wait()
        server.stop(None).wait()
