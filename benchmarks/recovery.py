"""How long training stands still when a worker dies: an AllReduce job of ours against torchrun, in the same run.

``python -m benchmarks.recovery [--quick] [--json]``: four processes train the network of model_zoo/mnist with PyTorch
(minibatch 64 each); one of them gets SIGKILL, again and again, never the same place twice in a row.  Measured from the
signal: until all survivors have done a step without it (for torchrun: until some process has done a step, which are all
new ones), and until four processes have done one together.  torchrun: one agent for each process (`--nnodes=1:4`),
c10d rendezvous, nothing saved or loaded, and the agent of the process killed survives, which is its best case.  Ours
also with SIGSTOP; with a cut network: recovery_cut.  Every process writes the time of each step down itself
(zoo/step_times.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from benchmarks.images import write_images
from benchmarks.measured_job import ROOT, BenchmarkError, running_job, story
from benchmarks.peers.environment import environment
from benchmarks.peers.launch import free_port, torchrun
from benchmarks.step_files import read_steps
from benchmarks.zoo.step_times import VARIABLE
from benchmarks.zoo.torch_mnist import SHAPE
from elasticdl.cluster.cluster import PodPhase
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

NUM_WORKERS = 4
BATCH = 64
RECORDS = 16_384
COLLECTIVE_TIMEOUT_S = 5.0
LONGEST_S = 180.0
LOOK_S = 0.02
QUIET_STEPS = 20  # by all four, before the next signal

Steps = Mapping[int, np.ndarray]  # by pid


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds after the signal."""

    next_step: float
    all_again: float


class Contestant(Protocol):
    """Processes that train.

    Attributes:
        num_workers: How many.
        longest_s: that an event may take.
    """

    @property
    def num_workers(self) -> int: ...

    @property
    def longest_s(self) -> float: ...

    def pids(self) -> list[int]:
        """Of the processes that train now, by place."""
        ...

    def check(self) -> None:
        """Raise BenchmarkError if a process has ended."""
        ...

    def story(self) -> str:
        """Return the last part of the output of the processes."""
        ...

    def has_gone_on(self, old: Steps, now: Steps, victim: int) -> float | None:
        """Return when the others had done a step without the victim; None: not yet."""
        ...

    def are_all_again(self, old: Steps, now: Steps, victim: int) -> float | None:
        """Return when all had done a step together again; None: not yet."""
        ...


class OurJob:
    """`elasticdl train --runtime=local`."""

    def __init__(
        self, job: subprocess.Popen[bytes], job_dir: Path, num_workers: int = NUM_WORKERS, longest_s: float = LONGEST_S
    ) -> None:
        self.num_workers = num_workers
        self.longest_s = longest_s
        self._job = job
        self._job_dir = job_dir

    def pids(self) -> list[int]:
        try:
            pods = ProcessCluster(json.loads((self._job_dir / "agent.json").read_text())["socket"]).list()
        except (OSError, ValueError, ElasticDLError):  # not there yet, or not yet whole, or ended: see `check`
            return []
        workers = [pod for pod in pods if pod.role is Role.WORKER and pod.phase is PodPhase.RUNNING and pod.pid]
        return [pod.pid for pod in sorted(workers, key=lambda pod: pod.index)]

    def check(self) -> None:
        if self._job.poll() is not None:
            raise BenchmarkError(f"the job has ended\n{self.story()}")

    def story(self) -> str:
        return story(self._job_dir)

    def has_gone_on(self, old: Steps, now: Steps, victim: int) -> float | None:
        # The step after the victim's last one may be one to which it still gave its part.
        after = last_step(now[victim]) + 2
        times = [done_at(now[pid], after) for pid in old if pid != victim]
        return max((at for at in times if at is not None), default=None) if None not in times else None

    def are_all_again(self, old: Steps, now: Steps, victim: int) -> float | None:
        # A joiner tries its functions out at step 1, and takes the others' step over when it enters their group.
        after = last_step(now[victim]) + 1
        times = [done_at(now[pid], after) for pid in now.keys() - old.keys()]
        return min((at for at in times if at is not None), default=None)


