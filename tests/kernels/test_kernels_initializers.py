"""Initial rows have the same bits as their oracle in NumPy, in every version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.kernels import _native
from tests.kernels.quantiles import normal_quantile
from tests.kernels.reference import initial_rows

KINDS = [("constant", 0.25, 0.0), ("uniform", -0.05, 0.07), ("normal", 0.5, 0.05), ("truncated_normal", -0.1, 2.0)]


@pytest.mark.parametrize(("kind", "a", "b"), KINDS)
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 130])
def test_rows_are_the_oracles_bit_by_bit(kind: str, a: float, b: float, dim: int) -> None:
    random = np.random.default_rng(dim)
    ids = random.integers(-(2**63), 2**63 - 1, 200_000 // dim, endpoint=True)
    key = int(random.integers(0, 2**64, dtype=np.uint64))
    rows = _native.Initializer(kind, key, a, b).rows(ids, dim)
    np.testing.assert_array_equal(rows.view(np.uint32), initial_rows(kind, key, a, b, ids, dim).view(np.uint32))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.integers(0, 2**64 - 1),
    st.sampled_from(KINDS),
)
def test_any_id_and_key(ids: list[int], key: int, kind: tuple[str, float, float]) -> None:
    array = np.array(ids, np.int64)
    rows = _native.Initializer(kind[0], key, *kind[1:]).rows(array, 5)
    np.testing.assert_array_equal(rows, initial_rows(kind[0], key, *kind[1:], array, 5))


def test_quantiles_of_the_normal_distribution() -> None:
    known = {0.5: 0.0, 0.975: 1.959963984540054, 0.001: -3.090232306167813, 1e-12: -7.034483825301132}
    computed = normal_quantile(np.array(list(known)))
    np.testing.assert_allclose(computed, list(known.values()), rtol=1e-13, atol=1e-15)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="orthogonal"):
        _native.Initializer("orthogonal", 1, 0.0)
    with pytest.raises(ValueError, match="dim"):
        _native.Initializer("uniform", 1, 0.0, 1.0).rows(np.zeros(1, np.int64), 0)
