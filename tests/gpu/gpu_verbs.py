"""Commands for members on a GPU."""

from __future__ import annotations

from itertools import count

import numpy as np
from numpy.typing import NDArray

from elasticdl.collective import ElasticGroup, GroupLost
from tests.collective.verbs import pattern

_SIZE = 2_000_003
_num_sums = 0


def summed(group: ElasticGroup, rank: int, sizes: list[int]) -> list[NDArray[np.float32]]:
    """Sums in the memory of the group's device."""
    import torch

    buffers = [torch.from_numpy(pattern(size, rank)).to(group.device) for size in sizes]
    group.reduce(buffers)
    return [buffer.cpu().numpy() for buffer in buffers]


def num_sums(group: ElasticGroup) -> int:
    return _num_sums


def wrong_sums_until_lost(group: ElasticGroup, rank: int, size: int) -> int:
    """Sums without end; how many that were said to be there were wrong.

    Args:
        size: of the group.
    """
    global _num_sums
    import torch

    own = torch.from_numpy(pattern(_SIZE, rank)).to(group.device)
    right = torch.from_numpy(sum(pattern(_SIZE, other) for other in range(size))).to(group.device)
    wrong = 0
    for _num_sums in count():
        buffers = [own.clone() for _ in range(4)]
        try:
            group.reduce(buffers)
        except GroupLost:
            return wrong
        wrong += sum(not torch.equal(buffer, right) for buffer in buffers)
    raise AssertionError("it never ends")
