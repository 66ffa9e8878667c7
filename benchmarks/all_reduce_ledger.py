"""The cost of ledger and weights in a step: a part of allreduce.py.

Two processes train the networks of all_reduce_training.py in one group, by turns: with the steps of a `GroupSession`
(headers, weights by records, the ledger, minibatches confirmed), and with plain sums of the same buffers by the same
group.  Counted is the processor time of one process, all its threads together: of a step, and of what a step of ours
has more than a plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import cast

from benchmarks.all_reduce_training import BATCH, NETWORKS, Network
from benchmarks.images import random_images
from benchmarks.measured_job import ROOT
from benchmarks.peers.launch import HOST, TOKEN
from elasticdl.activities import ActivityClock
from elasticdl.collective import ElasticGroup, Reduction
from elasticdl.data.example import encode_examples
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode, Share, TaskRecords
from elasticdl.model_def import load
from elasticdl.protocol import derive_seed
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.replica import Replica
from elasticdl.worker.allreduce.step_header import BatchRef
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.master_link import MasterLink

LONGEST_FORMING_S = 60.0
MINIBATCHES_PER_TASK = 16
NUM_BATCHES = 4


class OneGroup:
    """A master's watch, as a `GroupSession` sees it, whose only group never changes."""

    num_registrations = 1

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self._rank = rank
        members = [
            pb.GroupMember(worker_id=k, incarnation=k, address=one, is_source=False) for k, one in enumerate(addresses)
        ]
        self._reply = pb.WatchGroupReply(group=pb.Group(version=1 << 32, members=members))
        self._is_told = False

    def carry_standing(self, standing: Callable[[], tuple[int, float]]) -> None:
        """There are no heartbeats."""

    def carry_optimizer_share(self, share: Callable[[], float]) -> None:
        """The same."""

    def watch_group(self, known_version: int) -> pb.WatchGroupReply:
        if self._is_told:
            time.sleep(LONGEST_FORMING_S)
        self._is_told = True
        return self._reply

    def is_me(self, member: pb.GroupMember) -> bool:
        return bool(member.worker_id == self._rank)

    def ready_for_group(self, address: str, left: int, reason: str) -> pb.Ack:
        return pb.Ack(accepted=True)

    def group_formed(self, version: int, applied: pb.AppliedSet, steps: int, restored_from: str, engine: str) -> pb.Ack:
        return pb.Ack(accepted=True)


class Member:
    """One of the two processes, with one network."""

    def __init__(self, network: Network, group: ElasticGroup, rank: int, addresses: list[str]) -> None:
        from elasticdl.frameworks.torch import TorchFramework

        definition = load(str(ROOT / "benchmarks"), f"zoo.{network.model}", None, {}, required=("feed",))
        self._framework = TorchFramework(definition, BATCH, 0, Metadata())
        images, labels = random_images(NUM_BATCHES * BATCH, network.shape)
        records = list(encode_examples({"image": images.reshape(len(labels), -1), "label": labels}))
        made = self._framework.batches(Mode.TRAINING, iter([TaskRecords(1, 0, records)]))
        self._batches = cycle([batch for batch in made if not batch.end])
        self._group = group
        self._size = len(addresses)
        checkpoints = StateCheckpoints("", CheckpointKind("", "", "", {}), 1)
        model = Replica(self._framework, checkpoints, "", ActivityClock())
        self._session = GroupSession(cast(MasterLink, OneGroup(rank, addresses)), group, model, LONGEST_FORMING_S)
        self._session.start()
        self._session.enter()
        self._rank = rank
        self._num_steps = 0
        self.ledger_s = 0.0  # processor time of headers and ledger

    def plain_step(self) -> None:
        self._make(Share(next(self._batches), self._num_steps, 1 / self._size), self._group.begin_reduce)

    def own_step(self) -> None:
        task, n = divmod(self._num_steps, MINIBATCHES_PER_TASK)
        name = MinibatchName(0, self._size * task + self._rank, n)
        part = BatchRef(name, BATCH)
        self._num_steps += 1
        session = self._session
        began = time.process_time()
        plan = session.plan_step([part])
        session.take_confirmed()
        seed = derive_seed(0, name.epoch, name.task, name.n)
        self.ledger_s += time.process_time() - began
        self._make(Share(next(self._batches), seed, plan.scale(part)), session.begin_reduce)
        began = time.process_time()
        session.commit(plan)
        self.ledger_s += time.process_time() - began

    def _make(self, share: Share, begin: Callable[[object], Reduction]) -> None:
        reductions: list[Reduction] = []
        gradient = self._framework.local_gradient([share], lambda buffer: reductions.append(begin(buffer)))
        reductions.append(begin(gradient.buffers[-1]))
        for reduction in reductions:
            reduction.wait()
        self._framework.apply_gradient(gradient, None)

    def measure(self, is_quick: bool) -> dict[str, float]:
        """Milliseconds of processor time of a step, and ratios; steps of both kinds by turns."""
        count = 30 if is_quick else 150
        for _ in range(3):
            self.plain_step()
            self.own_step()
        self.ledger_s = 0.0
        pairs = [(self._cpu_ms(self.own_step), self._cpu_ms(self.plain_step)) for _ in range(count)]
        own, plain = statistics.median(one for one, _ in pairs), statistics.median(one for _, one in pairs)
        ledger = self.ledger_s / count * 1e3
        return {
            "step_cpu_ms": own,
            "plain_step_cpu_ms": plain,
            "step_cpu_ratio_to_plain": own / plain,
            "ledger_cpu_ms": ledger,
            "ledger_share_of_plain_step": ledger / plain,
        }

    @staticmethod
    def _cpu_ms(step: Callable[[], None]) -> float:
        began = time.process_time()
        step()
        return (time.process_time() - began) * 1e3


def measure(is_quick: bool) -> dict[str, float]:
    """By network."""
    figures: dict[str, float] = {}
    for network in NETWORKS:
        found = _measure(network, is_quick)
        print(f"{network.name}: {found}", file=sys.stderr, flush=True)
        for name, value in found.items():
            figures[f"{network.name}_{name}"] = value
    return figures


def _measure(network: Network, is_quick: bool) -> dict[str, float]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes on few cores, as in a job
    with ElasticGroup(HOST, TOKEN) as group:
        argv = [sys.executable, "-m", "benchmarks.all_reduce_ledger", network.name, group.address]
        with subprocess.Popen(argv + ["--quick"] * is_quick, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
            assert running.stdout is not None
            address = str(json.loads(running.stdout.readline()))
            try:
                return Member(network, group, 0, [group.address, address]).measure(is_quick)
            finally:
                group.leave()


def main() -> None:
    """The process of rank 1: tells its address, and does the same steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=[network.name for network in NETWORKS])
    parser.add_argument("address")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    network = next(one for one in NETWORKS if one.name == arguments.network)
    with ElasticGroup(HOST, TOKEN) as group:
        print(json.dumps(group.address), flush=True)
        Member(network, group, 1, [arguments.address, group.address]).measure(arguments.quick)


if __name__ == "__main__":
    main()
