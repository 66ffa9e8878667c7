"""A member's reason for the loss of a group: one cause, in plain words."""

from __future__ import annotations

import pytest

from elasticdl.collective import GroupLost
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import reason_of

GROUP = pb.Group(
    version=1 << 32 | 4, members=[pb.GroupMember(worker_id=7), pb.GroupMember(worker_id=9), pb.GroupMember(worker_id=2)]
)


@pytest.mark.parametrize(
    ("lost", "plain"),
    [
        (
            GroupLost("group 4294967300 is broken: Connection closed by peer (rank 1)", 1),
            "it has lost worker 9",
        ),
        (GroupLost("group 4294967300 is broken: rank 2 has gone", 2), "it has lost worker 2"),
        (GroupLost("group 4294967300 is broken: rank -1 has gone", -1), "it has lost a member"),
        (GroupLost("group 4294967300 is broken: Connection reset by peer", None), "it has lost a member"),
        (
            GroupLost("group 4294967300 cannot be formed: not all came within 5.0 s"),
            "group 1.4 cannot be formed: not all came within 5.0 s",
        ),
        (
            GroupLost("group 4294967300 cannot be formed: Connection refused", 1),
            "group 1.4 cannot be formed without worker 9",
        ),
        (GroupLost("a newer group without worker 9 is planned"), "a newer group without worker 9 is planned"),
    ],
)
def test_a_lost_group_has_one_plain_cause(lost: GroupLost, plain: str) -> None:
    assert reason_of(lost, GROUP) == plain
