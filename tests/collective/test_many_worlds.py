"""World after world in the same living processes: nothing is left of the old ones."""

from __future__ import annotations

from tests.collective import verbs
from tests.collective.members import Member, all_do, begin_to_form, form, members

CHANGES = 200


def check(world: list[Member]) -> None:
    told = [member.tell(verbs.summed, rank, [1001]) for rank, member in enumerate(world)]
    expected = sum(verbs.pattern(1001, rank) for rank in range(len(world)))
    for one in told:
        assert (one.result()[0] == expected).all()


def settled(world: list[Member]) -> list[dict[str, int]]:
    """Return the resources held once the threads that free old worlds are done."""
    found = all_do(world, verbs.settled)
    assert [held["python_threads"] for held in found] == [verbs.THREADS] * len(world)
    return found


def test_two_hundred_changes_leave_nothing_behind() -> None:
    """Grown, shrunk and turned round; every tenth world is lost, every tenth is given up while it forms."""
    with members(3) as three:
        before: list[dict[str, int]] = []
        for version in range(1, CHANGES + 1):
            world = [three, three[:2], three[::-1], three[1:]][version % 4]
            if version % 10 == 5:
                told = begin_to_form(world, version, absent=world[-1:])
                for member, one in zip(world, told, strict=False):
                    member.meanwhile(verbs.abandon, "never mind", version + 1)
                    one.error()
            else:
                form(world, version)
                check(world)
                if version % 10 == 0:
                    world[0].meanwhile(verbs.abandon, "never mind")
                    for member in world:
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
        told = [member.tell(verbs.world_after_world, peers, rank, 60) for rank, member in enumerate(three)]
        print("seconds for each world:", [one.result(60.0) for one in told])
