"""``python -m benchmarks.master_clients PORT FIRST END STEP_S COMMITTED``: workers of benchmarks/master.py.

Each has a connection of its own, registers, and sends heartbeats as a real one; on a command it takes tasks,
always asking for the next one while it has one, with the messages that it sends anyway, notes a minibatch every STEP_S
seconds in the file COMMITTED, 16 bits for each task, which stands for the model, and then reports it, with others if
the master wants fewer reports.  Commands are lines of standard input, each answered with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import OPTIONS, is_transient, token_metadata
from elasticdl.rpc.job_secret import read_certificate, read_token
from elasticdl_client.kubernetes.names import TLS_NAME

TIMEOUT_S = 10.0
LONG_POLL_S = 20.0
RETRY_S = 0.3
STREAM_S = 3600.0
MOST_HELD = 2  # leases of a worker without input processes
VARIABLES = (pb.Variable(name="kernel", shape=[2, 3], trainable=True),)


@dataclass(slots=True)
class Tally:
    """The calls since it was read last."""

    calls: Counter[str] = field(default_factory=Counter)
    lease_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    num_reports: int = 0  # messages with minibatches
    num_reported: int = 0  # minibatches

    def read(self) -> dict[str, Any]:
        found = {
            "calls": dict(self.calls),
            "lease_s": self.lease_s,
            "call_s": self.call_s,
            "num_reports": self.num_reports,
            "num_reported": self.num_reported,
        }
        self.calls, self.lease_s, self.call_s, self.num_reports, self.num_reported = Counter(), [], [], 0, 0
        return found


class AioWorker:
    """One worker: the calls of `MasterLink`, without threads."""

    def __init__(self, address: str, worker_id: int, step_s: float, committed: int, tally: Tally) -> None:
        certificate = read_certificate()
        assert certificate is not None
        credentials = grpc.ssl_channel_credentials(certificate.authority, certificate.key, certificate.certificate)
        options = (*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
        self._stub: Any = pb_grpc.MasterStub(grpc.aio.secure_channel(address, credentials, options))  # type: ignore[no-untyped-call]
        self._token = token_metadata(read_token())
        self._id, self._incarnation = worker_id, random.getrandbits(60)
        self._step_s = step_s
        self._stream: Any = None
        self._turn = asyncio.Lock()  # of one heartbeat or report
        self._committed = committed
        self._tally = tally
        self._registration = asyncio.Lock()
        self._held: dict[int, list[int]] = {}  # by lease: the minibatches that are done
        self._drawn: asyncio.Queue[pb.Lease] = asyncio.Queue()
        self._wants_lease = False  # each message asks for one
        self._may_ask = asyncio.Event()  # a lease has come, or one has ended without another
        self._leases: dict[int, pb.Lease] = {}
        self._ended_at = 0.0  # its newest task; it may have one lease more when the master knows of the end
        self._told_at = 0.0  # of progress
        self._heartbeat_s, self._report_s = 1.0, 0.1
        self._beaten_at = time.perf_counter() - random.random() * self._heartbeat_s
        self._seconds = {"compute": 0.0, "ps": 0.0, "input": 0.0, "idle": 0.0}
        self.generation = 0
        self.may_train = asyncio.Event()

    async def live(self) -> None:
        """Run until the process ends."""
        await self.register()
        await asyncio.gather(self._beat(), self._draw(), self._train())

    async def register(self) -> None:
        known = self.generation
        async with self._registration:
            if self.generation > known:
                return
            held = [pb.HeldLease(lease=self._leases[one], committed=done) for one, done in self._held.items()]
            request = pb.RegisterWorkerRequest(worker_id=self._id, incarnation=self._incarnation, held=held)
            reply = await self._call("RegisterWorker", request)
            if not reply.accepted:
                raise SystemExit(f"worker {self._id} is not accepted: {reply.reason}")
            report = pb.ModelReport(worker_id=self._id, incarnation=self._incarnation, variables=VARIABLES)
            if not self.generation:
                await self._call("ReportModel", report)
            self.generation = reply.generation

    async def _call(self, method: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Repeated while the master is away."""
        is_away = False
        while True:
            try:
                began = time.perf_counter()
                if method == "Exchange":
                    reply = await self._send(request, is_away)
                else:
                    function = getattr(self._stub, method)
                    reply = await function(request, timeout=timeout_s, metadata=self._token, wait_for_ready=is_away)
            except grpc.aio.AioRpcError as error:
                # A write to a stream that ends at this moment is answered with INTERNAL.
                if not is_transient(error) and error.code() is not grpc.StatusCode.INTERNAL:
                    raise
                is_away = True
                await asyncio.sleep(RETRY_S)
            except asyncio.InvalidStateError:  # the stream has ended since the message before
                continue
            else:
                self._tally.calls[method] += 1
                if method == "RequestLease":
                    if reply.WhichOneof("answer") == "lease":
                        self._tally.lease_s.append(time.perf_counter() - max(began, self._ended_at))
                else:
                    if method == "Exchange" and reply.lease.HasField("lease"):
                        self._tally.lease_s.append(time.perf_counter() - began)
                    self._tally.call_s.append(time.perf_counter() - began)
                return reply

    async def _send(self, message: pb.WorkerMessage, is_away: bool) -> pb.MasterMessage:
        """On the stream."""
        stream, self._stream = self._stream, None  # kept if there is an answer
        if stream is None:
            stream = self._stub.Exchange(timeout=STREAM_S, metadata=self._token, wait_for_ready=is_away)
        await stream.write(message)
        answer: pb.MasterMessage = await stream.read()
        if answer is grpc.aio.EOF:
            raise SystemExit(f"the master has closed the stream: {await stream.details()}")
        self._stream = stream
        return answer

    async def _exchange(self, reports: Sequence[pb.TaskReport] = ()) -> Sequence[pb.Ack]:
        """Report, with a heartbeat if one is due before the next report; without reports a heartbeat alone."""
        async with self._turn:
            message = pb.WorkerMessage(reports=reports)
            if self._wants_lease:
                message.lease_request.CopyFrom(self._lease_request())
            if self._until_beat_s() <= (min(self._report_s, self._heartbeat_s / 2) if reports else 0.0):
                message.heartbeat.CopyFrom(self._heartbeat())
            elif not reports:
                return ()
            answer: pb.MasterMessage = await self._call("Exchange", message)
            if answer.HasField("lease"):
                await self._on_lease(answer.lease)
        self._tally.num_reports += bool(reports)
        if answer.HasField("heartbeat"):
            await self._on_heartbeat(answer.heartbeat)
        return answer.acks

    async def _report(self, reports: Sequence[pb.TaskReport]) -> None:
        while reports:
            known = self.generation
            acks = await self._exchange(reports)
            last = acks[-1]
            if not last.accepted and last.generation > known:
                await self.register()
                reports = reports[len(acks) - 1 :]
                continue
            report = reports[len(acks) - 1]
            lease = report.finished.lease or report.progress.lease
            if not last.accepted and not self._may_have_ended(lease):
                raise SystemExit(f"a report of worker {self._id} is not accepted: {last.reason}")
            reports = reports[len(acks) :]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._until_beat_s())
            await self._exchange()

    def _until_beat_s(self) -> float:
        return self._beaten_at + self._heartbeat_s - time.perf_counter()

    def _heartbeat(self) -> pb.HeartbeatRequest:
        now = time.perf_counter()
        self._seconds["compute"] += now - self._beaten_at
        self._beaten_at = now
        return pb.HeartbeatRequest(
            role=pb.WORKER,
            id=self._id,
            incarnation=self._incarnation,
            positions=[pb.Position(lease=one, minibatch=len(done)) for one, done in self._held.items()],
            activity="compute",
            seconds=self._seconds,
            partition_version=1 << 40,
            cpu=pb.CpuUse(load=1.0, cores=2),
        )

    async def _on_heartbeat(self, reply: pb.HeartbeatReply) -> None:
        if reply.heartbeat_seconds:
            self._heartbeat_s, self._report_s = reply.heartbeat_seconds, reply.report_seconds
        if not reply.known:
            await self.register()
            return
        for lease in set(reply.revoked) & set(self._held):
            if not self._may_have_ended(lease):
                raise SystemExit(f"worker {self._id} has lost lease {lease}")

    def _may_have_ended(self, lease: int) -> bool:
        """Return whether a master that was killed may have noted the end of a task and not answered."""
        shard = self._leases[lease].shard
        return lease >> 32 < self.generation and len(self._held[lease]) == shard.end - shard.start

    def _lease_request(self) -> pb.LeaseRequest:
        return pb.LeaseRequest(worker_id=self._id, incarnation=self._incarnation)

    async def _draw(self) -> None:
        """With a message while a lease is held, as `MasterLink.request_lease` does; else by a long poll."""
        await self.may_train.wait()
        while True:
            self._may_ask.clear()
            if self._held:
                self._wants_lease = True
                if len(self._held) < MOST_HELD:
                    await self._ask_now()
                await self._may_ask.wait()
            elif not self._wants_lease:
                await self._on_lease(await self._call("RequestLease", self._lease_request(), LONG_POLL_S))
            else:
                self._wants_lease = False  # no message that asks is under way when the next one is answered
                await self._ask_now()

    async def _ask_now(self) -> None:
        async with self._turn:
            answer = await self._call("Exchange", pb.WorkerMessage(lease_request=self._lease_request()))
            await self._on_lease(answer.lease)

    async def _on_lease(self, reply: pb.LeaseReply) -> None:
        match reply.WhichOneof("answer"):
            case "unknown":
                await self.register()
            case "lease":
                lease = reply.lease
                self._wants_lease = False
                self._leases[lease.id] = lease
                self._held[lease.id] = list(range(lease.committed[-1] + 1)) if lease.committed else []
                self._drawn.put_nowait(lease)
                self._may_ask.set()
            case "end":
                raise SystemExit("the job is over: it had too few tasks for so long a measurement")

    async def _train(self) -> None:
        await self.may_train.wait()
        due = time.perf_counter() + random.random() * self._step_s
        while True:
            lease = await self._drawn.get()
            due = await self._train_task(lease, max(due, time.perf_counter()))

    async def _train_task(self, lease: pb.Lease, due: float) -> float:
        """Take one minibatch after another of a task; return when the next one is due."""
        done = self._held[lease.id]
        size = lease.shard.end - lease.shard.start
        num_told = len(done)
        while len(done) < size:
            await asyncio.sleep(due - time.perf_counter())
            due += self._step_s
            done.append(len(done))
            self._apply(lease.task, len(done))
            if len(done) < size and time.perf_counter() < self._told_at + self._report_s:
                continue
            self._told_at = time.perf_counter()
            report = pb.ProgressReport(
                worker_id=self._id,
                incarnation=self._incarnation,
                lease=lease.id,
                committed=done[num_told:],
                loss=0.5,
                has_loss=True,
            )
            num_told = len(done)
            reports = [pb.TaskReport(progress=report)]
            if len(done) == size:
                self._ended_at = self._told_at
                end = pb.FinishedTask(
                    worker_id=self._id, incarnation=self._incarnation, lease=lease.id, num_minibatches=size
                )
                reports.append(pb.TaskReport(finished=end))
            await self._report(reports)
            self._tally.num_reported += len(report.committed)
        del self._held[lease.id], self._leases[lease.id]
        self._may_ask.set()
        return due

    def _apply(self, task: int, num_minibatches: int) -> None:
        """The model holds so many minibatches of a task, or more: one that is computed again changes nothing."""
        held = int.from_bytes(os.pread(self._committed, 2, 2 * task), sys.byteorder)
        os.pwrite(self._committed, max(held, num_minibatches).to_bytes(2, sys.byteorder), 2 * task)


