"""Fixtures of the tests of the PyTorch framework: frameworks over modules of a small zoo, and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Mode, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch.computation import Computation
from elasticdl.model_def import load

ZOO = Path(__file__).parent / "zoo"


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests compare with loops on the CPU, whose random numbers are others than those of a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def framework() -> Callable[..., TorchFramework]:
    """Makes a framework over `module.symbol` of tests/torch/zoo."""

    def make(
        model_def: str = "torch_conv.custom_model",
        params: dict[str, object] | None = None,
        minibatch_size: int = 8,
        seed: int = 3,
        zoo: Path = ZOO,
        overlaps: bool = True,
        computation: Computation | None = None,
        **symbols: str,
    ) -> TorchFramework:
        definition = load(str(zoo), model_def, params, symbols, required=("feed",))
        return TorchFramework(
            definition, minibatch_size, seed, Metadata(seed=seed), overlaps=overlaps, computation=computation
        )

    return make


@pytest.fixture
def digits() -> list[bytes]:
    """80 records of 65 floats."""
    random = np.random.default_rng(0)
    rows = np.concatenate([random.normal(size=(80, 64)), random.integers(0, 10, (80, 1))], axis=1)
    return [row.astype("<f4").tobytes() for row in rows]


@pytest.fixture
def minibatches() -> Callable[..., list[Batch]]:
    """The minibatches of one task, without its end."""

    def make(
        framework: TorchFramework, records: Sequence[bytes], mode: Mode = Mode.TRAINING, lease: int = 1, seed: int = 11
    ) -> list[Batch]:
        found: list[Any] = list(framework.batches(mode, iter([TaskRecords(lease, seed, records)])))
        assert found[-1].end
        return found[:-1]

    return make
