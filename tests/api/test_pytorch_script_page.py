"""The script of docs/pytorch_script.md: five lines more than a plain one, and it runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch_script.md"
SIZE = 200
PLAIN = """
loader = DataLoader(dataset, batch_size=64, num_workers=2)
for epoch in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
"""


def lines_of(script: str) -> list[str]:
    """Its statements, as if each stood in one line."""
    return [line.strip() for line in ast.unparse(ast.parse(script)).splitlines()]


@pytest.fixture
def script() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_five_lines_make_a_plain_script_elastic(script: str) -> None:
    plain, elastic = lines_of(PLAIN), lines_of(script)
    changed = [line for line in elastic if line not in plain]
    assert len(changed) == 5
    assert [line for line in elastic if line in plain] == [line for line in plain if line in elastic]
    assert len([line for line in plain if line not in elastic]) == 2  # the loader and the loop over epochs


def test_the_script_runs_alone_as_it_stands(script: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1000),
        "scaler": torch.amp.GradScaler("cpu"),
        "criterion": nn.CrossEntropyLoss(),
        "dataset": TensorDataset(torch.randn(SIZE, 4), torch.zeros(SIZE, dtype=torch.int64)),
    }
    exec(compile(script, str(PAGE), "exec"), given)
    assert given["scheduler"].last_epoch == 3 * 4  # minibatches of 64 of 200 records, in three epochs
    assert given["epoch"] == 2
