"""Steps of a member alone that are begun before the numbers of the one before are known, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.framework import Batch, LabelError, Share
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch import gradients as module_gradients
from elasticdl.frameworks.torch.computation import Computation
from elasticdl.frameworks.torch.undo import TensorCopies

Make = Callable[..., TorchFramework]
Cut = Callable[..., list[Batch]]


@pytest.fixture(autouse=True)
def ahead_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_gradients, "_RUN_AHEAD", ("cpu",))


def shares(batches: Sequence[Batch]) -> list[Share]:
    return [Share(batch, 100 + k, 1.0, is_alone=True) for k, batch in enumerate(batches)]


def step(model: TorchFramework, share: Share, following: Share | None = None) -> tuple[float, dict[int, str]]:
    """Make a step as the loop does; return its loss, and descriptions of what is not finite."""
    gradient = model.local_gradient([share], lambda buffer: None)
    if following is not None:
        assert gradient.run_ahead is not None
        gradient.run_ahead(None, following)
    loss, weight, _ = gradient.told()
    if weight:
        model.apply_gradient(gradient, None)
    return float(loss), gradient.not_finite


def assert_equal(model: TorchFramework, other: TorchFramework) -> None:
    ours, theirs = model.state(), other.state()
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def spoil(share: Share) -> Share:
    data = share.batch.data
    return replace(share, batch=replace(share.batch, data=replace(data, features=data.features * math.nan)))


@pytest.mark.parametrize(
    "computation", [Computation(), Computation(clip_gradient_norm=0.1), Computation(part_size=3)], ids=str
)
@pytest.mark.parametrize("optimizer", ["adam", "optimizer"])
def test_steps_begun_ahead_are_the_same_bit_by_bit(
    framework: Make, digits: Any, minibatches: Cut, optimizer: str, computation: Computation
) -> None:
    ahead, plain = (framework(optimizer=optimizer, computation=computation) for _ in range(2))
    parts = shares(minibatches(ahead, digits))
    for k, share in enumerate(parts):
        following = parts[k + 1] if k + 1 < len(parts) else None
        assert step(ahead, share, following) == step(plain, share)
    assert_equal(ahead, plain)


def test_what_is_read_between_two_steps_is_the_model_without_the_next_one(
    framework: Make, digits: Any, minibatches: Cut
) -> None:
    ahead, plain = framework(), framework()
    parts = shares(minibatches(ahead, digits))
    for k, (share, following) in enumerate(pairwise(parts)):
        step(ahead, share, following)
        step(plain, share)
        match k % 4:
            case 0:
                assert_equal(ahead, plain)
            case 1:
                expected = plain.predictions(share.batch, None)
                assert torch.equal(ahead.predictions(share.batch, None), expected)
            case 2:
                ahead.load_state(plain.state())
            case _:
                assert {name: value.tobytes() for name, value in ahead.snapshot()().items()} == {
                    name: value.tobytes() for name, value in plain.state().items()
                }
    assert_equal(ahead, plain)


def test_another_minibatch_than_the_one_begun_may_come(framework: Make, digits: Any, minibatches: Cut) -> None:
    ahead, plain = framework(), framework()
    first, second, third, fourth, *_ = shares(minibatches(ahead, digits))
    for share, following in ((first, third), (second, third), (third, replace(fourth, seed=7)), (fourth, None)):
        step(ahead, share, following)
        step(plain, share)
    grouped = replace(first, is_alone=False)
    for model in (ahead, plain):
        step(model, second, third) if model is ahead else step(model, second)
        model.apply_gradient(model.local_gradient([grouped], lambda buffer: None), None)
    assert_equal(ahead, plain)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_step_that_is_dropped_leaves_nothing(framework: Make, digits: Any, minibatches: Cut, is_read: bool) -> None:
    ahead, plain = framework(), framework()
    first, second, *_ = shares(minibatches(ahead, digits))
    dropped = ahead.local_gradient([first if is_read else spoil(first)], lambda buffer: None)
    if is_read:
        dropped.told()
        assert_equal(ahead, plain)
    assert step(ahead, first, second) == step(plain, first)
    assert step(ahead, second) == step(plain, second)
    assert_equal(ahead, plain)


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("optimizer", ["adam", "optimizer"])
def test_an_update_that_is_not_finite_is_undone(
    framework: Make, digits: Any, minibatches: Cut, optimizer: str, num_before: int
) -> None:
    """Before the first update the optimizer has no state, and it has none again."""
    ahead, plain = framework(optimizer=optimizer), framework(optimizer=optimizer)
    *before, ill, after, last = shares(minibatches(ahead, digits))[: num_before + 3]
    for share, following in pairwise([*before, ill]):
        step(ahead, share, following)
        step(plain, share)
    loss, not_finite = step(ahead, spoil(ill), after)
    assert (loss, list(not_finite)) == (0.0, [0])
    assert "not finite" in not_finite[0]
    assert_equal(ahead, plain)
    for share, following in ((after, last), (last, None)):
        assert step(ahead, share, following) == step(plain, share)
    assert_equal(ahead, plain)


class Counting(torch.optim.SGD):
    """Counts its steps in its group's settings, as optimizers that find their rates themselves do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        return super().step(closure)


