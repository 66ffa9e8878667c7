"""Laws of applied sets and fences, and of the partition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.ps.applied import AppliedSet, Fences, MinibatchName
from elasticdl.ps.partition import Partition, dense_slices, even_buckets, owners_of
from elasticdl.rpc import elasticdl_pb2 as pb

NAMES = st.lists(st.builds(MinibatchName, st.integers(0, 2), st.integers(0, 3), st.integers(0, 12)), max_size=80)


@pytest.mark.ci
@given(names=NAMES)
def test_an_applied_set_is_a_set(names: list[MinibatchName]) -> None:
    applied, seen = AppliedSet(), set()
    for name in names:
        assert (name in applied) == (name in seen)
        assert applied.add(name) == (name not in seen)
        seen.add(name)
    assert list(applied) == sorted(seen)
    assert applied.num_names == len(seen)


@pytest.mark.ci
@given(names=NAMES)
def test_an_applied_set_survives_the_wire(names: list[MinibatchName]) -> None:
    applied = AppliedSet()
    for name in names:
        applied.num_applies += applied.add(name)
    message = applied.to_message()
    back = AppliedSet.from_message(message)
    assert list(back) == list(applied)
    assert back.num_applies == applied.num_applies
    assert back.to_message() == message


@pytest.mark.ci
@given(names=NAMES)
def test_extras_are_above_the_watermark(names: list[MinibatchName]) -> None:
    applied = AppliedSet()
    for name in names:
        applied.add(name)
        task = applied.of_task(name.epoch, name.task)
        assert all(n > task.watermark for n in task.extras)


@pytest.mark.ci
@given(leases=st.lists(st.integers(1, 9), max_size=30))
def test_a_lease_older_than_the_newest_known_is_refused(leases: list[int]) -> None:
    fences, newest = Fences(), 0
    for lease in leases:
        assert fences.refuses(lease, 0, 0) == (lease < newest)
        newest = max(newest, lease)
    assert not fences.refuses(1, 0, 1)


@pytest.mark.ci
@given(num_ps=st.integers(1, 9), size=st.integers(0, 100))
def test_dense_slices_cover_a_vector_once(num_ps: int, size: int) -> None:
    slices = [part for ps_id in range(num_ps) for part in dense_slices(even_buckets(ps_id, num_ps), size)]
    assert [n for s in slices for n in range(s.start, s.stop)] == list(range(size))


@pytest.mark.ci
@given(num_ps=st.integers(1, 9), ids=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=100))
def test_every_id_has_one_owner(num_ps: int, ids: list[int]) -> None:
    message = pb.Partition(version=1, ps=[pb.PsAddress(ps_id=ps_id, incarnation=1) for ps_id in range(num_ps)])
    partition = Partition.from_message(message)
    array = np.array(ids, np.int64)
    positions = [np.arange(len(ids)) if p is None else p for p in partition.split(array)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(len(ids)))
    alone = partition.split(array[::-1].copy())
    for here, there in zip(positions, alone, strict=True):
        assert there is None or set(array[here]) == set(array[::-1][there])


@pytest.mark.ci
def test_buckets_are_balanced() -> None:
    counts = np.bincount(owners_of([even_buckets(ps_id, 3) for ps_id in range(3)]))
    assert counts.max() - counts.min() <= 1
