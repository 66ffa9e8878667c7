"""Each layer against an oracle in NumPy, on dense, sparse and ragged tensors that hypothesis makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl_preprocessing import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    IndexLookup,
    LogRound,
    Normalizer,
    RoundIdentity,
    SparseEmbedding,
    ToNumber,
    ToRagged,
    ToSparse,
)
from tests.preprocessing import oracle
from tests.preprocessing.oracle import KINDS, kind_of, rows_of, tensor_of

few = settings(max_examples=15)
floats = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
anything = st.floats(width=32, allow_subnormal=False) | st.sampled_from([0.5, 1.5, 2.5, -0.5, 0.0, -0.0])
integers = st.integers(-(2**40), 2**40)
texts = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), max_size=8).map(str.encode)
kinds = st.sampled_from(KINDS)


@st.composite
def tables(draw: st.DrawFn, cells: st.SearchStrategy[Any]) -> tuple[str, list[list[Any]]]:
    """A kind of tensor, and rows for it."""
    kind = draw(kinds)
    if kind == "dense":
        width = draw(st.integers(1, 4))
        return kind, draw(st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1, max_size=4))
    return kind, draw(st.lists(st.lists(cells, max_size=4), min_size=1, max_size=4))


def check(layer: Any, table: tuple[str, list[list[Any]]], dtype: Any, expected: list[list[Any]], out: str) -> None:
    """The layer's result is of the input's kind and has the expected cells, eagerly and in a graph."""
    kind, rows = table
    tensor = tensor_of(rows, kind, dtype)
    result = layer(tensor)
    assert kind_of(result) == kind
    assert result.dtype.name == out
    np.testing.assert_equal(rows_of(result), expected)
    if kind == "sparse":
        np.testing.assert_array_equal(result.indices, tensor.indices)


@few
@given(tables(floats), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_normalizer(table: Any, subtractor: float, divisor: float) -> None:
    expected = oracle.apply(lambda row: oracle.normalized(row, subtractor, divisor), table[1], np.float32)
    kind, rows = table
    result = Normalizer(subtractor, divisor)(tensor_of(rows, kind, tf.float32))
    assert kind_of(result) == kind
    for got, row in zip(rows_of(result), expected, strict=True):
        np.testing.assert_allclose(got, row, rtol=1e-6, atol=1e-37)  # TensorFlow has no subnormal numbers


@few
@given(tables(anything), st.lists(st.integers(-50, 50).map(lambda k: k / 4), unique=True, max_size=5).map(sorted))
def test_discretization(table: Any, bins: list[float]) -> None:
    layer = Discretization(bins)
    expected = oracle.apply(lambda row: oracle.digitized(row, bins), table[1], np.float32)
    check(layer, table, tf.float32, expected, "int64")
    assert layer.num_bins() == len(bins) + 1


@few
@given(
    tables(st.integers(-20, 20)),
    st.lists(st.integers(-9, 9), unique=True, max_size=5).map(sorted),
    st.sampled_from([0, 1_700_000_000]),
)
def test_discretization_of_integers(table: Any, bins: list[int], least: int) -> None:
    """Times in seconds, too, which float32 would round to every 128th."""
    kind, rows = table
    rows, bins = [[least + cell for cell in row] for row in rows], [least + one for one in bins]
    check(Discretization(bins), (kind, rows), tf.int64,
          oracle.apply(lambda row: oracle.digitized(row, bins), rows, np.int64), "int64")  # fmt: skip


def _is_near_half(value: float, base: float | None) -> bool:
    if not value > 0 or math.isinf(value):
        return False
    logarithm = math.log(value) / math.log(base) if base else math.log(value)
    return abs(logarithm % 1 - 0.5) < 1e-9


@few
@given(
    tables(anything | st.floats(0, 2000, width=32, allow_subnormal=False)),
    st.sampled_from([None, 2, 10, 0.5]),
    st.integers(1, 12),
)
def test_log_round(table: Any, base: float | None, num_bins: int) -> None:
    kind, rows = table
    rows = [[1.0 if _is_near_half(value, base) else value for value in row] for row in rows]
    expected = oracle.apply(lambda row: oracle.log_rounded(row, num_bins, 7, base), rows, np.float32)
    check(LogRound(num_bins, default_value=7, base=base), (kind, rows), tf.float32, expected, "int64")


@few
@given(tables(anything | st.floats(-2, 12, width=32, allow_subnormal=False)), st.integers(1, 12))
def test_round_identity(table: Any, num_buckets: int) -> None:
    expected = oracle.apply(lambda row: oracle.rounded_identity(row, num_buckets, 3), table[1], np.float32)
    check(RoundIdentity(num_buckets, default_value=3), table, tf.float32, expected, "int64")


@few
@given(tables(integers | st.integers(-1, 9)), st.integers(1, 9))
def test_round_identity_of_integers(table: Any, num_buckets: int) -> None:
    expected = oracle.apply(lambda row: oracle.rounded_identity(row, num_buckets, 0), table[1], np.int64)
    check(RoundIdentity(num_buckets), table, tf.int64, expected, "int64")


@few
@given(tables(texts), st.integers(1, 1000))
def test_hashing(table: Any, num_bins: int) -> None:
    expected = [oracle.hashed(row, num_bins) for row in table[1]]
    check(Hashing(num_bins), table, tf.string, expected, "int64")


@few
@given(tables(st.integers(-(10**12), 10**12)), st.integers(1, 1000))
def test_hashing_of_integers_is_that_of_their_decimal_strings(table: Any, num_bins: int) -> None:
    expected = [oracle.hashed([str(value).encode() for value in row], num_bins) for row in table[1]]
    check(Hashing(num_bins), table, tf.int64, expected, "int64")


@few
@given(tables(texts), st.data(), st.integers(1, 5))
def test_index_lookup(table: Any, data: Any, num_oov: int) -> None:
    cells = sorted({cell.decode() for row in table[1] for cell in row})
    known = data.draw(st.lists(st.sampled_from(cells or ["a"]) | st.text("xyz"), unique=True))
    expected = [oracle.looked_up(row, known, num_oov) for row in table[1]]
    layer = IndexLookup(known, num_oov_tokens=num_oov)
    check(layer, table, tf.string, expected, "int64")
    assert layer.vocab_size() == len(known) + num_oov


@few
@given(tables(st.sampled_from([b"", b" ", b"12", b"-3", b" 40 "])), st.sampled_from(["int32", "int64", "float32"]))
def test_to_number_of_strings(table: Any, out_type: str) -> None:
    expected = [[float(cell) if cell.strip() else 7 for cell in row] for row in table[1]]
    check(ToNumber(out_type, default_value=7), table, tf.string, expected, out_type)


@few
@given(tables(floats))
def test_to_number_casts_numbers(table: Any) -> None:
    expected = [[int(cell) for cell in row] for row in table[1]]
    check(ToNumber(tf.int64, default_value=0), table, tf.float32, expected, "int64")


DROPPED = {"int64": (st.integers(-2, 2), -1), "float32": (st.sampled_from([0.0, 1.5, -1.0]), 0.0),
           "string": (st.sampled_from([b"", b"a", b"-1"]), b"")}  # fmt: skip


@pytest.mark.parametrize("dtype", DROPPED)
def test_to_sparse(dtype: str) -> None:
    cells, dropped = DROPPED[dtype]

    @few
    @given(tables(cells), st.none() | cells)
    def compare(table: Any, ignore: Any) -> None:
        kind, rows = table
        result = ToSparse(ignore)(tensor_of(rows, kind, dtype))
        gone = dropped if ignore is None else ignore
        assert kind_of(result) == "sparse"
        assert rows_of(result) == [[cell for cell in row if cell != gone] for row in rows]

    compare()


@few
@given(tables(st.integers(-2, 2)), st.none() | st.integers(-2, 2))
def test_to_ragged(table: Any, ignore: int | None) -> None:
    kind, rows = table
    layer = ToRagged(ignore_value=ignore)
    if kind == "sparse":
        with pytest.raises(TypeError, match="sparse"):
            layer(tensor_of(rows, kind, tf.int64))
        return
    gone = -1 if ignore is None else ignore
    assert rows_of(layer(tensor_of(rows, kind, tf.int64))) == [[cell for cell in row if cell != gone] for row in rows]
    assert rows_of(ToRagged()(tensor_of(rows, kind, tf.float32))) == rows


@few
@given(tables(st.text("ab,", max_size=6)).filter(lambda table: table[0] != "sparse"), st.sampled_from([",", "a", None]))
def test_to_ragged_splits_strings(table: Any, sep: str | None) -> None:
    kind, rows = table
    expected = [
        [part.encode() for cell in row for part in (cell.split(sep) if sep else [cell]) if part] for row in rows
    ]
    assert rows_of(ToRagged(sep=sep)(tensor_of(rows, kind, tf.string))) == expected


@few
@given(kinds, st.data(), st.integers(1, 3), st.booleans())
def test_concatenate_with_offset(kind: str, data: Any, parts: int, plain: bool) -> None:
    num_rows = data.draw(st.integers(1, 3))
    offsets = None if plain else data.draw(st.lists(st.integers(0, 100), min_size=parts, max_size=parts))
    rows_of_parts = []
    for _ in range(parts):
        width = data.draw(st.integers(1, 3))
        least = width if kind == "dense" else 0
        row = st.lists(st.integers(0, 9), min_size=least, max_size=width)
        rows_of_parts.append(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)))
    shifted = [[[cell + (offsets or [0] * parts)[k] for cell in row] for row in rows]
               for k, rows in enumerate(rows_of_parts)]  # fmt: skip
    result = ConcatenateWithOffset(offsets)([tensor_of(rows, kind, tf.int64) for rows in rows_of_parts])
    assert kind_of(result) == kind
    assert rows_of(result) == [[cell for rows in shifted for cell in rows[k]] for k in range(num_rows)]


def _embedding(table: Any, combiner: str) -> Any:
    layer = SparseEmbedding(*table.shape, combiner=combiner)
    layer.build()
    layer.set_weights([table])
    return layer


@few
@given(tables(st.integers(0, 9)), st.sampled_from(["sum", "mean", "sqrtn"]))
def test_sparse_embedding(table: Any, combiner: str) -> None:
    kind, rows = table
    weights = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    counted = [[cell for cell in row if cell or kind != "dense"] for row in rows]
    expected: Callable[..., Any] = oracle.embedded(counted, weights, combiner)
    result = _embedding(weights, combiner)(tensor_of(rows, kind, tf.int64))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
