"""A job directory, its master as a subprocess, and scripted workers and parameter servers that speak the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.rpc.servers import serve
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from tests.master.directory_cluster import DirectoryCluster
from tests.master.life import TOKEN

REPOSITORY = Path(__file__).resolve().parents[2]
_CALL_S = 20.0  # the master answers within 10, also where it cannot write its journal
_MODULE = """
def custom_model(): ...
def loss(labels, predictions): ...
def optimizer(): ...
def feed(dataset, mode, metadata): ...
"""


def held_port() -> socket.socket:
    """A socket bound to a port that no other process is given while it is open; it can listen on this very port."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited for {what}"
        pause.wait(0.02)
    return value


def applied_set(model: dict[tuple[int, int], set[int]]) -> pb.AppliedSet:
    tasks = [pb.AppliedTask(epoch=epoch, task=task, extras=sorted(done)) for (epoch, task), done in model.items()]
    return pb.AppliedSet(tasks=tasks, num_applies=sum(map(len, model.values())))


class MasterJob:
    """A job of 4 tasks of 2 minibatches of 8 records an epoch, and the lives of its master."""

    def __init__(self, directory: Path, num_records: int = 64, **flags: object) -> None:
        self.path = directory / "job"
        self.path.mkdir()
        zoo, data = directory / "zoo", directory / "data"
        zoo.mkdir()
        data.mkdir()
        (zoo / "digits.py").write_text(_MODULE)
        (data / "a.csv").write_text("x,y\n" + "1,2\n" * num_records)
        self.data = data
        given: dict[str, object] = {
            "job_name": "digits",
            "runtime": "local",
            "model_zoo": str(zoo),
            "model_def": "digits.custom_model",
            "training_data": str(data),
            "minibatch_size": 8,
            "num_minibatches_per_task": 2,
            "num_workers": 1,
            "checkpoint_dir": str(directory / "checkpoints"),
            **flags,
        }
        (self.path / "spec.json").write_text(JobSpec.from_flags("train", given).to_json())
        self._held = held_port()
        self.port = int(self._held.getsockname()[1])
        self.cluster = DirectoryCluster(self.path / "pods")
        self.process: subprocess.Popen[str] | None = None
        self._servers: list[ScriptedPs] = []

    def start(self) -> MasterJob:
        log = (self.path / "master.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.master.life", str(self.path), str(self.port)],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for ps in self._servers:
            ps.server.stop(None).wait()
        self.cluster.close()
        self._held.close()

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the master did not end\n{self.log()}") from None

    def log(self) -> str:
        """Without the flags at its beginning."""
        lines = (self.path / "master.log").read_text().splitlines()
        return "\n".join(line for line in lines if " INFO   --" not in line)

    def status(self) -> JobStatus:
        return JobStatus.from_json((self.path / "status.json").read_text())

    def journal(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = json.loads((self.path / "journal.json").read_bytes())["snapshot"]
        return snapshot

    def stub(self, token: str = TOKEN) -> pb_grpc.MasterStub:
        return pb_grpc.MasterStub(connect(f"127.0.0.1:{self.port}", token))

    def worker(self, worker_id: int = 0) -> ScriptedWorker:
        wait_until(lambda: self._has_pod(f"worker-{worker_id}"), f"worker {worker_id}\n{self._tail()}")
        return ScriptedWorker(self, worker_id)

    def ready_worker(self, worker_id: int = 0) -> ScriptedWorker:
        """A worker that has registered and reported its model."""
        worker = self.worker(worker_id)
        worker.register()
        worker.report_model()
        return worker

    def ps(self, ps_id: int = 0) -> ScriptedPs:
        wait_until(lambda: self._has_pod(f"ps-{ps_id}"), f"PS {ps_id}\n{self._tail()}")
        self._servers.append(ScriptedPs(self, ps_id))
        return self._servers[-1]

    def _has_pod(self, role: str) -> bool:
        return any(pod.name == f"elasticdl-digits-{role}" for pod in self.cluster.list())

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-20:])


