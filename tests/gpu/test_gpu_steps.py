"""Steps and state of a PyTorch model on a GPU, against a plain loop there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.framework import Batch, Share
from elasticdl.frameworks.torch import TorchFramework
from tests.torch.conftest import digits, framework, minibatches  # noqa: F401  fixtures

pytestmark = pytest.mark.gpu

Made = Callable[..., TorchFramework]
Cut = Callable[..., list[Batch]]


def trained(model: TorchFramework, batches: Sequence[Batch], is_alone: bool, is_ahead: bool = False) -> dict[str, Any]:
    shares = [Share(batch, k, 1.0, is_alone) for k, batch in enumerate(batches)]
    for share, following in zip_longest(shares, shares[1:]):
        gradient = model.local_gradient([share], lambda buffer: None)
        if is_ahead and following is not None:
            assert gradient.run_ahead is not None
            gradient.run_ahead(None, following)
        assert np.isfinite(gradient.told()).all()
        model.apply_gradient(gradient, None)
    return model.state()


def test_a_member_alone_makes_the_steps_of_a_plain_loop(
    framework: Made,  # noqa: F811
    minibatches: Cut,  # noqa: F811
    digits: list[bytes],  # noqa: F811
) -> None:
    alone, ahead, grouped, plain = (framework() for _ in range(4))
    batches = minibatches(alone, digits)
    assert all(batch.data.ahead is not None and batch.data.features.is_pinned() for batch in batches)
    states = [
        trained(alone, batches, True),
        trained(ahead, minibatches(ahead, digits), True, is_ahead=True),
        trained(grouped, minibatches(grouped, digits), False),
    ]
    module, optimizer = plain._built().module, plain._optimizer()
    module.train()
    for k, batch in enumerate(minibatches(plain, digits)):
        torch.manual_seed(k)
        optimizer.zero_grad()
        loss = plain._definition.loss(batch.data.labels.cuda(), module(batch.data.features.cuda()))  # type: ignore[misc,operator]
        loss.backward()
        optimizer.step()
    expected = plain.state()
    for state in states:
        assert list(state) == list(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(state[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def test_an_update_that_was_not_finite_is_undone(
    framework: Made,  # noqa: F811
    minibatches: Cut,  # noqa: F811
    digits: list[bytes],  # noqa: F811
) -> None:
    model = framework(optimizer="adam")
    *batches, ill, last = minibatches(model, digits)
    before = trained(model, batches, True, is_ahead=True)
    features = ill.data.features * float("nan")
    spoiled = replace(ill, data=replace(ill.data, features=features, ahead=None))
    gradient = model.local_gradient([Share(spoiled, 1, 1.0, True)], lambda buffer: None)
    assert gradient.run_ahead is not None
    gradient.run_ahead(None, Share(last, 2, 1.0, True))
    assert gradient.told().tolist() == [0.0, 0.0, 1.0]
    after = model.state()
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_snapshot_is_the_state_at_its_moment_whatever_is_trained_then(
    has_room: bool,
    framework: Made,  # noqa: F811
    minibatches: Cut,  # noqa: F811
    digits: list[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elasticdl.frameworks.torch.state._has_room", lambda values, device: has_room)
    model = framework()
    before = trained(model, minibatches(model, digits), True)
    fetched = model.snapshot()
    after = trained(model, minibatches(model, digits), True)
    found = fetched()
    assert list(found) == list(before)
    assert all(np.array_equal(found[name], before[name]) for name in before)
    assert any(not np.array_equal(found[name], after[name]) for name in before)
