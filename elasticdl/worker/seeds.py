"""Seeds of the randomness in training: functions of names, so that every worker draws the same for a minibatch."""

from __future__ import annotations

import hashlib
import random


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2**62) from integers such as (job seed, epoch, task) or (job seed, epoch, task, n)."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def task_order(seed: int, epoch: int, num_tasks: int) -> list[int]:
    """The order in which a master grants the tasks of an epoch."""
    order = list(range(num_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
