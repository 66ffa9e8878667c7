"""Steps of the PyTorch framework against plain loops of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from elasticdl.frameworks.framework import Batch, Mode, NotFiniteStep, Share
from elasticdl.frameworks.torch.computation import Computation
from elasticdl.frameworks.torch.gradients import finiteness_of
from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.torch.optimizer import _NUM_KNOWN
from elasticdl.frameworks.torch.randomness import seed_script
from elasticdl.frameworks.torch.state import ModuleState
from elasticdl.frameworks.torch.undo import change_of
from elasticdl_client.errors import CheckpointError

Make = Callable[..., Any]


def nothing(buffer: Any) -> None:
    """Does not reduce."""


def plain(framework: Any) -> tuple[Any, Any]:
    """A module and an optimizer of their own, as the framework began."""
    definition = framework._definition
    torch.manual_seed(framework._seed)
    module = definition.model()
    return module, definition.optimizer(module)


def plain_step(module: Any, optimizer: Any, batch: Batch, seed: int) -> float:
    module.train()
    optimizer.zero_grad()
    torch.manual_seed(seed)
    loss = functional.cross_entropy(module(batch.data.features), batch.data.labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(framework: Any) -> dict[str, Any]:
    return {name.removeprefix("model/"): v for name, v in framework.state().items() if name.startswith("model/")}


def largest_difference(framework: Any, module: Any) -> float:
    ours, theirs = weights(framework), module.state_dict()
    assert set(ours) == set(theirs)
    return max(float(np.abs(ours[name] - theirs[name].numpy()).max()) for name in ours)


def test_the_local_strategy_is_a_plain_loop_bit_by_bit(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework()
    module, optimizer = plain(tested)
    for batch in minibatches(tested, digits):
        assert tested.train(batch, 100 + batch.n) == plain_step(module, optimizer, batch, 100 + batch.n)
    assert largest_difference(tested, module) == 0.0


@pytest.mark.parametrize(("model", "optimizer"), [("torch_conv.custom_model", "adam"), ("sparse.custom_model", "sgd")])
def test_a_gradient_that_is_not_finite_ends_local_training(
    framework: Make, digits: Any, minibatches: Make, model: str, optimizer: str
) -> None:
    tested = framework(model, optimizer=optimizer)
    first, second, *_ = minibatches(tested, digits)
    assert tested.train(first, 1) > 0
    next(tested._built().module.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NotFiniteStep, match="The gradient is not finite"):
        tested.train(second, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_tensors_are_not_finite_if_one_number_is_not(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    usual = [torch.zeros(0, dtype=dtype), torch.tensor([-2.0, 1.0], dtype=dtype), torch.tensor([1 << 40])]
    assert finiteness_of([], cpu) == 0
    assert finiteness_of(usual, cpu) == 0
    assert usual[1].tolist() == [-2.0, 1.0]
    for ill in (math.nan, math.inf, -math.inf):
        assert finiteness_of([*usual, torch.tensor([1.0, ill], dtype=dtype)], cpu) == math.inf


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_of_one_member_is_a_plain_step(framework: Make, digits: Any, minibatches: Make, overlaps: bool) -> None:
    tested = framework(overlaps=overlaps)
    module, optimizer = plain(tested)
    for batch in minibatches(tested, digits):
        gradient = tested.local_gradient([Share(batch, 100 + batch.n, 1.0)], nothing)
        loss, scales, flaws = gradient.told()
        assert loss == pytest.approx(plain_step(module, optimizer, batch, 100 + batch.n), abs=1e-6)
        assert (scales, flaws) == (1.0, 0.0)
        tested.apply_gradient(gradient, None)
        assert largest_difference(tested, module) < 1e-6


def test_two_members_with_unequal_shares_are_one_step_of_all_records(
    framework: Make, digits: Any, minibatches: Make
) -> None:
    """Without BatchNorm's coupling inside a minibatch the mean over 7 + 3 records is the mean over 10."""
    params = {"dropout": 0.0, "norm": False}
    ten = minibatches(framework("plain.custom_model", params, minibatch_size=10), digits[:10])[0]
    together = framework("plain.custom_model", params)
    module, optimizer = plain(together)
    plain_step(module, optimizer, ten, 1)
    members = [framework("plain.custom_model", params, minibatch_size=7) for _ in range(2)]
    seven, three = minibatches(members[0], digits[:10])
    parts = [
        member.local_gradient([Share(batch, 1, batch.size / 10)], nothing)
        for member, batch in zip(members, (seven, three), strict=True)
    ]
    reduce(parts)
    for member, part in zip(members, parts, strict=True):
        member.apply_gradient(part, None)
        assert largest_difference(member, module) < 1e-6
    both = framework("plain.custom_model", params)
    both.apply_gradient(both.local_gradient([Share(seven, 1, 0.7), Share(three, 1, 0.3)], nothing), None)
    assert largest_difference(both, module) < 1e-6


