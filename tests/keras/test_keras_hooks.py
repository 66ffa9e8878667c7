"""Hooks that end training or change the model: as in `fit`, or refused where there are several workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticdl_client.errors import ModelDefinitionError

SEVERAL = [{"on_parameter_server": True}, {"on_parameter_server": False, "in_groups": True}]


def test_a_callback_that_sets_stop_training_ends_it(framework: Any) -> None:
    tested = framework("fitted.by_name", callbacks="stopping", on_parameter_server=False)
    tested.report()
    said = [tested.end_epoch(None, epoch, {"val_accuracy": value}) for epoch, value in enumerate((0.8, 0.95, 0.8))]
    assert said == ["", "on_epoch_end of Stops has set model.stop_training", ""]
    said = [tested.end_evaluation(8, {"accuracy": value}) for value in (0.8, 1.0)]
    assert said == ["", "on_test_end of Stops has set model.stop_training"]


def test_a_learning_rate_that_a_hook_sets_is_that_of_the_only_worker(
    framework: Any, rows_of: Any, minibatches: Any
) -> None:
    tested = framework("fitted.by_name", callbacks="slowing", on_parameter_server=False)
    tested.report()
    random = np.random.default_rng(0)
    rows = rows_of(np.concatenate([random.normal(size=(8, 4)), random.integers(0, 3, (8, 1))], axis=1))
    (batch,) = minibatches(tested, rows)
    start = tested.state()
    changes = []
    for epoch in range(2):
        tested.load_state(start)
        tested.train(batch, 1)
        changes.append(next(iter(tested.state().values())) - next(iter(start.values())))
        tested.end_epoch(None, epoch, {})
        start = {**start, **{name: value for name, value in tested.state().items() if "learning_rate" in name}}
    np.testing.assert_allclose(changes[1], 0.5 * changes[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("several", SEVERAL, ids=["PS", "AllReduce"])
def test_a_hook_that_changes_one_of_several_workers_is_refused_and_undone(
    framework: Any, several: dict[str, bool]
) -> None:
    tested = framework("fitted.by_name", callbacks="slowing", **several)
    tested.report()
    for _ in range(2):  # the task is tried again
        with pytest.raises(ModelDefinitionError, match="on_epoch_end of Slows has changed the learning rate, in one"):
            tested.end_epoch(None, 1, {})
    tested = framework("fitted.by_name", callbacks="clearing", **several)
    tested.report()
    before = tested._built().model.get_weights()
    hooks = [
        ("on_train_begin", tested.begin_training),
        ("on_epoch_end", lambda: tested.end_epoch(None, 0, {})),
        ("on_evaluation_end", lambda: tested.end_evaluation(3, {})),
    ]
    for name, call in hooks:
        with pytest.raises(ModelDefinitionError, match=f"{name} of Clears has changed the variable .*kernel"):
            call()
        for value, expected in zip(tested._built().model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, expected)
    tested.end_training(None, "")  # nothing is trained after it
