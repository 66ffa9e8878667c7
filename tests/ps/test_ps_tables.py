"""The NumPy table and its index against dictionaries."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Table
from elasticdl.ps.hashing import mix64
from elasticdl.ps.id_index import IdIndex
from elasticdl.ps.optimizers import build_optimizer
from elasticdl.ps.parameters import NumpyTable
from tests.ps.scenes import UNIFORM, config

ADAGRAD = config("Adagrad", learning_rate=0.1, initial_accumulator_value=0.1, epsilon=1e-7)
IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 20), min_size=0, max_size=40)


class OracleTable:
    """One row, one dictionary entry, one id at a time; Adagrad."""

    def __init__(self, fresh: NumpyTable) -> None:
        self._fresh = fresh
        self.rows: dict[int, np.ndarray] = {}
        self.accumulators: dict[int, np.ndarray] = {}

    def row(self, one: int, create: bool) -> np.ndarray:
        initial = self._fresh.pull(np.array([one], np.int64), create=False)[0]
        if create and one not in self.rows:
            self.rows[one], self.accumulators[one] = initial, np.full(3, 0.1, np.float32)
        return self.rows.get(one, initial)

    def apply(self, ids: list[int], gradients: np.ndarray) -> None:
        sums: dict[int, np.ndarray] = {}
        for one, gradient in zip(ids, gradients, strict=True):
            sums[one] = sums[one] + gradient if one in sums else gradient.copy()
        for one, gradient in sums.items():
            self.row(one, create=True)
            self.accumulators[one] = self.accumulators[one] + gradient * gradient
            self.rows[one] = self.rows[one] - gradient * np.float32(0.1) / np.sqrt(
                self.accumulators[one] + np.float32(1e-7)
            )


def make_table() -> NumpyTable:
    return NumpyTable(Table("t", 3, UNIFORM), build_optimizer(ADAGRAD), seed=5)


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["pull", "look", "apply"]), IDS), max_size=12))
def test_the_table_behaves_as_a_dictionary_of_rows(calls: list[tuple[str, list[int]]]) -> None:
    table, oracle = make_table(), OracleTable(make_table())
    for step, (kind, ids) in enumerate(calls, 1):
        if kind == "apply":
            gradients = np.random.default_rng(step).standard_normal((len(ids), 3)).astype(np.float32)
            table.apply(table.reserve(np.array(ids, np.int64)), gradients, step)
            oracle.apply(ids, gradients)
        else:
            rows = table.pull(np.array(ids, np.int64), create=kind == "pull")
            expected = [oracle.row(one, create=kind == "pull") for one in ids]
            np.testing.assert_allclose(rows, np.array(expected, np.float32).reshape(-1, 3), rtol=1e-5, atol=1e-7)
    assert sorted(table.ids().tolist()) == sorted(oracle.rows)
    copy = make_table()
    copy.load(table.snapshot())
    np.testing.assert_array_equal(copy.pull(table.ids(), False), table.pull(table.ids(), False))


@pytest.mark.ci
def test_many_rows_survive_growth() -> None:
    table = NumpyTable(Table("t", 2, UNIFORM), build_optimizer(config("SGD", learning_rate=1.0)), seed=0)
    random = np.random.default_rng(0)
    ids = random.permutation(200_000).astype(np.int64) - 100_000
    initial = table.pull(ids, create=False)
    for part in np.array_split(np.arange(len(ids)), 37):
        table.apply(table.reserve(ids[part]), np.repeat(ids[part, None], 2, axis=1).astype(np.float32), 1)
    np.testing.assert_array_equal(table.pull(ids, create=False), initial - ids[:, None].astype(np.float32))
    assert len(table.ids()) == len(ids)


@pytest.mark.ci
def test_a_pull_that_makes_the_table_grow_returns_the_grown_rows() -> None:
    table = NumpyTable(Table("t", 2, UNIFORM), build_optimizer(config("SGD", learning_rate=1.0)), seed=0)
    for first in range(0, 20_000, 700):
        ids = np.arange(first, first + 1000, dtype=np.int64)
        np.testing.assert_array_equal(table.pull(ids, create=True), table.pull(ids, create=False))


@pytest.mark.ci
def test_ids_of_one_place_are_told_apart() -> None:
    """All start their probing at the last place, so that they wrap around the end of the table."""
    candidates = np.arange(2_000_000, dtype=np.int64)
    ids = candidates[(mix64(candidates) & np.uint64(1023)) == np.uint64(1023)][:300]
    index = IdIndex()
    index.add(ids[:200])
    assert index.find(ids).tolist() == [*range(200), *[-1] * 100]
    index.add(ids[200:])
    assert index.find(ids).tolist() == list(range(300))


@pytest.mark.ci
def test_reading_only_creates_nothing() -> None:
    table = make_table()
    looked = table.pull(np.array([1, 2, 1]), create=False)
    assert len(table.ids()) == 0
    np.testing.assert_array_equal(looked, table.pull(np.array([1, 2, 1]), create=True))
    assert table.ids().tolist() == [1, 2]


@pytest.mark.ci
def test_slots_of_another_optimizer_start_fresh() -> None:
    table = make_table()
    table.apply(table.reserve(np.array([4])), np.ones((1, 3), np.float32), 1)
    other = NumpyTable(Table("t", 3, UNIFORM), build_optimizer(json.dumps(ADAM)), seed=5)
    other.load(table.snapshot())
    assert (other.snapshot().slots["velocity"] == 0).all()


ADAM = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