def reduce(parts: list[Any]) -> None:
    """Sums in place, as a group does."""
    for buffers in zip(*(part.buffers for part in parts), strict=True):
        total = sum(buffers[1:], start=buffers[0].copy())
        for buffer in buffers:
            buffer[:] = total


def test_buffers_are_handed_over_in_order_and_once_during_backward(
    framework: Make, digits: Any, minibatches: Make
) -> None:
    tested = framework("wide.custom_model")
    batch = minibatches(tested, digits)[0]
    events: list[Any] = []
    first = tested._built().parameters["first.weight"]
    first.register_hook(lambda grad: events.append("backward reaches the first layer"))
    gradient = tested.local_gradient([Share(batch, 1, 1.0)], events.append)
    handed = [event for event in events if not isinstance(event, str)]
    assert [id(buffer) for buffer in handed] == [id(buffer) for buffer in gradient.buffers[:-1]]
    assert len(handed) > 1
    assert isinstance(events[0], np.ndarray)  # the last layer's, before backward reaches the first one
    assert any(isinstance(event, str) for event in events)
    empty: list[Any] = []
    nothing_done = tested.local_gradient([], empty.append)
    assert [len(buffer) for buffer in nothing_done.buffers] == [len(buffer) for buffer in gradient.buffers]
    assert len(empty) == len(handed)
    assert not any(np.any(buffer) for buffer in nothing_done.buffers)


