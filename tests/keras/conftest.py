"""Fixtures of the tests of the Keras framework: frameworks over modules of a small zoo, and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Batch, Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.frameworks.keras.step.gradient_graph import GradientGraph
from elasticdl.model_def import load

ZOO = str(Path(__file__).parent / "zoo")

# Features that the oldest Keras of the range lacks, by the parameter of the tests that need them.
HAS = {
    "ragged": "ragged" in signature(keras.Input).parameters,
    "reversible": hasattr(keras.layers, "ReversibleEmbedding"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this Keras has not."""
    for item in items:
        given = getattr(item, "callspec", None)
        for name, has in HAS.items():
            if not has and given is not None and name in map(str, given.params.values()):
                item.add_marker(pytest.mark.skip(reason=f"this Keras is older: it has nothing {name}"))


@pytest.fixture(scope="session")
def framework() -> Callable[..., KerasFramework]:
    """Makes a framework over `module.symbol` of tests/keras/zoo."""

    def make(
        model_def: str,
        params: dict[str, object] | None = None,
        minibatch_size: int = 8,
        seed: int = 3,
        on_parameter_server: bool = True,
        zoo: str = ZOO,
        jit_compile: bool = False,
        embedding_threshold: int = 2 << 20,
        in_groups: bool = False,
        **symbols: str,
    ) -> KerasFramework:
        definition = load(zoo, model_def, params, symbols, required=("feed",))
        return KerasFramework(
            definition,
            minibatch_size,
            seed,
            Metadata(seed=seed),
            on_parameter_server,
            settings=KerasSettings(jit_compile, embedding_threshold, in_groups=in_groups),
        )

    return make


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., list[bytes]]:
    """Records of float32 numbers, one row of an array each."""

    def make(array: Any) -> list[bytes]:
        return [row.astype("<f4").tobytes() for row in np.asarray(array)]

    return make


@pytest.fixture(scope="session")
def minibatches() -> Callable[..., list[Batch]]:
    """The minibatches of one task, without its end."""

    def make(
        framework: KerasFramework, records: Sequence[bytes], mode: Mode = Mode.TRAINING, lease: int = 1, seed: int = 11
    ) -> list[Batch]:
        found = list(framework.batches(mode, iter([TaskRecords(lease, seed, records)])))
        assert found[-1].end
        return found[:-1]

    return make


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GradientGraph]:
    """The gradient graphs that are traced."""
    found: list[GradientGraph] = []
    init = GradientGraph.__init__

    def noted(graph: GradientGraph, *args: Any, **kwargs: Any) -> None:
        init(graph, *args, **kwargs)
        found.append(graph)

    monkeypatch.setattr(GradientGraph, "__init__", noted)
    return found
