"""Memory and speed of `--shard_optimizer`: the optimizer's state in each member, and steps with shards and without.

``python -m benchmarks.sharded_optimizer [--quick] [--json] [--device=cuda]``: groups of 1, 2, 4 and 8 processes
(`--sizes`) train dense layers of about 20 M parameters (`--width`) with Adam, minibatches of 16 in memory, in two
groups of the same processes by turns: one with shards, one without.  All processes share the cores, or with
`--device=cuda` one GPU, where each gives NCCL a machine's name of its own (`NCCL_HOSTID`), as NCCL refuses two ranks on
one device of a machine: then they are connected by sockets.  Counted are bytes that the optimizer keeps for tensors,
and the median of the turns' ratios of seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from benchmarks.all_reduce_ledger import LONGEST_FORMING_S, OneGroup
from benchmarks.measured_job import ROOT
from benchmarks.peers.launch import HOST, TOKEN
from elasticdl.activities import ActivityClock
from elasticdl.collective import ElasticGroup
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Share
from elasticdl.model_def import load
from elasticdl.ps.applied import MinibatchName
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.replica import Replica, ShardedReplica
from elasticdl.worker.allreduce.sharded_session import ShardedSession
from elasticdl.worker.allreduce.step_header import BatchRef
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.master_link import MasterLink

SIZES = "1,2,4,8"
WIDTH = 1824  # 19,993,690 parameters
MINIBATCH = 16
WARM_UP_STEPS = 2
_MIB = 1 << 20


class Training:
    """One member of one group."""

    def __init__(self, is_sharded: bool, width: int, group: ElasticGroup, rank: int, addresses: list[str]) -> None:
        import torch

        from elasticdl.frameworks.torch import TorchFramework
        from elasticdl.frameworks.torch.computation import Computation
        from elasticdl.frameworks.torch.samples import TensorSamples

        definition = load(
            str(ROOT / "benchmarks"), "zoo.torch_dense.custom_model", {"width": width}, {}, required=("loss",)
        )
        computation = Computation(shards_optimizer=is_sharded)
        self.framework = TorchFramework(definition, MINIBATCH, 0, Metadata(), computation=computation)
        generator = torch.Generator().manual_seed(rank)
        features = torch.randn((MINIBATCH, width), generator=generator)
        labels = torch.randint(0, 10, (MINIBATCH,), generator=generator)
        self._batch = Batch(1, 0, size=MINIBATCH, data=TensorSamples(features, labels))
        self._rank, self._size = rank, len(addresses)
        checkpoints = StateCheckpoints("", CheckpointKind("", "", "", {}), 1)
        link = cast(MasterLink, OneGroup(rank, addresses))
        self._session: GroupSession
        if is_sharded:
            model = ShardedReplica(self.framework, checkpoints, "", ActivityClock())
            self._session = ShardedSession(link, group, model, self.framework, LONGEST_FORMING_S)
        else:
            replica = Replica(self.framework, checkpoints, "", ActivityClock())
            self._session = GroupSession(link, group, replica, LONGEST_FORMING_S)
        self._session.start()
        self._session.enter()

    def step(self) -> float:
        """Make one; return its seconds."""
        began = time.perf_counter()
        session, framework = self._session, self.framework
        name = MinibatchName(0, self._rank, session.ledger.steps)
        plan = session.plan_step([BatchRef(name, MINIBATCH)])
        reductions: list[Any] = []
        share = Share(self._batch, session.ledger.steps, 1 / self._size, self._size == 1)
        gradient = framework.local_gradient([share], lambda buffer: reductions.append(session.begin_reduce(buffer)))
        if gradient.buffers:
            reductions.append(session.begin_reduce(gradient.buffers[-1]))
            session.finish_reduce(reductions)
        gradient.told()

        def update() -> None:
            framework.apply_gradient(gradient, None)
            session.commit(plan)

        session.complete(update)
        return time.perf_counter() - began


def measure(sizes: list[int], width: int, device: str, num_turns: int) -> dict[str, float]:
    """Return figures by size of the group."""
    figures: dict[str, float] = {}
    for size in sizes:
        with _processes(size, width, device, num_turns) as found:
            figures |= {f"members_{size}_{name}": value for name, value in _figures(found).items()}
        print({name: value for name, value in figures.items() if f"_{size}_" in name}, file=sys.stderr, flush=True)
    return figures


def _figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return those of one group.

    Args:
        found: measurements of its processes, by rank.
    """
    whole = found[0]["whole_bytes"]
    largest = max(one["shard_bytes"] for one in found)
    ratios = [plain / own for own, plain in zip(found[0]["own_s"], found[0]["plain_s"], strict=True)]
    return {
        "state_mib": largest / _MIB,
        "state_share_of_whole": largest / whole,
        "whole_state_mib": whole / _MIB,
        "step_ms": 1e3 * statistics.median(found[0]["own_s"]),
        "steps_per_second_ratio_to_whole": statistics.median(ratios),
    }


@contextmanager
def _processes(size: int, width: int, device: str, num_turns: int) -> Iterator[list[dict[str, Any]]]:
    """Run one group; gives what its processes have measured, by rank."""
    running = []
    try:
        for rank in range(size):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            else:
                environment |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            arguments = [f"--rank={rank}", f"--width={width}", f"--turns={num_turns}"]
            argv = [sys.executable, "-m", "benchmarks.sharded_optimizer", *arguments]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment))
        addresses = [_told(one) for one in running]
        for one in running:
            assert one.stdin is not None
            one.stdin.write(json.dumps(addresses) + "\n")
            one.stdin.flush()
        yield [_told(one) for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()


def _told(running: subprocess.Popen[str]) -> Any:
    assert running.stdout is not None
    return json.loads(running.stdout.readline())


def _run_member(rank: int, width: int, num_turns: int) -> None:
    """Be one process: tell the addresses, learn those of all, measure."""
    import torch

    from elasticdl.frameworks.torch.model import own_device

    torch.set_flush_denormal(True)  # a model that has learnt its minibatch by heart would compute with them
    device = str(own_device())
    with ElasticGroup(HOST, TOKEN, device) as own_group, ElasticGroup(HOST, TOKEN, device) as plain_group:
        print(json.dumps([own_group.address, plain_group.address]), flush=True)
        pairs = json.loads(sys.stdin.readline())
        own = Training(True, width, own_group, rank, [pair[0] for pair in pairs])
        plain = Training(False, width, plain_group, rank, [pair[1] for pair in pairs])
        for _ in range(WARM_UP_STEPS):
            own.step()
            plain.step()
        turns = [(own.step(), plain.step()) for _ in range(num_turns)]
        found = {
            "shard_bytes": own.framework.shard_bytes(),
            "whole_bytes": plain.framework.shard_bytes(),
            "own_s": [one for one, _ in turns],
            "plain_s": [one for _, one in turns],
        }
        print(json.dumps(found), flush=True)
        sys.stdin.readline()  # until all have measured
    os._exit(0)  # the watch of a group that never changes still waits


def main() -> None:
    """Measure, or be a process of a group that is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _run_member(arguments.rank, arguments.width, arguments.turns)
    sizes = [int(size) for size in arguments.sizes.split(",")]
    figures = measure(sizes, arguments.width, arguments.device, 5 if arguments.quick else 15)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    else:
        for name, value in figures.items():
            print(f"{name:50} {value:10.3f}")


if __name__ == "__main__":
    main()
