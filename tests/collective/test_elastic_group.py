"""Sums and copies among real processes on one address."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from elasticdl.collective import ElasticGroup, GroupLost, Peer
from elasticdl.collective.formed_group import FormedGroup
from elasticdl.collective.group import PIECE_BYTES
from elasticdl.collective.nccl import NcclLinks, StagedLinks
from elasticdl_client.errors import ElasticDLError
from tests.collective import verbs
from tests.collective.members import HOST, TOKEN, Member, all_do, form, members, until
from tests.lean_import import LEAN_IMPORT

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 2, 3, 7, 31, 0, 1023, 65537, 300_001]


@pytest.fixture(scope="module")
def four() -> Iterator[list[Member]]:
    with members(4) as made:
        yield made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_exact_for_every_group_and_odd_sizes(four: list[Member], size: int) -> None:
    group = four[:size]
    form(group, size)
    told = [member.tell(verbs.summed, rank, SIZES) for rank, member in enumerate(group)]
    for one in told:
        for found, length in zip(one.result(), SIZES, strict=True):
            np.testing.assert_array_equal(found, sum(verbs.pattern(length, rank) for rank in range(size)))


def test_all_see_the_values_of_all_by_rank(four: list[Member]) -> None:
    group = [four[2], four[0], four[1]]
    form(group, 11)
    told = [member.tell(verbs.gathered, member.number, -(2**60), 7) for member in group]
    assert [one.result() for one in told] == [[[2, -(2**60), 7], [0, -(2**60), 7], [1, -(2**60), 7]]] * 3
    assert all_do(group, verbs.gathered) == [[[], [], []]] * 3


@pytest.mark.parametrize(("size", "source"), [(2, 1), (3, 0)])
def test_a_state_of_mixed_types_and_sizes_reaches_all(four: list[Member], size: int, source: int) -> None:
    group = four[:size]
    form(group, 20 + size)
    told = [member.tell(verbs.give_state, rank, source) for rank, member in enumerate(group)]
    assert all(one.result() for one in told)


@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 5_000_000])
def test_bytes_reach_all(four: list[Member], size: int) -> None:
    group = four[:3]
    form(group, 1000 + size)
    told = [member.tell(verbs.give_bytes, size, rank, 2) for rank, member in enumerate(group)]
    assert all(one.result() for one in told)


def test_sums_that_overlap_may_be_waited_for_in_any_order(four: list[Member]) -> None:
    form(four, 10_000_000)
    told = [member.tell(verbs.sum_behind_other_work, rank) for rank, member in enumerate(four)]
    for one in told:
        for n, found in enumerate(one.result()):
            np.testing.assert_array_equal(found, sum(verbs.pattern(200_000 + n, rank) for rank in range(4)))


def test_memory_of_any_library_is_summed_in_place(four: list[Member]) -> None:
    group = four[:2]
    form(group, 10_000_001)
    told = [member.tell(verbs.sum_of_many_kinds, rank) for rank, member in enumerate(group)]
    for one in told:
        for n, found in enumerate(one.result()):
            np.testing.assert_array_equal(found, verbs.pattern(10 + n, 0) + verbs.pattern(10 + n, 1))


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (np.broadcast_to(np.float32(1), 3), "read-only"),
        (np.zeros((4, 4), np.float32)[:, 1], "not contiguous"),
        (np.zeros(3, np.bool_), "bool"),
        ([1.0, 2.0], "a list"),
    ],
)
def test_what_cannot_be_summed_in_place_is_refused(buffer: object, why: str) -> None:
    with ElasticGroup(HOST, TOKEN) as alone:
        alone.form(1, [Peer(0, alone.address)], 0, 1.0)
        with pytest.raises(ValueError, match=why):
            alone.reduce([buffer])


def test_one_alone_is_a_group() -> None:
    with ElasticGroup(HOST, TOKEN) as alone:
        alone.form(1, [Peer(7, alone.address)], 0, 1.0)
        buffer = verbs.pattern(5, 1)
        alone.reduce([buffer])
        np.testing.assert_array_equal(buffer, verbs.pattern(5, 1))
        assert alone.gather(np.array([3, 4])).tolist() == [[3, 4]]
        assert alone.broadcast_bytes(b"x", 0) == b"x"
        assert list(alone.broadcast({"a": np.ones(2)}, 0)) == ["a"]
        alone.abandon("enough")
        with pytest.raises(GroupLost, match="enough"):
            alone.gather(np.array([3]))


@pytest.mark.parametrize("host", [HOST, "localhost", "::1"])
def test_several_groups_may_live_in_one_process(host: str) -> None:
    with ElasticGroup(host, TOKEN) as one, ElasticGroup(host, TOKEN) as two, ElasticGroup(host, TOKEN) as three:
        groups = (one, two, three)
        peers = [Peer(number, group.address) for number, group in enumerate(groups)]

        def live(rank: int) -> list[list[int]]:
            for version in range(1, 4):
                groups[rank].form(version, peers, rank, 30.0)
                found: list[list[int]] = groups[rank].gather(np.array([rank + version])).tolist()
            return found

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(live, range(3))) == [[[3], [4], [5]]] * 3
            waiting = pool.submit(one.gather, np.array([1]))
            three.abandon("enough")
            with pytest.raises(GroupLost):
                waiting.result(30.0)


def test_of_a_large_sum_each_piece_is_waited_for_anew() -> None:
    """On a slow network the whole takes long: the master must not take that for one collective that stands still."""
    count = PIECE_BYTES // 4
    with ElasticGroup(HOST, TOKEN) as one, ElasticGroup(HOST, TOKEN) as two, ThreadPoolExecutor(2) as pool:
        peers = [Peer(number, group.address) for number, group in enumerate((one, two))]
        for formed in [pool.submit(group.form, 1, peers, rank, 30.0) for rank, group in enumerate((one, two))]:
            formed.result()
        whole, pieces = np.arange(2 * count + 5, dtype=np.float32), np.ones(2 * count + 5, np.float32)
        waiting = pool.submit(one.reduce, [whole])
        for start in range(0, len(pieces), count):
            until(lambda: one.waiting_seconds > 0.2)
            began = time.monotonic() - one.waiting_seconds
            two.reduce([pieces[start : start + count]])
            until(lambda began=began: time.monotonic() - one.waiting_seconds > began + 0.1)
        waiting.result(30.0)
        np.testing.assert_array_equal(whole, np.arange(2 * count + 5, dtype=np.float32) + 1)
        np.testing.assert_array_equal(whole, pieces)


def test_a_peer_at_a_wrong_rank_is_refused() -> None:
    with ElasticGroup(HOST, TOKEN) as alone, pytest.raises(ValueError, match="is not this process"):
        alone.form(1, [Peer(0, "127.0.0.1:1"), Peer(1, alone.address)], 0, 1.0)


def test_collectives_by_way_of_main_memory_give_the_same() -> None:
    """The calls of members that share a GPU, with tensors of the CPU."""
    with members(3) as three:
        form(three, 1)
        assert all_do(three, verbs.engine) == ["the native mesh"] * 3
        expected = sum(verbs.pattern(6_000_003, rank) for rank in range(3))
        for summed, given in [t.result() for t in [m.tell(verbs.staged, rank, 1) for rank, m in enumerate(three)]]:
            assert np.array_equal(summed, expected)
            assert np.array_equal(given, verbs.pattern(6, 1))


@pytest.mark.parametrize(("links", "calls"), [(StagedLinks, [PIECE_BYTES, 4]), (NcclLinks, [PIECE_BYTES + 4])])
def test_an_array_on_a_gpu_is_cut_as_by_members_without_one(
    links: type, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU: torch's device `meta` stands for it, and the calls are only noted."""
    import torch

    found: list[int] = []
    monkeypatch.setattr(links, "all_reduce", lambda _, tensor: found.append(tensor.nbytes))
    with ElasticGroup(HOST, TOKEN) as group:
        group._formed = FormedGroup(1, [group.address] * 2, 0, TOKEN, group._place)
        group._formed._by_device["meta"] = links.__new__(links)
        group.begin_reduce(torch.empty(PIECE_BYTES // 4 + 1, device="meta"))
        group._formed = None
    assert found == calls


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(ElasticDLError, match=r"192\.0\.2\.1"):
        ElasticGroup("192.0.2.1", TOKEN)


@pytest.mark.parametrize(("device", "why"), [("cuda:99", "GPU"), ("tpu", "no collectives")])
def test_a_device_that_is_not_here_is_named(device: str, why: str) -> None:
    with pytest.raises(ElasticDLError, match=why) as raised:
        ElasticGroup(HOST, TOKEN, device)
    assert device in raised.value.what


def test_processes_end_well_with_or_without_a_farewell() -> None:
    with members(3) as three:
        form(three, 1)
        assert all_do(three, verbs.gathered, 1) == [[[1]] * 3] * 3
        three[0].meanwhile(verbs.abandon, "enough")
        assert [member.end() for member in three] == [0, 0, 0]


def test_tensors_of_tensorflow_are_summed_without_a_copy() -> None:
    """In a process of its own: the members have no TensorFlow."""
    done = subprocess.run([sys.executable, "-c", LEAN_IMPORT + _TENSORFLOW], timeout=120, cwd=ROOT)
    if done.returncode == _NO_DLPACK:
        pytest.skip("this TensorFlow is older: its tensors have no __dlpack__")
    assert done.returncode == 0


_NO_DLPACK = 5
_TENSORFLOW = f"""
import sys
import tensorflow as tf
from elasticdl.collective.group import shared_tensor
gradient = tf.function(lambda x: x * 2)(tf.ones(5))
if not hasattr(gradient, "__dlpack__"):
    sys.exit({_NO_DLPACK})
tensor = shared_tensor(gradient)
tensor += 1
assert gradient.numpy().tolist() == [3.0] * 5
"""
