"""``python -m benchmarks.master_process JOB_DIR PORT``: a real master whose pods are lines of a file and run nothing.

Its scripted members are in benchmarks/master_clients.py, and benchmarks/master.py measures it.
With ``--peer`` it is the limit of the library: an empty servicer with the same messages, the same token and the same
certificate, which answers at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elasticdl.cluster.local.framework_import import no_garbage_collection

with no_garbage_collection():  # as in elasticdl/master/__main__.py
    import grpc

    from elasticdl.cluster.cluster import CannotResize, EventType, Pod, PodEvent, PodPhase, PodSpec
    from elasticdl.cluster.local.adapter import pod_from_message
    from elasticdl.master.environment import Endpoint
    from elasticdl.master.local_environment import LOOPBACK, FileJournal, LocalEnvironment, read_spec, replace_file
    from elasticdl.master.master import Master
    from elasticdl.rpc import elasticdl_pb2 as pb
    from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
    from elasticdl.rpc.channels import OPTIONS, TOKEN_KEY
    from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE, read_certificate, read_token
    from elasticdl_client.job_status import JobStatus

PODS = "pods"
JOURNAL_BYTES = "journal_bytes"


class ListedCluster:
    """`Cluster` whose pods are lines of a file: they run from their creation on, and outlive the master."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the rest
        lines = path.read_text().splitlines() if path.exists() else []
        self._pods = {pod.name: pod for pod in (pod_from_message(json.loads(line)) for line in lines)}
        self._changes: queue.SimpleQueue[PodEvent] = queue.SimpleQueue()

    def create(self, spec: PodSpec) -> Pod:
        pod = Pod(spec.name, spec.role, spec.index, f"uid of {spec.name}", PodPhase.RUNNING, dict(spec.labels))
        with self._lock, self._path.open("a") as file:
            self._pods[pod.name] = pod
            file.write(json.dumps(asdict(pod)) + "\n")
        self._changes.put(PodEvent(EventType.ADDED, pod))
        return pod

    def delete(self, name: str, grace_s: float | None = None) -> None:
        with self._lock:
            pod = self._pods.pop(name, None)
        if pod is not None:
            self._changes.put(PodEvent(EventType.DELETED, pod))

    def resize(self, spec: PodSpec) -> int:
        raise CannotResize("Only real pods have a memory.")

    def list(self) -> list[Pod]:
        with self._lock:
            return list(self._pods.values())

    def watch(self) -> Iterator[PodEvent]:
        while True:
            yield self._changes.get()

    def logs(self, name: str) -> str:
        return ""


class CountingJournal(FileJournal):
    """A `FileJournal` that counts what it writes, in a file next to it."""

    def __init__(self, job_dir: Path) -> None:
        super().__init__(job_dir)
        self._journal, self._file = job_dir / "journal.json", job_dir / JOURNAL_BYTES
        self._inode = 0
        self._counted = [0, 0, 0]  # writes, bytes, bytes of the last

    def save(self, snapshot: dict[str, Any], status: JobStatus | None = None) -> None:
        super().save(snapshot, status)
        found = self._journal.stat()
        if found.st_ino != self._inode:
            self._inode = found.st_ino
            self._counted = [self._counted[0] + 1, self._counted[1] + found.st_size, found.st_size]
            replace_file(self._file, self._file.with_suffix(".new"), json.dumps(self._counted).encode())


class EmptyMaster(pb_grpc.MasterServicer):  # type: ignore[misc]
    """The peer's answers, of the kinds and sizes of the master's."""

    def __init__(self, records_per_task: int, num_tasks: int) -> None:
        self._tasks = itertools.count()
        self._records, self._num_tasks = records_per_task, num_tasks

    def RegisterWorker(self, _request: object, _context: object) -> pb.RegisterWorkerReply:  # noqa: N802
        return pb.RegisterWorkerReply(accepted=True, generation=1)

    def ReportModel(self, _request: object, _context: object) -> pb.Ack:  # noqa: N802
        return pb.Ack(accepted=True, generation=1)

    def Heartbeat(self, _request: object, _context: object) -> pb.HeartbeatReply:  # noqa: N802
        return pb.HeartbeatReply(known=True, generation=1, newest_lease=1)

    def RequestLease(self, _request: object, _context: object) -> pb.LeaseReply:  # noqa: N802
        number = next(self._tasks)
        task = number % self._num_tasks
        shard = pb.ShardMessage(name="records.csv", start=task * self._records, end=(task + 1) * self._records)
        lease = pb.Lease(id=(1 << 32) + number, type=pb.TRAINING, task=task, shard=shard)
        return pb.LeaseReply(generation=1, lease=lease)

    def Exchange(self, messages: Iterator[pb.WorkerMessage], context: Any) -> Iterator[pb.MasterMessage]:  # noqa: N802
        for message in messages:
            beat = self.Heartbeat(message.heartbeat, context) if message.HasField("heartbeat") else None
            acks = [pb.Ack(accepted=True, generation=1, model_version=1 << 20) for _ in message.reports]
            lease = self.RequestLease(message.lease_request, context) if message.HasField("lease_request") else None
            yield pb.MasterMessage(heartbeat=beat, acks=acks, lease=lease)


class BareGate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Compares the token: the least that a server of ours must do."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if dict(details.invocation_metadata).get(TOKEN_KEY) != self._token:
            raise AssertionError("the benchmark has the token")
        return continuation(details)


def serve_peer(port: int, servicer: EmptyMaster) -> None:
    """Run the peer until the process is killed."""
    found = read_certificate()
    assert found is not None
    credentials = grpc.ssl_server_credentials([(found.key, found.certificate)], found.authority, True)
    server = grpc.server(ThreadPoolExecutor(4000), interceptors=[BareGate(read_token())], options=OPTIONS)
    pb_grpc.add_MasterServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    server.wait_for_termination()


def run_master(job_dir: Path, port: int) -> int:
    """Run one generation of the master; return its exit code."""
    environment = LocalEnvironment(
        spec=read_spec(job_dir),
        cluster=ListedCluster(job_dir / PODS),
        journal=CountingJournal(job_dir),
        endpoint=Endpoint(LOOPBACK, port, read_token()),
        token_file=os.environ[TOKEN_FILE_VARIABLE],
    )
    master = Master(environment)
    signal.signal(signal.SIGTERM, lambda number, frame: master.request_stop("SIGTERM"))
    return master.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--peer", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.peer:
        spec = read_spec(arguments.job_dir)
        records = spec.minibatch_size * spec.num_minibatches_per_task
        with (Path(spec.training_data) / "records.csv").open() as file:
            num_tasks = sum(1 for _ in file) // records
        serve_peer(arguments.port, EmptyMaster(records, num_tasks))
        return 0
    return run_master(arguments.job_dir, arguments.port)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
