"""Ownership: every element and every id has one owner, and all carry about the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.ps.partition import (
    ALL_BUCKETS,
    NUM_BUCKETS,
    Buckets,
    Partition,
    buckets,
    dense_slices,
    even_buckets,
    joined_buckets,
    num_floats,
    owners_of,
    slices_outside,
    slices_within,
)
from elasticdl.ps.server.service import PsService
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.wire import ExchangeCall, decode_reply, exchange_frame, initialize_frame, known_ids_frame
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.ps.fleet import Fleet

# Of the zoo's models: floats of the dense variables, and rows and dimension of the tables.
ZOO = {
    "mnist": (12_874, []),
    "digits": (74_762, []),
    "deepfm_edl_embedding": (10_369, [(5_383, 16), (5_383, 1)]),
    "deepfm_large": (30_593, [(1_000_000, 16), (1_000_000, 1)]),
}


@st.composite
def shares(draw: st.DrawFn) -> list[Buckets]:
    """Any division of all buckets over some PS."""
    cuts = sorted(draw(st.sets(st.integers(1, NUM_BUCKETS - 1), max_size=12)))
    spans = list(zip([0, *cuts], [*cuts, NUM_BUCKETS], strict=True))
    owners = [draw(st.integers(0, 3)) for _ in spans]
    return [
        joined_buckets(span for span, owner in zip(spans, owners, strict=True) if owner == ps_id) for ps_id in range(4)
    ]


def message(divided: Sequence[Buckets], version: int = 1) -> pb.Partition:
    return pb.Partition(
        version=version,
        ps=[
            pb.PsAddress(
                ps_id=ps_id, incarnation=10 + ps_id, buckets=[pb.BucketRange(start=a, end=b) for a, b in share]
            )
            for ps_id, share in enumerate(divided)
        ],
    )


@given(divided=shares(), size=st.integers(0, 5000))
def test_dense_vectors_are_cut_and_put_together_again(divided: list[Buckets], size: int) -> None:
    partition = Partition.from_message(message([share for share in divided if share]))
    vector = np.arange(size, dtype=np.float32)
    parts = [partition.dense_part(ps_id, vector) for ps_id in range(partition.num_ps)]
    assert [len(part) for part in parts] == [num_floats(server.buckets, size) for server in partition.servers]
    np.testing.assert_array_equal(partition.dense_whole(parts, size), vector)


@given(divided=shares(), bounds=st.lists(st.integers(0, 3000), max_size=12))
def test_ranges_of_a_vector_are_found_in_the_parts_of_all_ps(divided: list[Buckets], bounds: list[int]) -> None:
    partition = Partition.from_message(message([share for share in divided if share]))
    bounds = sorted(bounds)
    ranges = tuple(zip(bounds[::2], bounds[1::2], strict=False))
    vector = np.zeros(3000, np.float32)
    for start, end in ranges:
        vector[start:end] = 1.0
    for ps_id in range(partition.num_ps):
        part = partition.dense_part(ps_id, vector)
        in_part = partition.ranges_within(ps_id, ranges, 3000)
        assert all(part[start:end].all() for start, end in in_part)
        assert sum(end - start for start, end in in_part) == part.sum()
        halves = [slice(0, len(part) // 2), slice(len(part) // 2, len(part))]
        outside = slices_outside(halves, in_part)
        assert not any(part[one].any() for one in outside)
        assert sum(one.stop - one.start for one in outside) == len(part) - part.sum()


@given(own=shares(), wanted=shares(), size=st.integers(0, 5000))
def test_a_share_is_found_within_another(own: list[Buckets], wanted: list[Buckets], size: int) -> None:
    for held in own:
        vector = np.concatenate([np.arange(size)[part] for part in (slice(0, 0), *dense_slices(held, size))])
        for share in wanted:
            common = joined_buckets((max(a, c), min(b, d)) for a, b in share for c, d in held if max(a, c) < min(b, d))
            found = [vector[part] for part in (slice(0, 0), *slices_within(share, held, size))]
            expected = [np.arange(size)[part] for part in (slice(0, 0), *dense_slices(common, size))]
            np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))


@given(divided=shares(), ids=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=100))
def test_every_id_has_one_owner_wherever_it_stands(divided: list[Buckets], ids: list[int]) -> None:
    partition = Partition.from_message(message([share for share in divided if share]))
    array = np.array(ids, np.int64)
    positions = partition.split(array)
    assert sorted(np.concatenate(positions).tolist()) == list(range(len(ids)))
    for ps_id, mine in enumerate(positions):
        assert mine.tolist() == sorted(mine.tolist())
        for bucket in buckets(array[mine]).tolist():
            assert any(start <= bucket < end for start, end in partition.servers[ps_id].buckets)
    for here, there in zip(positions, partition.split(array[::-1].copy()), strict=True):
        assert set(array[here]) == set(array[::-1][there])


def test_buckets_are_divided_evenly_if_nothing_is_said() -> None:
    for num_ps in (1, 2, 3, 7, 1024):
        said = Partition.from_message(message([even_buckets(ps_id, num_ps) for ps_id in range(num_ps)]))
        unsaid = Partition.from_message(message([()] * num_ps))
        assert unsaid == said
        np.testing.assert_array_equal(unsaid.owners, said.owners)
    assert even_buckets(0, 1) == ALL_BUCKETS


def test_a_bucket_with_two_owners_or_none_is_noticed() -> None:
    for wrong in ([((0, 600),), ((500, 1024),)], [((0, 500),), ((600, 1024),)], [((0, 1025),)]):
        with pytest.raises(ValueError, match="bucket"):
            owners_of(wrong)


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("num_ps", range(2, 17))
def test_all_ps_hold_about_the_same(model: str, num_ps: int) -> None:
    """Bytes, with the two slots of Adam."""
    size, tables = ZOO[model]
    sizes = np.array([3 * 4 * num_floats(even_buckets(ps_id, num_ps), size) for ps_id in range(num_ps)])
    partition = Partition.from_message(message([()] * num_ps))
    for rows, dim in tables:
        row_bytes = 8 + 3 * 4 * dim
        sizes += [row_bytes * len(mine) for mine in partition.split(np.arange(rows, dtype=np.int64))]
    assert sizes.max() / sizes.mean() <= 1.1


def test_calls_by_an_old_partition_are_refused_with_the_new_one() -> None:
    fleet = Fleet.begin(1)
    service = PsService(0, fleet.states[0])
    service.incarnation = 12
    old, new = message([ALL_BUCKETS], version=3), message([ALL_BUCKETS], version=4)
    service.accept_partition(new)
    service.accept_partition(old)
    assert service.partition == new
    initialize = fleet.initialize_call(0)

    def answers(incarnation: int, version: int) -> list[tuple[int, int]]:
        """The status of each method, and the version of the partition in its reply."""
        initialize.header.incarnation, initialize.header.partition_version = incarnation, version
        frames = [
            service.initialize(initialize_frame(initialize).whole()),
            service.exchange(exchange_frame(ExchangeCall(incarnation, None, None, version)).whole()),
            service.known_ids(known_ids_frame(incarnation, "deep", version).whole()),
        ]
        standing = service.task_standing(
            pb.TaskStandingRequest(incarnation=incarnation, partition_version=version, lease=1)
        )
        replies = [*(decode_reply(frame)[0] for frame in frames), standing]
        return [(reply.status, reply.partition.version) for reply in replies]

    assert answers(12, 3) == [(pb.OLD_PARTITION, 4)] * 4
    assert answers(12, 4) == [(pb.OK, 0)] * 4
    assert answers(12, 5) == [(pb.OK, 0)] * 4  # newer than this PS knows
    assert answers(11, 3) == [(pb.WRONG_INCARNATION, 4)] * 4
    assert answers(11, 4) == [(pb.WRONG_INCARNATION, 0)] * 4


def test_a_ps_that_is_not_ready_refuses_every_call() -> None:
    service = PsService(0, ServerState())
    reply, _ = decode_reply(service.exchange(exchange_frame(ExchangeCall(0, None, None, 1)).whole()))
    assert reply.status == pb.WRONG_INCARNATION
    assert service.task_standing(pb.TaskStandingRequest()).status == pb.WRONG_INCARNATION
