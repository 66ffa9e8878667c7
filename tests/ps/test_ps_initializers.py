"""Initial values of rows: functions of (seed, table, id), distributed as Keras says."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.frameworks.framework import Table
from elasticdl.ps.optim.initializers import build_initializer, check_table
from elasticdl_client.errors import ModelDefinitionError

NAMES = [
    "RandomUniform",
    "RandomNormal",
    "TruncatedNormal",
    "GlorotUniform",
    "GlorotNormal",
    "HeUniform",
    "HeNormal",
    "LecunUniform",
    "LecunNormal",
]


def table_of(initializer: Any, name: str = "t", dim: int = 16, input_dim: int = 2000) -> Table:
    return Table(name, dim, json.dumps(keras.saving.serialize_keras_object(initializer)), input_dim)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_distributed_as_keras_draws_them(name: str) -> None:
    initializer = getattr(keras.initializers, name)(seed=5)
    theirs = np.sort(np.asarray(initializer((2000, 16))).ravel())
    ours = np.sort(build_initializer(table_of(initializer), 1).rows(np.arange(2000), 16).ravel())
    scale = theirs.std()
    assert abs(ours.mean() - theirs.mean()) < 0.03 * scale
    quantiles = np.linspace(0.01, 0.99, 99)
    assert np.max(np.abs(np.quantile(ours, quantiles) - np.quantile(theirs, quantiles))) < 0.06 * scale
    if "RandomNormal" not in name:
        assert abs(ours[0] - theirs[0]) < 0.02 * scale
        assert abs(ours[-1] - theirs[-1]) < 0.02 * scale


def test_constants() -> None:
    ids = np.array([3, -4])
    for initializer, value in [
        (keras.initializers.Zeros(), 0.0),
        (keras.initializers.Ones(), 1.0),
        (keras.initializers.Constant(0.25), 0.25),
    ]:
        assert (build_initializer(table_of(initializer), 0).rows(ids, 16) == value).all()


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50), name=st.sampled_from(NAMES))
def test_a_row_does_not_depend_on_its_batch(ids: list[int], name: str) -> None:
    initializer = build_initializer(table_of(getattr(keras.initializers, name)()), 42)
    together = initializer.rows(np.array(ids, np.int64), 16)
    alone = np.concatenate([initializer.rows(np.array([one], np.int64), 16) for one in ids])
    np.testing.assert_array_equal(together, alone)


def test_rows_differ_by_seed_table_id_and_column() -> None:
    initializer = keras.initializers.RandomUniform()
    ids = np.arange(100)
    rows = build_initializer(table_of(initializer), 1).rows(ids, 16)
    assert len(np.unique(rows)) > 0.99 * rows.size
    assert not (rows == build_initializer(table_of(initializer), 2).rows(ids, 16)).any()
    assert not (rows == build_initializer(table_of(initializer, name="u"), 1).rows(ids, 16)).any()


def test_the_bits_of_the_values_never_change() -> None:
    """Checkpoints hold only rows that exist: the others must come back the same with every version of this code."""
    rows = build_initializer(Table("t", 2, '{"class_name": "RandomNormal", "config": {}}'), 7).rows(
        np.array([1, -1]), 2
    )
    assert rows.view(np.uint32).tolist() == GOLDEN


GOLDEN = [[3163588185, 3146538500], [3159428024, 1031044141]]


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(ModelDefinitionError, match="Orthogonal"):
        check_table(table_of(keras.initializers.Orthogonal()))
    with pytest.raises(ModelDefinitionError, match=r"HeNormal.*no bound"):
        check_table(table_of(keras.initializers.HeNormal(), input_dim=0))
