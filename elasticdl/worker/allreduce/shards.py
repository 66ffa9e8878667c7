"""Which member of a group holds the optimizer's state of which parameter, and who sends it when the members change.

Pure functions of the sizes of parameters, of the size of the group, and of what its members hold: the same in each.
A shard is the state of one parameter.  Parameters are cut into as many consecutive runs as there are members; a member
owns the run of its rank, and holds that of another rank as well, so that the loss of one member loses no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def owners(sizes: Sequence[int], num_members: int) -> list[int]:
    """Return the rank that owns each parameter: consecutive runs, about equal in size.

    Args:
        sizes: of the parameters, in elements.
    """
    total, start, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(num_members - 1, (2 * start + size) * num_members // (2 * total)))
        start += size
    return found


def distance_of_holders(pods: Sequence[int]) -> int:
    """Return by how many ranks the second holder of a shard comes after its owner.

    It is the least number with which most of the pairs are in two pods: a pod is lost with all its members.

    Args:
        pods: of the members, by rank.
    """
    num_members = len(pods)

    def num_together(distance: int) -> int:
        return sum(pods[rank] == pods[(rank + distance) % num_members] for rank in range(num_members))

    return min(range(1, num_members), key=num_together, default=1)


def held_by(rank: int, owner_of: Sequence[int], num_members: int, distance: int = 1) -> frozenset[int]:
    """Return the shards that a member holds: those that it owns, and those of one rank before it.

    Args:
        distance: see `distance_of_holders`.
    """
    ranks = {rank, (rank - distance) % num_members}
    return frozenset(number for number, owner in enumerate(owner_of) if owner in ranks)


@dataclass(frozen=True, slots=True)
class ShardTransfer:
    """Shards that one member sends to all others.

    Attributes:
        giver: its rank.
    """

    giver: int
    shards: tuple[int, ...]


def in_pieces(numbers: Sequence[int], sizes: Sequence[int], max_elements: int) -> list[list[int]]:
    """Return parameters in groups whose sizes have a limit together; a larger parameter is a group of its own.

    Args:
        sizes: of all parameters, in elements.
        max_elements: of a group.
    """
    pieces: list[list[int]] = []
    left = 0
    for number in numbers:
        if not pieces or sizes[number] > left:
            pieces.append([])
            left = max_elements
        pieces[-1].append(number)
        left -= sizes[number]
    return pieces


def is_whole(held: npt.NDArray[np.bool_]) -> bool:
    """Whether each shard is held by a member.

    Args:
        held: [members, shards].
    """
    return bool(held.any(axis=0).all())


def transfers(
    held: npt.NDArray[np.bool_], wanted: Sequence[frozenset[int]], is_all: bool = False
) -> list[ShardTransfer]:
    """Return who sends what, so that each member has what it wants; holders of the same shards take turns.

    Args:
        held: [members, shards]; each shard by a member at least.
        wanted: shards of each member, by rank.
        is_all: send each shard, also those that all members have which want them.
    """
    num_members, num_shards = held.shape
    by_giver: dict[int, list[int]] = {}
    for number in range(num_shards):
        if is_all or any(number in wanted[rank] and not held[rank, number] for rank in range(num_members)):
            holders = np.flatnonzero(held[:, number])
            giver = int(holders[number * len(holders) // num_shards])
            by_giver.setdefault(giver, []).append(number)
    return [ShardTransfer(giver, tuple(by_giver[giver])) for giver in sorted(by_giver)]