class Frozen(OurJob):
    """The victim is stopped: it continues itself, or is replaced."""

    def are_all_again(self, old: Steps, now: Steps, victim: int) -> float | None:
        return self.has_gone_on(old, now, victim)


class TorchRun:
    """Four agents of torchrun."""

    num_workers = NUM_WORKERS
    longest_s = LONGEST_S

    def __init__(self, agents: list[subprocess.Popen[bytes]], output: Path) -> None:
        self._agents = agents
        self._output = output

    def pids(self) -> list[int]:
        """By place; the script is the only child of its agent that runs it."""
        return [pid for agent in self._agents for pid in _children(agent.pid) if _is_script(pid)]

    def check(self) -> None:
        if any(agent.poll() is not None for agent in self._agents):
            raise BenchmarkError(f"an agent of torchrun has ended\n{self.story()}")

    def story(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]

    def has_gone_on(self, old: Steps, now: Steps, victim: int) -> float | None:
        return min((float(now[pid]["at"][0]) for pid in now.keys() - old.keys() if len(now[pid])), default=None)

    def are_all_again(self, old: Steps, now: Steps, victim: int) -> float | None:
        new = [now[pid] for pid in now.keys() - old.keys() if len(now[pid])]
        return min((float(one["at"][0]) for one in new if one["world_size"][0] == NUM_WORKERS), default=None)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_script(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"benchmarks.peers.torch_ddp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def last_step(steps: np.ndarray) -> int:
    return int(steps["step"][-1]) if len(steps) else 0


def done_at(steps: np.ndarray, number: int) -> float | None:
    """Return when a process had done the first step of that number or a later one."""
    found = np.flatnonzero(steps["step"] >= number)
    return float(steps["at"][found[0]]) if len(found) else None


def wait_for(what: str, contestant: Contestant, look: Callable[[], float | None]) -> float:
    deadline = time.monotonic() + contestant.longest_s
    pause = threading.Event()
    while (found := look()) is None:
        contestant.check()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited without success for {what}\n{contestant.story()}")
        pause.wait(LOOK_S)
    return found


def await_quiet(contestant: Contestant, directory: Path) -> list[int]:
    """Until all processes have done some steps from now on; returns them."""
    pids: list[int] = []
    counts: dict[int, int] = {}

    def look() -> float | None:
        nonlocal pids, counts
        steps = read_steps(directory)
        now = {pid: len(steps.get(pid, ())) for pid in contestant.pids()}
        if len(now) != contestant.num_workers or now.keys() != counts.keys():
            pids, counts = list(now), now
            return None
        return 0.0 if all(now[pid] >= counts[pid] + QUIET_STEPS for pid in now) else None

    wait_for(f"{contestant.num_workers} processes that train", contestant, look)
    return pids


def recover(contestant: Contestant, directory: Path, place: int, number: signal.Signals) -> Recovery:
    """Send a signal to the process at a place, and wait until all has recovered."""
    victim = await_quiet(contestant, directory)[place]
    current = set(contestant.pids())
    old = {pid: steps for pid, steps in read_steps(directory).items() if pid in current}
    known = set(read_steps(directory))
    at = time.monotonic()
    os.kill(victim, number)

    def now() -> dict[int, np.ndarray]:
        """Of the processes of the moment of the signal, and of later ones."""
        return {pid: steps for pid, steps in read_steps(directory).items() if pid in current or pid not in known}

    try:
        name = signal.Signals(number).name
        gone_on = wait_for(f"a step after {name}", contestant, lambda: contestant.has_gone_on(old, now(), victim))
        again = wait_for(f"all after {name}", contestant, lambda: contestant.are_all_again(old, now(), victim))
    finally:
        if number == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
    return Recovery(gone_on - at, again - at)


def recoveries(contestant: Contestant, directory: Path, count: int, number: signal.Signals) -> list[Recovery]:
    found = []
    for k in range(count):
        found.append(recover(contestant, directory, 1 + k % (NUM_WORKERS - 1), number))
        print(f"{type(contestant).__name__}, {number.name}: {found[-1]}", file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def our_job(
    directory: Path,
    steps: Path,
    num_workers: int = NUM_WORKERS,
    model: str = "torch_mnist.custom_model",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An endless job of ours, whose processes write their steps to a directory."""
    data = write_images(directory / "images", RECORDS, SHAPE)
    steps.mkdir()
    job_dir = directory / "job"
    given = {VARIABLE: str(steps), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    flags = {
        "job_name": "recovery",
        "model_zoo": ROOT / "benchmarks",
        "model_def": f"zoo.{model}",
        "training_data": data,
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": num_workers,
        "num_epochs": 0,
        "minibatch_size": BATCH,
        "collective_timeout": COLLECTIVE_TIMEOUT_S,
        "envs": ",".join(f"{name}={value}" for name, value in given.items()),
    }
    with running_job(job_dir, flags) as job:
        yield job, job_dir


@contextlib.contextmanager
def torch_agents(directory: Path, steps: Path) -> Iterator[TorchRun]:
    steps.mkdir()
    port = free_port()
    output = directory / "torchrun.out"
    script = ["--model=torch_mnist.custom_model", f"--batch={BATCH}", f"--records={RECORDS}"]
    options = [
        f"--nnodes=1:{NUM_WORKERS}",
        "--max-restarts=1000",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    argv = torchrun([*options, "--rdzv-id=recovery", "--nproc-per-node=1", "--local-addr=127.0.0.1"], script)
    # Processes that share the agents' store meet under the number of their own agent's restarts; these numbers differ
    # if an agent restarts its process before it has ended by itself, and then the four never find each other.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    variables = environment() | apart | {VARIABLE: str(steps), "OMP_NUM_THREADS": "1"}
    agents: list[subprocess.Popen[bytes]] = []
    with output.open("wb") as file:
        try:
            for _ in range(NUM_WORKERS):
                agents.append(subprocess.Popen(argv, cwd=ROOT, env=variables, stdout=file, stderr=file))
            yield TorchRun(agents, output)
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                try:
                    agent.wait(60)
                except subprocess.TimeoutExpired:
                    agent.kill()


def told(name: str, found: list[Recovery]) -> dict[str, float]:
    figures = {}
    for what in ("next_step", "all_again"):
        seconds = [getattr(one, what) for one in found]
        figures[f"{name}_{what}_median_s"] = statistics.median(seconds)
        figures[f"{name}_{what}_max_s"] = max(seconds)
    return figures


def measure(is_quick: bool, directory: Path) -> dict[str, float]:
    """All figures: seconds, and ours divided by torchrun's."""
    count = 3 if is_quick else 10
    figures: dict[str, float] = {}
    steps = directory / "our-steps"
    with our_job(directory, steps) as (job, job_dir):
        figures |= told("elasticdl", recoveries(OurJob(job, job_dir), steps, count, signal.SIGKILL))
        stopped = told("elasticdl_stopped", recoveries(Frozen(job, job_dir), steps, count, signal.SIGSTOP))
        figures |= {name: seconds for name, seconds in stopped.items() if "next_step" in name}
    steps = directory / "torch-steps"
    with torch_agents(directory, steps) as agents:
        figures |= told("torchrun", recoveries(agents, steps, count, signal.SIGKILL))
    for what in ("next_step_median", "next_step_max", "all_again_median", "all_again_max"):
        figures[f"{what}_ratio_to_torchrun"] = figures[f"elasticdl_{what}_s"] / figures[f"torchrun_{what}_s"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repeats instead of ten")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elasticdl-recovery-") as directory:
        figures = measure(arguments.quick, Path(directory))
    if arguments.json:
        print(json.dumps({"benchmark": "recovery", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")


if __name__ == "__main__":
    main()