def test_settings_that_an_update_has_changed_are_put_back(framework: Make, digits: Any, minibatches: Cut) -> None:
    ahead, plain = framework(), framework()
    for model in (ahead, plain):
        model._made_optimizer = Counting(model._built().parameters.values(), lr=0.1)
        model.state()  # now the settings are those of the start
    first, ill, after, last, *_ = shares(minibatches(ahead, digits))
    for model in (ahead, plain):
        step(model, first, ill if model is ahead else None)
    step(ahead, spoil(ill), after)
    assert_equal(ahead, plain)
    assert ahead.state()["group/0/num_steps"] == 1
    assert step(ahead, after, last) == step(plain, after)
    assert_equal(ahead, plain)


def test_a_step_that_is_dropped_before_its_update_is_applied_leaves_nothing(
    framework: Make, digits: Any, minibatches: Cut
) -> None:
    ahead, plain = framework(), framework()
    first, second, third, *_ = shares(minibatches(ahead, digits))
    step(ahead, first, second)
    step(plain, first)
    for _ in range(2):
        gradient = ahead.local_gradient([second], lambda buffer: None)
        assert gradient.run_ahead is not None
        gradient.run_ahead(None, third)
        gradient.told()
    assert step(ahead, third, first) == step(plain, third)
    assert_equal(ahead, plain)


def test_an_error_in_the_next_forward_pass_is_raised_in_its_own_step(
    framework: Make, digits: Any, minibatches: Cut
) -> None:
    ahead, plain = framework(), framework()
    first, second, third, *_ = shares(minibatches(ahead, digits))
    wrong = replace(second, batch=replace(second.batch, data=replace(second.batch.data, features=torch.ones(8, 3))))
    step(ahead, first, wrong)
    step(plain, first)
    with pytest.raises(RuntimeError, match="size"):
        ahead.local_gradient([wrong], lambda buffer: None)
    assert step(ahead, third) == step(plain, third)
    assert_equal(ahead, plain)


def test_an_error_of_the_optimizer_leaves_the_model_as_it_was(framework: Make, digits: Any, minibatches: Cut) -> None:
    ahead, plain = framework(), framework()
    first, second, third, *_ = shares(minibatches(ahead, digits))
    step(ahead, first, second)
    step(plain, first)
    handle = ahead._optimizer().register_step_post_hook(lambda *_: 1 // 0)
    gradient = ahead.local_gradient([second], lambda buffer: None)
    assert gradient.run_ahead is not None
    with pytest.raises(ZeroDivisionError):
        gradient.run_ahead(None, third)
    handle.remove()
    assert_equal(ahead, plain)
    assert step(ahead, second, third) == step(plain, second)
    assert_equal(ahead, plain)


@pytest.mark.parametrize(
    ("overlaps", "computation"),
    [(False, Computation()), (True, Computation(shards_optimizer=True))],
    ids=["skip", "sharded"],
)
def test_nothing_runs_ahead_where_a_step_must_be_known_first(
    framework: Make, digits: Any, minibatches: Cut, overlaps: bool, computation: Computation
) -> None:
    model = framework(overlaps=overlaps, computation=computation)
    share = shares(minibatches(model, digits))[0]
    assert model.local_gradient([share], lambda buffer: None).run_ahead is None


def test_a_model_too_large_for_copies_makes_the_same_steps(
    framework: Make, digits: Any, minibatches: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticdl.frameworks.torch.undo._memory", lambda device: 1000.0)
    ahead, plain = framework(), framework()
    parts = shares(minibatches(ahead, digits))
    for share, following in pairwise(parts):
        assert step(ahead, share, following) == step(plain, share)
    assert_equal(ahead, plain)


def test_a_device_without_memory_for_copies_makes_the_same_steps(
    framework: Make, digits: Any, minibatches: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def no_memory(copies: TensorCopies, tensors: list[Any]) -> None:
        tries.append(tensors)
        raise torch.OutOfMemoryError

    ahead, plain = framework(), framework()
    parts = shares(minibatches(ahead, digits))
    ahead._gradients()._undo._copies = copies = TensorCopies()
    monkeypatch.setattr(copies, "take", partial(no_memory, copies))
    for share, following in pairwise(parts):
        assert step(ahead, share, following) == step(plain, share)
    assert_equal(ahead, plain)
    assert len(tries) == 1


def test_no_record_is_blamed_for_labels_of_another_task(
    framework: Make, digits: Any, minibatches: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = framework()
    monkeypatch.setattr(TorchFramework, "_samples_per_batch", 8)
    first, second, *_ = shares(minibatches(model, digits))
    wrong = replace(second, batch=replace(second.batch, data=replace(second.batch.data, labels=torch.full((8,), 99))))
    for lease, sample in ((first.batch.lease, 8 * wrong.batch.n), (first.batch.lease + 1, None)):
        gradient = model.local_gradient([first], lambda buffer: None)
        assert gradient.run_ahead is not None
        gradient.run_ahead(None, replace(wrong, batch=replace(wrong.batch, lease=lease)))
        with monkeypatch.context() as failing:
            failing.setattr(model._gradients(), "_own_numbers", lambda *_: 1 // 0)
            with pytest.raises(LabelError) as raised:
                gradient.told()
        assert raised.value.sample == sample
