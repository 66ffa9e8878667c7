"""A wrong cell of a table is said alike in Keras and PyTorch: the column, the value, and the flag to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticdl.data.factory import create_reader
from elasticdl.data.table_decoder import wrong_cell
from elasticdl.frameworks.framework import FeedError, Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load

KERAS = """
import keras

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, features):
        return self.dense(keras.ops.zeros((8, 1)))
"""
TORCH = """
import torch

def custom_model():
    return torch.nn.Linear(1, 1)
"""


def said(framework: str, directory: Path, row: str, **dtypes: str) -> str:
    """The error of a row far behind those that the types were guessed from."""
    rows = ["age,name,income,y", *(f"{k % 90},n{k},{k}.5,1" for k in range(1100)), row]
    (directory / "rows.csv").write_text("\n".join(rows))
    reader = create_reader(str(directory / "rows.csv"), {"column_dtypes": dtypes}, label_column="y")
    (directory / "cells_zoo.py").write_text(KERAS if framework == "keras" else TORCH)
    symbol = "Model" if framework == "keras" else "custom_model"
    definition = load(str(directory), f"cells_zoo.{symbol}", required=())
    made: Any
    if framework == "keras":
        made = KerasFramework(
            definition, 8, 3, reader.metadata(), on_parameter_server=False, settings=KerasSettings(jit_compile=False)
        )
    else:
        made = TorchFramework(definition, 8, 3, reader.metadata())
    (shard,) = reader.shards()
    task = TaskRecords(1, 0, reader.read(shard))
    with pytest.raises(FeedError) as error:
        list(made.batches(Mode.TRAINING, iter([task])))
    return str(error.value)


@pytest.mark.parametrize("framework", ["keras", "torch"])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("34.5,x,1.5,1", ["'34.5' in the column age", "read as int64", 'column_dtypes={"age": "float64"}']),
        ("old,x,1.5,1", ["'old' in the column age", 'column_dtypes={"age": "string"}', "--max_bad_records"]),
        (",x,1.5,1", ["no value in the column age", 'column_dtypes={"age": "float64"}', "NaN"]),
        ("3,x,much,1", ["'much' in the column income", "float64", 'column_dtypes={"income": "string"}']),
        ("3,Doe, Joe,1.5,1", ["5 fields, the header 4", "Quote"]),
        ("3,x", ["2 fields, the header 4"]),
        (r"3,an \"end\",1.5,1", ["A row is not CSV", "double the quotes inside", "escapechar", "--max_bad_records"]),
        (r'3,"an \"end\"",1.5,1', ["A row is not CSV", "double", "escapechar", "--max_bad_records"]),
    ],
)
def test_a_wrong_cell_is_said_with_its_column_its_value_and_the_flag(
    framework: str, tmp_path: Path, row: str, words: list[str]
) -> None:
    message = said(framework, tmp_path, row)
    for word in words:
        assert word in message, message


def test_a_column_without_a_value_in_the_first_rows_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.csv").write_text("\n".join(["a,late,y", *(f"{k},,1" for k in range(1000)), "7,2.5,1"]))
    source = str(tmp_path / "rows.csv")
    assert dict(create_reader(source, {}).metadata().column_dtypes)["late"] == "string"
    assert "The column late has no value in the first 1,000 rows" in caplog.text
    assert 'column_dtypes={"late": "float64"}' in caplog.text
    caplog.clear()
    create_reader(source, {"column_dtypes": {"late": "float64"}}).metadata()
    create_reader(source, {}, columns=["a"], label_column="y").metadata()
    assert not caplog.text


def test_a_code_among_whole_numbers_is_to_be_read_as_text(tmp_path: Path) -> None:
    for value in ("02134", "9" * 30):
        assert 'column_dtypes={"zip": "string"}' in str(wrong_cell("zip", "int64", value))
