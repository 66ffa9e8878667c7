"""Which member holds which shard, and which one sends it: for all small groups."""

from __future__ import annotations

import random

import numpy as np
import pytest

from elasticdl.worker.allreduce.sharded_session import (
    distance_of_holders,
    held_by,
    in_pieces,
    is_whole,
    owners,
    transfers,
)

SIZES = [5, 300, 7, 7, 120, 1, 64, 64, 64, 900, 3]


@pytest.mark.parametrize("num_members", range(1, 9))
def test_each_shard_is_held_twice_and_no_run_is_larger_than_its_part_and_a_parameter(num_members: int) -> None:
    owner_of = owners(SIZES, num_members)
    assert owner_of == sorted(owner_of)
    sizes = [sum(size for size, owner in zip(SIZES, owner_of, strict=True) if owner == r) for r in range(num_members)]
    assert max(sizes) <= sum(SIZES) / num_members + max(SIZES)
    held = [held_by(rank, owner_of, num_members) for rank in range(num_members)]
    holders = [sum(number in one for one in held) for number in range(len(SIZES))]
    assert holders == [min(2, num_members)] * len(SIZES)


@pytest.mark.parametrize(
    ("pods", "distance"),
    [([0], 1), ([0, 1, 2], 1), ([0, 0, 1, 1], 2), ([4] * 4 + [7] * 4, 4), ([0, 0, 0], 1), ([3, 3, 5, 5, 8, 8], 2)],
)
def test_the_second_holder_of_a_shard_is_in_another_pod_where_there_is_one(pods: list[int], distance: int) -> None:
    assert distance_of_holders(pods) == distance
    num_members = len(pods)
    owner_of = owners([10] * 24, num_members)
    held = [held_by(rank, owner_of, num_members, distance) for rank in range(num_members)]
    assert {len(one) for one in held} == {24 * min(2, num_members) // num_members}
    for number in range(24) if len(set(pods)) > 1 else ():
        assert len({pods[rank] for rank in range(num_members) if number in held[rank]}) == 2


def test_equal_parameters_are_divided_equally() -> None:
    assert owners([10] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_sent_is_what_is_lacking_and_comes_from_those_that_have_it() -> None:
    draw = random.Random(1)
    for _ in range(200):
        num_members, survivors = draw.randint(1, 6), draw.randint(1, 6)
        before = owners(SIZES, survivors + 1)
        held = np.zeros((num_members, len(SIZES)), np.bool_)
        for rank in range(min(survivors, num_members)):
            held[rank, list(held_by(rank, before, survivors + 1))] = True
        wanted = [held_by(rank, owners(SIZES, num_members), num_members) for rank in range(num_members)]
        if not is_whole(held):
            continue
        sent = transfers(held, wanted)
        assert all(held[one.giver, list(one.shards)].all() for one in sent)
        numbers = [number for one in sent for number in one.shards]
        assert len(numbers) == len(set(numbers))
        lacking = {n for rank, own in enumerate(wanted) for n in own if not held[rank, n]}
        assert set(numbers) == lacking
        assert sorted(n for one in transfers(held, wanted, is_all=True) for n in one.shards) == list(range(len(SIZES)))


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [([0, 3, 0], [[0, 1, 2]]), ([0], [[0]]), ([], []), ([2, 2, 2], [[0, 1], [2]]), ([9, 0, 1], [[0], [1, 2]])],
)
def test_shards_are_sent_in_pieces_and_may_be_empty(sizes: list[int], pieces: list[list[int]]) -> None:
    assert in_pieces(range(len(sizes)), sizes, 4) == pieces


def test_a_shard_without_a_holder_is_noticed() -> None:
    held = np.array([[True, False, False], [True, True, False]])
    assert not is_whole(held)
    held[0, 2] = True
    assert is_whole(held)
