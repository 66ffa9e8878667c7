"""When a member dies, hangs, or is slow, the group is lost at once, and nothing else."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticdl.collective import ElasticGroup, GroupLost
from elasticdl.collective.formed_group import FormedGroup, _in_short
from elasticdl.collective.rendezvous import Rendezvous, RendezvousServer, link
from tests.collective import verbs
from tests.collective.members import ANSWER_S, HOST, TOKEN, Member, Told, all_do, begin_to_form, form, members, until

LOST_WITHIN_S = 15.0  # on a busy machine; nothing else here ends a wait sooner


@pytest.fixture
def four() -> Iterator[list[Member]]:
    with members(4) as made:
        yield made


def busy(group: list[Member]) -> list[Told]:
    """All gather without end."""
    told = [member.tell(verbs.lost_after) for member in group]
    for member in group:
        until(lambda member=member: member.meanwhile(verbs.waiting_seconds) > 0)  # type: ignore[misc]
    return told


def is_sound(group: list[Member]) -> bool:
    told = [member.tell(verbs.gathered, rank) for rank, member in enumerate(group)]
    return all(one.result() == [[rank] for rank in range(len(group))] for one in told)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_of_a_kill_see_it_at_once_and_continue(four: list[Member], victim: int) -> None:
    form(four, 1)
    told = busy(four)
    before = time.time()
    four[victim].kill()
    survivors = [member for member in four if member.number != victim]
    for member in survivors:
        when, what = told[member.number].result()
        assert when - before < LOST_WITHIN_S, what
        assert re.search(r"rank \d", what), what
        print(f"{when - before:.3f} s: {what}")
    form(survivors, 2)
    assert is_sound(survivors)


def test_abandon_frees_members_that_wait_for_a_stopped_one(four: list[Member]) -> None:
    form(four, 1)
    told = busy(four)
    four[2].stop()
    survivors = [four[0], four[1], four[3]]
    for member in survivors:
        until(lambda member=member: member.meanwhile(verbs.waiting_seconds) > 0.2)  # type: ignore[misc]
        assert not told[member.number].has_answered(0)
    for member in (four[0], four[1]):
        before = member.meanwhile(verbs.abandon, "member 2 is silent")
        when, what = told[member.number].result()
        assert when - before < LOST_WITHIN_S, what
    when, what = told[3].result()  # this one has no message, and its neighbour is the stopped one
    assert when - before < LOST_WITHIN_S
    assert "rank 0" in what or "rank 1" in what, what
    assert survivors[0].call(verbs.waiting_seconds) == 0.0
    form(survivors, 2)
    assert is_sound(survivors)
    four[2].go_on()
    assert told[2].result()
    form([*survivors, four[2]], 3)
    assert is_sound([*survivors, four[2]])


def test_a_sum_on_its_way_is_lost_with_the_group(four: list[Member]) -> None:
    form(four, 1)
    told = [member.tell(verbs.summed, member.number, [5_000_000] * 3) for member in four[:3]]
    four[3].kill()
    for one in told:
        assert isinstance(one.error(), GroupLost)
    form(four[:3], 2)
    assert is_sound(four[:3])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_in_the_middle_of_forming_is_got_over(four: list[Member], victim: int) -> None:
    """Rank 0 owns the store in which the others wait."""
    three = four[:3]
    told = begin_to_form(four, 2, absent=four[3:])
    four[victim].kill()
    survivors = [member for member in three if member.number != victim]
    for member in survivors:
        member.meanwhile(verbs.abandon, "a member died", 3)
        assert told[member.number].error(LOST_WITHIN_S)
    form(survivors, 3)
    assert is_sound(survivors)


def test_one_that_dies_in_the_middle_of_forming_is_missed_without_a_report(four: list[Member]) -> None:
    told = begin_to_form(four, 2, absent=four[3:])
    until(lambda: all(member.meanwhile(verbs.is_meeting) for member in four[:3]))
    four[1].kill()
    for rank in (0, 2):
        error = told[rank].error(LOST_WITHIN_S)
        assert (error.what, error.rank) == ("group 2 cannot be formed: rank 1 has gone", 1)


def test_one_that_stops_while_all_connect_blocks_no_other(four: list[Member]) -> None:
    """It has linked itself, has come to the meeting, and does nothing more."""
    peers = [four[0].peer, four[1].peer]
    told = four[0].tell(ElasticGroup.form, 1, peers, 0, 30.0)
    linked = link(four[0].address, TOKEN, 1, 1, 5.0).socket
    silent = Rendezvous(four[0].address, TOKEN, 1, 1, 5.0)
    silent.wait_for(["linked/0"], ANSWER_S)
    assert not told.has_answered(0.05)
    before = four[0].meanwhile(verbs.abandon, "rank 1 is silent")
    assert told.error(LOST_WITHIN_S).what == "rank 1 is silent"
    assert time.time() - before < LOST_WITHIN_S
    linked.close()
    silent.close(farewell=False)
    form([four[1], four[0]], 2)
    assert is_sound([four[1], four[0]])
    assert four[0].call(verbs.settled)["python_threads"] == verbs.THREADS


def test_forming_can_be_abandoned_and_takes_no_longer_than_allowed(four: list[Member]) -> None:
    peers = [four[0].peer, four[1].peer]
    told = four[1].tell(ElasticGroup.form, 1, peers, 1, 30.0)
    until(lambda: four[1].meanwhile(verbs.is_meeting))
    assert not told.has_answered(0.1)
    four[1].meanwhile(verbs.abandon, "enough")
    assert told.error(LOST_WITHIN_S).what == "enough"
    told = four[1].tell(ElasticGroup.form, 2, peers, 1, 0.3)
    what = told.error(0.3 + LOST_WITHIN_S).what  # of the first that sees that the time is over
    assert re.fullmatch(r"group 2 cannot be formed: (not all came within 0\.3 s|it took .*)", what), what
    four[1].meanwhile(verbs.abandon, "a newer group is planned", 5)
    assert "given up" in four[1].tell(ElasticGroup.form, 4, peers, 1, 30.0).error(LOST_WITHIN_S).what
    form(four[:2], 5)
    assert four[1].meanwhile(verbs.abandon, "an old one", 5)
    assert is_sound(four[:2])
    assert four[1].call(verbs.settled)["python_threads"] == verbs.THREADS


def test_a_slow_member_is_waited_for(four: list[Member]) -> None:
    group = four[:3]
    form(group, 1)
    told = [member.tell(verbs.gathered, 1) for member in (group[0], group[2])]
    until(lambda: group[0].meanwhile(verbs.waiting_seconds) > 5.0)
    assert group[1].meanwhile(verbs.waiting_seconds) == 0.0
    told.append(group[1].tell(verbs.gathered, 1))
    assert [one.result() for one in told] == [[[1]] * 3] * 3


def test_nothing_works_without_a_group() -> None:
    with ElasticGroup("127.0.0.1", TOKEN) as group:
        for verb in (group.gather, lambda values: group.reduce([values])):
            with pytest.raises(GroupLost, match="in no group"):
                verb(np.zeros(1, np.int64))
        assert all_do([], verbs.used) == []


def test_a_group_that_ends_between_two_sums_writes_to_neither_any_more() -> None:
    """Another thread ends it after the first has begun: the beginner of the second may use the memory again."""

    class Sum:
        is_on_its_way = True

        def wait(self, timeout_s: float) -> bool:
            self.is_on_its_way = False
            return True

    first, memory = Sum(), SimpleNamespace(device=SimpleNamespace(type="cpu"))
    links: Any = SimpleNamespace(interrupt=lambda: None)
    with ElasticGroup("127.0.0.1", TOKEN) as group:
        formed = FormedGroup(1, ["127.0.0.1:1", "127.0.0.1:2"], 0, TOKEN, group._place)
    formed._by_device = {"cpu": links}
    formed.begin(memory, lambda links: first)
    formed.end("a newer group is planned")
    with pytest.raises(GroupLost, match="a newer group is planned"):
        formed.begin(memory, lambda links: Sum())
    assert not first.is_on_its_way


def test_an_engine_that_fails_in_any_way_ends_the_group_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    places = [RendezvousServer(HOST, TOKEN) for _ in range(2)]
    addresses = [place.address for place in places]
    groups = [FormedGroup(1, addresses, rank, TOKEN, place) for rank, place in enumerate(places)]
    with ThreadPoolExecutor(2) as pool:  # here is no such device, so NCCL cannot be made
        forming = [pool.submit(group.form, "cuda:99", 30.0) for group in groups]
        for one in forming:
            with pytest.raises(GroupLost, match="cannot be formed"):
                one.result(60)
    assert raised == []
    for place in places:
        place.close()


def test_of_an_error_of_nccl_its_reason_is_reported() -> None:
    text = (
        "NCCL error in: /src/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN), NCCL version 2.28.9\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    )
    assert _in_short(RuntimeError(text)) == "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
