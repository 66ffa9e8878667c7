"""PyTorch models of the zoo, and scripts, on a GPU or on the CPU, against plain loops.

``python -m benchmarks.gpu [--device=cpu|cuda] [--quick] [--json] [PART …]``: the parts that are named, or else all of
them, each in a process of its own:

- `--steps`: milliseconds of a step on minibatches in memory (gpu_steps.py);
- `--jobs`: samples per second of whole jobs, from raw images and from JPEG files (gpu_jobs.py);
- `--stall`: how long steps wait for a checkpoint of 100 M parameters (gpu_stall.py);
- `--kill`: how long a worker stands still when another one dies (gpu_kill.py).

Every ratio is that of the rates, ours to the plain loop's: 1 is as fast.  A part that fails prints its error, the
others run, and the exit code is 1.  On the CPU networks and data are so small that all of it runs on two cores; its
figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.measured_job import ROOT, BenchmarkError

PARTS = ("steps", "jobs", "stall", "kill")
LONGEST_S = 240.0  # of a part
LONGEST_END_S = 40.0  # after Ctrl-C: the part stops its jobs


def measure(part: str, device: str, is_quick: bool, figures: dict[str, float]) -> bool:
    """Add the figures of a part, measured in this process; return whether there are all."""
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}  # before torch is imported
    with tempfile.TemporaryDirectory(prefix=f"elasticdl-gpu-{part}-") as directory:
        try:
            for found in importlib.import_module(f"benchmarks.gpu_{part}").measure(device, is_quick, Path(directory)):
                figures.update(found)
        except BenchmarkError as error:
            print(error, file=sys.stderr, flush=True)
            return False
        except (Exception, KeyboardInterrupt):  # noqa: BLE001  the figures before it stay
            traceback.print_exc()
            return False
    return True


def measure_apart(part: str, device: str, is_quick: bool, figures: dict[str, float]) -> bool:
    """Add the figures of a part, measured in a process of its own; return whether there are all."""
    print(f"==> {part}", file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "benchmarks.gpu", f"--{part}", f"--device={device}", "--json"]
    with subprocess.Popen(argv + ["--quick"] * is_quick, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"{part} takes longer than {LONGEST_S:.0f} s", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGINT)
            output, _ = _last_words(process)
    if process.returncode != 0:
        print(f"{part} failed with exit code {process.returncode}", file=sys.stderr, flush=True)
    lines = output.strip().splitlines()
    figures.update(json.loads(lines[-1]) if lines else {})
    return process.returncode == 0


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=LONGEST_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def main() -> int:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="append_const", const=part, dest="parts", help=f"see gpu_{part}.py")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not _has_gpu():
        parser.error("there is no GPU: --device=cpu runs without")
    parts = arguments.parts or PARTS
    run = measure if len(parts) == 1 else measure_apart
    figures: dict[str, float] = {}
    is_whole = [run(part, arguments.device, arguments.quick, figures) for part in parts]
    print(json.dumps(figures) if arguments.json else json.dumps(figures, indent=2))
    return 0 if all(is_whole) else 1


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())
