"""The learning rate of a minibatch is the user's scheduler's, for any caller and order of calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticdl.frameworks.framework import Mode, TaskRecords
from elasticdl_client.errors import ModelDefinitionError


def test_a_schedule_of_epoch_and_rate_is_what_keras_makes_of_it(framework: Any) -> None:
    tested = framework("feeds.custom_model", callbacks="by_epoch")
    assert [tested.learning_rate(epoch, 7) for epoch in (3, 0, 1)] == pytest.approx([0.0125, 0.1, 0.05])
    assert not tested.report().has_callbacks


def test_a_rate_of_zero_is_distinguished_from_no_rate(framework: Any) -> None:
    tested = framework("feeds.custom_model", callbacks="by_epoch_alone")
    rates = [tested.learning_rate(epoch, 0) for epoch in (0, 1, 2)]
    assert rates[:2] == [0.5, 0.25]
    assert 0 < rates[2] < 1e-20
    with pytest.raises(ModelDefinitionError, match=r"LearningRateScheduler, called with \(3\), returned -0.25"):
        tested.learning_rate(3, 0)


def test_a_schedule_by_version(framework: Any) -> None:
    tested = framework("feeds.custom_model", callbacks="by_version")
    assert [tested.learning_rate(0, version) for version in (0, 1, 9)] == pytest.approx([0.1, 0.05, 0.01])


def test_without_a_scheduler_there_is_no_rate(framework: Any) -> None:
    assert framework("feeds.custom_model").learning_rate(0, 0) is None


@pytest.mark.parametrize(
    ("callbacks", "optimizer", "message"),
    [
        ("both", "optimizer", "2 learning-rate schedulers"),
        ("by_version", "decaying", "the optimizer a ExponentialDecay"),
        ("by_version", "decaying_scaled", "the optimizer a ExponentialDecay"),
        ("raising_schedule", "optimizer", r"called with \(0\), raised KeyError"),
        ("negative_schedule", "optimizer", "returned -0.1"),
        ("watching", "optimizer", "Watcher has on_batch_end"),
    ],
)
def test_what_is_no_schedule_is_refused_before_the_first_step(
    framework: Any, callbacks: str, optimizer: str, message: str
) -> None:
    with pytest.raises(ModelDefinitionError, match=message):
        framework("feeds.custom_model", callbacks=callbacks, optimizer=optimizer).report()


def test_the_local_strategy_trains_at_the_given_rate(framework: Any, rows_of: Any) -> None:
    changes = []
    for rate in (0.1, 0.05):
        tested = framework("feeds.custom_model", on_parameter_server=False)
        batch, _ = tested.batches(Mode.TRAINING, iter([TaskRecords(1, 0, rows_of(np.ones((4, 1))))]))
        before = tested.state()["model/sequential/dense/kernel"]
        tested.train(batch, 0, rate)
        changes.append(float((tested.state()["model/sequential/dense/kernel"] - before)[0, 0]))
    assert changes[1] == pytest.approx(changes[0] / 2, rel=1e-4)
