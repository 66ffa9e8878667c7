"""Why a world was lost, as people read it: the engine's words name addresses and ranks, these name workers."""

from __future__ import annotations

import re

from elasticdl.collective import GroupLost
from elasticdl.rpc import elasticdl_pb2 as pb

_BROKEN = re.compile(r"world \d+ is broken: ")
_NOT_FORMED = re.compile(r"world \d+ cannot be formed: ")


def shown(version: int) -> str:
    """A version as people read it: the life of the master, and the count."""
    return f"{version >> 32}.{version & 0xFFFFFFFF}"


def reason_of(lost: GroupLost, world: pb.World) -> str:
    """One cause, in plain words.

    Args:
        world: the one that was lost.
    """
    rank = -1 if lost.rank is None else lost.rank
    worker = f"worker {world.members[rank].worker_id}" if 0 <= rank < len(world.members) else ""
    if _BROKEN.match(lost.what):
        return f"it has lost {worker or 'a member'}"
    not_formed = _NOT_FORMED.match(lost.what)
    if not_formed is None:
        return lost.what
    cause = f" without {worker}" if worker else f": {lost.what[not_formed.end() :]}"
    return f"world {shown(world.version)} cannot be formed{cause}"