def test_a_parameter_that_no_share_reaches_is_left_alone(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework(params={"spare": True})
    before = weights(tested)["spare.weight"]
    batch = minibatches(tested, digits)[0]
    tested.apply_gradient(tested.local_gradient([Share(batch, 1, 1.0)], nothing), None)
    np.testing.assert_array_equal(weights(tested)["spare.weight"], before)  # no weight decay either


def test_statistics_of_batch_norm_are_averaged_and_counted_once(
    framework: Make, digits: Any, minibatches: Make
) -> None:
    tested = framework()
    first, second = minibatches(tested, digits)[:2]
    before = weights(tested)
    alone = []
    for batch in (first, second):
        other = framework()
        other.train(batch, 1)
        alone.append(weights(other))
    gradient = tested.local_gradient([Share(first, 1, 0.25), Share(second, 1, 0.75)], nothing)
    np.testing.assert_array_equal(weights(tested)["norm.running_mean"], before["norm.running_mean"])
    tested.apply_gradient(gradient, None)
    after = weights(tested)
    for name in ("norm.running_mean", "norm.running_var"):
        np.testing.assert_allclose(after[name], 0.25 * alone[0][name] + 0.75 * alone[1][name], atol=1e-6)
    assert after["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("bad", [{"loss": "loss_inf"}, {"loss": "loss_with_a_bad_gradient"}])
def test_a_share_that_is_not_finite_adds_nothing(
    framework: Make, digits: Any, minibatches: Make, bad: dict[str, str]
) -> None:
    tested = framework("plain.custom_model", overlaps=False, **{name: f"flaws.{v}" for name, v in bad.items()})
    well, ill = minibatches(tested, digits)[:2]
    ill.data.labels[:] = 99
    gradient = tested.local_gradient([Share(well, 1, 0.5), Share(ill, 1, 0.5)], nothing)
    assert list(gradient.not_finite) == [1]
    assert "not finite" in gradient.not_finite[1]
    _, scales, flaws = gradient.told()
    assert (scales, flaws) == (0.5, 1.0)
    expected = framework("plain.custom_model").local_gradient([Share(well, 1, 0.5)], nothing)
    for ours, theirs in zip(gradient.buffers[:-1], expected.buffers[:-1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    gradient.rescale = 2.0
    tested.apply_gradient(gradient, None)
    module, optimizer = plain(framework("plain.custom_model"))
    plain_step(module, optimizer, well, 1)
    assert largest_difference(tested, module) < 1e-6


@pytest.mark.parametrize("has_masks", [False, True])
def test_buffers_of_integers_count_beyond_what_float32_does(has_masks: bool) -> None:
    now = [torch.tensor(2**24 + 1), torch.tensor([2.5]), torch.tensor(True), torch.tensor([[0]], dtype=torch.uint8)]
    before = [torch.tensor(2**24), torch.tensor([1.0]), torch.tensor(False), torch.tensor([[1]], dtype=torch.uint8)]
    assert change_of(now, before, has_masks).tolist() == [1.0, 1.5, 1.0, -1.0]


def test_with_overlap_a_bad_gradient_is_named(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework("plain.custom_model", loss="flaws.loss_with_a_bad_gradient")
    ill = minibatches(tested, digits)[0]
    ill.data.labels[:] = 99
    gradient = tested.local_gradient([Share(ill, 1, 1.0)], nothing)
    assert gradient.told()[2] == 1.0
    assert gradient.not_finite == {0: "the gradient is not finite"}


@pytest.mark.parametrize("optimizer", ["optimizer", "adam"])
def test_a_restored_state_continues_bit_by_bit(framework: Make, digits: Any, minibatches: Make, optimizer: str) -> None:
    straight = framework(optimizer=optimizer)
    batches = minibatches(straight, digits)
    blank = straight.state()
    begun = [straight.train(batch, batch.n) for batch in batches[:5]]
    state = {name: value.copy() for name, value in straight.state().items()}
    expected = [straight.train(batch, batch.n) for batch in batches[5:]]
    restored = framework(optimizer=optimizer, seed=99)
    restored.load_state(state)
    assert [restored.train(batch, batch.n) for batch in batches[5:]] == expected
    for name, value in straight.state().items():
        np.testing.assert_array_equal(value, restored.state()[name])
    straight.load_state(blank)
    assert set(straight.state()) == set(blank)
    assert [straight.train(batch, batch.n) for batch in batches[:5]] == begun


@pytest.mark.parametrize("is_sharded", [False, True])
def test_slots_of_frozen_parameters_are_no_state(is_sharded: bool) -> None:
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    trained, frozen = {"weight": module.weight}, {"bias": module.bias}
    built = BuiltModule(module, torch.device("cpu"), trained, frozen, (), Computation())
    optimizer = torch.optim.Adagrad(module.parameters())
    state = ModuleState("model.py", built, optimizer, is_sharded)
    arrays = state.arrays()
    slots = set() if is_sharded else {"optimizer/weight/step", "optimizer/weight/sum"}
    assert set(arrays) == {"model/weight", "model/bias", *slots}
    state.keep(trained)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after = state.arrays()
    state.load(arrays)
    state.load(after)
    assert state.arrays().keys() == after.keys()
    np.testing.assert_array_equal(state.arrays()["optimizer/weight/sum"], after["optimizer/weight/sum"])


def test_the_state_of_another_model_is_refused(framework: Make, digits: Any, minibatches: Make) -> None:
    trained = framework("plain.custom_model", optimizer="adam")
    trained.train(minibatches(trained, digits)[0], 1)
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        framework().load_state(trained.state())


def test_a_schedule_is_a_function_of_the_step(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework("scheduled.custom_model")
    assert [tested.learning_rate(0, n) for n in (0, 1, 4, 2)] == pytest.approx([0.1, 0.05, 0.00625, 0.025])
    batch = minibatches(tested, digits)[0]
    tested.train(batch, 1, tested.learning_rate(0, 2))
    assert [group["lr"] for group in tested._optimizer().param_groups] == pytest.approx([0.025, 0.25])
    far = _NUM_KNOWN + 5
    assert [tested.learning_rate(0, n) for n in (far, far - 1, 2)] == pytest.approx([0.0, 0.0, 0.025])
    tested.learning_rate(0, far)
    assert len(tested._rates._known) == _NUM_KNOWN
    by_epoch = framework("scheduled.custom_model", lr_scheduler="by_epoch")
    assert [by_epoch.learning_rate(epoch, 77) for epoch in (0, 2)] == pytest.approx([0.1, 0.025])


def test_modes_are_set_and_predictions_do_not_change_the_model(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework()
    batch = minibatches(tested, digits, Mode.EVALUATION)[0]
    before = weights(tested)
    first, second = tested.predictions(batch, None), tested.predictions(batch, None)
    assert torch.equal(first, second)
    for name, value in weights(tested).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_step_of_one_member_alone_is_a_plain_step_bit_by_bit(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework()
    module, optimizer = plain(tested)
    handed: list[Any] = []
    for batch in minibatches(tested, digits):
        gradient = tested.local_gradient([Share(batch, 100 + batch.n, 1.0, is_alone=True)], handed.append)
        assert gradient.buffers == handed == []  # there is nothing to reduce
        expected = plain_step(module, optimizer, batch, 100 + batch.n)
        np.testing.assert_array_equal(gradient.told(), np.array([expected, 1, 0], np.float32))
        tested.apply_gradient(gradient, None)
    assert largest_difference(tested, module) == 0.0


def test_a_member_comes_and_goes_between_two_steps_alone(framework: Make, digits: Any, minibatches: Make) -> None:
    tested, expected = framework(), framework()
    for k, batch in enumerate(minibatches(tested, digits)[:6]):
        share = Share(batch, k, 1.0, is_alone=k % 2 == 0)
        tested.apply_gradient(tested.local_gradient([share], nothing), None)
        expected.train(batch, k)
    for name, value in weights(expected).items():
        np.testing.assert_allclose(weights(tested)[name], value, atol=1e-6)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_minibatch_alone_that_is_not_finite_leaves_the_model_as_it_was(
    framework: Make, digits: Any, minibatches: Make, overlaps: bool
) -> None:
    tested = framework(loss="flaws.loss_inf", overlaps=overlaps)
    ill = minibatches(tested, digits)[0]
    ill.data.labels[:] = 99
    before = weights(tested)
    gradient = tested.local_gradient([Share(ill, 1, 1.0, is_alone=True)], nothing)
    assert gradient.told().tolist() == [0.0, 0.0, 1.0]
    assert gradient.not_finite == {0: "the loss is not finite"}
    for name, value in weights(tested).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_of_buffers_that_were_never_finite_only_a_change_counts(
    framework: Make, digits: Any, minibatches: Make, overlaps: bool, is_alone: bool
) -> None:
    tested = framework("masked.custom_model", overlaps=overlaps)
    expected = framework("torch_conv.custom_model", {"dropout": 0.0}, overlaps=overlaps)
    first, ill = minibatches(tested, digits)[:2]
    before = weights(tested)
    for one in (tested, expected):
        gradient = one.local_gradient([Share(first, 1, 1.0, is_alone=is_alone)], nothing)
        assert gradient.told()[1:].tolist() == [1.0, 0.0]
        one.apply_gradient(gradient, None)
    after = before | weights(expected)
    for name, value in weights(tested).items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    ill.data.features[:] = math.inf
    gradient = tested.local_gradient([Share(ill, 2, 1.0, is_alone=is_alone)], nothing)
    assert gradient.told()[2] == 1.0
    assert "the change of the non-trainable variables" in gradient.not_finite[0]


def test_a_member_alone_takes_a_buffer_that_becomes_finite(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework("masked.observed_model")
    first, ill = minibatches(tested, digits)[:2]
    for batch in (first, first):
        gradient = tested.local_gradient([Share(batch, 1, 1.0, is_alone=True)], nothing)
        assert gradient.told()[1:].tolist() == [1.0, 0.0]
        tested.apply_gradient(gradient, None)
    ill.data.features[:] = math.inf
    gradient = tested.local_gradient([Share(ill, 2, 1.0, is_alone=True)], nothing)
    assert gradient.told()[2] == 1.0


def test_a_sparse_gradient_of_a_member_alone_is_dense_as_in_a_group(
    framework: Make, digits: Any, minibatches: Make
) -> None:
    tested = framework("sparse.custom_model", optimizer="adam")  # which takes none that is sparse
    for k, batch in enumerate(minibatches(tested, digits)[:2]):
        tested.apply_gradient(tested.local_gradient([Share(batch, 1, 1.0, is_alone=k == 0)], nothing), None)


class Reads(TorchDispatchMode):  # type: ignore[misc]
    """Counts the single numbers (`item()`) that the host waits for, not those that are read in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_alone", [True, False])
def test_no_single_number_of_the_device_is_waited_for_within_a_step(
    framework: Make, digits: Any, minibatches: Make, is_alone: bool
) -> None:
    tested = framework()
    first, second = minibatches(tested, digits)[:2]
    for batch in (first, second):  # the optimizer's state comes into being with the first
        with Reads() as reads:
            gradient = tested.local_gradient([Share(batch, 1, 1.0, is_alone)], nothing)
            tested.apply_gradient(gradient, None)
    assert reads.count == 0


def test_seeds_of_scripts_are_those_of_pytorch_without_its_walk_over_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        torch.cuda.init()
    torch.manual_seed(5)
    expected = torch.rand(3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))  # a build for CUDA
    monkeypatch.setattr(torch, "manual_seed", pytest.fail)
    seed_script(5)
    assert torch.equal(torch.rand(3), expected)
