"""Features become the arguments of `forward` by name, whatever else there is in the table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import Mode, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.frameworks.torch.model import ForwardArguments
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

MODULE = """
import torch

class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(2, 1, bias=False)

    def forward(self, c, b, scale=None):
        return self.dense(torch.stack([b, c], dim=1))[:, 0]

class Whole(Named):
    def forward(self, features):
        assert sorted(features) == ["a", "b", "c", "t"], features
        return super().forward(features["c"], features["b"])

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.dense(x[:, None])[:, 0]

def loss(labels, predictions):
    return (labels - predictions) ** 2

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def table(tmp_path: Path) -> Any:
    rows = [f"{a / 7},{b / 5},{a * b % 3 / 2},text {a},{b / 5 - a * b % 3}" for a in range(8) for b in range(6)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,c,t,y", *rows]))
    return create_reader(str(tmp_path / "rows.csv"), label_column="y")


@pytest.fixture
def framework(tmp_path: Path) -> Callable[..., TorchFramework]:
    (tmp_path / "torch_arguments_zoo.py").write_text(MODULE)

    def make(symbol: str, metadata: Any) -> TorchFramework:
        definition = load(str(tmp_path), f"torch_arguments_zoo.{symbol}", required=())
        return TorchFramework(definition, 8, 3, metadata)

    return make


@pytest.mark.parametrize("symbol", ["Named", "Whole"])
def test_a_table_with_further_columns_trains_on_those_that_forward_names(
    framework: Callable[..., TorchFramework],
    table: Any,
    tmp_path: Path,
    symbol: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = framework(symbol, table.metadata())
    records = table.read(table.shards()[0])
    with caplog.at_level(logging.INFO, "elasticdl.torch"):
        for epoch in range(40):
            batches = made.batches(Mode.TRAINING, iter([TaskRecords(1, epoch, records)]))
            losses = [made.train(batch, epoch) for batch in batches if not batch.end]
    assert max(losses) < 1e-3
    said = [record.getMessage() for record in caplog.records if "is not given the features a, t" in record.getMessage()]
    assert len(said) == (symbol == "Named")
    made.export(str(tmp_path / "export"), None, [])
    if symbol == "Named":
        program = torch.export.load(tmp_path / "export" / "model.pt2").module()
        found = program(c=torch.tensor([1.0, 0.0, 1.0]), b=torch.tensor([0.0, 1.0, 1.0]))
        assert found.tolist() == pytest.approx([-2, 1, -1], abs=0.05)


def test_a_dictionary_of_one_is_the_tensor_of_a_model_of_pytorchs_own() -> None:
    for module in (torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3)))):
        args, kwargs = ForwardArguments(module).of({"x": torch.ones(4, 2)})
        assert module(*args, **kwargs).shape == (4, 3)
        with pytest.raises(ModelDefinitionError, match="features: x, y"):
            ForwardArguments(module).of({"x": torch.ones(4, 2), "y": torch.ones(4, 2)})


@pytest.mark.parametrize(
    ("symbol", "features", "words"),
    [
        ("Named", {"a": 1, "b": 2}, ["no feature c", "parameters: c, b, scale=None", "features: a, b"]),
        ("Named", (1, 2, 3, 4), ["given 4 arguments", "parameters: c, b, scale=None"]),
        ("Line", (1, 2), ["given 2 arguments", "parameters: x", "PREDICTION"]),  # the second may be a label
    ],
)
def test_features_that_do_not_fit_are_refused_with_both_lists(
    framework: Callable[..., TorchFramework], table: Any, symbol: str, features: Any, words: list[str]
) -> None:
    module = framework(symbol, table.metadata())._built().module
    with pytest.raises(ModelDefinitionError) as error:
        ForwardArguments(module).of(features)
    for word in words:
        assert word in str(error.value)
