"""Dense values that are frozen go on as if nothing had happened, and what was frozen stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl.ps.server import model
from elasticdl.ps.server.model import DenseSnapshot, DenseValues
from tests.ps.scenes import ADAM

SIZE, OTHERS, BLOCK = 103, 11, 8
CONFIG = OptimizerConfig.parse(ADAM)
WHOLE = (slice(0, SIZE),), (slice(0, OTHERS),)
PARTS = (slice(3, 20), slice(24, 25), slice(90, SIZE)), (slice(7, OTHERS),)


def fresh() -> DenseValues:
    random = np.random.default_rng(0)
    return DenseValues(
        random.standard_normal(SIZE).astype(np.float32), {}, random.standard_normal(OTHERS).astype(np.float32), CONFIG
    )


def update(values: DenseValues, step: int, is_whole: bool) -> None:
    random = np.random.default_rng(step)
    gradient, change = random.standard_normal(SIZE), random.standard_normal(OTHERS)
    parts = (*(WHOLE if is_whole else PARTS), CONFIG.scalars(step))
    values.apply(gradient.astype(np.float32), change.astype(np.float32), [parts])


def copy_of(values: DenseValues) -> DenseSnapshot:
    frozen = frozen_now(values)
    values.thaw()
    return frozen


def frozen_now(values: DenseValues) -> DenseSnapshot:
    with ThreadPoolExecutor(1) as threads:
        return values.freeze(values.room(threads))


def assert_same(one: DenseSnapshot, other: DenseSnapshot) -> None:
    np.testing.assert_array_equal(one.trainable, other.trainable)
    np.testing.assert_array_equal(one.non_trainable, other.non_trainable)
    assert len(one.slots) == len(other.slots) == 2
    for left, right in zip(one.slots, other.slots, strict=True):
        np.testing.assert_array_equal(left, right)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["whole", "parts", "freeze", "thaw", "read"]), max_size=14))
def test_any_order_of_updates_and_freezing_leaves_what_updates_alone_do(events: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "_BLOCK", BLOCK)
        values, alone = fresh(), fresh()
        frozen: list[tuple[DenseSnapshot, DenseSnapshot]] = []
        for step, event in enumerate(events, 1):
            if event in ("whole", "parts"):
                update(values, step, event == "whole")
                update(alone, step, event == "whole")
            elif event == "freeze":
                frozen.append((frozen_now(values), copy_of(alone)))
            elif event == "thaw":
                values.thaw()
            for one, other in zip(values.read(), alone.read(), strict=True):
                np.testing.assert_array_equal(one, other)
        for seen, expected in frozen:
            assert_same(seen, expected)
        assert_same(copy_of(values), copy_of(alone))


def test_memory_of_a_frozen_view_goes_when_it_is_thawed() -> None:
    values = fresh()
    frozen = frozen_now(values)
    update(values, 1, is_whole=False)
    values.thaw()
    assert values._trainable._frozen == []
    assert not np.shares_memory(frozen.trainable, values._trainable.vectors[0])
