"""Whole local jobs with one worker, against plain loops: a part of gpu.py.

ResNet-50 in bfloat16, minibatches of 128, from 1,024 raw images of 224 × 224 bytes and from as many JPEG files of
500 × 375 that are decoded and cropped.  Ours are jobs of the zoo (AllReduce and Local), which read RecordIO and parse
it in `feed`, in the worker's own thread or (`input_workers`) in processes; and a script that is run as a job.  The
peers are the script's loop without ElasticDL: over slices of pinned tensors, and over a DataLoader with as many
processes as there are CPUs.  A rate is that of the steps that each process writes down itself (zoo/step_times.py), in
its last seconds.  On the CPU a small network, and fewer images.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.images import image_records, random_jpegs, random_pixels, write_records
from benchmarks.measured_job import POLL_S, ROOT, BenchmarkError, running_job, story
from benchmarks.peers.environment import environment
from benchmarks.step_files import read_steps
from benchmarks.zoo.step_times import VARIABLE
from elasticdl.data.example import encode_example

LONGEST_START_S = 60.0
TIMES_FILE_IS_READ = 16  # an epoch is a multiple of the images, which are in one file under that number of names
LONG_GAP = 5.0  # times the median step: between two bursts, where input comes task by task
LEAST_COVERED = 0.4  # of the measured seconds by whole bursts
PEERS = {"raw": ("slices", "loader"), "jpeg": ("loader",)}
OURS = ("all_reduce", "all_reduce_input_workers", "local", "script")
MOST_INPUT_WORKERS = {"raw": 4, "jpeg": 64}  # copying needs a few, decoding as many as there are CPUs
LEFT_OUT_IF_QUICK = frozenset({"raw_local", "raw_loader", "jpeg_all_reduce", "jpeg_local"})


@dataclass(frozen=True, slots=True)
class Size:
    """Of a measurement, by device.

    Attributes:
        model: a function of zoo/torch_resnet50.py.
        side: of a raw image.
        num_jpegs: that differ; each comes several times.
    """

    model: str
    batch: int
    side: int
    num_images: int
    num_jpegs: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """After the first step: those that do not count, and those that do."""

    warm_up: float
    measured: float


SIZES = {
    "cpu": Size("small_model", 4, 32, 128, 16),
    "cuda": Size("custom_model", 128, 224, 1024, 256),
}
Running = Callable[[], None]
"""Raises BenchmarkError if the process has ended."""


class Contest:
    """All contestants, one after the other, on the same images."""

    def __init__(self, device: str, seconds: Seconds, directory: Path) -> None:
        self._size = SIZES[device]
        self._seconds = seconds
        self._directory = directory
        self._num_processes = len(os.sched_getaffinity(0))
        self._variables = {"PYTHONPATH": str(ROOT)}
        if device == "cpu":
            self._variables |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
        self._data = {kind: directory / kind for kind in PEERS}
        size = self._size
        raw = image_records(*random_pixels(size.num_images, (3, size.side, size.side)))
        write_records(self._data["raw"], raw, TIMES_FILE_IS_READ)
        files, labels = random_jpegs(size.num_jpegs)
        records = [encode_example({"image": a, "label": b}) for a, b in zip(files, labels.tolist(), strict=True)]
        write_records(self._data["jpeg"], records * (size.num_images // size.num_jpegs), TIMES_FILE_IS_READ)

    def samples_per_second(self, kind: str, name: str) -> float:
        """Run one contestant.

        Args:
            kind: of the images.
            name: of `OURS` or `PEERS`.

        Raises:
            BenchmarkError: it makes no steps.
        """
        place = self._directory / f"{kind}-{name}"
        steps = place / "steps"
        steps.mkdir(parents=True)
        with self._running(kind, name, place, self._variables | {VARIABLE: str(steps)}) as check:
            return self._size.batch * _steps_per_second(steps, self._seconds, check)

    @contextlib.contextmanager
    def _running(self, kind: str, name: str, place: Path, variables: dict[str, str]) -> Iterator[Running]:
        if name not in OURS:
            with _running_script(self._script(kind, name), place, variables) as check:
                yield check
            return
        flags: dict[str, object] = {
            "job_name": name.replace("_", "-"),
            "distribution_strategy": "Local" if name == "local" else "AllReduceStrategy",
            "num_workers": 1,
            "minibatch_size": self._size.batch,
            "num_epochs": 0,
            "envs": ",".join(f"{key}={value}" for key, value in variables.items()),
        }
        flags |= self._script_flags(kind) if name == "script" else self._zoo_flags(kind, name)
        with running_job(place / "job", flags) as job:
            yield lambda: _check(job, lambda: story(place / "job"))

    def _zoo_flags(self, kind: str, name: str) -> dict[str, object]:
        flags: dict[str, object] = {
            "model_zoo": ROOT / "benchmarks",
            "model_def": f"zoo.torch_resnet50.{self._size.model}",
            "training_data": self._data[kind],
            "precision": "bf16",
            "channels_last": "true",
        }
        if kind == "jpeg":
            flags["feed"] = "feed_jpeg"
        if name == "all_reduce_input_workers":
            flags["input_workers"] = min(self._num_processes, MOST_INPUT_WORKERS[kind])
        return flags

    def _script_flags(self, kind: str) -> dict[str, object]:
        argv = [*self._script(kind, "slices" if kind == "raw" else "loader"), "--elastic"]
        return {"job_command": shlex.join(argv)}

    def _script(self, kind: str, name: str) -> list[str]:
        """Return the command line of a loop."""
        given = "slices" if name == "slices" else {"raw": "samples", "jpeg": "jpeg"}[kind]
        argv = [sys.executable, "-m", "benchmarks.peers.image_loop", f"{self._data[kind]}/data-00000"]
        argv += [f"--model={self._size.model}", f"--batch={self._size.batch}", f"--input={given}"]
        return [*argv, f"--processes={self._num_processes}"]


def measure(device: str, is_quick: bool, directory: Path) -> Iterator[dict[str, float]]:
    """Yield samples per second, and ours divided by the peers'.

    Raises:
        BenchmarkError: some were not measured; the others were yielded.
    """
    contest = Contest(device, Seconds(2.0, 4.0) if is_quick else Seconds(3.0, 6.0), directory)
    failed = []
    for kind, peers in PEERS.items():
        rates: dict[str, float] = {}
        for name in (*peers, *OURS):
            if is_quick and f"{kind}_{name}" in LEFT_OUT_IF_QUICK:
                continue
            began = time.monotonic()
            try:
                rates[name] = contest.samples_per_second(kind, name)
            except BenchmarkError as error:
                failed.append(f"{kind}_{name}")
                print(f"{failed[-1]}: {error}", file=sys.stderr, flush=True)
                continue
            took = time.monotonic() - began
            print(f"{kind}, {name}: {rates[name]:,.0f} samples/s (in {took:.0f} s)", file=sys.stderr, flush=True)
            yield {f"jobs_{kind}_{name}_samples_per_second": rates[name]} | {
                f"jobs_{kind}_{name}_ratio_to_{peer}": rates[name] / rates[peer]
                for peer in peers
                if name in OURS and peer in rates
            }
    if failed:
        raise BenchmarkError(f"not measured: {', '.join(failed)}")


@contextlib.contextmanager
def _running_script(argv: list[str], place: Path, variables: dict[str, str]) -> Iterator[Running]:
    """A loop while the block runs; then it is killed with its processes."""
    output = place / "output"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            argv, cwd=ROOT, env=environment() | variables, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            yield lambda: _check(process, lambda: output.read_text(errors="replace")[-3000:])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _check(process: subprocess.Popen[bytes], tell: Callable[[], str]) -> None:
    if process.poll() is not None:
        raise BenchmarkError(f"it has ended\n{tell()}")


def _steps_per_second(directory: Path, seconds: Seconds, check: Running) -> float:
    """Wait until a process has made steps for long enough; return its rate in the measured time."""
    deadline = time.monotonic() + LONGEST_START_S + seconds.warm_up + seconds.measured
    pause = threading.Event()
    while True:
        check()
        for times in (steps["at"] for steps in read_steps(directory).values()):
            later = times[times >= times[0] + seconds.warm_up] if len(times) else times
            if len(later) > 1 and later[-1] - later[0] >= seconds.measured:
                return steady_rate(later)
        if time.monotonic() > deadline:
            raise BenchmarkError("it makes no steps, or too few")
        pause.wait(POLL_S)


def steady_rate(times: NDArray[np.float64]) -> float:
    """Steps per second, from when each was done; of whole bursts where they come in bursts."""
    gaps = np.diff(times)
    begins = np.flatnonzero(gaps > LONG_GAP * np.median(gaps)) + 1
    first, last = (int(begins[0]), int(begins[-1])) if len(begins) > 1 else (0, len(times) - 1)
    if times[last] - times[first] < LEAST_COVERED * (times[-1] - times[0]):
        first, last = 0, len(times) - 1
    return float((last - first) / (times[last] - times[first]))
