"""The native table against dictionaries of rows."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.kernels import _native
from tests.kernels.reference import DictionaryTable, Floats, Ids, initial_rows, unmix64

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 20), max_size=40)
UNIFORM = ("uniform", 5, -0.05, 0.05)
RATE = np.float32(0.1)


def adagrad_table(dim: int = 3, expected_rows: int = 0, constraint: _native.Constraint | None = None) -> _native.Table:
    optimizer = _native.Optimizer("Adagrad", {"epsilon": 1e-7})
    constraint = constraint or _native.Constraint()
    return _native.Table(dim, _native.Initializer(*UNIFORM), optimizer, [0.1], constraint, expected_rows)


def sgd_table(dim: int, constant: float = 0.0, expected_rows: int = 0) -> _native.Table:
    initializer, optimizer = _native.Initializer("constant", 0, constant), _native.Optimizer("SGD", {})
    return _native.Table(dim, initializer, optimizer, [], _native.Constraint(), expected_rows)


def adagrad(weights: Floats, slots: Sequence[Floats], gradient: Floats) -> None:
    slots[0] += gradient * gradient
    weights -= gradient * RATE / np.sqrt(slots[0] + np.float32(1e-7))


def adagrad_oracle(dim: int = 3) -> DictionaryTable:
    def fresh(ids: Ids, dim: int) -> Floats:
        return initial_rows(*UNIFORM, ids, dim)

    return DictionaryTable(dim, fresh, adagrad, [0.1])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["pull", "look", "apply"]), IDS), max_size=12))
def test_the_table_behaves_as_a_dictionary_of_rows(calls: list[tuple[str, list[int]]]) -> None:
    table, oracle = adagrad_table(), adagrad_oracle()
    for number, (kind, ids) in enumerate(calls):
        array = np.array(ids, np.int64)
        if kind == "apply":
            gradients = np.random.default_rng(number).standard_normal((len(ids), 3), np.float32)
            table.apply(array, gradients, (float(RATE), 0.0))
            oracle.apply(array, gradients)
        else:
            np.testing.assert_array_equal(table.pull(array, kind == "pull"), oracle.pull(array, kind == "pull"))
    assert sorted(table.ids().tolist()) == sorted(oracle.rows)
    assert len(table) == len(oracle.rows)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 16, 17, 30, 32, 64, 100])
def test_any_dimension(dim: int) -> None:
    random = np.random.default_rng(dim)
    table, oracle = adagrad_table(dim), adagrad_oracle(dim)
    for _ in range(5):
        ids = random.integers(-150, 150, 400)
        gradients = random.standard_normal((400, dim), np.float32)
        table.apply(ids, gradients, (float(RATE), 0.0))
        oracle.apply(ids, gradients)
    every = np.arange(-160, 160)
    np.testing.assert_array_equal(table.pull(every, False), oracle.pull(every, False))


@pytest.mark.parametrize("expected_rows", [0, 300_000, 1000])
def test_many_rows_survive_growth(expected_rows: int) -> None:
    table = sgd_table(2, expected_rows=expected_rows)
    random = np.random.default_rng(0)
    ids = random.permutation(300_000) - 150_000
    for part in np.array_split(ids, 37):
        table.apply(part, np.repeat(part[:, None], 2, axis=1).astype(np.float32), (1.0, 0.0))
    np.testing.assert_array_equal(table.pull(ids, False), -np.repeat(ids[:, None], 2, axis=1).astype(np.float32))
    assert len(table) == len(ids)
    assert np.array_equal(np.sort(table.ids()), np.arange(-150_000, 150_000))


def test_one_call_may_be_large() -> None:
    table = sgd_table(1)
    ids = np.random.default_rng(1).integers(0, 50_000, 1_000_000)
    table.apply(ids, np.ones((len(ids), 1), np.float32), (1.0, 0.0))
    counts = np.bincount(ids, minlength=50_000)
    np.testing.assert_array_equal(table.pull(np.arange(50_000), True)[:, 0], -counts.astype(np.float32))
    assert np.array_equal(table.pull(ids, False)[:, 0], -counts[ids].astype(np.float32))


def test_ids_of_one_place_are_distinguished() -> None:
    """All are in one stripe and start their probing at its last place, so that they wrap around."""
    above = np.arange(500, dtype=np.uint64) << np.uint64(16)
    ids = unmix64(above | np.uint64(9 << 48) | np.uint64(0xFFFF)).view(np.int64)
    table = sgd_table(1)
    numbers = np.arange(1, 301, dtype=np.float32)
    table.apply(ids[:300], numbers[:, None], (1.0, 0.0))
    assert table.pull(ids, False)[:, 0].tolist() == [*(-numbers).tolist(), *[0.0] * 200]


def test_reading_only_creates_nothing() -> None:
    table = adagrad_table()
    ids = np.array([1, 2, 1, -(2**63), 2**63 - 1])
    looked = table.pull(ids, create=False)
    assert len(table) == 0
    np.testing.assert_array_equal(looked, table.pull(ids, create=True))
    assert sorted(table.ids().tolist()) == [-(2**63), 1, 2, 2**63 - 1]


def test_rows_are_pulled_into_memory_that_is_there() -> None:
    table = adagrad_table()
    ids = np.arange(10)
    out = np.zeros((10, 3), np.float32)
    table.pull_into(ids, False, out)
    np.testing.assert_array_equal(out, table.pull(ids, True))


def test_gradients_of_repeated_ids_are_summed_in_order_then_clipped() -> None:
    table = sgd_table(1)
    ids = np.array([5, 7, 5, 5, 7])
    gradients = np.array([1e8, 3.0, 1.0, -1e8, -1.0], np.float32)[:, None]
    table.apply(ids, gradients, (1.0, 0.0))
    assert table.pull(np.array([5, 7]), False)[:, 0].tolist() == [0.0, -2.0]  # 1e8 + 1 is 1e8 in float32
    table.apply(ids, gradients, (1.0, 0.0), clip=0.5)
    assert table.pull(np.array([5, 7]), False)[:, 0].tolist() == [0.0, -2.5]
    table.apply(np.array([5]), np.array([[-3.0]], np.float32), (1.0, 0.0), clip=0.5)
    assert table.pull(np.array([5]), False)[0, 0] == 0.5


@pytest.mark.parametrize(
    ("arguments", "theirs"),
    [
        (("non_neg",), keras.constraints.NonNeg()),
        (("max_norm", 2.0), keras.constraints.MaxNorm(2.0, axis=1)),
        (("unit_norm",), keras.constraints.UnitNorm(axis=1)),
        (("min_max_norm", 0.5, 3.0, 0.7), keras.constraints.MinMaxNorm(0.5, 3.0, 0.7, axis=1)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_constraints_are_keras_s_of_touched_rows(arguments: tuple[str, float], theirs: keras.Constraint) -> None:
    table = adagrad_table(9, constraint=_native.Constraint(*arguments))
    ids = np.arange(200)
    random = np.random.default_rng(0)
    values = random.standard_normal((200, 9), np.float32) * random.uniform(0, 2, (200, 1)).astype(np.float32)
    values[0] = 0.0
    table.load(ids, values, [None])
    np.testing.assert_array_equal(table.pull(ids, False), values)
    table.apply(ids[:150], np.zeros((150, 9), np.float32), (0.1, 0.0))
    expected = np.concatenate([np.asarray(theirs(values[:150])), values[150:]])
    np.testing.assert_allclose(table.pull(ids, False), expected, rtol=1e-6, atol=1e-9)


def test_loaded_rows_go_on_where_they_were() -> None:
    random = np.random.default_rng(4)
    table, other = adagrad_table(), adagrad_table()
    ids = random.permutation(5000)
    table.apply(ids, random.standard_normal((5000, 3), np.float32), (0.1, 0.0))
    for part, rows, slots in table.freeze().chunks(700):
        other.load(part, rows, slots)
    gradients = random.standard_normal((5000, 3), np.float32)
    for each in (table, other):
        each.apply(ids, gradients, (0.1, 0.0))
    np.testing.assert_array_equal(table.pull(ids, False), other.pull(ids, False))


def test_a_slot_that_is_not_loaded_starts_fresh() -> None:
    table, oracle = adagrad_table(), adagrad_oracle()
    ids = np.array([4, 9])
    table.load(ids, np.ones((2, 3), np.float32), [None])
    for one in ids.tolist():
        oracle.row(one, create=True)[:] = 1.0
    gradients = np.full((2, 3), 2.0, np.float32)
    table.apply(ids, gradients, (float(RATE), 0.0))
    oracle.apply(ids, gradients)
    np.testing.assert_array_equal(table.pull(ids, False), oracle.pull(ids, False))
    with pytest.raises(ValueError, match="id 9 is there already"):
        table.load(np.array([11, 9]), np.ones((2, 3), np.float32), [None])


def test_memory_is_reported_and_bounded() -> None:
    table = sgd_table(16)
    table.pull(np.arange(200_000), True)
    assert 64 * 200_000 < table.memory_bytes() < 2.5 * (64 + 8 + 16 / 0.5) * 200_000
    assert sgd_table(16, expected_rows=1_000_000).memory_bytes() > 16_000_000
    assert sgd_table(16).memory_bytes() < 100_000


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    table = adagrad_table()
    ids, gradients, scalars = np.arange(4), np.zeros((4, 3), np.float32), (0.1, 0.0)
    for wrong in (gradients[:3], np.zeros((4, 2), np.float32), gradients.astype(np.float64), gradients.ravel()):
        with pytest.raises(ValueError, match="gradients"):
            table.apply(ids, wrong, scalars)
    with pytest.raises(ValueError, match="scalars"):
        table.apply(ids, gradients, (0.1,))
    with pytest.raises(ValueError, match="ids"):
        table.pull(ids.astype(np.int32), True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out"):
        table.pull_into(ids, True, gradients[:3])
    with pytest.raises(ValueError, match="slots"):
        table.load(ids, gradients, [])
    with pytest.raises(ValueError, match="slot"):
        table.load(ids, gradients, [gradients[:2]])
    assert len(table) == 0
    with pytest.raises(ValueError, match="dim"):
        sgd_table(0)
    with pytest.raises(ValueError, match="expected_rows"):
        sgd_table(1, expected_rows=-1)
    with pytest.raises(ValueError, match="slots"):
        _native.Table(
            1, _native.Initializer("constant", 0, 0.0), _native.Optimizer("Adam", {}), [], _native.Constraint()
        )
    with pytest.raises(ValueError, match="max_value"):
        _native.Constraint("max_value", 2.0)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(MemoryError):
        sgd_table(1, expected_rows=2**60)
    table = sgd_table(2**31 - 1)
    with pytest.raises(MemoryError):
        table.pull(np.arange(2**20), False)
    assert len(table) == 0
