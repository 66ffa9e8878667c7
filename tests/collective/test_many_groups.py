"""Group after group in the same living processes: nothing is left of the old ones."""

from __future__ import annotations

from tests.collective import verbs
from tests.collective.members import Member, all_do, begin_to_form, form, members

CHANGES = 200


def check(group: list[Member]) -> None:
    told = [member.tell(verbs.summed, rank, [1001]) for rank, member in enumerate(group)]
    expected = sum(verbs.pattern(1001, rank) for rank in range(len(group)))
    for one in told:
        assert (one.result()[0] == expected).all()


def settled(group: list[Member]) -> list[dict[str, int]]:
    """Return the resources held once the threads that free old groups are done."""
    found = all_do(group, verbs.settled)
    assert [held["python_threads"] for held in found] == [verbs.THREADS] * len(group)
    return found


def test_two_hundred_changes_leave_nothing_behind() -> None:
    """Grown, shrunk and turned round; every tenth group is lost, every tenth is given up while it forms."""
    with members(3) as three:
        before: list[dict[str, int]] = []
        for version in range(1, CHANGES + 1):
            group = [three, three[:2], three[::-1], three[1:]][version % 4]
            if version % 10 == 5:
                told = begin_to_form(group, version, absent=group[-1:])
                for member, one in zip(group, told, strict=False):
                    member.meanwhile(verbs.abandon, "never mind", version + 1)
                    one.error()
            else:
                form(group, version)
                check(group)
                if version % 10 == 0:
                    group[0].meanwhile(verbs.abandon, "never mind")
                    for member in group:
                        member.tell(verbs.summed, 0, [10]).error()
            if version == CHANGES // 2:
                before = settled(three)
        after = settled(three)
        print(before, after, sep="\n")
        for held, once in zip(after, before, strict=True):
            assert held["descriptors"] <= once["descriptors"] + 4
            assert held["threads"] <= once["threads"] + 4
            assert held["rss_kb"] - once["rss_kb"] < 2_000


def test_the_first_to_leave_takes_nothing_from_the_others() -> None:
    """Members leave at their own time; messages already sent still arrive."""
    with members(3) as three:
        peers = [member.peer for member in three]
        told = [member.tell(verbs.group_after_group, peers, rank, 60) for rank, member in enumerate(three)]
        print("seconds for each group:", [one.result(60.0) for one in told])
