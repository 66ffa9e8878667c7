"""Throughput of AllReduce jobs of ours against DistributedDataParallel with Gloo: a part of allreduce.py.

A CNN of 1.2 M parameters on images of 28 × 28, and ResNet-20 on images of 32 × 32; minibatches of 64 in each of one and
two processes, which share the cores.  Ours are real jobs (`elasticdl train --runtime=local`) that read RecordIO; the
peer (peers/torch_ddp.py under torchrun) slices tensors in memory.  By turns; the median of the turns' ratios counts.
Beside the rate: processor time of one process for a step, all its threads together, which others on the machine disturb
less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images import write_images
from benchmarks.measured_job import ROOT, BenchmarkError, steady_rate
from benchmarks.peers.environment import environment
from benchmarks.peers.launch import torchrun
from benchmarks.step_files import cpu_seconds_per_step
from benchmarks.zoo.step_times import VARIABLE

BATCH = 64
RECORDS = 16_384  # a multiple of the records of a task, so that all minibatches are full
WARM_UP_S = 4.0


@dataclass(frozen=True, slots=True)
class Network:
    """A function of a module of benchmarks/zoo."""

    name: str
    model: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    samples_per_second: float  # of all processes together
    cpu_ms_per_step: float  # of one process


NETWORKS = (
    Network("mnist_cnn", "torch_mnist.large_model", (1, 28, 28)),
    Network("resnet20", "torch_resnet.custom_model", (3, 32, 32)),
)


def measure(is_quick: bool, directory: Path) -> dict[str, float]:
    """Samples per second, and ours divided by the peer's."""
    figures: dict[str, float] = {}
    turns, seconds = (1, 8.0) if is_quick else (3, 15.0)
    for network in NETWORKS:
        data = write_images(directory / network.name, RECORDS, network.shape)
        for processes in (1, 2):
            ours, plain = [], []
            for _ in range(turns):
                ours.append(_ours(directory, data, network, processes, seconds))
                plain.append(_plain(directory, network, processes, seconds))
                print(f"{network.name}, {processes}: {ours[-1]}, DDP {plain[-1]}", file=sys.stderr, flush=True)
            name = f"{network.name}_{processes}p"
            for what in ("samples_per_second", "cpu_ms_per_step"):
                figures[f"{name}_{what}"] = statistics.median(getattr(speed, what) for speed in ours)
                figures[f"{name}_ddp_{what}"] = statistics.median(getattr(speed, what) for speed in plain)
            pairs = list(zip(ours, plain, strict=True))
            ratios = [one.samples_per_second / other.samples_per_second for one, other in pairs]
            figures[f"{name}_ratio_to_ddp"] = statistics.median(ratios)
            figures[f"{name}_cpu_ratio_to_ddp"] = statistics.median(
                one.cpu_ms_per_step / other.cpu_ms_per_step for one, other in pairs
            )
    return figures


def _threads(processes: int) -> int:
    """Of each process: its share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _ours(directory: Path, data: Path, network: Network, processes: int, seconds: float) -> Speed:
    flags: dict[str, object] = {
        "job_name": "allreduce",
        "model_zoo": ROOT / "benchmarks",
        "model_def": f"zoo.{network.model}",
        "training_data": data,
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": processes,
        "min_workers": processes,
        "minibatch_size": BATCH,
        "num_minibatches_per_task": 16,
    }
    with tempfile.TemporaryDirectory(prefix="job-", dir=directory) as place:
        steps = Path(place) / "steps"
        steps.mkdir()
        flags["envs"] = f"{VARIABLE}={steps},PYTHONPATH={ROOT},OMP_NUM_THREADS={_threads(processes)}"
        rate = steady_rate(Path(place) / "job", flags, WARM_UP_S, seconds)
        return Speed(rate, cpu_seconds_per_step(steps) * 1e3)


def _plain(directory: Path, network: Network, processes: int, seconds: float) -> Speed:
    script = [f"--model={network.model}", f"--batch={BATCH}", f"--records={RECORDS}", f"--seconds={seconds}"]
    argv = torchrun(["--standalone", f"--nproc-per-node={processes}"], script)
    with tempfile.TemporaryDirectory(prefix="steps-", dir=directory) as steps:
        variables = environment() | {VARIABLE: steps, "OMP_NUM_THREADS": str(_threads(processes))}
        done = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"{' '.join(argv)} failed:\n{done.stderr[-3000:]}")
        rate = float(json.loads(done.stdout.strip().splitlines()[-1])["samples_per_second"])
        return Speed(rate, cpu_seconds_per_step(Path(steps)) * 1e3)
