"""Callbacks that the master decides: early stopping, saved models, occasions; scripts of events against the core."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.master.core.plan.callbacks import EarlyStop, SaveRule, Saving, StopRule, Watched


def stopped_at(values: list[float], **rule: Any) -> int | None:
    """The number of the evaluation that ends training."""
    watched = Watched("loss", rule.pop("maximize", False), rule.pop("min_delta", 0.0))
    stopping = EarlyStop(StopRule(watched, **rule))
    return next((n for n, value in enumerate(values) if stopping.evaluated({"loss": value})), None)


def test_training_stops_after_as_many_evaluations_without_improvement_as_there_is_patience() -> None:
    assert stopped_at([5, 4, 3, 3, 3.5], patience=2) == 4
    assert stopped_at([5, 4, 3, 3, 2.9, 3], patience=2) is None


def test_more_is_better_where_the_rule_says_so() -> None:
    assert stopped_at([0.5, 0.7, 0.6], patience=1, maximize=True) == 2


def test_an_improvement_must_be_larger_than_its_least_size() -> None:
    assert stopped_at([5, 4.95, 4.9], patience=2, min_delta=0.2) == 2


def test_a_baseline_that_is_not_reached_ends_training() -> None:
    assert stopped_at([5, 4, 3, 3.5], patience=2, baseline=1.0) == 3


def test_the_first_evaluations_may_not_count() -> None:
    assert stopped_at([1, 2, 3, 3], patience=1, start_from=2) == 3


def test_a_metric_that_is_not_a_number_never_improves() -> None:
    assert stopped_at([float("nan")] * 3, patience=2) == 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=12),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, 0.0, 3.0]),
    st.integers(0, 3),
)
def test_keras_stops_at_the_same_epoch(
    values: list[float], patience: int, maximize: bool, min_delta: float, baseline: float | None, start: int
) -> None:
    callback = keras.callbacks.EarlyStopping("loss", min_delta, patience, 0, "max" if maximize else "min", baseline)
    callback.start_from_epoch = start
    callback.set_model(keras.Sequential())
    callback.on_train_begin()
    expected = None
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"loss": value})
        if getattr(callback.model, "stop_training", False):
            expected = epoch
            break
    found = stopped_at(
        values, patience=patience, maximize=maximize, min_delta=min_delta, baseline=baseline, start_from=start
    )
    assert found == expected


def test_what_has_become_of_a_rule_outlives_the_master() -> None:
    rule = StopRule(Watched("loss", False), patience=2)
    before, after = EarlyStop(rule), EarlyStop(rule)
    for value in (3.0, 4.0):
        assert not before.evaluated({"loss": value})
    after.restore(before.snapshot())
    assert "has not improved for 2 evaluations" in after.evaluated({"loss": 4.0})


def test_only_the_best_model_is_saved_and_only_if_it_is_good_enough() -> None:
    saving = Saving(SaveRule("best", Watched("accuracy", True), threshold=0.5))
    found = [saving.evaluated({"accuracy": value}) for value in (0.4, 0.6, 0.6, 0.7)]
    assert found == [False, True, False, True]


def test_a_metric_that_the_evaluation_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="monitors 'auc', and the evaluation's metrics are: accuracy"):
        EarlyStop(StopRule(Watched("auc", True))).evaluated({"accuracy": 1.0})
