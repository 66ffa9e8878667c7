"""SIGKILL of one of two workers that share a GPU: a part of gpu.py.

Both train the network of 1.2 M parameters in minibatches of 64, and sum by NCCL over the loopback interface, which
tests that code and says nothing about its speed.  Measured from the signal: until the survivor has surely done a step
alone, and until two workers have done one together.  On the CPU the same job with the CPU's engine.
"""

from __future__ import annotations

import re
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measured_job import BenchmarkError
from benchmarks.recovery import OurJob, Recovery, our_job, recover, told
from benchmarks.step_files import read_steps

NUM_WORKERS = 2
LONGEST_S = 90.0  # from the start of the job to its steps
MODEL = "torch_mnist_nccl.large_model"
_CONNECTED = re.compile(rf"nranks {NUM_WORKERS} .*Init COMPLETE")
NCCL_VARIABLES = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}


def measure(device: str, is_quick: bool, directory: Path) -> Iterator[dict[str, float]]:
    """Yield seconds after the signal; and the median step of two workers."""
    steps, reports = directory / "steps", directory / "nccl"
    reports.mkdir()
    variables = {"CUDA_VISIBLE_DEVICES": "-1"}
    if device == "cuda":
        variables = {**NCCL_VARIABLES, "NCCL_DEBUG_FILE": f"{reports}/%p"}
    with our_job(directory, steps, NUM_WORKERS, MODEL, variables) as (job, job_dir):
        contestant = OurJob(job, job_dir, NUM_WORKERS, LONGEST_S)
        found: list[Recovery] = []
        for k in range(2 if is_quick else 4):
            found.append(recover(contestant, steps, k % NUM_WORKERS, signal.SIGKILL))
            print(f"kill: {found[-1]}", file=sys.stderr, flush=True)
    if device == "cuda":
        _check_nccl(reports)
    between = np.concatenate([np.diff(one["at"]) for one in read_steps(steps).values()])
    yield {**told("kill", found), "kill_step_ms": statistics.median(between.tolist()) * 1e3}


def _check_nccl(reports: Path) -> None:
    """Raise BenchmarkError unless NCCL has connected two processes."""
    if not any(_CONNECTED.search(file.read_text(errors="replace")) for file in reports.iterdir()):
        raise BenchmarkError("kill: NCCL has connected no two workers, so that another engine was measured")
