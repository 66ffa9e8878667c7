"""AllReduce against plain torch.distributed in the same run: the collectives without a model, and training.

``python -m benchmarks.allreduce [--quick] [--json] [--only=collectives|training|ledger]``.  Training is in
all_reduce_training.py, the cost of ledger and weights in all_reduce_ledger.py.  Collectives are those of two
processes: sums of 1 KiB, 1 MiB, 5 MB and 25 MiB of float32, by `ElasticGroup.reduce` of a numpy array and by
`all_reduce` of torch.distributed (Gloo) of a tensor, by turns.  The header of a step is a gather of 16 int64; `reform`
is one world left and the next one formed, its first header included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import all_reduce_ledger, all_reduce_training
from benchmarks.peers.launch import HOST, TOKEN, free_port
from elasticdl.collective import ElasticGroup, Peer

SIZES = {"1_kib": 1 << 10, "1_mib": 1 << 20, "5_mb": 5_000_000, "25_mib": 25 << 20}
WORLD = 2
HEADER = np.arange(16, dtype=np.int64)
LONGEST_FORMING_S = 60.0


class Pair:
    """This process and the other one, in a world of ours and in the default group of torch.distributed."""

    def __init__(self, group: ElasticGroup, rank: int, peers: Sequence[Peer], port: int) -> None:
        import torch.distributed

        self.rank = rank
        self._group = group
        self._peers = peers
        self._version = 0
        self.reform()
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=len(peers)
        )

    def reform(self) -> None:
        self._version += 1
        self._group.form(self._version, self._peers, self.rank, LONGEST_FORMING_S)
        self._group.gather(HEADER)

    def seconds_of(self, step: Callable[[], object], count: int) -> float:
        """The median of so many steps, which both processes do."""
        for _ in range(3):
            step()
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def measure(self, is_quick: bool) -> dict[str, float]:
        """Medians of several turns: milliseconds of each, ours divided by plain."""
        import torch
        import torch.distributed

        turns = 3 if is_quick else 7
        figures: dict[str, float] = {}
        for name, size in SIZES.items():
            count = max(5, min(300, (1 << 27) // size)) // (4 if is_quick else 1)
            array = np.zeros(size // 4, np.float32)  # sums of ones would soon be infinite
            tensor = torch.zeros(size // 4)
            reduce_ours = partial(self._group.reduce, [array])
            reduce_plain = partial(torch.distributed.all_reduce, tensor)
            ours, plain = [], []
            for _ in range(turns):
                ours.append(self.seconds_of(reduce_ours, count))
                plain.append(self.seconds_of(reduce_plain, count))
            figures[f"{name}_ms"] = statistics.median(ours) * 1e3
            figures[f"{name}_plain_ms"] = statistics.median(plain) * 1e3
            ratios = [one / other for one, other in zip(ours, plain, strict=True)]
            figures[f"{name}_ratio_to_plain"] = statistics.median(ratios)
        headers = [self.seconds_of(lambda: self._group.gather(HEADER), 100) for _ in range(turns)]
        figures["header_ms"] = statistics.median(headers) * 1e3
        figures["reform_ms"] = self.seconds_of(self.reform, 5 * turns) * 1e3
        return figures


def other(address: str, port: int, is_quick: bool) -> None:
    """The process of rank 1: tells its address, and does the same steps."""
    with ElasticGroup(HOST, TOKEN) as group:
        print(group.address, flush=True)
        pair = Pair(group, 1, [Peer(0, address), Peer(1, group.address)], port)
        pair.measure(is_quick)
        leave_plain()


def leave_plain() -> None:
    import torch.distributed

    torch.distributed.destroy_process_group()


def measure_collectives(is_quick: bool) -> dict[str, float]:
    with ElasticGroup(HOST, TOKEN) as group:
        port = free_port()
        argv = [sys.executable, "-m", "benchmarks.allreduce", f"--join={group.address}", f"--port={port}"]
        with subprocess.Popen(argv + ["--quick"] * is_quick, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            try:
                address = running.stdout.readline().strip()
                pair = Pair(group, 0, [Peer(0, group.address), Peer(1, address)], port)
                figures = pair.measure(is_quick)
                leave_plain()
                return figures
            finally:
                group.leave()
                running.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of each; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", choices=["collectives", "training", "ledger"], help="this part alone")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if arguments.only in (None, "training") and not arguments.join:
        with tempfile.TemporaryDirectory(prefix="elasticdl-allreduce-") as directory:
            figures |= all_reduce_training.measure(arguments.quick, Path(directory))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on few cores, as in a job
    if arguments.join:
        other(arguments.join, arguments.port, arguments.quick)
        return
    if arguments.only in (None, "collectives"):
        figures |= measure_collectives(arguments.quick)
    if arguments.only in (None, "ledger"):
        figures |= all_reduce_ledger.measure(arguments.quick)
    if arguments.json:
        print(json.dumps({"benchmark": "allreduce", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:14,.3f}")


if __name__ == "__main__":
    main()
