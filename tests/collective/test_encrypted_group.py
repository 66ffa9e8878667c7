"""Collectives with --encrypt: the same sums, nothing on the wire, and an error that names its sender."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticdl.collective import ElasticGroup, GroupLost, Peer, nccl
from elasticdl.collective.formed_group import FormedGroup
from elasticdl.collective.rendezvous import Rendezvous, RendezvousServer
from elasticdl.kernels._native import Mesh, MeshWork, RecordLayer
from elasticdl.rpc.addresses import parse
from elasticdl.rpc.handshake import HandshakeError
from tests.rpc.tap import Fault, Tap, tap

HOST = "127.0.0.1"
TOKEN = "the token of this job"
WITHIN_S = 30.0
Array = NDArray[Any]


def layers(num_members: int) -> list[list[RecordLayer | None]]:
    """Of each, by rank; they take new keys all the time."""
    found: list[list[RecordLayer | None]] = [[None] * num_members for _ in range(num_members)]
    for one in range(num_members):
        for other in range(one):
            keys = bytes([one]) * 32, bytes([64 + other]) * 32
            found[one][other] = RecordLayer(keys[0], keys[1], records_per_key=5)
            found[other][one] = RecordLayer(keys[1], keys[0], records_per_key=5)
    return found


def sockets(num_members: int) -> list[list[int]]:
    """Of each, by rank; they hold little, so that records go in parts."""
    found = [[-1] * num_members for _ in range(num_members)]
    for one in range(num_members):
        for other in range(one):
            ends = socket.socketpair()
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            found[one][other], found[other][one] = ends[0].detach(), ends[1].detach()
    return found


def done(work: MeshWork) -> None:
    while not work.wait(WITHIN_S):
        raise AssertionError("it does not end")


@pytest.mark.parametrize("num_members", [2, 3, 5])
def test_collectives_of_all_sizes_are_the_same_through_records(num_members: int) -> None:
    made = [Mesh(*one) for one in zip(range(num_members), sockets(num_members), layers(num_members), strict=True)]

    def live(rank: int) -> list[Array]:
        mesh, results = made[rank], []
        for count in (1, 1000, 40_000, 900_001):
            array = np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)
            works = [mesh.all_reduce(array.ctypes.data, count, "float32", array)]
            header = np.arange(16, dtype=np.int64) + rank
            gathered = np.zeros((num_members, 16), np.int64)
            places = [row.ctypes.data for row in gathered]
            works.append(mesh.all_gather(header.ctypes.data, header.nbytes, places, (header, gathered)))
            sent = np.full(count, rank, np.float32)
            works.append(mesh.broadcast(sent.ctypes.data, sent.nbytes, 1, sent))
            for work in works:
                done(work)
            results += [array, gathered, sent]
        return results

    with ThreadPoolExecutor(num_members) as pool:
        found = list(pool.map(live, range(num_members)))
    for count, (summed, gathered, sent) in zip((1, 1000, 40_000, 900_001), batched(found[0]), strict=True):
        values = [np.random.default_rng([rank, count]).standard_normal(count) for rank in range(num_members)]
        np.testing.assert_allclose(summed, sum(value.astype(np.float32) for value in values), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(gathered, np.arange(16) + np.arange(num_members)[:, None])
        np.testing.assert_array_equal(sent, np.ones(count))
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    made[0].close()  # with a farewell, which is a record, too
    assert [mesh.gone() for mesh in made[1:]] == [-1] * (num_members - 1)
    for mesh in made[1:]:
        mesh.close()


def batched(results: list[Array]) -> Iterator[list[Array]]:
    for at in range(0, len(results), 3):
        yield results[at : at + 3]


@contextmanager
def pair(encrypts: tuple[bool, bool]) -> Iterator[tuple[list[ElasticGroup], list[list[Peer]], Tap]]:
    """Two groups, and the peers as each sees them: the second reaches the first through a tap, by TCP alone."""
    with ExitStack() as stack:
        groups = [stack.enter_context(ElasticGroup(HOST, TOKEN, encrypts=one)) for one in encrypts]
        wire = stack.enter_context(tap(parse(groups[0].address)[1]))
        seen_by_first = [Peer(0, groups[0].address), Peer(1, groups[1].address)]
        yield groups, [seen_by_first, [Peer(0, f"{HOST}:{wire.port}"), seen_by_first[1]]], wire


def both(groups: list[ElasticGroup], verb: Callable[[int], Any]) -> list[Any]:
    """Return the result of each, or the GroupLost that it raised."""

    def tried(rank: int) -> Any:
        try:
            return verb(rank)
        except GroupLost as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(tried, range(2)))


def form(groups: list[ElasticGroup], peers: list[list[Peer]], version: int = 1) -> list[Any]:
    return both(groups, lambda rank: groups[rank].form(version, peers[rank], rank, WITHIN_S))


def summed(group: ElasticGroup, rank: int, size: int = 300_000) -> Array:
    array = np.random.default_rng(rank).standard_normal(size).astype(np.float32)
    group.reduce([array])
    return array


def test_sums_stand_on_the_wire_in_clear_or_not_at_all_and_are_the_same() -> None:
    sums = []
    known = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)[:100].tobytes()
    for encrypts in (False, True):
        with pair((encrypts, encrypts)) as (groups, peers, wire):
            assert form(groups, peers) == [None, None]
            sums += both(groups, lambda rank, groups=groups: summed(groups[rank], rank))
            told = both(
                groups, lambda rank, groups=groups: groups[rank].broadcast_bytes([b"given by the first", None][rank], 0)
            )
            assert told == [b"given by the first"] * 2
            for words in (known, b"given by the first", b'"version"', b"linked"):
                assert (words in wire.seen) is not encrypts, words
            assert TOKEN.encode() not in wire.seen
    for other in sums[1:]:
        np.testing.assert_array_equal(sums[0], other)


@pytest.mark.parametrize("to_server", [True, False], ids=["to the first", "from the first"])
@pytest.mark.parametrize("fault", Fault)
def test_a_spoilt_record_ends_the_group_with_an_error_that_names_a_member(fault: Fault, to_server: bool) -> None:
    with pair((True, True)) as (groups, peers, wire):
        wire.fault, wire.to_server = fault, to_server
        assert form(groups, peers) == [None, None]
        found = both(groups, lambda rank: summed(groups[rank], rank))
        reader = 0 if to_server else 1
        what = "gone" if fault is Fault.CUT else "sent a record that was changed, repeated, left out or moved"
        assert f"rank {1 - reader} has {what}" in found[reader].what
        assert (found[reader].rank, found[1 - reader].rank) == (1 - reader, reader)
        assert form(groups, peers, 2) == [None, None]
        np.testing.assert_array_equal(*both(groups, lambda rank: summed(groups[rank], rank)))


@pytest.mark.parametrize("encrypts", [(True, False), (False, True)])
def test_members_of_both_kinds_form_no_group_and_say_why(encrypts: tuple[bool, bool]) -> None:
    with pair(encrypts) as (groups, peers, _):
        found = groups[1]
        with pytest.raises(GroupLost, match=r"rank 0 cannot be reached: the other end .*encrypts? what it sends"):
            found.form(1, peers[1], 1, WITHIN_S)


def test_a_meeting_of_the_other_kind_is_refused() -> None:
    place = RendezvousServer(HOST, TOKEN, encrypts=True)
    with pytest.raises(HandshakeError, match="the other end encrypts what it sends"):
        Rendezvous(place.address, TOKEN, 1, 0, WITHIN_S)
    meeting = Rendezvous(place.address, TOKEN, 1, 0, WITHIN_S, encrypts=True)
    meeting.publish("a", b"x" * 100_000)
    assert meeting.wait_for(["a"], WITHIN_S) == [b"x" * 100_000]
    meeting.close(farewell=True)
    place.close()


@pytest.mark.parametrize(("encrypts", "gpus"), [(True, [b"a", b"b"]), (False, [b"a", b"a"])])
def test_arrays_on_gpus_come_to_main_memory_if_they_are_encrypted_or_a_gpu_is_shared(
    encrypts: bool, gpus: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU: that NCCL is not asked is what is seen."""
    free = iter(gpus)
    monkeypatch.setattr(nccl, "identity", lambda device: next(free))
    places = [RendezvousServer(HOST, TOKEN, encrypts) for _ in range(2)]
    addresses = [place.address for place in places]
    groups = [FormedGroup(1, addresses, rank, TOKEN, place, encrypts) for rank, place in enumerate(places)]
    with ThreadPoolExecutor(2) as pool:
        for forming in [pool.submit(group.form, "cuda:0", WITHIN_S) for group in groups]:
            forming.result(60)
    assert [type(group._by_device["cuda"]) for group in groups] == [nccl.StagedLinks] * 2
    assert all("through main memory" in group.engine and "NCCL" not in group.engine for group in groups)
    for one in (*groups, *places):
        (one.leave if isinstance(one, FormedGroup) else one.close)()
