"""Values that all processes of a job share: roles of pods, devices, ranges of records, the order of tasks, seeds."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from enum import StrEnum

HEARTBEAT_S = 1.0  # between two heartbeats of a worker of a small job
REPORT_S = 0.1  # between two of its reports of progress: a call costs both sides as much as many a minibatch


class Role(StrEnum):
    """The work of a pod; a pod has one role."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """By a worker that holds a model of its own.

    Attributes:
        version: minibatches in the model.
        error: why it could not be written; empty: it is whole.
    """

    version: int
    directory: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """The accelerator that a worker's model is on.

    Attributes:
        name: as the framework has it: cuda:0, GPU:0.
        kind: the product, such as NVIDIA H100 80GB HBM3.
        used_bytes: of its memory, by this process, as far as the framework manages it.
        total_bytes: of its memory; 0: not known.
    """

    name: str
    kind: str
    used_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Records ``start`` (inclusive) to ``end`` (exclusive) of the part of a source called ``name``.

    Attributes:
        identity: of the part when the job counted it (`elasticdl.data.identity`); empty: nothing says which one it is.
    """

    name: str
    start: int
    end: int
    identity: str = field(default="", compare=False)

    def __len__(self) -> int:
        return self.end - self.start

    def first(self, num_records: int) -> Shard:
        """Return a part of at most that many records, from the start on."""
        return Shard(self.name, self.start, min(self.end, self.start + num_records), self.identity)


def pod_and_process(worker_id: int, processes_per_worker: int) -> tuple[int, int]:
    """Return the index of the pod that a worker's process is in, and its number in the pod."""
    return divmod(worker_id, processes_per_worker)


def task_order(seed: int, epoch: int, num_tasks: int) -> list[int]:
    """Return the order in which the tasks of an epoch are granted: the same for any number of workers."""
    order = list(range(num_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def derive_seed(*parts: int) -> int:
    """Return a seed in [0, 2**62), the same in every process.

    Args:
        parts: such as (job seed, epoch, task) or (job seed, epoch, task, n).
    """
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