async def serve(port: int, first: int, end: int, step_s: float, committed_file: Path) -> None:
    """Run the workers and execute the commands of standard input until it ends."""
    committed = os.open(committed_file, os.O_RDWR)
    tally = Tally()
    workers = [AioWorker(f"127.0.0.1:{port}", n, step_s, committed, tally) for n in range(first, end)]
    lives = asyncio.gather(*(worker.live() for worker in workers))
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        line = sys.stdin.readline()
        lines.put_nowait(line)
        if not line:
            loop.remove_reader(sys.stdin)

    loop.add_reader(sys.stdin, read)
    while True:
        next_line = asyncio.ensure_future(lines.get())
        waited: list[asyncio.Future[Any]] = [next_line, lives]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if lives.done():
            lives.result()
        match line := next_line.result().split():
            case ["train"]:
                for worker in workers:
                    worker.may_train.set()
                answer: Any = {}
            case ["figures"]:
                answer = tally.read()
            case ["generations"]:
                answer = [worker.generation for worker in workers]
            case []:
                return
            case _:
                raise SystemExit(f"unknown command {line}")
        print(json.dumps(answer), flush=True)


def main() -> None:
    port, first, end = map(int, sys.argv[1:4])
    asyncio.run(serve(port, first, end, float(sys.argv[4]), Path(sys.argv[5])))


if __name__ == "__main__":
    main()
