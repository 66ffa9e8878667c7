"""Steps and state of a PyTorch model on a GPU, against a plain loop there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def trained(model: TorchFramework, batches: Sequence[Batch], is_alone: bool) -> dict[str, Any]:
    for k, batch in enumerate(batches):
        gradient = model.local_gradient([Share(batch, k, 1.0, is_alone)], lambda buffer: None)
        assert np.isfinite(gradient.told()).all()
        model.apply_gradient(gradient, None)
    return model.state()


def test_a_member_alone_makes_the_steps_of_a_plain_loop(
    framework: Made,  # noqa: F811
    minibatches: Cut,  # noqa: F811
    digits: list[bytes],  # noqa: F811
) -> None:
    alone, grouped, plain = framework(), framework(), framework()
    batches = minibatches(alone, digits)
    assert all(batch.data.ahead is not None and batch.data.features.is_pinned() for batch in batches)
    states = [trained(alone, batches, True), trained(grouped, minibatches(grouped, digits), False)]
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
