"""Unique ids, gathering, summing and splitting rows, against NumPy."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.kernels import _native
from tests.kernels.reference import mix64, unmix64

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(INT64 | st.integers(-5, 5), max_size=60)
SIZES = [0, 1, 7, 1000]
DIMS = [1, 3, 4, 8, 16, 17, 32, 64, 200]


@settings(max_examples=200, deadline=None)
@given(IDS)
def test_unique_ids_come_in_order_of_first_appearance(ids: list[int]) -> None:
    unique, positions = _native.unique(np.array(ids, np.int64))
    assert unique.tolist() == list(dict.fromkeys(ids))
    assert unique[positions].tolist() == ids
    assert (unique.dtype, positions.dtype) == (np.int64, np.int32)


def test_ids_of_the_same_place_are_distinguished() -> None:
    hashes = np.arange(400, dtype=np.uint64) << np.uint64(20) | np.uint64(0xFFFFF)
    ids = np.tile(unmix64(hashes).view(np.int64), 3)
    assert (mix64(ids[:400]) == hashes).all()
    unique, positions = _native.unique(ids)
    assert unique.tolist() == ids[:400].tolist()
    assert positions.tolist() == [*range(400)] * 3


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_new_arrays_begin_at_a_cache_line_and_may_be_written(size: int) -> None:
    positions = np.zeros(size, np.int32)
    rows = [_native.gather(np.ones((1, 3), np.float32), positions) for _ in range(5)]
    assert [array.__array_interface__["data"][0] % 64 for array in rows] == [0] * 5
    for array in rows:
        assert array.shape == (size, 3)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = 2.0
    assert all((array == 2.0).all() for array in rows)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_positions", SIZES)
def test_gather_and_sum_are_each_others_inverse(dim: int, num_positions: int) -> None:
    random = np.random.default_rng(dim)
    rows = random.standard_normal((50, dim), np.float32)
    positions = random.integers(0, 50, num_positions, np.int32)
    np.testing.assert_array_equal(_native.gather(rows, positions), rows[positions])

    out = np.full((num_positions + 2, dim), 7.0, np.float32)
    assert _native.gather(rows, positions, out) is out
    np.testing.assert_array_equal(out[:num_positions], rows[positions])
    assert (out[num_positions:] == 7.0).all()

    gradients = random.standard_normal((num_positions, dim), np.float32)
    sums = np.zeros((50, dim), np.float32)
    np.add.at(sums, positions, gradients)
    np.testing.assert_array_equal(_native.sum_rows(gradients, positions, 50), sums)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(INT64, st.floats(-1e6, 1e6, width=32)), max_size=60))
def test_sums_are_made_in_the_order_given(pairs: list[tuple[int, float]]) -> None:
    unique, positions = _native.unique(np.array([one % 7 for one, _ in pairs], np.int64))
    gradients = np.array([[value] for _, value in pairs], np.float32).reshape(-1, 1)
    sums = dict.fromkeys(unique.tolist(), np.float32(0.0))
    for one, value in pairs:
        sums[one % 7] = np.float32(sums[one % 7] + np.float32(value))
    assert _native.sum_rows(gradients, positions, len(unique))[:, 0].tolist() == list(sums.values())


@settings(max_examples=100, deadline=None)
@given(IDS, st.integers(1, 5))
def test_split_gives_each_ps_the_positions_of_its_own_ids(ids: list[int], num_ps: int) -> None:
    array = np.array(ids, np.int64)
    owners = np.random.default_rng(num_ps).integers(0, num_ps, 1024).astype(np.uint16)
    buckets = (mix64(array) >> np.uint64(54)).astype(np.uint16)
    np.testing.assert_array_equal(_native.buckets(array), buckets)
    parts = _native.split(array, owners, num_ps)
    assert [part.tolist() for part in parts] == [np.flatnonzero(owners[buckets] == ps).tolist() for ps in range(num_ps)]


def test_what_does_not_fit_is_refused() -> None:
    rows, positions = np.zeros((3, 2), np.float32), np.array([0, 3], np.int32)
    ids, owners = np.zeros(4, np.int64), np.zeros(1024, np.uint16)
    with pytest.raises(ValueError, match="position"):
        _native.gather(rows, positions)
    with pytest.raises(ValueError, match="position"):
        _native.gather(rows, np.array([-1], np.int32))
    with pytest.raises(ValueError, match="out"):
        _native.gather(rows, positions, np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        _native.gather(rows, positions, np.frombuffer(bytes(16), np.float32).reshape(2, 2))
    with pytest.raises(ValueError, match="position"):
        _native.sum_rows(rows[:2], positions, 3)
    with pytest.raises(ValueError, match="as many"):
        _native.sum_rows(rows, positions, 4)
    with pytest.raises(ValueError, match="int64"):
        _native.unique(np.zeros(4, np.int32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        _native.unique(np.zeros(8, np.int64)[::2])
    with pytest.raises(ValueError, match="dimensions"):
        _native.unique(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match="1,024"):
        _native.split(ids, owners[:-1], 1)
    with pytest.raises(ValueError, match="PS 0 of 0"):
        _native.split(ids, owners, 0)


def test_arrays_at_odd_addresses_are_read() -> None:
    ids = np.arange(100, dtype=np.int64)
    moved = np.frombuffer(b"x" + ids.tobytes(), np.int64, offset=1)
    assert not moved.flags.aligned
    assert _native.unique(moved)[0].tolist() == ids.tolist()


def test_records_end_where_their_lengths_say() -> None:
    body = b"".join(struct.pack("<I", len(record)) + record for record in (b"", b"ab", b"cde"))
    ends = _native.record_ends(body, 3)
    assert ends.tolist() == [4, 10, 17]
    assert _native.split_records(body, ends, 0) == [b"", b"ab", b"cde"]
    assert _native.split_records(body[4:], ends[1:], 4) == [b"ab", b"cde"]
    assert _native.record_ends(body[:12], 3).tolist() == [4, 10]
    assert _native.record_ends(body[:15], 3).tolist() == [4, 10, 17]


def test_large_records_are_split_without_the_gil_and_are_the_same() -> None:
    rows = [bytes([k]) * (30_000 + k) for k in range(5)]
    body = b"".join(struct.pack("<I", len(row)) + row for row in rows)
    assert _native.split_records(body, _native.record_ends(body, 5), 0) == rows


def test_the_same_bytes_are_cut_out_of_records_with_one_head() -> None:
    assert _native.cut_records([b"ab1234!", b"ab5678?"], b"b", 2, 6) == [b"1234", b"5678"]
    assert _native.cut_records([b"ab1234!", b"aB5678?"], b"b", 2, 6) is None
    assert _native.cut_records([], b"b", 2, 6) == []
    large = [b"h" + bytes([k]) * 50_000 for k in range(4)]
    assert _native.cut_records(large, b"h", 1, 50_001) == [row[1:] for row in large]
    with pytest.raises(ValueError, match="not in a record"):
        _native.cut_records([b"ab"], b"", 1, 3)
    with pytest.raises(ValueError, match="not in a record"):
        _native.cut_records([b"ab"], b"abc", 1, 2)
    with pytest.raises(TypeError):
        _native.cut_records(["ab"], b"", 0, 1)  # type: ignore[list-item]


@pytest.mark.parametrize("ends", [[3], [18], [10, 4]])
def test_a_record_that_is_not_in_its_piece_is_refused(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="not in the piece"):
        _native.split_records(bytes(17), np.array(ends, np.int64), 0)


def test_ids_within_a_bound() -> None:
    assert _native.all_within(np.array([0, 4]), 5)
    assert _native.all_within(np.zeros(0, np.int64), 0)
    assert not _native.all_within(np.array([0, 5]), 5)
    assert not _native.all_within(np.array([0, -1]), 5)
