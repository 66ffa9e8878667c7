"""A member's part of a synchronous step, and the update after the reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.framework import NUM_TOLD, Batch, LocalGradient, Share
from elasticdl.frameworks.keras.operations import IdOutOfRange
from elasticdl.model_def import load


@pytest.fixture
def digits() -> Any:
    random = np.random.default_rng(0)
    return np.concatenate([random.normal(size=(64, 64)), random.integers(0, 10, (64, 1))], axis=1).astype("f4")


def computed(member: Any, *shares: Share) -> LocalGradient:
    gradient: LocalGradient = member.local_gradient(shares, lambda buffer: None)
    return gradient


def reduced(*gradients: LocalGradient) -> None:
    """Sums in place, as a group does."""
    for buffers in zip(*(gradient.buffers for gradient in gradients), strict=True):
        views = [torch.from_dlpack(buffer) for buffer in buffers]
        total = torch.stack(views).sum(0)
        for view in views:
            view.copy_(total)


def values(member: Any) -> list[Any]:
    """Variables and slots, whatever the names of optimizers are in a process with several."""
    return list(member.state().values())


@pytest.fixture(scope="module")
def two_members(framework: Any) -> list[Any]:
    return [framework("conv.custom_model", on_parameter_server=False) for _ in range(2)]


@pytest.fixture
def pair(two_members: list[Any]) -> list[Any]:
    """Two members of equal values, traced once for all tests."""
    one, other = two_members
    one.load_state(dict(zip(one.state(), values(other), strict=True)))
    return two_members


def shares_of(batches: list[Batch], scale: float) -> list[Share]:
    return [Share(batch, 100 + batch.n, scale) for batch in batches]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("symbol", ["custom_model", "sequential_model"])
def test_a_group_of_one_is_local_training(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, symbol: str, jit_compile: bool
) -> None:
    options = {"on_parameter_server": False, "optimizer": "adam", "jit_compile": jit_compile}
    local, member = framework(f"conv.{symbol}", **options), framework(f"conv.{symbol}", **options)
    for batch, own in zip(minibatches(local, rows_of(digits)), minibatches(member, rows_of(digits)), strict=True):
        loss = local.train(batch, 100 + batch.n, 0.01)
        gradient = computed(member, *shares_of([own], 1.0))
        np.testing.assert_allclose(gradient.told(), [loss, 1.0, 0.0], rtol=1e-4)
        member.apply_gradient(gradient, 0.01)
    for value, expected in zip(values(member), values(local), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("num_shares", "symbol", "jit_compile"),
    [
        ((2,), "spectral_model", True),
        ((1, 1), "shrinking_model", False),
        ((2, 0), "spectral_model", False),
        ((2, 0), "activating_model", False),
    ],
)
def test_a_variable_that_the_model_assigns_is_assigned_once_in_a_step(
    framework: Any,
    rows_of: Any,
    minibatches: Any,
    digits: Any,
    request: Any,
    num_shares: tuple[int, ...],
    symbol: str,
    jit_compile: bool,
) -> None:
    """Whatever the number of minibatches that a member computes: as in `fit`, with the batch of the whole step."""
    options = {"on_parameter_server": False, "optimizer": "adam", "jit_compile": jit_compile}
    members = [framework(f"conv.{symbol}", **options) for _ in num_shares]
    batches = [minibatches(member, rows_of(digits)) for member in members]
    plain = load(str(request.path.parent / "zoo"), f"conv.{symbol}", None, {"optimizer": "adam"})
    model = plain.model()
    model.set_weights([variable.numpy() for variable in members[0]._built().model.weights])
    model.compile(plain.optimizer(), plain.loss, run_eagerly=True)  # a few steps take less than tracing them
    model.fit(digits[:, :64].reshape(-1, 8, 8, 1), digits[:, 64], batch_size=16, shuffle=False, verbose=0)
    for first in range(0, 8, 2):
        starts = np.cumsum([first, *num_shares])
        gradients = [
            computed(member, *shares_of(own[start : start + count], 0.5))
            for member, own, start, count in zip(members, batches, starts, num_shares, strict=False)
        ]
        reduced(*gradients)
        for member, gradient in zip(members, gradients, strict=True):
            member.apply_gradient(gradient, None)
    for member in members:
        for value, expected in zip(values(member), values(members[0]), strict=True):
            np.testing.assert_array_equal(value, expected)
    for variable, expected in zip(members[0]._built().model.weights, model.weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("symbol", ["Subclass", "Compiled"])
def test_an_id_without_a_row_is_an_error_inside_a_tf_function_too(
    framework: Any, minibatches: Any, symbol: str
) -> None:
    member = framework(f"swapped.{symbol}", on_parameter_server=False, jit_compile=True, minibatch_size=2)
    (batch,) = minibatches(member, [b"1 1 2 3 4 5 6", b"0 1 2 3 4 5 40"])
    with pytest.raises(IdOutOfRange, match=r"the embedding layer 'table': .* not in \[0, 40\)"):
        computed(member, Share(batch, 100, 1.0))


def test_the_division_among_members_changes_nothing_but_the_order_of_sums(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any
) -> None:
    members = [framework("conv.custom_model", on_parameter_server=False, optimizer="adam") for _ in range(3)]
    batches = [minibatches(member, rows_of(digits)) for member in members]
    for step in range(2):
        alone, *both = members
        names = range(4 * step, 4 * step + 4)
        own = [[batches[k][n] for n in names] for k in range(3)]
        whole = computed(alone, *shares_of(own[0], 0.25))
        parts = [computed(both[0], *shares_of(own[1][:1], 0.25)), computed(both[1], *shares_of(own[2][1:], 0.25))]
        reduced(*parts)
        np.testing.assert_allclose(parts[0].told(), whole.told(), rtol=1e-5)
        for member, gradient in zip(members, [whole, *parts], strict=True):
            member.apply_gradient(gradient, None)
    for one, first, second in zip(*map(values, members), strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, one, rtol=1e-3, atol=1e-5)


def test_a_member_without_work_applies_what_the_others_computed(
    pair: list[Any], rows_of: Any, minibatches: Any, digits: Any
) -> None:
    busy, idle = pair
    (batch, *_) = minibatches(busy, rows_of(digits))
    gradients = [computed(busy, Share(batch, 1, 1.0)), computed(idle)]
    assert [buffer.shape for buffer in gradients[1].buffers] == [np.from_dlpack(b).shape for b in gradients[0].buffers]
    reduced(*gradients)
    busy.apply_gradient(gradients[0], None)
    idle.apply_gradient(gradients[1], None)
    for value, expected in zip(values(idle), values(busy), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_minibatch_that_is_not_finite_adds_nothing_and_is_counted(
    pair: list[Any], rows_of: Any, minibatches: Any, digits: Any
) -> None:
    digits[:8, 0] = np.nan
    member, other = pair
    batches = minibatches(member, rows_of(digits))
    before = values(member)
    gradient = computed(member, *shares_of(batches[:2], 0.5))
    assert list(gradient.not_finite) == [0]
    assert "not finite" in gradient.not_finite[0]
    loss, weight, count = gradient.told()
    assert np.isfinite(loss)
    assert (weight, count) == (0.5, 1.0)
    gradient.rescale = 2.0
    member.apply_gradient(gradient, None)
    minibatches(other, rows_of(digits))
    other.apply_gradient(computed(other, *shares_of(batches[1:2], 1.0)), None)
    for value, expected in zip(values(member), values(other), strict=True):
        assert np.isfinite(value).all()
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert any((value != old).any() for value, old in zip(values(member), before, strict=True))


def test_the_buffer_is_written_in_place(pair: list[Any], rows_of: Any, minibatches: Any, digits: Any) -> None:
    member, _ = pair
    (batch, *_) = minibatches(member, rows_of(digits))
    gradient = computed(member, Share(batch, 1, 1.0))
    tensor = torch.from_dlpack(gradient.buffers[-1])
    assert tensor.dtype == torch.float32
    tensor[-NUM_TOLD:] = torch.tensor([7.0, 8.0, 9.0])
    np.testing.assert_array_equal(gradient.told(), [7.0, 8.0, 9.0])


def test_a_schedule_inside_the_optimizer_follows_what_the_model_has_seen(
    framework: Any, rows_of: Any, minibatches: Any, digits: Any, tmp_path: Any, request: Any
) -> None:
    source = (request.path.parent / "zoo" / "conv.py").read_text()
    schedule = "keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.0)"
    code = f"\n\ndef decaying():\n    return keras.optimizers.SGD({schedule})\n"
    (tmp_path / "decayed.py").write_text(source + code)
    options = {"on_parameter_server": False, "zoo": str(tmp_path), "optimizer": "decaying"}
    early, late = (framework("decayed.plain_model", **options) for _ in range(2))
    changes = []
    for member, version in ((early, 0), (late, 8)):
        (batch, *_) = minibatches(member, rows_of(digits))
        before = member.initial().trainable.copy()
        gradient = computed(member, Share(batch, 1, 1.0))
        assert member.learning_rate(0, version) == pytest.approx(0.5 - 0.05 * version)
        member.apply_gradient(gradient, member.learning_rate(0, version))
        trained = np.concatenate([v.numpy().ravel() for v in member._built().trainable])
        changes.append(trained - before)
    np.testing.assert_allclose(changes[1], changes[0] * 0.2, rtol=1e-3, atol=1e-6)
