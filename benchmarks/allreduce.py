"""AllReduce against plain torch.distributed in the same run: the collectives without a model, and training.

``python -m benchmarks.allreduce [--quick] [--json] [--only=collectives|training|ledger]``.  Training is in
all_reduce_training.py, the cost of ledger and weights in all_reduce_ledger.py.  Collectives are those of two and four
processes: sums of 1 KiB to 64 MiB of float32, by `ElasticGroup.reduce` of a numpy array and by `all_reduce` of
torch.distributed (Gloo) of a tensor, by turns; and ours by TCP, as between machines, in clear and encrypted.  The
header of a step is a gather of 16 int64; `reform` is a group left and the next one formed, its first header included;
`abandon` is from one member's word to the end of a sum of another one that waits for it.
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
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import all_reduce_ledger, all_reduce_training
from benchmarks.peers.launch import HOST, TOKEN, free_port
from elasticdl.collective import ElasticGroup, GroupLost, Peer

SIZES = {
    "1_kib": 1 << 10,
    "16_kib": 1 << 14,
    "128_kib": 1 << 17,
    "1_mib": 1 << 20,
    "5_mb": 5_000_000,
    "25_mib": 25 << 20,
    "64_mib": 64 << 20,
}
NUM_MEMBERS = (2, 4)
HEADER = np.arange(16, dtype=np.int64)
LONGEST_FORMING_S = 60.0
WAITING_S = 0.3


class Groups:
    """Of one process: those that take Unix sockets here, and two that speak by TCP, in clear and encrypted."""

    def __init__(self, stack: ExitStack) -> None:
        self.all = [stack.enter_context(ElasticGroup(HOST, TOKEN, encrypts=one)) for one in (False, False, True)]

    @property
    def addresses(self) -> list[str]:
        return [group.address for group in self.all]


class Member:
    """This process among the others, in groups of ours and in the default group of torch.distributed."""

    def __init__(self, groups: Groups, rank: int, addresses: Sequence[Sequence[str]], port: int) -> None:
        """
        Args:
            addresses: of the groups of all processes.
        """
        import torch.distributed

        self.rank = rank
        self._group, self._clear, self._encrypted = groups.all
        peers = [[Peer(*one) for one in enumerate(column)] for column in zip(*addresses, strict=True)]
        self._peers = peers[0]
        self._version = 0
        self.reform()
        for group, theirs in zip(groups.all[1:], peers[1:], strict=True):
            group.form(1, [one if one.id == rank else by_tcp(one) for one in theirs], rank, LONGEST_FORMING_S)
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=len(self._peers)
        )

    def reform(self) -> None:
        self._version += 1
        self._group.form(self._version, self._peers, self.rank, LONGEST_FORMING_S)
        self._group.gather(HEADER)

    def leave(self) -> None:
        import torch.distributed

        torch.distributed.destroy_process_group()
        for group in (self._group, self._clear, self._encrypted):
            group.leave()

    def seconds_of(self, step: Callable[[], object], count: int) -> float:
        """Return the median of this number of steps, which both processes do."""
        for _ in range(3):
            step()
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def measure(self, is_quick: bool) -> dict[str, float]:
        """Medians of several turns: milliseconds of each, plain divided by ours; and the same of processor time.

        `…_encrypted_speed` is what is left of the speed by TCP with encryption; also in processor time.
        """
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
            reduce_by_tcp = [partial(group.reduce, [array]) for group in (self._clear, self._encrypted)]
            steps = (reduce_ours, reduce_plain, *reduce_by_tcp)
            taken: list[list[float]] = [[] for _ in steps]
            processor_s = [0.0] * len(steps)
            for _ in range(turns):
                for number, step in enumerate(steps):
                    before = time.process_time()
                    taken[number].append(self.seconds_of(step, count))
                    processor_s[number] += time.process_time() - before
            ours, plain, clear, encrypted = taken
            figures[f"{name}_ms"] = statistics.median(ours) * 1e3
            figures[f"{name}_plain_ms"] = statistics.median(plain) * 1e3
            figures[f"{name}_times_plain"] = median_ratio(plain, ours)
            figures[f"{name}_processor_times_plain"] = processor_s[1] / processor_s[0]
            figures[f"{name}_tcp_ms"] = statistics.median(clear) * 1e3
            figures[f"{name}_encrypted_speed"] = median_ratio(clear, encrypted)
            figures[f"{name}_encrypted_processor_speed"] = processor_s[2] / processor_s[3]
        headers = [
            [self.seconds_of(partial(group.gather, HEADER), 100) for _ in range(turns)]
            for group in (self._group, self._clear, self._encrypted)
        ]
        figures["header_ms"] = statistics.median(headers[0]) * 1e3
        figures["header_tcp_ms"] = statistics.median(headers[1]) * 1e3
        figures["header_encrypted_speed"] = median_ratio(headers[1], headers[2])
        figures["reform_ms"] = self.seconds_of(self.reform, 5 * turns) * 1e3
        figures["abandon_ms"] = statistics.median([self.abandon() for _ in range(turns)]) * 1e3
        return figures

    def abandon(self) -> float:
        """Rank 0 abandons the group instead of a sum; the seconds until the sum of the last rank has failed."""
        self._group.reduce([np.zeros(1, np.float32)])
        is_first, is_last = self.rank == 0, self.rank == len(self._peers) - 1
        when = np.zeros(len(self._peers), np.float64)
        if is_first:
            time.sleep(WAITING_S)  # the others wait by then
            when[0] = time.time()
            self._group.abandon("measured")
        else:
            with suppress(GroupLost):
                self._group.reduce([np.zeros(SIZES["25_mib"] // 4, np.float32)])
            when[self.rank] = time.time() if is_last else 0.0
        self.reform()
        self._group.reduce([when])
        return float(when[-1] - when[0])


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of each turn."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def by_tcp(peer: Peer) -> Peer:
    """Return the peer under a name that its Unix socket does not have."""
    return Peer(peer.id, peer.address.replace(HOST, f"[::ffff:{HOST}]"))


def other(rank: int, port: int, is_quick: bool) -> None:
    """A process of another rank: tells its addresses, learns those of all, and does the same steps."""
    with ExitStack() as stack:
        groups = Groups(stack)
        print(json.dumps(groups.addresses), flush=True)
        member = Member(groups, rank, json.loads(sys.stdin.readline()), port)
        member.measure(is_quick)
        member.leave()


def measure_collectives(num_members: int, is_quick: bool) -> dict[str, float]:
    port = free_port()
    with ExitStack() as running:
        groups = Groups(running)
        others = []
        for rank in range(1, num_members):
            argv = [sys.executable, "-m", "benchmarks.allreduce", f"--join={rank}", f"--port={port}"]
            pipes = subprocess.Popen(
                argv + ["--quick"] * is_quick, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            others.append(running.enter_context(pipes))
        addresses = [groups.addresses, *(json.loads(one.stdout.readline()) for one in others if one.stdout)]
        for one in others:
            assert one.stdin is not None
            one.stdin.write(json.dumps(addresses) + "\n")
            one.stdin.flush()
        try:
            member = Member(groups, 0, addresses, port)
            figures = member.measure(is_quick)
            member.leave()
            return {f"{num_members}_members_{name}": value for name, value in figures.items()}
        finally:
            for group in groups.all:
                group.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of each; less exact")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", choices=["collectives", "training", "ledger"], help="this part alone")
    parser.add_argument("--join", type=int, help=argparse.SUPPRESS)
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
        for num_members in NUM_MEMBERS:
            figures |= measure_collectives(num_members, arguments.quick)
    if arguments.only in (None, "ledger"):
        figures |= all_reduce_ledger.measure(arguments.quick)
    if arguments.json:
        print(json.dumps({"benchmark": "allreduce", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:14,.3f}")


if __name__ == "__main__":
    main()
