"""PyTorch models of the zoo, and scripts, on a GPU or on the CPU, against plain loops.

``python -m benchmarks.gpu [--device=cpu|cuda] [--quick] [--json] [PART …]``: the parts that are named, or else all of
them, each in a process of its own:

- `--steps`: milliseconds of a step on minibatches in memory (gpu_steps.py);
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
from pathlib import Path

from benchmarks.measured_job import ROOT

PARTS = ("steps", "stall", "kill")
LONGEST_S = 180.0  # of a part
LONGEST_END_S = 40.0  # after Ctrl-C: the part stops its jobs


def measure(part: str, device: str, is_quick: bool) -> dict[str, float]:
    """The figures of a part, in this process."""
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}  # before torch is imported
    with tempfile.TemporaryDirectory(prefix=f"elasticdl-gpu-{part}-") as directory:
        figures: dict[str, float] = importlib.import_module(f"benchmarks.gpu_{part}").measure(
            device, is_quick, Path(directory)
        )
    return figures


def measure_apart(part: str, device: str, is_quick: bool) -> dict[str, float] | None:
    """The figures of a part, in a process of its own; None: it failed."""
    print(f"==> {part}", file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "benchmarks.gpu", f"--{part}", f"--device={device}", "--json"]
    with subprocess.Popen(argv + ["--quick"] * is_quick, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            print(f"{part} takes longer than {LONGEST_S:.0f} s", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=LONGEST_END_S)
            finally:
                process.kill()
    if process.returncode != 0:
        print(f"{part} failed with exit code {process.returncode}", file=sys.stderr, flush=True)
        return None
    figures: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return figures


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
    figures: dict[str, float] = {}
    failed = []
    for part in parts:
        found = (measure if len(parts) == 1 else measure_apart)(part, arguments.device, arguments.quick)
        if found is None:
            failed.append(part)
        figures |= found or {}
    print(json.dumps(figures) if arguments.json else json.dumps(figures, indent=2))
    return 1 if failed else 0


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())