def repeated(call: Callable[[float], Any], timeout_s: float = _CALL_S) -> Any:
    """The answer to a call with a time limit in seconds, which is made again while the master is down."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return call(timeout_s)
        except grpc.RpcError as error:
            is_away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # streams
            if not is_away or time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)


class ScriptedWorker:
    """Does what a test tells it to, over the wire."""

    def __init__(self, job: MasterJob, worker_id: int) -> None:
        self.job = job
        self.id = worker_id
        self.incarnation = random.getrandbits(40)
        self.stub = job.stub()
        self.generation = 0
        self.model: dict[tuple[int, int], set[int]] = {}  # Local strategy: its content

    def call(self, method: str, request: Any, timeout_s: float = _CALL_S) -> Any:
        return repeated(lambda limit_s: getattr(self.stub, method)(request, timeout=limit_s), timeout_s)

    def register(self, held: tuple[tuple[pb.Lease, tuple[int, ...]], ...] = ()) -> pb.RegisterWorkerReply:
        request = pb.RegisterWorkerRequest(
            worker_id=self.id,
            incarnation=self.incarnation,
            held=[pb.HeldLease(lease=lease, committed=committed) for lease, committed in held],
            applied=applied_set(self.model),
        )
        reply = self.call("RegisterWorker", request)
        self.generation = reply.generation
        return reply

    def report_model(self, **fields: Any) -> pb.Ack:
        variables = [pb.Variable(name="kernel", shape=[2, 3], trainable=True)]
        report = pb.ModelReport(worker_id=self.id, incarnation=self.incarnation, variables=variables, **fields)
        return self.call("ReportModel", report)

    def request_lease(self, timeout_s: float = 5.0) -> pb.LeaseReply:
        request = pb.LeaseRequest(worker_id=self.id, incarnation=self.incarnation)
        try:
            return self.call("RequestLease", request, timeout_s)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return pb.LeaseReply(wait=True)  # its answer came too late: the master takes a lease in it back

    def lease(self) -> pb.Lease:
        """The next task, however many waits it takes."""
        for _ in range(10):
            reply = self.request_lease()
            if reply.HasField("lease"):
                return reply.lease
            assert reply.WhichOneof("answer") == "wait", reply
        raise AssertionError(f"no lease\n{self.job.log()}")

    def progress(self, lease: pb.Lease, *committed: int) -> pb.Ack:
        self.model.setdefault((lease.epoch, lease.task), set()).update(committed)
        report = pb.ProgressReport(
            worker_id=self.id,
            incarnation=self.incarnation,
            lease=lease.id,
            committed=committed,
            loss=0.5,
            has_loss=True,
        )
        return self.report(pb.TaskReport(progress=report))

    def finish(self, lease: pb.Lease) -> pb.Ack:
        task = pb.FinishedTask(worker_id=self.id, incarnation=self.incarnation, lease=lease.id, num_minibatches=2)
        return self.report(pb.TaskReport(finished=task))

    def report(self, report: pb.TaskReport) -> pb.Ack:
        message = pb.WorkerMessage(reports=[report])
        answer: pb.MasterMessage = repeated(
            lambda timeout_s: next(self.stub.Exchange(iter((message,)), timeout=timeout_s))
        )
        return answer.acks[0]

    def train_all(self, on_minibatch: Callable[[pb.Lease, int], None] = lambda lease, n: None) -> int:
        """Trains until the master says that the job is over; how many tasks."""
        done = 0
        while True:
            reply = self.request_lease()
            match reply.WhichOneof("answer"):
                case "lease":
                    for n in range(2):
                        on_minibatch(reply.lease, n)
                    assert self.progress(reply.lease, 0, 1).accepted
                    assert self.finish(reply.lease).accepted
                    done += reply.lease.type != pb.TRAIN_END
                case "end":
                    self.leave()
                    return done
                case "unknown":
                    self.register()

    def leave(self) -> None:
        """The pod is gone."""
        self.job.cluster.delete(f"elasticdl-digits-worker-{self.id}")


# An index without a byte, whose checksum is 0.
END_OF_PART = struct.pack("<QII8s", 0, 0, 2, b"ELDLPS02")


class ScriptedPs(pb_grpc.ParameterServerServicer):
    """A PS without parameters: an applied set, and parts of checkpoints."""

    def __init__(self, job: MasterJob, ps_id: int) -> None:
        self.job = job
        self.id = ps_id
        self.nonce = random.getrandbits(40)
        self.incarnation = 0
        self.part = bytes(1000)
        self.applied: dict[tuple[int, int], set[int]] = {}

        def register(server: grpc.Server) -> None:
            pb_grpc.add_ParameterServerServicer_to_server(self, server)

        self.server, self.port = serve(register, "127.0.0.1", 0, TOKEN, 4)

    def join(self) -> pb.RegisterPsReply:
        request = pb.RegisterPsRequest(
            ps_id=self.id, address=f"127.0.0.1:{self.port}", nonce=self.nonce, held_incarnation=self.incarnation
        )
        reply = ScriptedWorker.call(self, "RegisterPs", request)  # type: ignore[arg-type]
        assert reply.accepted, reply
        self.incarnation = reply.incarnation
        ready = pb.PsReadyRequest(ps_id=self.id, incarnation=self.incarnation, initialized=True)
        assert ScriptedWorker.call(self, "PsReady", ready).accepted  # type: ignore[arg-type]
        return reply

    @property
    def stub(self) -> pb_grpc.MasterStub:
        return self.job.stub()

    def apply(self, lease: pb.Lease, n: int) -> None:
        self.applied.setdefault((lease.epoch, lease.task), set()).add(n)

    def leave(self) -> None:
        """The pod is gone, as when the job is over."""
        self.job.cluster.delete(f"elasticdl-digits-ps-{self.id}")

    def _set(self) -> pb.AppliedSet:
        return applied_set(self.applied)

    def ReadAppliedSet(self, request: pb.PsQuestion, context: grpc.ServicerContext) -> pb.AppliedSetReply:  # noqa: N802
        return pb.AppliedSetReply(status=pb.OK, applied=self._set(), initialized=True)

    def SaveCheckpoint(  # noqa: N802
        self, request: pb.SaveCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.SaveCheckpointReply:
        path = Path(request.directory) / f"ps-{self.id}"
        try:
            path.write_bytes(part := self.part + END_OF_PART)
        except OSError as error:
            return pb.SaveCheckpointReply(status=pb.OK, error=f"{path}: {error.strerror}")
        return pb.SaveCheckpointReply(status=pb.OK, file=path.name, size_bytes=len(part), crc32=0)


@contextlib.contextmanager
def running(job: MasterJob) -> Iterator[MasterJob]:
    """The first life of the master; processes that still run at the end are killed."""
    try:
        yield job.start()
    finally:
        job.end()


def is_root() -> bool:
    return os.geteuid() == 0
