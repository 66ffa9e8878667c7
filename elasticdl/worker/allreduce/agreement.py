"""The comparison of a group's members: whether they sum up the same, and whether they do so equally often.

Members whose models differ would add unlike buffers, or wait for a buffer of a member that has none.  So each sends a
number for all that it sums up when it enters a group, and the texts are compared where the numbers are not equal.
Within a step each says in its headers whether it reduces once more.

It only compares: the session exchanges the numbers and headers, and ends the group.
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
        number: a hash of them; equal in members that sum up the same.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        """
        Args:
            parts: a description of each; see `ReplicaState.sums`.
        """
        self._text = "\n".join(parts)
        hashed = hashlib.blake2b(self._text.encode(), digest_size=8).digest()
        self.number = int.from_bytes(hashed, "little", signed=True)

    def compare(
        self, numbers: Sequence[int], members: Sequence[pb.GroupMember], group: ElasticGroup, rank: int
    ) -> None:
        """Compare the members' sums; a collective of all of them where they are not equal.

        Args:
            numbers: of the members, by rank.
            rank: of this member.

        Raises:
            ModelDefinitionError: this member differs from rank 0.
            GroupLost: another one does.
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
    """Compare whether the members reduce once more in a step.

    Args:
        again: of each member, by rank.

    Raises:
        JobError: one has ended the step, and another one has not.
    """
    if any(again) and not all(again):
        more, fewer = (members[again.index(kind)].worker_id for kind in (True, False))
        raise JobError(
            f"worker {more} calls backward() once more in a step that worker {fewer} has ended",
            "call it equally often in all workers: what depends on a count of batches, as a generator that is "
            "trained every fifth time, is to count controller.num_steps, which is equal in all of them",
        )
