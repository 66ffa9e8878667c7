"""The master at scale: a real one over gRPC with token and TLS, its workers and parameter servers scripted.

``python -m benchmarks.master [--workers=N] [--seconds=S] [--step_seconds=S] [--tasks=N] [--quick] [--json]``: a job of
N workers and 16 parameter servers.  Each worker has a connection of its own, registers, sends heartbeats, and then
trains: it takes tasks of 8 minibatches and reports them, all as often as the master says.  Then the master is killed
(SIGKILL), and all wait for its next generation.  At the end what the master has in its ledger is compared with what the
model holds.

The peer is an empty servicer of gRPC with the same messages, token and certificate: the limit of the library.  All
share the machine with the workers, so the result is the processor time of the master's process for a call;
`calls_per_core_s` is how many a whole core would do at that cost.  With ``--own_core`` the master has one core for
itself, and the workers the others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.master_process import JOURNAL_BYTES, PODS
from benchmarks.measured_job import ROOT, BenchmarkError
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.addresses import free_ports
from elasticdl.rpc.channels import connect
from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE
from elasticdl.rpc.servers import serve
from elasticdl.task_numbers import TaskNumbers
from elasticdl_client.certificates import make_certificate
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus

TOKEN = "the token of a benchmark"
PER_TASK = 8
NUM_PS = 16
START_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
_MODULE = """
def custom_model(): ...
def loss(labels, predictions): ...
def optimizer(): ...
def feed(dataset, mode, metadata): ...
"""


@dataclass(slots=True)
class Scene:
    """A directory with the job, its secret and its data.

    Attributes:
        directory: for everything.
        num_workers: of the job.
        step_s: between two minibatches of a worker.
        num_tasks: of its only epoch.
        cores: of the master; empty: any.
        num_clients: processes of the workers.
    """

    directory: Path
    num_workers: int
    step_s: float
    num_tasks: int
    cores: frozenset[int] = frozenset()
    num_clients: int = 2
    port: int = field(default_factory=lambda: free_ports("127.0.0.1", 1)[0])

    @property
    def job_dir(self) -> Path:
        return self.directory / "job"

    @property
    def committed_file(self) -> Path:
        """For each task of how many minibatches the model has the gradients."""
        return self.directory / "committed"

    def make(self) -> None:
        """Write all files that the processes read."""
        zoo, data = self.directory / "zoo", self.directory / "data"
        for made in (self.job_dir, zoo, data):
            made.mkdir()
        (zoo / "nothing.py").write_text(_MODULE)
        (data / "records.csv").write_text("x,y\n" + "1,2\n" * (self.num_tasks * PER_TASK))
        np.zeros(self.num_tasks, np.int16).tofile(self.committed_file)
        flags = {
            "job_name": "benchmark",
            "runtime": "local",
            "model_zoo": str(zoo),
            "model_def": "nothing.custom_model",
            "training_data": str(data),
            "distribution_strategy": "ParameterServerStrategy",
            "minibatch_size": 1,
            "num_minibatches_per_task": PER_TASK,
            "num_workers": self.num_workers,
            "num_ps_pods": NUM_PS,
            "checkpoint_dir": str(self.directory / "checkpoints"),
        }
        (self.job_dir / "spec.json").write_text(JobSpec.from_flags("train", flags).to_json())
        secret = self.directory / "secret"
        secret.mkdir()
        for name, text in make_certificate().items():
            (secret / name).write_text(text)
        (secret / "token").write_text(TOKEN)
        (secret / "token").chmod(0o600)
        os.environ[TOKEN_FILE_VARIABLE] = str(secret / "token")

    def status(self) -> JobStatus:
        return JobStatus.from_json((self.job_dir / "status.json").read_text())


class Measured:
    """The process of a master, or of the peer."""

    def __init__(self, scene: Scene, *arguments: str) -> None:
        self._scene = scene
        with (scene.job_dir / "master.log").open("ab") as log:
            argv = [sys.executable, "-m", "benchmarks.master_process", str(scene.job_dir), str(scene.port), *arguments]
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        if scene.cores:
            os.sched_setaffinity(self.process.pid, scene.cores)  # while it starts; its threads inherit it

    def cpu_s(self) -> float:
        """Processor time so far."""
        return _cpu_s(self.process)

    def size(self) -> tuple[float, int]:
        """Resident MB, and threads."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"])

    def check(self) -> None:
        """Raise an error if the process has ended."""
        if self.process.poll() is not None:
            log = (self._scene.job_dir / "master.log").read_text(errors="replace")[-3000:]
            raise BenchmarkError(f"the master has ended\n{log}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Clients:
    """The processes of the workers."""

    def __init__(self, scene: Scene) -> None:
        bounds = [scene.num_workers * n // scene.num_clients for n in range(scene.num_clients + 1)]
        argv = [sys.executable, "-m", "benchmarks.master_clients", str(scene.port)]
        rest = [str(scene.step_s), str(scene.committed_file)]
        self._processes = [
            subprocess.Popen(
                [*argv, str(first), str(end), *rest], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for first, end in itertools.pairwise(bounds)
        ]

    def ask(self, command: str) -> list[Any]:
        """Send a command to all processes; return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchmarkError("a process of workers has ended")
            answers.append(json.loads(line))
        return answers

    def cpu_s(self) -> float:
        """Processor time so far, of all."""
        return sum(map(_cpu_s, self._processes))

    def num_registered(self, generation: int) -> int:
        """Return how many clients know this generation of the master, or a later one."""
        return sum(known >= generation for found in self.ask("generations") for known in found)

    def tally(self) -> tuple[Counter[str], list[float], list[float], int, int]:
        """Since the last time: calls, seconds of those for a task and of others, reports, and minibatches in them."""
        calls: Counter[str] = Counter()
        num_reports = num_reported = 0
        leases: list[float] = []
        others: list[float] = []
        for found in self.ask("figures"):
            calls.update(found["calls"])
            leases += found["lease_s"]
            others += found["call_s"]
            num_reports += found["num_reports"]
            num_reported += found["num_reported"]
        return calls, leases, others, num_reports, num_reported

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _cpu_s(process: subprocess.Popen[Any]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class StillPs(pb_grpc.ParameterServerServicer):  # type: ignore[misc]
    """A parameter server that holds what the file of committed minibatches says, and sends a heartbeat a second."""

    def __init__(self, scene: Scene, ps_id: int) -> None:
        self._id = ps_id
        self._committed_file = scene.committed_file
        self._server, port = serve(
            lambda server: pb_grpc.add_ParameterServerServicer_to_server(self, server), "127.0.0.1", 0, TOKEN, 4
        )
        self._address = f"127.0.0.1:{port}"
        self._stub: Any = pb_grpc.MasterStub(connect(f"127.0.0.1:{scene.port}", TOKEN))  # type: ignore[no-untyped-call]
        self._incarnation = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def ReadAppliedSet(self, request: pb.PsQuestion, context: object) -> pb.AppliedSetReply:  # noqa: N802
        return pb.AppliedSetReply(status=pb.OK, applied=self._applied(), initialized=True)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._server.stop(None).wait()

    def _applied(self) -> pb.AppliedSet:
        watermarks = TaskNumbers()
        watermarks.put(0, array("q", np.fromfile(self._committed_file, np.int16).tolist()))
        runs = [
            pb.AppliedRun(epoch=epoch, first_task=first, num_tasks=count, watermark=watermark)
            for epoch, first, count, watermark in TaskNumbers.runs(watermarks)
        ]
        return pb.AppliedSet(runs=runs, num_applies=watermarks.total_of_all())

    def _live(self) -> None:
        while not self._stop.wait(1.0 if self._incarnation else 0.1):
            with contextlib.suppress(grpc.RpcError):  # the master is away
                request = pb.HeartbeatRequest(
                    role=pb.PS, id=self._id, incarnation=self._incarnation, activity="serving", load=pb.PsLoad()
                )
                known = self._incarnation and self._stub.Heartbeat(request, timeout=10).known
                if not known:
                    self._register()

    def _register(self) -> None:
        request = pb.RegisterPsRequest(
            ps_id=self._id, address=self._address, nonce=self._id + 1, held_incarnation=self._incarnation
        )
        reply = self._stub.RegisterPs(request, timeout=10)
        if reply.accepted:
            self._incarnation = reply.incarnation
            ready = pb.PsReadyRequest(ps_id=self._id, incarnation=self._incarnation, initialized=True)
            self._stub.PsReady(ready, timeout=10)


def wait_until(condition: Callable[[], object], what: str, master: Measured) -> float:
    """Wait for a condition; return the seconds that it took."""
    began = time.perf_counter()
    pause = threading.Event()
    while not condition():
        master.check()
        if time.perf_counter() - began > START_S:
            raise BenchmarkError(f"not within {START_S:g} s: {what}")
        pause.wait(POLL_S)
    return time.perf_counter() - began


def measure_for(seconds: float, master: Measured, clients: Clients) -> dict[str, float]:
    """Measure for a while, from now on."""
    clients.tally()
    cpu_s, began = master.cpu_s(), time.perf_counter()
    threading.Event().wait(seconds)
    calls, leases, others, num_reports, num_reported = clients.tally()
    cpu_s, elapsed = master.cpu_s() - cpu_s, time.perf_counter() - began
    master.check()
    num_calls = max(1, calls.total())
    found = {
        "calls_s": num_calls / elapsed,
        "reports_s": num_reports / elapsed,
        "minibatches_s": num_reported / elapsed,
        "cpu": cpu_s / elapsed,
        "us_per_call": cpu_s / num_calls * 1e6,
        "calls_per_core_s": num_calls / max(cpu_s, 1e-9),
        "call_p50_ms": _quantile(others, 0.5) * 1e3,
        "call_p99_ms": _quantile(others, 0.99) * 1e3,
    }
    if num_reported:
        found["us_per_minibatch"] = cpu_s / num_reported * 1e6
    if leases:
        found |= {"lease_p50_ms": _quantile(leases, 0.5) * 1e3, "lease_p99_ms": _quantile(leases, 0.99) * 1e3}
    return found


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _journal(scene: Scene) -> tuple[int, int, int]:
    """Return the number of writes, their bytes, and the bytes of the newest, in the current generation."""
    text = (scene.job_dir / JOURNAL_BYTES).read_text()
    writes, size, newest = json.loads(text)
    return writes, size, newest


@contextlib.contextmanager
def running(scene: Scene, *arguments: str) -> Iterator[tuple[list[Measured], Clients, dict[str, float]]]:
    """A master or peer (the list holds its newest generation) and its registered workers."""
    lives = [Measured(scene, *arguments)]
    servers: list[StillPs] = []
    clients: Clients | None = None
    figures: dict[str, float] = {}
    try:
        if not arguments:
            pods = scene.job_dir / PODS
            num_pods = scene.num_workers + NUM_PS
            figures["pods_s"] = wait_until(
                lambda: pods.exists() and pods.read_text().count("\n") >= num_pods, "all pods", lives[0]
            )
            servers = [StillPs(scene, n) for n in range(NUM_PS)]
        clients = Clients(scene)
        figures["register_s"] = wait_until(
            lambda: clients.num_registered(1) == scene.num_workers, "all workers are registered", lives[0]
        )
        yield lives, clients, figures
    finally:
        if clients is not None:
            clients.end()
        lives[-1].kill()
        for server in servers:
            server.end()


def measure_master(scene: Scene, seconds: float) -> dict[str, Any]:
    """All figures of the real master."""
    with running(scene) as (lives, clients, figures):
        beats = measure_for(seconds, lives[0], clients)
        clients.ask("train")
        wait_until(lambda: scene.status().records_done > 0, "the first reports", lives[0])
        before = _journal(scene)
        training = measure_for(seconds, lives[0], clients)
        after = _journal(scene)
        figures["journal_bytes_s"] = (after[1] - before[1]) / seconds
        figures["journal_writes_s"] = (after[0] - before[0]) / seconds
        figures["journal_bytes"] = after[2]
        figures["memory_mb"], figures["threads"] = lives[0].size()
        clients_cpu_s = clients.cpu_s()
        lives[0].kill()
        lives.append(Measured(scene))
        figures["restart_first_s"] = wait_until(
            lambda: clients.num_registered(2) > 0, "a worker is registered again", lives[1]
        )
        figures["restart_s"] = figures["restart_first_s"] + wait_until(
            lambda: clients.num_registered(2) == scene.num_workers, "all workers are registered again", lives[1]
        )
        figures["restart_cpu_s"] = lives[1].cpu_s()
        figures["restart_clients_cpu_s"] = clients.cpu_s() - clients_cpu_s
        done = scene.status().records_done
        figures["continued_s"] = wait_until(
            lambda: scene.status().generation == 2 and scene.status().records_done > done, "more reports", lives[1]
        )
        clients.end()
        _check_ledger(scene, lives[1])
        return {**figures, "beats": beats, "training": training}


def _check_ledger(scene: Scene, master: Measured) -> None:
    """Check that the ledger has nothing that the model lacks, and lacks at most one unreported task of each worker.

    The last second before the kill may come late: once the parameter servers have said what they hold.
    """
    held = int(np.fromfile(scene.committed_file, np.int16).sum())
    least = held - scene.num_workers * PER_TASK
    _wait_for_status(scene, master)  # maybe of what was before
    _wait_for_status(scene, master)
    wait_until(lambda: scene.status().records_done >= least, f"{least} of the model's {held} minibatches", master)
    if (done := scene.status().records_done) > held:
        raise BenchmarkError(f"the ledger has {done} minibatches, the model {held}")


def _wait_for_status(scene: Scene, master: Measured) -> None:
    """Wait for the next status, which a busy master writes less often than once a second."""
    before = scene.status().updated_at
    wait_until(lambda: scene.status().updated_at > before, "another status", master)


def measure_peer(scene: Scene, seconds: float) -> dict[str, Any]:
    """Measure the same calls to an empty servicer."""
    with running(scene, "--peer") as (lives, clients, _):
        beats = measure_for(seconds, lives[0], clients)
        clients.ask("train")
        training = measure_for(seconds, lives[0], clients)
        return {"beats": beats, "training": training}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the master and its peer, one after the other."""
    found: dict[str, Any] = {}
    num_workers, seconds, step_s = arguments.workers, arguments.seconds, arguments.step_seconds
    num_tasks = int(num_workers / step_s / PER_TASK * (2 * seconds + 30)) + num_workers
    cores = os.sched_getaffinity(0)
    own = frozenset({max(cores)}) if arguments.own_core else frozenset[int]()
    os.sched_setaffinity(0, cores - own)  # inherited by the workers
    num_clients = max(2, len(cores) - 2)
    for name in ("elasticdl",) if arguments.no_peer else ("elasticdl", "peer"):
        with tempfile.TemporaryDirectory() as directory:
            scene = Scene(
                Path(directory),
                num_workers,
                step_s,
                max(num_tasks, arguments.tasks),
                own,
                num_clients,
            )
            scene.make()
            found[name] = measure_peer(scene, seconds) if name == "peer" else measure_master(scene, seconds)
    for phase in () if arguments.no_peer else ("beats", "training"):
        found[f"{phase}_ratio"] = found["elasticdl"][phase]["us_per_call"] / found["peer"][phase]["us_per_call"]
    return found


def _lines(found: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{path}{name} ")
        else:
            yield f"{path + name:40} {value:12,.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000, help="of the job")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--step_seconds", type=float, default=1.0, help="between two minibatches of a worker")
    parser.add_argument("--tasks", type=int, default=0, help="of the epoch at least, 0: as many as the time needs")
    parser.add_argument("--own_core", action="store_true", help="the master alone has the last core of this machine")
    parser.add_argument("--quick", action="store_true", help="100 workers, 3 seconds; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--no_peer", action="store_true", help="the master alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes are ended, too
    if min(arguments.workers, arguments.seconds, arguments.step_seconds) <= 0:
        parser.error("--workers, --seconds and --step_seconds must be positive")
    if arguments.quick:
        arguments.workers, arguments.seconds = 100, 3.0
    if arguments.own_core and len(os.sched_getaffinity(0)) < 2:
        parser.error("--own_core needs a second core")
    found = measure(arguments)
    if arguments.json:
        print(json.dumps({"benchmark": "master", "quick": arguments.quick, "workers": arguments.workers, **found}))
        return
    for line in _lines(found):
        print(line)


if __name__ == "__main__":
    main()
