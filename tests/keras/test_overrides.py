"""Overrides of a user's `keras.Model` are honoured, with the numbers of plain Keras, or refused by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.framework import Mode, Parameters, Share
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

RATE = 0.1
MOVED, ORDINARY = 0, 1_000_000  # thresholds below and above every table
MODELS = ["AddLoss", "Regularized", "ComputeLoss", "OldComputeLoss"]
SLOW = [pytest.param(name, marks=[pytest.mark.full] if "Old" in name or name == "AddLoss" else []) for name in MODELS]


@pytest.fixture
def numbers() -> Any:
    random = np.random.default_rng(4)
    parts = [random.normal(size=(21, 1)), random.uniform(0.5, 2.0, (21, 1)), random.integers(0, 20, (21, 3))]
    return np.concatenate(parts, axis=1).astype("f4")


@pytest.fixture
def records(numbers: Any, rows_of: Any) -> list[bytes]:
    found: list[bytes] = rows_of(numbers)
    return found


class Oracle:
    """Plain Keras with the values of a tested model: `train_on_batch` on the same minibatches of eight."""

    def __init__(self, tested: Any, zoo: str, symbol: str, numbers: Any, weighted: bool) -> None:
        definition = load(zoo, f"overridden.{symbol}")
        self.model = definition.model()
        self.parts = [numbers[:, 2:].astype("i8"), numbers[:, :1], *([numbers[:, 1]] if weighted else [])]
        # Eager: a few steps take less than tracing them.
        self.model.compile(optimizer=definition.optimizer(), loss=definition.loss, run_eagerly=True)
        with suppress(StopIteration):  # Keras 3.5 takes the only batch twice where it makes variables
            self.model.test_on_batch(*[part[:2] for part in self.parts])
        for variable, value in zip(self.model.trainable_variables, split(tested), strict=True):
            variable.assign(value)

    def train(self) -> list[float]:
        return [self.step(*[part[k : k + 8] for part in self.parts]) for k in range(0, 21, 8)]

    def step(self, *parts: Any) -> float:
        self.model.reset_metrics()  # older Keras returns the mean of all batches
        return float(self.model.train_on_batch(*parts, return_dict=True)["loss"])

    def values(self) -> list[Any]:
        return [variable.numpy() for variable in self.model.trainable_variables]

    def evaluate(self) -> float:
        x, y, *weight = self.parts
        given = weight[0] if weight else None
        logs = self.model.evaluate(x, y, sample_weight=given, batch_size=8, verbose=0, return_dict=True)
        return float(logs["loss"])


def split(tested: Any) -> list[Any]:
    parts, start, flat = [], 0, tested.initial().trainable
    for variable in tested.report().variables:
        if variable.trainable:
            size = int(np.prod(variable.shape))
            parts.append(flat[start : start + size].reshape(variable.shape))
            start += size
    return parts


def table_and_rest(tested: Any) -> tuple[int, Any, Any]:
    """Which variable is the table, its values, and those of all others."""
    names = [variable.name for variable in tested.report().variables]
    of_table = next(k for k, name in enumerate(names) if "table" in name)
    parts = split(tested)
    table = parts.pop(of_table)
    return of_table, table, np.concatenate([part.ravel() for part in parts])


@pytest.fixture
def zoo(request: Any) -> str:
    return str(request.path.parent / "zoo")


@pytest.mark.parametrize(("symbol", "weighted"), [*((symbol, True) for symbol in MODELS), ("ComputeLoss", False)])
def test_local_steps_are_those_of_train_on_batch(
    framework: Any, minibatches: Any, records: Any, numbers: Any, zoo: str, symbol: str, weighted: bool
) -> None:
    feed = "weighted_feed" if weighted else "feed"
    tested = framework(f"overridden.{symbol}", feed=feed, on_parameter_server=False)
    oracle = Oracle(tested, zoo, symbol, numbers, weighted)
    losses = [tested.train(batch, 1) for batch in minibatches(tested, records)]
    assert losses == pytest.approx(oracle.train(), rel=1e-5)
    trained = [value for name, value in tested.state().items() if name.startswith("model/")]
    for value, expected in zip(trained, oracle.values(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("symbol", "jit_compile"), [("AddLoss", False), ("Regularized", False), ("ComputeLoss", True)])
def test_steps_with_a_moved_table_are_those_of_train_on_batch(
    framework: Any, minibatches: Any, records: Any, numbers: Any, zoo: str, symbol: str, jit_compile: bool
) -> None:
    options = {"feed": "weighted_feed", "jit_compile": jit_compile}
    ordinary = framework(f"overridden.{symbol}", embedding_threshold=ORDINARY, **options)
    tested = framework(f"overridden.{symbol}", embedding_threshold=MOVED, **options)
    assert [table.name for table in tested.report().tables] == ["table"]
    oracle = Oracle(ordinary, zoo, symbol, numbers, weighted=True)
    of_table, table, dense = table_and_rest(ordinary)
    losses = []
    for batch in minibatches(tested, records):
        ids = batch.ids["table"]
        step = tested.gradients(batch, Parameters(dense, tested.initial().non_trainable), {"table": table[ids]}, 1)
        losses.append(step.loss)
        dense = dense - np.float32(RATE) * step.gradient
        table = table.copy()
        np.subtract.at(table, ids, np.float32(RATE) * step.row_gradients["table"])
    assert losses == pytest.approx(oracle.train(), rel=1e-5)
    expected = oracle.values()
    np.testing.assert_allclose(table, expected.pop(of_table), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dense, np.concatenate([part.ravel() for part in expected]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("symbol", SLOW)
def test_a_step_of_two_members_weighs_by_records_and_is_one_of_train_on_batch(
    framework: Any, minibatches: Any, records: Any, numbers: Any, zoo: str, symbol: str
) -> None:
    """Of a loss that is a mean over samples, which those here are, but for the L1 of activities."""
    members = [framework(f"overridden.{symbol}", on_parameter_server=False, minibatch_size=8) for _ in range(2)]
    oracle = Oracle(members[0], zoo, symbol, numbers, weighted=False)
    *_, full, short = minibatches(members[0], records)
    own = minibatches(members[1], records)[-1]
    assert (full.size, short.size, own.size) == (8, 5, 5)
    gradients = [
        members[0].local_gradient([Share(full, 1, 8 / 13)], lambda buffer: None),
        members[1].local_gradient([Share(own, 1, 5 / 13)], lambda buffer: None),
    ]
    views = [torch.from_dlpack(gradient.buffers[0]) for gradient in gradients]
    total = views[0] + views[1]
    for member, gradient, view in zip(members, gradients, views, strict=True):
        view.copy_(total)
        member.apply_gradient(gradient, None)
    parts = [part[8:] for part in oracle.parts]
    if symbol in ("AddLoss", "ComputeLoss", "Regularized"):
        # Keras sums what `add_loss` is given for each sample, and of old activities' L1, too; members do so, each in
        # its own minibatch, and weigh.
        batches = [[part[:8] for part in parts], [part[8:] for part in parts]]
        expected = weighed_steps(oracle, batches, [8 / 13, 5 / 13])
    else:
        loss = oracle.step(*parts)
        assert float(gradients[0].told()[0]) == pytest.approx(loss, rel=1e-5)
        expected = oracle.values()
    trained = [value for name, value in members[0].state().items() if name.startswith("model/")]
    for value, wanted in zip(trained, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def weighed_steps(oracle: Oracle, batches: list[Any], shares: list[float]) -> list[Any]:
    """The values after steps of plain Keras from the same values, one on each minibatch, weighed."""
    start = oracle.values()
    total = [np.zeros_like(value) for value in start]
    for batch, share in zip(batches, shares, strict=True):
        for variable, value in zip(oracle.model.trainable_variables, start, strict=True):
            variable.assign(value)
        oracle.step(*batch)
        total = [one + share * value for one, value in zip(total, oracle.values(), strict=True)]
    return total


@pytest.mark.parametrize(("symbol", "weighted"), [("Plain", True), ("Regularized", False), ("ComputeLoss", True)])
def test_val_loss_is_that_of_evaluate(
    framework: Any, minibatches: Any, records: Any, numbers: Any, zoo: str, symbol: str, weighted: bool
) -> None:
    feed = "weighted_feed" if weighted else "feed"
    tested = framework(f"overridden.{symbol}", feed=feed, on_parameter_server=False, callbacks="watching")
    served = framework(f"overridden.{symbol}", feed=feed, embedding_threshold=MOVED, callbacks="watching")
    expected = Oracle(tested, zoo, symbol, numbers, weighted).evaluate()
    _, table, dense = table_and_rest(tested)
    values = Parameters(dense, served.initial().non_trainable)
    for one, parameters in ((tested, None), (served, values)):
        assert one.report().metrics == ("loss",)
        evaluation = one.evaluation()
        for batch in minibatches(one, records, Mode.EVALUATION):
            evaluation.update(batch, parameters, {name: table[ids] for name, ids in batch.ids.items()})
        assert evaluation.results(evaluation.states())["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_table_that_compute_loss_looks_up_stays_in_the_workers(
    framework: Any, minibatches: Any, records: Any, caplog: Any
) -> None:
    caplog.set_level("INFO")
    tested = framework("overridden.LooksUp", embedding_threshold=MOVED)
    ordinary = framework("overridden.LooksUp", embedding_threshold=ORDINARY)
    assert tested.report().tables == ()
    assert "stays an ordinary variable: compute_loss looks it up" in caplog.text
    for batch, own in zip(minibatches(tested, records), minibatches(ordinary, records), strict=True):
        step = tested.gradients(batch, tested.initial(), {}, 1)
        expected = ordinary.gradients(own, ordinary.initial(), {}, 1)
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("symbol", ["PerSample", "Nothing"])
def test_a_compute_loss_that_returns_no_number_is_refused_before_the_first_step(framework: Any, symbol: str) -> None:
    with pytest.raises(ModelDefinitionError, match=f"{symbol}.compute_loss returned .*, not one number"):
        framework(f"overridden.{symbol}").report()
