"""Types and functions shared by all processes of a job: pod roles, devices, ranges of records, task order, seeds."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from enum import StrEnum

HEARTBEAT_S = 1.0  # between two heartbeats of a worker in a small job
REPORT_S = 0.1  # between two progress reports of a worker: a call can cost as much time as a minibatch


class Role(StrEnum):
    """The work of a pod; a pod has one role."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint written by a worker that has its own model (Local strategy, AllReduce).

    Attributes:
        version: Number of minibatches in the model.
        directory: The directory of the checkpoint.
        error: Why it could not be written; empty: it is complete.
    """

    version: int
    directory: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """The accelerator of a worker's model.

    Attributes:
        name: Name in the framework: cuda:0, GPU:0.
        kind: Product name, such as NVIDIA H100 80GB HBM3.
        used_bytes: Device memory that the framework has allocated in this process.
        total_bytes: Size of the device memory; 0: unknown.
    """

    name: str
    kind: str
    used_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Records ``start`` (inclusive) to ``end`` (exclusive) of the part of a data source with the name ``name``.

    Attributes:
        identity: Identity of the part when the job counted its records (`elasticdl.data.identity`); empty: unknown.
    """

    name: str
    start: int
    end: int
    identity: str = field(default="", compare=False)

    def __len__(self) -> int:
        return self.end - self.start

    def first(self, num_records: int) -> Shard:
        """Return the first records of this shard, at most `num_records`."""
        return Shard(self.name, self.start, min(self.end, self.start + num_records), self.identity)


def pod_and_process(worker_id: int, processes_per_worker: int) -> tuple[int, int]:
    """Return the index of the pod of a worker's process, and the number of the process in the pod."""
    return divmod(worker_id, processes_per_worker)


def task_order(seed: int, epoch: int, num_tasks: int) -> list[int]:
    """Return the order in which the tasks of an epoch are assigned: the same for any number of workers."""
    order = list(range(num_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def derive_seed(*parts: int) -> int:
    """Return a seed in [0, 2**62), the same in every process.

    Args:
        parts: Numbers that identify the use, such as (job seed, epoch, task) or (job seed, epoch, task, n).
    """
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
