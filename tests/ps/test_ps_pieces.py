"""Pieces with histories of their own: parts of different moments, restored into any number of PS."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.ps.partition import PartSnapshot, Piece
from elasticdl.ps.server.in_flight import StatePartition
from tests.ps.fleet import Fleet, Oracle, assert_close, assert_equal, integers, reals, restored, sums
from tests.ps.scenes import config

NUM_NAMES = 12
PUSHES = st.lists(st.tuples(st.integers(0, NUM_NAMES - 1), st.sets(st.integers(0, 4))), max_size=40)


def taken(fleet: Fleet, ps_id: int) -> PartSnapshot:
    snapshot = fleet.states[ps_id].snapshot()
    assert snapshot is not None
    return snapshot


def pushed_and_taken(fleet: Fleet, pushes: list[tuple[int, set[int]]], moments: list[int]) -> list[PartSnapshot]:
    """The state of each PS after a number of pushes, each of which went to some PS only."""
    parts: dict[int, PartSnapshot] = {}
    for moment in range(len(pushes) + 1):
        parts |= {ps_id: taken(fleet, ps_id) for ps_id, its in enumerate(moments) if its == moment}
        if moment < len(pushes):
            n, to = pushes[moment]
            fleet.push(integers(n), to=[ps_id for ps_id in sorted(to) if ps_id < len(moments)])
    return [parts[ps_id] for ps_id in range(len(moments))]


def piece(*buckets: tuple[int, int], version: int, names: list[int]) -> Piece:
    applied = AppliedSet()
    for n in names:
        applied.add(MinibatchName(0, 0, n))
        applied.num_applies += 1
    return Piece(buckets, version, applied.to_message())


@settings(max_examples=40)
@given(data=st.data())
def test_after_any_restore_the_names_pushed_again_make_the_undisturbed_model(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PS take their parts at different moments; twice other numbers of PS go on from such parts."""
    fleet = Fleet.begin(data.draw(st.integers(1, 5)))
    for _ in range(2):
        pushes = data.draw(PUSHES)
        moments = [data.draw(st.integers(0, len(pushes))) for _ in fleet.states]
        parts = pushed_and_taken(fleet, pushes, moments)
        fleet = restored(parts, data.draw(st.integers(1, 5)), tmp_path_factory.mktemp("checkpoint"))
    for n, to in data.draw(PUSHES):
        fleet.push(integers(n), to=[ps_id for ps_id in sorted(to) if ps_id < len(fleet.states)])
    for n in range(NUM_NAMES):
        fleet.push(integers(n))
    assert_equal(fleet.read(), sums(integers(n) for n in range(NUM_NAMES)))
    for ps_id in range(len(fleet.states)):
        assert [name.n for name in fleet.names(ps_id)] == list(range(NUM_NAMES))
        snapshot = taken(fleet, ps_id)
        assert len(snapshot.pieces) == 1, "pieces that have become alike are one again"
        assert snapshot.pieces[0].version == NUM_NAMES
        snapshot.close()


def test_every_piece_has_its_own_step_count(tmp_path: Path) -> None:
    """PS 0's part is older than PS 1's: one PS with both continues as each would have."""
    adam = config("Adam", learning_rate=0.05)
    fleet, oracle = Fleet.begin(2, adam), Oracle(adam)
    for n in range(3):
        fleet.push(reals(n))
    older = taken(fleet, 0)
    for n in range(3, 6):
        fleet.push(reals(n))
    one = restored([older, taken(fleet, 1)], 1, tmp_path)
    assert [name.n for name in one.names(0)] == [0, 1, 2]
    for n in range(3, 8):
        one.push(reals(n))
    for n in range(8):
        oracle.push(reals(n))
    assert_close(one.read(), oracle.read())
    assert one.push(reals(3))[0].version == 8


def test_parts_go_on_bit_by_bit_in_another_number_of_ps(tmp_path: Path) -> None:
    adam = config("Adam", learning_rate=0.05)
    three, undisturbed = Fleet.begin(3, adam), Fleet.begin(1, adam)
    for n in range(5):
        three.push(reals(n))
        undisturbed.push(reals(n))
    five = restored([taken(three, ps_id) for ps_id in range(3)], 5, tmp_path / "five")
    for n in range(5, 9):
        five.push(reals(n))
        undisturbed.push(reals(n))
    two = restored([taken(five, ps_id) for ps_id in range(5)], 2, tmp_path / "two")
    for n in range(9, 12):
        two.push(reals(n))
        undisturbed.push(reals(n))
    assert_equal(two.read(), undisturbed.read())


def test_what_was_really_repeated_stays_seen() -> None:
    twice = piece((0, 512), version=3, names=[0, 1])
    twice.applied.num_applies += 1
    pieces = StatePartition([twice, piece((512, 1024), version=2, names=[0])])
    common = AppliedSet.common([one.applied for one in pieces.copy()])
    assert list(common) == [MinibatchName(0, 0, 0)]
    assert common.num_applies == common.num_names + 1


def test_pieces_that_differ_in_names_or_version_stay_apart() -> None:
    pieces = StatePartition(
        [
            piece((0, 100), version=2, names=[0, 1]),
            piece((100, 200), version=2, names=[0, 2]),
            piece((200, 300), (400, 1024), version=2, names=[0, 1]),
            piece((300, 400), version=3, names=[0, 1]),
        ]
    )
    assert [one.buckets for one in pieces.copy()] == [
        ((0, 100), (200, 300), (400, 1024)),
        ((100, 200),),
        ((300, 400),),
    ]
    assert pieces.version == 3
    assert pieces.of_task(0, 0).watermark == 1
    assert list(pieces.of_task(0, 0).extras) == []


@given(
    sets=st.lists(
        st.sets(st.builds(MinibatchName, st.integers(0, 1), st.integers(0, 2), st.integers(0, 8)), max_size=30),
        min_size=1,
        max_size=4,
    )
)
def test_the_common_names_are_the_intersection(sets: list[set[MinibatchName]]) -> None:
    applied = []
    for names in sets:
        one = AppliedSet()
        for name in names:
            one.num_applies += one.add(name)
        applied.append(one)
    common = AppliedSet.common(applied)
    assert set(common) == set.intersection(*sets)
    assert common.num_applies == common.num_names
