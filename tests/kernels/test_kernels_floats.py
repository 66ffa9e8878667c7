"""Short floats, checksums, and the look for what is not finite."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.kernels import _native
from tests.kernels.reference import crc32c

EDGES = [0.0, -0.0, 1.0, 65504.0, 65519.99, 65520.0, -65520.0, 1e30, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001]
SPECIAL = np.array([*EDGES, 1e-40, np.inf, -np.inf, np.nan, -np.nan], np.float32)


def any_floats() -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    return np.concatenate([SPECIAL, bits.view(np.float32)])


@pytest.mark.parametrize("first", [0, 1, 5])  # those beyond a multiple of eight are converted one by one
def test_float16_is_numpys(first: int) -> None:
    values = any_floats()[first:]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    halves = _native.to_half(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(halves[number], expected.view(np.uint16)[number])
    assert np.isnan(halves.view(np.float16)[~number]).all()


def test_each_float16_comes_back() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    for values, bits in [
        (_native.from_half(halves), expected),
        (np.concatenate([_native.from_half(halves[i : i + 1]) for i in range(0, 65536, 37)]), expected[::37]),
    ]:
        number = ~np.isnan(bits)
        np.testing.assert_array_equal(values.view(np.uint32)[number], bits.view(np.uint32)[number])
        assert np.isnan(values[~number]).all()


def test_float16_of_single_values() -> None:
    for value in SPECIAL[:-2]:
        with np.errstate(over="ignore"):
            expected = np.float16(value)
        assert _native.to_half(np.array([value]))[0] == expected.view(np.uint16)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = any_floats()
    halves = _native.to_bfloat16(values)
    back = _native.from_bfloat16(halves)
    np.testing.assert_array_equal(back.view(np.uint32), halves.astype(np.uint32) << 16)
    assert (np.isnan(back) == np.isnan(values)).all()
    ordinary = np.isfinite(values) & (np.abs(values) < 3e38)
    bits = values.view(np.uint32).astype(np.uint64)[ordinary]
    below = bits & np.uint64(0xFFFF0000)
    rest = bits - below
    up = (rest > 0x8000) | ((rest == 0x8000) & (below & 0x10000 != 0))
    np.testing.assert_array_equal(back.view(np.uint32)[ordinary], below + up * np.uint64(0x10000))


def test_shapes_are_kept() -> None:
    values = np.ones((3, 0, 5), np.float32)
    assert _native.from_half(_native.to_half(values)).shape == (3, 0, 5)
    scalar = np.array(2.5, np.float32)
    assert _native.from_bfloat16(_native.to_bfloat16(scalar)) == scalar


def test_not_finite_is_found_wherever_it_is() -> None:
    for size in (0, 1, 31, 20_000):
        values = np.full(size, np.finfo(np.float32).max, np.float32)
        assert _native.all_finite(values)
        for place in {0, size // 2, size - 1} if size else set():
            for bad in (np.nan, np.inf, -np.inf):
                spoiled = values.copy()
                spoiled[place] = bad
                assert not _native.all_finite(spoiled)


def test_the_checksum_is_castagnolis() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(b"") == 0
    assert _native.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert _native.crc32c(bytearray(b"\xff") * 32) == 0x62A8AB43


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 16), st.integers(0, 3000))
def test_checksums_go_on_and_do_not_depend_on_the_processor(size: int, first: int, cut: int) -> None:
    data = np.random.default_rng(size).bytes(size + first)[first:]
    expected = crc32c(data)
    assert _native.crc32c(data) == expected
    assert _native._crc32c_portable(data) == expected  # type: ignore[attr-defined]
    assert _native.crc32c(memoryview(data)[cut:], _native.crc32c(data[:cut])) == expected


def test_checksums_of_long_data() -> None:
    data = np.random.default_rng(3).bytes(3 * 4096 * 5 + 3 * 256 * 3 + 13)
    assert _native.crc32c(data) == _native._crc32c_portable(data)  # type: ignore[attr-defined]
    floats = np.frombuffer(data[:40_000], np.float32).reshape(100, 100)
    assert _native.crc32c(floats) == _native.crc32c(data[:40_000])


@pytest.mark.skipif(not _native.has_crc32(), reason="the processor cannot multiply without carry")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 16), st.integers(0, 3000))
def test_the_checksum_of_recordio_is_that_of_zlib(size: int, first: int, cut: int) -> None:
    data = np.random.default_rng(size).bytes(size + first)[first:]
    assert _native.crc32(data) == zlib.crc32(data)
    assert _native.crc32(memoryview(data)[cut:], _native.crc32(data[:cut])) == zlib.crc32(data)


def test_scattered_data_has_no_checksum() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _native.crc32c(memoryview(b"abcdef")[::2])
    with pytest.raises(ValueError, match="bytes-like"):
        _native.crc32c("text")
