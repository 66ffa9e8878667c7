"""Processor time of a process's start, by role: from exec until it looks for its job, all modules imported.

``python -m benchmarks.start [--quick] [--json]``: each role is started without the environment of a job, which it
refuses after its imports, by turns with the peer: a Python that imports NumPy and gRPC, which a worker needs whatever
its other imports are.  Bytecode is compiled before.  The figures are medians, in milliseconds of user and system time.
A worker that is forked from a standby has its imports already.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTS = {
    "peer": ("-c", "import numpy, grpc"),
    "client": ("-m", "elasticdl_client.main", "--version"),
    "agent": ("-m", "elasticdl.cluster.local.agent"),
    "master": ("-m", "elasticdl.master"),
    "ps": ("-m", "elasticdl.ps"),
    "worker": ("-m", "elasticdl.worker"),
}


def processor_ms(arguments: tuple[str, ...]) -> float:
    """User and system time of one Python process, in milliseconds."""
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, used = os.wait4(process.pid, 0)
    return 1e3 * (used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer starts")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    arguments = parser.parse_args()
    for package in ("elasticdl", "elasticdl_client"):
        compileall.compile_dir(ROOT / package, quiet=2)
    measured: dict[str, list[float]] = {role: [] for role in STARTS}
    for _ in range(5 if arguments.quick else 21):
        for role, command in STARTS.items():
            measured[role].append(processor_ms(command))
    figures = {f"{role}_ms": statistics.median(times) for role, times in measured.items()}
    figures |= {f"{role}_to_peer": figures[f"{role}_ms"] / figures["peer_ms"] for role in STARTS if role != "peer"}
    if arguments.json:
        print(json.dumps({"benchmark": "start", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:20} {value:9.2f}")


if __name__ == "__main__":
    main()
