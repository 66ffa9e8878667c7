"""A member's reason for the loss of a world: one cause, in plain words."""

from __future__ import annotations

import pytest

from elasticdl.collective import GroupLost
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import reason_of

WORLD = pb.World(
    version=1 << 32 | 4, members=[pb.WorldMember(worker_id=7), pb.WorldMember(worker_id=9), pb.WorldMember(worker_id=2)]
)


@pytest.mark.parametrize(
    ("lost", "plain"),
    [
        (
            GroupLost("world 4294967300 is broken: Connection closed by peer (rank 1)", 1),
            "it has lost worker 9",
        ),
        (GroupLost("world 4294967300 is broken: rank 2 has gone", 2), "it has lost worker 2"),
        (GroupLost("world 4294967300 is broken: rank -1 has gone", -1), "it has lost a member"),
        (GroupLost("world 4294967300 is broken: Connection reset by peer", None), "it has lost a member"),
        (
            GroupLost("world 4294967300 cannot be formed: not all came within 5.0 s"),
            "world 1.4 cannot be formed: not all came within 5.0 s",
        ),
        (
            GroupLost("world 4294967300 cannot be formed: Connection refused", 1),
            "world 1.4 cannot be formed without worker 9",
        ),
        (GroupLost("a newer world without worker 9 is planned"), "a newer world without worker 9 is planned"),
    ],
)
def test_a_lost_world_has_one_plain_cause(lost: GroupLost, plain: str) -> None:
    assert reason_of(lost, WORLD) == plain
