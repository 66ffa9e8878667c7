"""Checks that the members of a group sum up the same buffers, and equally often in a step.

Members whose models differ would add unlike buffers, or wait for a buffer that another member does not have.  So each
member sends a hash of everything it sums up when it enters a group; if the hashes differ, the members compare the
descriptions.  Within a step, each member says in its header whether it reduces once more.

This module only compares: the session exchanges the hashes and headers, and ends the group.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from elasticdl.collective import ElasticGroup, GroupLost
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import JobError, ModelDefinitionError


class Sums:
    """The variables and buffers that a member sums up in a step, in order.

    Attributes:
        number: Hash of the descriptions; equal in members that sum up the same.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        """
        Args:
            parts: A description of each variable or buffer; see `ReplicaState.sums`.
        """
        self._text = "\n".join(parts)
        hashed = hashlib.blake2b(self._text.encode(), digest_size=8).digest()
        self.number = int.from_bytes(hashed, "little", signed=True)

    def compare(
        self, numbers: Sequence[int], members: Sequence[pb.GroupMember], group: ElasticGroup, rank: int
    ) -> None:
        """Raise if the members sum up different things; if any differ, all members must call this together.

        Args:
            numbers: `Sums.number` of each member, by rank.
            rank: Rank of this member.

        Raises:
            ModelDefinitionError: this member differs from rank 0.
            GroupLost: another member differs from rank 0.
        """
        other = next((k for k, number in enumerate(numbers) if number != numbers[0]), None)
        if other is None:
            return
        first = group.broadcast_bytes(self._text.encode() if rank == 0 else None, 0).decode()
        with contextlib.suppress(GroupLost):  # a member that ends the group breaks what others still receive
            group.gather(np.zeros(1, np.int64))
        if self._text == first:
            raise GroupLost(f"the model of worker {members[other].worker_id} is another one")
        pairs = zip_longest(self._text.splitlines(), first.splitlines(), fillvalue="nothing more")
        mine, theirs = next((a, b) for a, b in pairs if a != b)
        raise ModelDefinitionError(
            f"The model is not that of worker {members[0].worker_id}: a step sums up {mine} here, and {theirs} there.",
            "Let no chance, environment variable or number of the worker decide what the model is made of, or what it "
            "assigns in a training step.",
        )


def check_rounds(again: Sequence[bool], members: Sequence[pb.GroupMember]) -> None:
    """Raise unless all members, or none, reduce once more in a step.

    Args:
        again: Whether each member reduces once more, by rank.

    Raises:
        JobError: one member has ended the step, and another has not.
    """
    if any(again) and not all(again):
        more, fewer = (members[again.index(kind)].worker_id for kind in (True, False))
        raise JobError(
            f"worker {more} calls backward() once more in a step that worker {fewer} has ended",
            "call it equally often in all workers: what depends on a count of batches, as a generator that is "
            "trained every fifth time, is to count controller.num_steps, which is equal in all of them",
        )
